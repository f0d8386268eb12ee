"""Two arms' schedules side by side: which operation's steps part, and at which step first.

A step is what one request computed in one pass, ``[start, end)`` and its drafts, and who else was in the pass. Steps of
another shape or in other company may change bits without any fault, so outputs of such operations say nothing about
reused state (`samestate.checks.geometry`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import dropwhile
from typing import NamedTuple

from samestate.checks.geometry import Mismatch, mismatch, missing_steps
from samestate.checks.history import ArmHistory, Row, Schedule
from samestate.evidence.records import BatchSource

Company = Mapping[str, set[str]]
"""Place of a record -> the operations in its step, each with what it computed: ``a.cold [0, 16)``."""


class Parted(NamedTuple):
    """An operation whose steps are not alike."""

    op: str
    message: str
    """``step 1: [1792, 3583) against [1792, 3584)``: A against B."""
    evidence: list[str]
    """File and line of the records, A's first."""
    attributable: bool
    """One side starts where no checkpoint can end: that is a fault, whatever the steps."""


class Unseen(NamedTuple):
    """An operation that was not compared."""

    op: str
    why: str


class Schedules(NamedTuple):
    """What comparing two arms came to."""

    compared: int
    """Operations with steps on both sides."""
    parted: list[Parted]
    """In the order in which A ran them: the first is where the arms part."""
    unseen: list[Unseen]
    """Operations that one side alone has, or whose steps it does not record whole."""
    notes: list[str]
    """What a reader must know to trust it."""


def compare_schedules(a: ArmHistory, b: ArmHistory) -> Schedules:
    """Operation by operation; a side that reuses a prefix is compared over what is left for it to compute."""
    parted, unseen, compared = [], [], 0
    ours, theirs = company(a), company(b)
    for op in dict.fromkeys([*_generations(a), *_generations(b)]):
        why = next(filter(None, (_gap(side, op) for side in (a, b))), None)
        one, other = a.schedule(op), b.schedule(op)
        if why is not None or not one or not other:
            unseen.append(Unseen(op, why or "one side has no steps of it"))
            continue
        compared += 1
        found = shapes_part(one, other) or company_parts((a, op), (b, op), ours, theirs)
        if found is not None:
            attributable = _off_checkpoints(a, one) or _off_checkpoints(b, other)
            parted.append(Parted(op, found.message, found.evidence, attributable))
    return Schedules(compared, parted, unseen, list(_notes(a, b)))


def _gap(arm: ArmHistory, op: str) -> str | None:
    """Why an operation's steps are not whole in an arm; None: they are, from the first one that is there."""
    started = next((seen.rec for seen in arm.started if seen.rec.op == op), None)
    output = arm.output(op)
    if started is None:
        return f"arm {arm.name} does not have it"
    if output is None:
        return f"arm {arm.name} has no output of it"
    gap = missing_steps(arm.schedule(op), started.prompt_tokens + len(output.rec.token_ids) - 1)
    return gap and f"arm {arm.name}: {gap}"


def _off_checkpoints(arm: ArmHistory, schedule: Schedule) -> bool:
    return bool(arm.engines) and schedule[0].start % arm.engine.rec.checkpoint_interval != 0


def _notes(a: ArmHistory, b: ArmHistory) -> list[str]:
    prompts = [{seen.rec.op: seen.rec.prompt_sha256 for seen in arm.started} for arm in (a, b)]
    other = [op for op in prompts[0].keys() & prompts[1].keys() if prompts[0][op] != prompts[1][op]]
    return [f"{len(other)} operations have other prompts on the two sides, e.g. {min(other)}"] if other else []


def _generations(arm: ArmHistory) -> list[str]:
    return [seen.rec.op for seen in arm.started if seen.rec.prompt_sha256 is not None]


def shapes_part(a: Schedule, b: Schedule) -> Mismatch | None:
    """The first step that is not alike, over what both computed; A against B."""
    if a[0].start > b[0].start:
        found = mismatch(b, a, whole=False)
        return None if found is None else Mismatch(_turned(found.message), found.evidence[::-1])
    return mismatch(a, b, whole=a[0].start == b[0].start)


def _turned(message: str) -> str:
    """The same with A first."""
    step, colon, shapes = message.partition(": ")
    left, against, right = shapes.partition(" against ")
    return f"{step}{colon}{right}{against}{left}" if against else message


def company(arm: ArmHistory) -> Company:
    """Who computed what in every step of an arm."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for op in _generations(arm):
        for row in arm.schedule(op, BatchSource.SCHEDULER) or ():
            found[row.where].add(_named(op, row))
    return found


def _named(op: str, row: Row) -> str:
    return f"{op} [{row.start}, {row.end})"


def company_parts(
    a: tuple[ArmHistory, str], b: tuple[ArmHistory, str], ours: Company, theirs: Company
) -> Mismatch | None:
    """The first step of two operations in which the others are other ones, over what both computed."""
    left, right = (arm.schedule(op) or () for arm, op in (a, b))
    start = max((next(iter(side)).start for side in (left, right) if side), default=0)
    sides = [list(dropwhile(lambda row: row.start < start, side)) for side in (left, right)]
    for step, (one, other) in enumerate(zip(*sides, strict=False)):
        beside = [found[row.where] - {_named(op, row)} for found, op, row in ((ours, a[1], one), (theirs, b[1], other))]
        if beside[0] != beside[1]:
            with_a, with_b = (", ".join(sorted(others)) or "nobody" for others in beside)
            return Mismatch(f"step {step}: with {with_a} against with {with_b}", [one.where, other.where])
    return None
