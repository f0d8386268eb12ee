"""``resumptions``: a request that was preempted goes on from a state that some step had computed.

Its blocks are gone, so it looks its tokens up again, its own outputs included, as a new request does. Where it goes on
must be what that lookup found: a state of tokens that begin as its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from samestate.checks.base import CheckResult, Finding, Place
from samestate.checks.geometry import only_step_ends
from samestate.checks.history import ArmHistory, History, Row
from samestate.checks.prefixes import Prefixes
from samestate.checks.scenario import Generation, generations, lineage
from samestate.checks.seen import Seen
from samestate.checks.verdicts import conclude, fail, unknown
from samestate.evidence.records import Lookup

CHECK = "resumptions"


class _Step(NamedTuple):
    """A step that ended somewhere, of a request of an arm."""

    prefixes: Prefixes
    request: str
    row: Row
    here: bool
    """In the arm that is looked at, where its place in the stream tells when it was."""


class Resumption(NamedTuple):
    """A request and the step with which it goes on after a preemption."""

    one: Generation
    before: Row
    row: Row


def resumptions(history: History) -> CheckResult:
    """Every resumption of every candidate; without one the question did not come up, and that is unknown."""
    findings: list[Finding] = []
    examined = reused = 0
    for arm in history.candidates:
        steps = _steps(history, arm)
        checked = generations(history, [arm])
        found = list(resumed(checked))
        examined += len(found)
        reused += sum(one.row.start > 0 for one in found)
        findings += [finding for one in found for finding in _resumption(history, one, steps)]
        findings += _unaccounted(arm, checked, found)
    if not examined and not findings:
        findings.append(unknown("never_resumed", "no request went on after a preemption: nothing was tested"))
    summary = f"{examined} resumptions, {reused} of them from a reused state"
    return conclude(CHECK, findings, unit="resumptions", examined=examined, summary=summary)


def resumed(checked: Sequence[Generation]) -> Iterator[Resumption]:
    """The steps with which preempted requests go on: a lookup comes before them, or they take up tokens again."""
    for one in checked:
        if one.request in one.arm.preempted:
            for before, row in pairwise(one.schedule or ()):
                if row.start < before.end - before.drafted or _between(one, before, row):
                    yield Resumption(one, before, row)


def _between(one: Generation, before: Row, row: Row) -> list[Seen[Lookup]]:
    """Answered lookups of a request between two of its steps."""
    lookups = one.arm.lookups.get(one.request or "", ())
    return [seen for seen in lookups if seen.rec.matched_tokens is not None and before.n < seen.n < row.n]


def _unaccounted(arm: ArmHistory, checked: Sequence[Generation], found: Sequence[Resumption]) -> Iterator[Finding]:
    """Preempted requests of which no record shows how they went on."""
    shown = {resumption.one.request for resumption in found}
    places = {one.request: one.place for one in checked}
    for request, wheres in arm.preempted.items():
        if request not in shown:
            message = f"arm {arm.name}: {request} was preempted, and no record shows how it went on"
            yield unknown("resumption_unknown", message, places.get(request, Place(arm=arm.name)), wheres)


def _resumption(history: History, found: Resumption, steps: Mapping[int, list[_Step]]) -> Iterator[Finding]:
    one, p = found.one, found.row.start
    name = f"{one.name}: after a preemption it goes on from {p} of {found.before.end} tokens"
    yield from _looked_up(history, found, name)
    if not p or not only_step_ends(one.arm):
        return
    prefixes = Prefixes(history, one.arm)
    digest = prefixes.digest(one.request or "", p)
    before = (step for step in steps.get(p, ()) if not step.here or step.row.n < found.row.n)
    if digest is None or all(step.prefixes.digest(step.request, p) != digest for step in before):
        place = one.place.model_copy(update={"boundary": p})
        sure = digest is not None and history.whole(one.arm.name) and not any(row.drafted for row in one.schedule or ())
        message = f"{name}, and no step of a request that begins so had ended there"
        yield (fail if sure else unknown)("state_never_computed", message, place, [found.before.where, found.row.where])


def _looked_up(history: History, found: Resumption, name: str) -> Iterator[Finding]:
    """The last lookup between the two steps names where it goes on, unless a load failed."""
    one, p = found.one, found.row.start
    request, place = one.request or "", one.place.model_copy(update={"boundary": p})
    evidence = [found.before.where, found.row.where]
    between = _between(one, found.before, found.row)
    if not between:
        yield unknown("lookup_missing", f"{name}, and no answered lookup before that is recorded", place, evidence)
        return
    last = between[-1]
    said = last.rec.local_tokens + (last.rec.matched_tokens or 0)
    failed = any(load.completed is not None and not load.completed.rec.ok for load in one.arm.loads.get(request, ()))
    if p > said or (p < said and not failed):
        make = fail if history.whole(one.arm.name) else unknown
        yield make("lookup_disagrees", f"{name}, and its lookup found {said}", place, [*evidence, last.where])


def _steps(history: History, arm: ArmHistory) -> dict[int, list[_Step]]:
    """The steps of an arm, and of those whose cache it finds, by where they end; drafted ones left out."""
    found: dict[int, list[_Step]] = {}
    for owner in lineage(history, arm):
        prefixes = Prefixes(history, owner)
        for one in generations(history, [owner]):
            for row in one.schedule or ():
                if not row.drafted and one.request is not None:
                    found.setdefault(row.end, []).append(_Step(prefixes, one.request, row, owner is arm))
    return found
