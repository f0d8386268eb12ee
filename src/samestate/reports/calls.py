"""Captured calls of one module, side by side: the first argument that differs, or that equal inputs gave other outputs.

Two calls belong together where they computed the same tokens of two operations that are named. Calls of two runs are
never put together: their engines may differ in anything. A defect of the module is shown only where all inputs are
equal and an output is not (requirements 50-52); where there is no input, or one whose values were not captured, inputs
are not equal but unknown.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from samestate.checks.history import ArmHistory
from samestate.checks.seen import Seen
from samestate.evidence.ground_records import OPAQUE
from samestate.evidence.records import Argument, CallCaptured

Outcome = Literal["equal", "inputs_differ", "same_inputs_other_outputs", "not_compared"]
LIMITATION = (
    "Arguments and outputs of the call alone: what the module reads beside them (caches, metadata, its parameters, "
    "scratch memory) is not captured."
)


class Compared(NamedTuple):
    """What comparing the calls of two operations came to."""

    outcome: Outcome
    message: str
    """One line."""
    calls: int
    """Pairs of calls that were compared."""
    evidence: list[str]


def compare_calls(module: str, a: ArmHistory, op_a: str, b: ArmHistory, op_b: str, rank: int = 0) -> Compared:
    """The calls of `module` on `rank` during two operations, over the tokens that both computed."""
    if a is b and op_a == op_b:
        return Compared("not_compared", f"{a.name}:{op_a} is named twice; name two operations", 0, [])
    for arm in (a, b):
        if arm.imported_from is not None:
            said = f"arm {arm.name} was recorded in another run: probes of two runs are not joined"
            return Compared("not_compared", said, 0, [])
    ours, theirs = _calls(module, a, op_a, rank), _calls(module, b, op_b, rank)
    for side, op, found in ((a, op_a, ours), (b, op_b, theirs)):
        if isinstance(found, str):
            return Compared("not_compared", f"arm {side.name}: {op}: {found}", 0, [])
    assert isinstance(ours, dict) and isinstance(theirs, dict)
    shared = [span for span in ours if span in theirs]
    if not shared:
        return Compared("not_compared", f"{op_a} and {op_b} computed no tokens in the same steps", 0, [])
    for done, span in enumerate(shared, 1):
        one, other = ours[span], theirs[span]
        parted = _differing(span, one.rec, other.rec)
        if parted is not None:
            return Compared(*parted, done, [one.where, other.where])
    return Compared("equal", f"{len(shared)} calls have equal inputs and equal outputs", len(shared), [])


def _calls(module: str, arm: ArmHistory, op: str, rank: int) -> dict[tuple[int, int], Seen[CallCaptured]] | str:
    """Calls by the tokens that they computed, or why they cannot be told."""
    schedule = arm.schedule(op)
    started = next((seen.t_ns for seen in arm.started if seen.rec.op == op), None)
    ended = next((seen.t_ns for seen in arm.ends.get(op, ())), None)
    if not schedule or started is None or ended is None:
        return "its steps, or its beginning and end, are not recorded"
    mine = [
        seen
        for seen in arm.calls
        if seen.rec.rank == rank
        and (seen.rec.module == module or seen.rec.module.endswith(f".{module}"))
        and started <= seen.rec.at_ns <= ended
    ]
    if len({seen.rec.module for seen in mine}) > 1:
        return f"several captured modules end in {module}; name one whole"
    if len(mine) != len(schedule):
        return f"{len(mine)} calls were captured in {len(schedule)} steps"
    ordered = sorted(mine, key=lambda seen: seen.rec.call)
    return {(row.start, row.end): seen for row, seen in zip(schedule, ordered, strict=True)}


def _differing(span: tuple[int, int], one: CallCaptured, other: CallCaptured) -> tuple[Outcome, str] | None:
    where = f"tokens [{span[0]}, {span[1]}), call {one.call} against {other.call}"
    argument, equal = _first(one.inputs, other.inputs)
    if argument is not None:
        in_place = ", written in place: what it held before may mean nothing" if argument.written else ""
        said = f"{where}: input {argument.name} differs already ({equal} others agree){in_place}: no defect is shown"
        return "inputs_differ", said
    if not one.outputs and not other.outputs:
        return "not_compared", f"{where}: no output was captured"
    output, _ = _first(one.outputs, other.outputs)
    if output is not None and not equal:
        return "not_compared", f"{where}: {output.name} differs, and no input was captured: no defect is shown"
    opaque = next((one.name for one in one.inputs if one.value.startswith(OPAQUE)), None)
    if output is not None and opaque is not None:
        said = f"{where}: {output.name} differs, and what input {opaque} holds was not captured: no defect is shown"
        return "not_compared", said
    if output is not None:
        return "same_inputs_other_outputs", f"{where}: all {equal} inputs agree and {output.name} differs"
    return None


def _first(ours: list[Argument], theirs: list[Argument]) -> tuple[Argument | None, int]:
    """The first argument that differs, one that is not written in place before others; how many agree."""
    left, right = ({one.name: one for one in side} for side in (ours, theirs))
    names = list(dict.fromkeys([*left, *right]))
    differing = [name for name in names if _held(left.get(name)) != _held(right.get(name))]
    differing.sort(key=lambda name: (left.get(name) or right[name]).written)
    first = (left.get(differing[0]) or right[differing[0]]) if differing else None
    return first, len(names) - len(differing)


def _held(one: Argument | None) -> tuple[str, list[int] | None] | None:
    return (one.value, one.shape) if one else None
