"""The prompts that a probe compares, what is asked of each, and the resolved plan that says so."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple

from samestate.engines.base import EngineError
from samestate.engines.black_box import Prompt
from samestate.evidence.canonical import sha256_hex, token_digest
from samestate.lab.black_box_prompts import Prompts
from samestate.plans import black_box as b
from samestate.plans.load import plan_sha256
from samestate.plans.model import InputIdentity, ModelIdentity, Plan, ResolvedPlan


class Case(NamedTuple):
    """One prompt."""

    name: str
    prompt: Prompt
    salt: str
    others: list[str]
    """Salts of the further cold runs; empty where the server cannot be asked for any."""

    @property
    def operations(self) -> list[str]:
        """Before the local cache is dropped, in order."""
        colds = [f"cold-{number}" for number in range(2, len(self.others) + 2)]
        return ["cold", *colds, "repeat", "interposer", "repeat-2"]

    @property
    def reloads(self) -> list[str]:
        """After that."""
        return ["reload", *(["reload-2"] if self.others else [])]


def chosen_lengths(
    plan: Plan, said: Sequence[str] | None, most: int | None, interval: int | None, means: b.Means, left: b.Cost
) -> tuple[list[tuple[str, int]], list[str]]:
    """(length, N) of the prompts to compare, and what is left out and why. Raises `EngineError` where none remains.

    Args:
        plan: With the lengths to take where nobody `said` others.
        said: By the user.
        most: Tokens that a prompt and its answer may have.
        interval: C; None: not known.
        means: What may be done to the server.
        left: Of the budget.

    """
    wanted = said or b.around(interval)
    in_words = [length for length in wanted if "C" in length]
    if interval is None and in_words:
        raise EngineError(f"--lengths: {in_words[0]} needs C, which could not be found; say lengths in tokens")
    kept, left_out = b.fitting(wanted, interval, most, plan.output_tokens, means, left)
    if not kept:
        raise EngineError(
            f"--budget-requests, --budget-tokens: no length fits what is left ({left.requests} requests, "
            f"{left.tokens:,} tokens) or the server's context; allow more, or say shorter --lengths"
        )
    return kept, left_out


def make_cases(prompts: Prompts, lengths: Sequence[int], *, again: bool) -> list[Case]:
    """A prompt for each length; `again`: it can be computed whole more than once. Raises `ClientError`."""
    colds = b.cold_runs(len(lengths)) if again else 0
    names = [f"{b.CASE}{tokens}" for tokens in lengths]
    return [
        Case(name, prompts.make(name, tokens), secrets.token_urlsafe(24), _salts(colds))
        for name, tokens in zip(names, lengths, strict=True)
    ]


def _salts(count: int) -> list[str]:
    return [secrets.token_urlsafe(24) for _ in range(count)]


def resolved_plan(plan: Plan, cases: Sequence[Case], interval: int | None, model: str, *, reload: bool) -> ResolvedPlan:
    """C is 0 where it is not known; of the checkpoint nothing is seen but its name."""
    operations = [f"{case.name}.{op}" for case in cases for op in case.operations]
    if reload:
        operations += [f"{case.name}.{op}" for case in cases for op in case.reloads]
    return ResolvedPlan(
        format=1,
        plan_sha256=plan_sha256(plan),
        checkpoint_interval=interval or 0,
        lengths=[case.prompt.tokens for case in cases],
        model=ModelIdentity(name=model, files={}, sha256=sha256_hex(b"")),
        inputs=[
            InputIdentity(
                case=case.name,
                role="target",
                tokens=case.prompt.tokens,
                sha256=None if case.prompt.ids is None else token_digest(list(case.prompt.ids)),
            )
            for case in cases
        ],
        operations=operations,
    )
