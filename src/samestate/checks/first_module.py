"""Which module's output differs first between two computations of one prompt, by traced steps (requirements 12, 50).

It says where to look and decides nothing. Steps are put side by side only where both operations ran the same ones:
another shape of a batch changes bits without any fault.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from samestate.checks.geometry import mismatch
from samestate.checks.history import ArmHistory
from samestate.checks.seen import Seen
from samestate.evidence.controls import CAPTURE_LIMIT_VARIABLE
from samestate.evidence.ground_records import TRACE_DIGITS
from samestate.evidence.records import StepTraced

_DIGITS = re.compile(r"[0-9a-f]*", re.ASCII)
HOW = "samestate run --trace-modules records them"


class FirstModule(NamedTuple):
    """What the traces of two operations show."""

    message: str
    """A clause that names the first module whose output differs, or says why none is named."""
    module: str | None = None
    """As the trace lists it: ``model.layers.3.self_attn.indexer.indexer_op``."""
    rank: int | None = None
    evidence: tuple[str, ...] = ()
    """Where the two steps stand."""
    lasting: bool = False
    """The step's last output differs too: what differed was used."""


def first_module(ours: ArmHistory, op: str, theirs: ArmHistory, other: str) -> FirstModule:
    """Operation `op` of arm `ours` against `other` of `theirs`."""
    sides = ((ours, op), (theirs, other))
    for arm, name in sides:
        if not arm.traced.get(name):
            how = f"{CAPTURE_LIMIT_VARIABLE} bounds them" if arm.traced else HOW
            return FirstModule(f"no module outputs were recorded of {arm.name} {name} ({how})")
    parted = mismatch(ours.schedule(op), theirs.schedule(other), whole=True)
    if parted is not None:
        return FirstModule(f"their steps are unequal ({parted.message}), so no module is named")
    one, two = (_steps(arm, name) for arm, name in sides)
    if {rank for _, rank in one} != {rank for _, rank in two}:
        return FirstModule("not the same ranks recorded module outputs, so no module is named")
    compared = 0
    for key in sorted(one.keys() & two.keys()):
        left, right = one[key], two[key]
        names, others = (_names(arm, seen.rec) for (arm, _), seen in zip(sides, (left, right), strict=True))
        step, rank = key
        if names is None or names != others or left.rec.tokens != right.rec.tokens or left.rec.tokens < 1:
            return FirstModule(f"their modules ran otherwise in step {step} on rank {rank}, so none is named")
        for index, name in enumerate(names):
            compared += 1
            if _digest(left.rec, index) != _digest(right.rec, index):
                said = f"the first module output that differs is {name} (step {step}, rank {rank}, "
                said += f"{compared - 1} outputs before it agree)"
                lasting = _digest(left.rec, len(names) - 1) != _digest(right.rec, len(names) - 1)
                return FirstModule(said, name, rank, (left.where, right.where), lasting)
    if not compared:
        return FirstModule("no module output was recorded of the same step of both")
    steps = len({step for step, _ in one.keys() & two.keys()})
    return FirstModule(f"the {compared} module outputs recorded of their first {steps} steps agree")


def _steps(arm: ArmHistory, op: str) -> dict[tuple[int, int], Seen[StepTraced]]:
    """By step and rank."""
    return {(seen.rec.step, seen.rec.rank): seen for seen in arm.traced[op]}


def _ranks(arm: ArmHistory) -> int:
    """Of the arm's engines; 0: none is recorded."""
    return max((seen.rec.ranks for seen in arm.engines), default=0)


def _names(arm: ArmHistory, rec: StepTraced) -> list[str] | None:
    """Names of a step's outputs; None: the listing is missing or of another length, or these are no digests."""
    names = arm.listings.get((rec.rank, rec.listing))
    if names is None or not names or len(names) * TRACE_DIGITS != len(rec.digests):
        return None
    return names if 0 <= rec.rank < _ranks(arm) and _DIGITS.fullmatch(rec.digests) else None


def _digest(rec: StepTraced, index: int) -> str:
    return rec.digests[index * TRACE_DIGITS : (index + 1) * TRACE_DIGITS]
