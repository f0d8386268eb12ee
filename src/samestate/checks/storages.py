"""``storages``: named parameters and buffers are the same in all arms, and at the end as at the start (requirement 48).

Not exercised where no arm records them: they are asked for, since reading all weights takes time.
"""

from __future__ import annotations

from collections.abc import Iterator

from samestate.checks.base import CheckResult, Finding, Place
from samestate.checks.history import ArmHistory, History
from samestate.checks.seen import Seen
from samestate.checks.verdicts import conclude, fail, not_exercised, unknown
from samestate.evidence.records import StorageRow, StoragesDigested

CHECK = "storages"
MOMENTS = ("start", "end")
LIMITATION = "Equal parameters and buffers do not show that scratch memory, or which kernels were executed, was equal."
"""Under every verdict over storages (requirement 49)."""
_SHOWN = 5
"""Differences told of one comparison."""
Taken = dict[tuple[int, str], Seen[StoragesDigested]]
"""By rank and moment."""


def storages(history: History) -> CheckResult:
    """Rank by rank: the start against the end, and every arm against the first."""
    arms = history.ordered
    if not any(arm.storages for arm in arms):
        return not_exercised(CHECK, "not_recorded", "no arm records its parameters and buffers", unit="tensors")
    findings: list[Finding] = []
    examined = 0
    first: Taken = {}
    owners: dict[int, str] = {}
    for arm in arms:
        taken: Taken = {(seen.rec.rank, seen.rec.moment): seen for seen in arm.storages}
        findings += _whole(arm, taken)
        for (rank, moment), seen in sorted(taken.items()):
            examined += len(seen.rec.rows)
            if moment == "end" and (rank, "start") in taken:
                start = taken[rank, "start"]
                findings += _differences(start, seen, arm.name, rank, f"arm {arm.name}: rank {rank}: since its start")
            if moment == "start":
                other = first.setdefault((rank, moment), seen)
                of = owners.setdefault(rank, arm.name)
                findings += _differences(other, seen, arm.name, rank, f"rank {rank}: arm {arm.name} against {of}")
    names = {row.name for arm in arms for seen in arm.storages for row in seen.rec.rows}
    summary = f"{len(names)} parameters and buffers on {len(owners)} ranks in {len(arms)} arms"
    return conclude(CHECK, findings, unit="tensors", examined=examined, summary=summary)


def _whole(arm: ArmHistory, taken: Taken) -> Iterator[Finding]:
    engine = arm.engine
    for rank in range(engine.rec.ranks):
        place = Place(arm=arm.name, rank=rank)
        for moment in MOMENTS:
            seen = taken.get((rank, moment))
            if seen is None:
                message = f"arm {arm.name}: rank {rank} did not digest its parameters at its {moment}"
                yield unknown("missing_storages", message, place, [engine.where])
            elif not seen.rec.rows:
                yield unknown("no_storages", f"arm {arm.name}: rank {rank} names no parameter", place, [seen.where])


def _differences(
    was: Seen[StoragesDigested], now: Seen[StoragesDigested], arm: str, rank: int, what: str
) -> Iterator[Finding]:
    if was is now:
        return
    place, evidence = Place(arm=arm, rank=rank), [was.where, now.where]
    if was.rec.digest != now.rec.digest:
        message = f"{what}: digests {was.rec.digest} and {now.rec.digest} cannot be compared"
        yield unknown("other_digest", message, place, evidence)
        return
    ours, theirs = ({row.name: row for row in side.rec.rows} for side in (was, now))
    differing = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
    for name in differing[:_SHOWN]:
        message = f"{what}: {name} is {_shown(ours.get(name))}, then {_shown(theirs.get(name))}"
        yield fail("storage_differs", message, place, evidence)


def _shown(row: StorageRow | None) -> str:
    if row is None:
        return "absent"
    return f"{row.dtype.removeprefix('torch.')}{row.shape} {row.digest[:12]}"
