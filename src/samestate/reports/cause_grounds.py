"""What two arms stand on, as causes: the kernels that ran, and the parameters and buffers that they read.

What one side alone recorded, or what was recorded of some ranks or of nothing, is never called the same.
"""

from __future__ import annotations

from collections.abc import Iterator

from samestate.checks.environment import facts
from samestate.checks.history import ArmHistory
from samestate.checks.seen import Seen
from samestate.checks.settings import effective_settings
from samestate.checks.storages import MOMENTS
from samestate.evidence.records import StoragesDigested
from samestate.reports.cause import Cause, Step

_SHOWN = 3
_DECIDE = (
    "versions.",
    "env.",
    "kernel_config.",
    "model_config.dtype",
    "model_config.quantization",
    "model_config.enforce_eager",
    "cache_config.cache_dtype",
    "cache_config.mamba_",
    "parallel_config.tensor_parallel_size",
    "parallel_config.pipeline_parallel_size",
)
"""Effective settings that decide which kernels run, and in what precision; those of a schedule show in the steps."""


def kernel(a: ArmHistory, b: ArmHistory) -> Step:
    """Chosen configurations, then backends, variables, patched files, device, then settings that decide kernels."""
    if a is b:
        return Step(Cause.KERNEL, False, "one engine", [])
    evidence = [seen.where for arm in (a, b) for seen in arm.engines[:1]]
    differing = [*_choices(a, b), *_ground(a, b), *_versions(a, b)]
    if differing:
        return Step(Cause.KERNEL, True, "; ".join(differing[:_SHOWN]), evidence)
    unseen = [*_unselected(a, b), *_unobserved(a, b)]
    if unseen:
        return Step(Cause.KERNEL, None, f"not recorded: {'; '.join(unseen[:_SHOWN])}", evidence)
    return Step(Cause.KERNEL, False, "the same configurations, backends, variables, files and versions", evidence)


def _configurations(arm: ArmHistory) -> dict[tuple[int, str, tuple[str, ...]], object]:
    return {
        (seen.rec.rank, one.kernel, tuple(one.key)): one.config for seen in arm.selected for one in seen.rec.selections
    }


def _choices(a: ArmHistory, b: ArmHistory) -> Iterator[str]:
    ours, theirs = _configurations(a), _configurations(b)
    for place in sorted(ours.keys() & theirs.keys()):
        if ours[place] != theirs[place]:
            yield f"rank {place[0]}: {place[1]} ran with another configuration for key ({', '.join(place[2])})"


def _unselected(a: ArmHistory, b: ArmHistory) -> Iterator[str]:
    """What keeps the chosen configurations from being called the same."""
    what = "which autotuned configurations ran"
    if not a.selected or not b.selected:
        yield what
        return
    for arm in (a, b):
        for rank in sorted(_ranks(arm) - {seen.rec.rank for seen in arm.selected}):
            yield f"{what} on rank {rank} of arm {arm.name}"
        for seen in arm.selected:
            for line in seen.rec.violations[:1]:
                yield f"{what} in arm {arm.name}, whose rank {seen.rec.rank} says: {line}"
    ours, theirs = _configurations(a), _configurations(b)
    if (ours or theirs) and not ours.keys() & theirs.keys():
        yield f"{what} for the same key in both arms"


def _unobserved(a: ArmHistory, b: ArmHistory) -> Iterator[str]:
    what = "backends, variables and patched files"
    if not a.environments or not b.environments:
        yield what
        return
    for arm in (a, b):
        for rank in sorted(_ranks(arm) - {seen.rec.rank for seen in arm.environments}):
            yield f"{what} of rank {rank} of arm {arm.name}"


def _ranks(arm: ArmHistory) -> set[int]:
    """Those that its engine says it has."""
    return {rank for seen in arm.engines for rank in range(seen.rec.ranks)}


def _ground(a: ArmHistory, b: ArmHistory) -> Iterator[str]:
    ours, theirs = ({seen.rec.rank: facts(seen.rec) for seen in arm.environments} for arm in (a, b))
    for rank in sorted(ours.keys() & theirs.keys()):
        was, now = ours[rank], theirs[rank]
        for name in sorted(was.keys() | now.keys()):
            if was.get(name) != now.get(name):
                yield f"rank {rank}: {name} is {was.get(name, 'absent')} and {now.get(name, 'absent')}"


def _versions(a: ArmHistory, b: ArmHistory) -> Iterator[str]:
    """Versions, kernel settings and recorded variables; settings of the connector are what the run is about."""
    was, now = (effective_settings(arm.engine.rec) if arm.engines else {} for arm in (a, b))
    for name in sorted(was.keys() | now.keys()):
        if name.startswith(_DECIDE) and was.get(name) != now.get(name):
            yield f"{name} is {was.get(name, 'absent')} and {now.get(name, 'absent')}"


Taken = dict[tuple[int, str], Seen[StoragesDigested]]


def storage(a: ArmHistory, b: ArmHistory) -> Step:
    """The arms at their starts, and each at its end against its start."""
    ours, theirs = _taken(a), _taken(b)
    if not ours and not theirs:
        return Step(Cause.STORAGE, None, "parameters and buffers were not digested", [])
    missing = [_untaken(arm, taken) for arm, taken in ((a, ours), (b, theirs))]
    for was, now, when in _pairs(a, b, ours, theirs):
        if was.rec.digest != now.rec.digest:
            said = f"digests {was.rec.digest} and {now.rec.digest} cannot be compared"
            return Step(Cause.STORAGE, None, said, [was.where, now.where])
        rows = [{row.name: row for row in side.rec.rows} for side in (was, now)]
        differing = sorted(name for name in rows[0].keys() | rows[1].keys() if rows[0].get(name) != rows[1].get(name))
        if differing:
            count = f"rank {now.rec.rank}: {len(differing)} parameters and buffers differ"
            said = f"{count} {when}, the first is {differing[0]}"
            return Step(Cause.STORAGE, True, said, [was.where, now.where])
    if any(missing):
        return Step(Cause.STORAGE, None, next(filter(None, missing)), [])
    counted = sum(len(seen.rec.rows) for (_, moment), seen in theirs.items() if moment == "start")
    first = next(iter(theirs.values()))
    return Step(Cause.STORAGE, False, f"{counted} parameters and buffers with equal digests", [first.where])


def _taken(arm: ArmHistory) -> Taken:
    """By rank and moment; a record that names no tensor says nothing."""
    return {(seen.rec.rank, seen.rec.moment): seen for seen in arm.storages if seen.rec.rows}


def _untaken(arm: ArmHistory, taken: Taken) -> str:
    """The first rank and moment of which nothing was digested; empty: all were."""
    for rank in sorted(_ranks(arm) or {0}):
        for moment in MOMENTS:
            if (rank, moment) not in taken:
                return f"parameters and buffers of rank {rank} of arm {arm.name} were not digested at its {moment}"
    return ""


def _pairs(
    a: ArmHistory, b: ArmHistory, ours: Taken, theirs: Taken
) -> Iterator[tuple[Seen[StoragesDigested], Seen[StoragesDigested], str]]:
    for rank, moment in sorted(ours.keys() & theirs.keys()) if a is not b else ():
        if moment == "start":
            yield ours[rank, moment], theirs[rank, moment], "between the arms"
    for arm, taken in {a.name: (a, ours), b.name: (b, theirs)}.values():
        for rank, moment in sorted(taken):
            if moment == "end" and (rank, "start") in taken:
                yield taken[rank, "start"], taken[rank, "end"], f"between start and end of arm {arm.name}"
