"""Whether what an engine answered in company, out of a cache, is what it answers alone and cold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cache.soak_work import Answered


class Floor(NamedTuple):
    """What company alone does to a log-probability; both sides cold."""

    value: float
    tokens: int
    """Compared."""
    parted: int
    """Requests that then went on differently."""


class Compared(NamedTuple):
    """Requests by what became of them; a tie is neither equal nor wrong."""

    equal: int
    resumed: list[str]
    """Of the equal ones those whose control was computed as they were: what they had said before a preemption, as a
    prompt."""
    ties: list[str]
    wrong: list[str]


def floor(alone: Sequence[Answered], cold: Sequence[Answered]) -> Floor:
    """The largest difference over the tokens that both sides have in common; `cold` in company, never preempted."""
    by_name = {one.name: one for one in alone}
    differences, parted = [], 0
    for other in cold:
        one = by_name[other.name]
        assert one.prompt == other.prompt, other.name
        assert other.cached == 0, f"{other.name}: not cold"
        assert not other.preempted, f"{other.name}: preempted"
        part = first_difference(one.tokens, other.tokens)
        parted += part is not None
        pairs = list(zip(one.logprobs, other.logprobs, strict=True))[:part]
        differences += [abs(mine - theirs) for mine, theirs in pairs]
    assert differences, "nothing was compared"
    return Floor(max(differences), len(differences), parted)


def compare(
    alone: Sequence[Answered], candidate: Sequence[Answered], floor: float, resumed: Sequence[Answered] = ()
) -> Compared:
    """Every request that was asked alone must be in `candidate`, with the same prompt.

    Args:
        alone: The control.
        candidate: Asked in company, out of the cache.
        floor: A difference where the control preferred its token by less is a tie.
        resumed: Alone and cold too: what candidates that were preempted had to compute afterwards.

    """
    others = {one.name: one for one in candidate}
    assert len(others) == len(candidate) == len(alone)
    again = {(one.name, len(one.prompt)): one for one in resumed}
    found = Compared(0, [], [], [])
    for one in alone:
        other = others[one.name]
        assert one.prompt == other.prompt, one.name
        part = first_difference(one.tokens, other.tokens)
        if part is None:
            found = found._replace(equal=found.equal + 1)
            continue
        at, control = part, one
        if any(0 < given <= part for given in other.preempted):
            checked = _segments(one, other, again)
            at, control = checked if checked is not None else (-1, one)
        if at < 0:
            found = found._replace(equal=found.equal + 1)
            found.resumed.append(f"{one.name}: token {part}, preempted at {other.preempted}")
            continue
        margin = control.margins[at - (len(control.prompt) - len(one.prompt))]
        said = f"{one.name}: token {at}, margin {margin:.3g}, {other.cached} of {len(one.prompt)} cached"
        said += f", preempted at {other.preempted}" if other.preempted else ""
        (found.ties if margin < floor else found.wrong).append(said)
    return found


def _segments(one: Answered, other: Answered, again: Mapping[tuple[str, int], Answered]) -> tuple[int, Answered] | None:
    """Where an answer first differs from what was computed as it was, preemption by preemption, and that control."""
    ends = [*sorted(set(other.preempted) - {0}), len(other.tokens)]
    for start, end in zip([0, *ends], ends, strict=False):
        control = one if start == 0 else again[other.name, len(other.prompt) + start]
        assert control.prompt == other.prompt + other.tokens[:start], other.name
        part = first_difference(control.tokens[: end - start], other.tokens[start:end])
        if part is not None:
            return start + part, control
    return None


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    pairs = enumerate(zip(one, other, strict=True))
    return next((index for index, (left, right) in pairs if left != right), None)


def reuse(answers: Sequence[Answered]) -> dict[str, Any]:
    """How much was not computed."""
    prompt, cached = sum(len(one.prompt) for one in answers), sum(one.cached for one in answers)
    return {
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "hits": sum(one.cached > 0 for one in answers),
        "preempted": sum(bool(one.preempted) for one in answers),
        "preempted_in_answer": sum(any(one.preempted) for one in answers),
    }
