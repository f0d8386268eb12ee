"""What lies upon vLLM is what the plan declares, on every rank: part of ``identity``.

A plan declares a guard and repairs by name, and the recorder goes without saying; which functions each may touch is
fixed (`REPLACES`, `WRAPS`). The process that put one on says so itself, in its own stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from samestate.checks.base import Finding, Place
from samestate.checks.history import ArmHistory
from samestate.checks.seen import Seen
from samestate.checks.verdicts import fail, unknown
from samestate.evidence.marker_records import REPLACES, WRAPS, RecorderStarted
from samestate.evidence.record_base import PatchedFunction
from samestate.evidence.records import InterventionApplied
from samestate.plans.model import MarkerPlan

Functions = frozenset[tuple[str, str, str]]
"""Module, name and hash of the source before."""


def interventions(plan: MarkerPlan) -> list[str]:
    """Names of what the plan puts onto vLLM: its guard and its repairs."""
    return [*([plan.guard] if plan.guard else []), *plan.repairs]


def patches(plan: MarkerPlan, arm: ArmHistory) -> Iterator[Finding]:
    """Everything that was put on and is not declared, and everything declared that a rank does not attest."""
    asked = interventions(plan)
    for stream in arm.markers.streams.values():
        for started in stream.started:
            yield from _beyond(arm, started, "the recorder", started.rec.functions, WRAPS[_watched(started.rec)])
    for seen in arm.interventions:
        if seen.rec.name not in asked:
            message = f"arm {arm.name}: {seen.rec.name} was put on vLLM, planned {', '.join(asked) or 'nothing'}"
            yield fail("unplanned_intervention", message, Place(arm=arm.name), [seen.where])
        else:
            declared = REPLACES.get(seen.rec.name, frozenset())
            yield from _beyond(arm, seen, seen.rec.name, seen.rec.functions, declared)
    for name in asked:
        yield from _attested(arm, name)


def _watched(rec: RecorderStarted) -> str:
    return rec.runner if rec.role == "rank" else rec.role


def _beyond(
    arm: ArmHistory,
    seen: Seen[RecorderStarted] | Seen[InterventionApplied],
    name: str,
    functions: Sequence[PatchedFunction],
    declared: frozenset[str],
) -> Iterator[Finding]:
    for one in functions:
        if (touched := f"{one.module}.{one.qualname}") not in declared:
            message = f"arm {arm.name}: {name} replaced {touched}, which is none of its functions"
            yield fail("undeclared_function", message, Place(arm=arm.name), [seen.where])


def _attested(arm: ArmHistory, name: str) -> Iterator[Finding]:
    """Every rank says that `name` is in force, before its first step, and on the same sources as the others."""
    recorder = arm.markers.recorder
    found: dict[int, Functions] = {}
    for rank in range(recorder.rec.ranks if recorder else 1):
        streams = [one for one in arm.markers.rank_streams if any(seen.rec.rank == rank for seen in one.started)]
        names = {one.stream for one in streams}
        there = [seen for seen in arm.interventions if seen.rec.name == name and seen.stream in names]
        place = Place(arm=arm.name, rank=rank)
        if not there:
            message = f"arm {arm.name}: rank {rank} does not say that {name} was put on, as the plan has it"
            yield unknown("not_attested", message, place, [seen.where for one in streams for seen in one.started])
            continue
        steps = [seen for one in streams for seen in one.rows]
        late = next((seen for seen in there for step in steps if step.stream == seen.stream and step.n < seen.n), None)
        if late is not None:
            message = f"arm {arm.name}: rank {rank} put {name} on after its first step"
            yield unknown("attested_late", message, place, [late.where])
        found[rank] = frozenset(
            (one.module, one.qualname, one.source_sha256) for seen in there for one in seen.rec.functions
        )
    yield from _unlike(arm, name, found)


def _unlike(arm: ArmHistory, name: str, found: Mapping[int, Functions]) -> Iterator[Finding]:
    first = next(iter(found), 0)
    for rank, functions in found.items():
        if functions != found[first]:
            names = ", ".join(sorted({f"{module}.{name}" for module, name, _ in functions ^ found[first]}))
            message = f"arm {arm.name}: {name} met other sources on rank {rank} than on rank {first}: {names}"
            yield unknown("interventions_differ", message, Place(arm=arm.name, rank=rank))
