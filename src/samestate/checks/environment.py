"""``environment``: what every rank's process stands on was observed before it was used, and is alike in all arms.

An inventory speaks for the arm in whose streams it stands, and for no other (requirement 12). Where the plan lists the
files that are not as released, they are those and no others (requirement 14). Not exercised where no arm has an
inventory and the plan has no list.
"""

from __future__ import annotations

from collections.abc import Iterator

from samestate.checks.base import CheckResult, Finding, Place
from samestate.checks.history import ArmHistory, History
from samestate.checks.seen import MissingEvidence, Seen
from samestate.checks.verdicts import conclude, fail, not_exercised, unknown
from samestate.evidence.records import EnvironmentObserved

CHECK = "environment"
_SHOWN = 5
"""Differences told of one rank."""


def environment(history: History) -> CheckResult:
    """Every rank of every engine says what it stands on, once, before the first operation; the same in all arms."""
    arms, listed = history.ordered, _listed(history)
    if listed is None and not any(arm.environments for arm in arms):
        return not_exercised(CHECK, "not_recorded", "no arm records what its processes stand on", unit="ranks")
    findings: list[Finding] = []
    examined = 0
    first: dict[int, tuple[ArmHistory, Seen[EnvironmentObserved]]] = {}
    for arm in arms:
        mine = {seen.rec.rank: seen for seen in arm.environments}
        examined += len(mine)
        findings += [*_whole(arm), *_in_time(arm)]
        for rank, seen in mine.items():
            if listed is not None:
                findings += _as_listed(arm, seen, listed, history.plan.differing_settings)
            if rank not in first:
                first[rank] = arm, seen
                continue
            findings += _alike(*first[rank], arm, seen, history.plan.differing_settings)
    patched = {(one.distribution, one.path) for arm in arms for seen in arm.environments for one in seen.rec.patched}
    devices = sorted({seen.rec.device for arm in arms for seen in arm.environments})
    summary = f"{examined} ranks on {', '.join(devices) or 'no device'}; {len(patched) or 'no'} files not as released"
    return conclude(CHECK, findings, unit="ranks", examined=examined, summary=summary)


def facts(seen: EnvironmentObserved) -> dict[str, str]:
    """What could make two processes compute differently, by name. Another card of the same kind is none of it."""
    found = {"device": seen.device, "driver": seen.driver or "none"}
    found |= {f"variables.{name}": value for name, value in seen.variables.items()}
    found |= {f"backends.{name}": value for name, value in seen.backends.items()}
    found |= {f"patched.{one.distribution}/{one.path}": one.sha256 or "gone" for one in seen.patched}
    return found


def _listed(history: History) -> set[str] | None:
    """Files that the plan expects not to be as released; None: it lists none, or cannot be read."""
    try:
        listed = history.plan.expected_patched
    except MissingEvidence:
        return None
    return None if listed is None else set(listed)


def _as_listed(
    arm: ArmHistory, seen: Seen[EnvironmentObserved], listed: set[str], declared: list[str]
) -> Iterator[Finding]:
    """A file in which the plan lets arms differ may be patched in one and not in another: it is not held to the list.

    Of files that nobody listed only the first are told: a build of one's own has them by the hundred.
    """
    rank, place, evidence = seen.rec.rank, Place(arm=arm.name, rank=seen.rec.rank), [seen.where]
    patched = {f"{one.distribution}/{one.path}" for one in seen.rec.patched}
    waived = {name for name in patched | listed if f"environment.patched.{name}" in declared}
    for name in sorted(listed - patched - waived):
        message = f"arm {arm.name}: rank {rank}: {name} is not among the files that are not as released, "
        message += "expected_patched lists it"
        yield fail("patch_absent", message, place, evidence)
    unlisted = sorted(patched - listed - waived)
    for name in unlisted[:_SHOWN]:
        message = f"arm {arm.name}: rank {rank}: {name} is not as released, expected_patched does not list it"
        yield fail("unexpected_patch", message, place, evidence)
    if len(unlisted) > _SHOWN:
        message = f"arm {arm.name}: rank {rank}: {len(unlisted) - _SHOWN} more files are not as released and not listed"
        yield fail("unexpected_patch", message, place, evidence)


def _whole(arm: ArmHistory) -> Iterator[Finding]:
    engine = arm.engine
    said = [seen.rec.rank for seen in arm.environments]
    for rank in range(engine.rec.ranks):
        place = Place(arm=arm.name, rank=rank)
        if said.count(rank) == 0:
            message = f"arm {arm.name}: rank {rank} does not say what it stands on"
            yield unknown("missing_environment", message, place, [engine.where])
        elif said.count(rank) > 1:
            wheres = [seen.where for seen in arm.environments if seen.rec.rank == rank]
            yield unknown("repeated_environment", f"arm {arm.name}: rank {rank} was observed again", place, wheres)


def _in_time(arm: ArmHistory) -> Iterator[Finding]:
    """An inventory that was taken later does not speak for what ran before."""
    begins = min((seen.t_ns for seen in arm.started), default=None)
    for seen in arm.environments:
        if begins is not None and seen.t_ns > begins:
            message = f"arm {arm.name}: rank {seen.rec.rank} was observed after the first operation had begun"
            yield unknown("late_environment", message, Place(arm=arm.name, rank=seen.rec.rank), [seen.where])


def _alike(
    other: ArmHistory,
    theirs: Seen[EnvironmentObserved],
    arm: ArmHistory,
    seen: Seen[EnvironmentObserved],
    declared: list[str],
) -> Iterator[Finding]:
    was, now = facts(theirs.rec), facts(seen.rec)
    rank = seen.rec.rank
    place, evidence = Place(arm=arm.name, rank=rank), [theirs.where, seen.where]
    differing = [
        name
        for name in sorted(was.keys() | now.keys())
        if was.get(name) != now.get(name) and not {"environment", f"environment.{name}"} & set(declared)
    ]
    for name in differing[:_SHOWN]:
        ours, mine = was.get(name, "absent"), now.get(name, "absent")
        message = f"rank {rank}: {name} is {ours} in arm {other.name} and {mine} in arm {arm.name}"
        yield fail("environment_differs", message, place, evidence)
