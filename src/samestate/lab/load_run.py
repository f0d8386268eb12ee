"""A load: levels of concurrency or rate, each cold and then reused, on one server, in phases that are told one by one.

Every level has prompts of its own, so that its cold requests are cold. What is asked again is asked in an order that
the seed shuffles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import NamedTuple

from samestate.engines.base import CounterValues
from samestate.engines.served import StreamingClient
from samestate.evidence.latency_records import HostSampled, LoadPhase
from samestate.evidence.records import CountersRead, OperationName, OperationOutput
from samestate.evidence.stream import StreamWriter
from samestate.lab.errors import RunError
from samestate.lab.host import sample
from samestate.lab.load_driver import Level, LoadAnswer, LoadAsk, LoadDriver, Sent
from samestate.lab.operate import request_timed
from samestate.models.templates import TEMPLATES, render

Told = Callable[[int, int, str], None]
"""Of requests done, of how many, and which one."""


class LoadPlan(NamedTuple):
    """What to ask of a server under load."""

    levels: Sequence[Level]
    lengths: Sequence[int]
    """N, in turn."""
    requests: int
    """Of every phase."""
    attempts: Sequence[OperationName]
    """Cold, and then what is made of the same prompts: repeat, reload."""
    output_tokens: int
    template: str
    seed: int
    """Of the answers, the orders and the times."""
    run: str
    """A word of this run alone, in every document's beginning; empty where each engine is new."""


class Phase(NamedTuple):
    """One phase as it went."""

    rec: LoadPhase
    sent: Sent
    before: CounterValues
    after: CounterValues
    hosts: list[HostSampled]


def phases(client: StreamingClient, driver: LoadDriver, plan: LoadPlan, told: Told) -> Iterator[Phase]:
    """All phases, level by level. Raises `RunError` and `EngineError`."""
    total = len(plan.levels) * len(plan.attempts) * plan.requests
    done = 0

    def over(op: str) -> None:
        nonlocal done
        done += 1
        told(done, total, op)

    for at, level in enumerate(plan.levels):
        prompts = [_prompt(client, plan, level, number) for number in range(plan.requests)]
        for number, attempted in enumerate(plan.attempts):
            if attempted is OperationName.RELOAD and not client.reset_local_cache().local_reset:
                raise RunError(f"{level.name}: the server did not reset its local cache; other requests may hold it")
            seed = plan.seed + at * len(plan.attempts) + number
            order = list(prompts)
            if number:
                Random(seed).shuffle(order)
            asks = [LoadAsk(f"{case}.{attempted.value}", case, ids) for case, ids in order]
            yield _phase(client, driver, level, attempted, asks, seed, over)


def _phase(
    client: StreamingClient,
    driver: LoadDriver,
    level: Level,
    attempted: OperationName,
    asks: list[LoadAsk],
    seed: int,
    over: Callable[[str], None],
) -> Phase:
    name = f"{level.name}.{attempted.value}"
    before, first = client.counters(), sample(name, "before")
    sent = driver.send(level, asks, seed, over)
    last, after = sample(name, "after"), client.counters()
    rec = LoadPhase(
        level=level.name,
        attempted=attempted.value,
        concurrency=level.concurrency,
        rate=level.rate,
        seed=seed,
        ops=[ask.op for ask in asks],
        due_ns=sent.due_ns,
    )
    return Phase(rec, sent, before, after, [one for one in (first, last) if one is not None])


def _prompt(client: StreamingClient, plan: LoadPlan, level: Level, number: int) -> tuple[str, list[int]]:
    tokens = plan.lengths[number % len(plan.lengths)]
    case = f"{level.name}-{number + 1}-N{tokens}"
    document = "-".join(filter(None, (plan.run, case)))
    try:
        return case, render(TEMPLATES[plan.template].parts(document), client.encode, tokens)
    except ValueError as error:
        raise RunError(f"{case}: {error}") from None


def record(client: StreamWriter, phase: Phase) -> None:
    """Write a phase into an engine's client stream, as records that the checks of a load read."""
    name = f"{phase.rec.level}.{phase.rec.attempted}"
    client.append(phase.rec)
    client.append(CountersRead(op=name, when="before", values=phase.before.values, missing=phase.before.missing))
    client.append(CountersRead(op=name, when="after", values=phase.after.values, missing=phase.after.missing))
    for sampled in phase.hosts:
        client.append(sampled)
    for answer in phase.sent.answers:
        _record_answer(client, answer)
    client.flush()


def _record_answer(client: StreamWriter, answer: LoadAnswer) -> None:
    generation = answer.generation
    if generation is None or generation.timing is None:
        return
    client.append(
        OperationOutput(
            op=answer.ask.op,
            request=generation.request,
            token_ids=generation.token_ids,
            logprobs=None,
            finish_reason=generation.finish_reason,
            cached_tokens=generation.cached_tokens,
        )
    )
    client.append(request_timed(answer.ask.op, generation.request, generation.timing))
