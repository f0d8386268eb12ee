"""Timed requests to a server that already runs: cold, again, and again after a reset of its local cache alone.

No archive and no records: the server's own counters say what it reused, as far as they say it. Prompts are rendered
with the server's tokenizer; their documents are new in every run, so that a cold one is cold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

from samestate.engines.base import Ask, CounterValues, EngineError, Generation
from samestate.engines.served import StreamingClient
from samestate.evidence.records import OperationName
from samestate.lab.errors import RunError
from samestate.models.templates import TEMPLATES, render

Told = Callable[[int, int, str], None]
"""Of requests done, of how many, and which one."""


class LivePlan(NamedTuple):
    """What to ask of a server."""

    lengths: list[int]
    """N, tokens."""
    trials: int
    warmups: int
    output_tokens: int
    template: str
    seed: int
    order_seed: int | None
    """Shuffles the measured trials; None: ascending by trial, then by length."""
    run: str
    """A word of this run alone, in every document's beginning."""


class LiveRequest(NamedTuple):
    """One request and what the server's counters said around it."""

    trial: int
    """From 1; 0: a warm-up."""
    case: str
    tokens: int
    attempted: OperationName
    generation: Generation
    before: CounterValues
    after: CounterValues

    def grown(self, name: str) -> int | None:
        """By how much a counter grew; None: it could not be read."""
        if name not in self.before.values or name not in self.after.values:
            return None
        return int(self.after.values[name] - self.before.values[name])


def measure(client: StreamingClient, plan: LivePlan, told: Told) -> Iterator[LiveRequest]:
    """Every request, one at a time, warm-ups first. Raises `RunError` and `EngineError`.

    A server without ``/reset_prefix_cache`` is asked for no reload.
    """
    cases = list(_cases(plan))
    conditions = [OperationName.COLD, OperationName.REPEAT]
    can_reset = _resets(client)
    if can_reset:
        conditions.append(OperationName.RELOAD)
    total, done = len(cases) * len(conditions), 0
    for trial, case, tokens in cases:
        ids = _prompt(client, plan, case, tokens)
        for attempted in conditions:
            if attempted is OperationName.RELOAD and not client.reset_local_cache().local_reset:
                raise RunError(f"{case}: the server did not reset its local cache; it may be busy with other requests")
            before = client.counters()
            request = f"{plan.run}-{case}-{attempted.value}"
            (generation,) = client.generate([Ask(request, ids)], plan.output_tokens, plan.seed, True)
            yield LiveRequest(trial, case, tokens, attempted, generation, before, client.counters())
            done += 1
            told(done, total, f"{case}.{attempted.value}")


def _cases(plan: LivePlan) -> Iterator[tuple[int, str, int]]:
    for number in range(1, plan.warmups + 1):
        yield from ((0, f"w{number}-N{tokens}", tokens) for tokens in plan.lengths)
    measured = [(number, tokens) for number in range(1, plan.trials + 1) for tokens in plan.lengths]
    if plan.order_seed is not None:
        Random(plan.order_seed).shuffle(measured)
    yield from ((number, f"t{number}-N{tokens}", tokens) for number, tokens in measured)


def _prompt(client: StreamingClient, plan: LivePlan, case: str, tokens: int) -> list[int]:
    try:
        return render(TEMPLATES[plan.template].parts(f"{plan.run}-{case}"), client.encode, tokens)
    except ValueError as error:
        raise RunError(f"{case}: {error}") from None


def _resets(client: StreamingClient) -> bool:
    try:
        client.reset_local_cache()
    except EngineError:
        return False
    return True
