"""Tickets: what a swap left open, and what a later run must show for it to be closed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from samestate.checks.base import CheckResult, Verdict
from samestate.checks.custody_analyzer import CustodyJudgement, Probe
from samestate.checks.custody_fields import REQUIRED
from samestate.checks.custody_history import CustodyHistory
from samestate.checks.custody_probe import Ran, archive_of, ran
from samestate.checks.custody_smokes import SMOKES
from samestate.checks.custody_window import JOURNAL
from samestate.evidence.custody_records import ProbeEnded

_OPEN = (Verdict.FAIL, Verdict.UNKNOWN)
_SIMULATED = "sim"


class Criterion(BaseModel):
    """What a later run must show."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    on: Literal["swap", "probe"]
    plan: str | None
    """Of a probe."""
    plan_sha256: str | None
    """Of its ``plan.json``; None: the probe left none, and the plan's name must do."""
    engine: str | None
    """That the plan ran on; None: it came to none, and any will do that is not a simulation."""
    check: str
    smoke: str | None
    """The smoke that must be among those that passed."""
    request_sha256: str | None
    """Of the smoke's request; None: it was never sent."""
    artefacts: list[str]
    """What must be among the artefacts that the later swap requires from before."""
    verdict: Literal["pass"] = "pass"


class Ticket(BaseModel):
    """One thing that a swap left open."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    id: str
    swap: str | None
    journal_sha256: str
    """Of the records that opened it."""
    opened: str
    """When the last of these was written, RFC 3339; a run that began before closes nothing."""
    title: str
    observed: list[str]
    criteria: Annotated[list[Criterion], Field(min_length=1)]


class Later(NamedTuple):
    """A later run, as far as criteria ask."""

    began: str | None
    """RFC 3339; None: it does not say."""
    name: str | None
    """Of a swap."""
    swap: Mapping[str, str]
    """Verdicts by check of a swap; empty for a run that is none."""
    smokes: Mapping[str, frozenset[str]]
    """SHA-256 of the requests of the smokes that a swap ran."""
    required: frozenset[str]
    """Artefacts that it required from before."""
    plan: str | None
    ran: Ran | None
    """What the plan's archive is a run of."""
    probe: Mapping[str, str]
    """Verdicts by check of a plan's run, and its own under ``verdict``."""


def tickets(judgement: CustodyJudgement, history: CustodyHistory, journal_sha256: str) -> list[Ticket]:
    """A ticket for each check that failed or is unknown, and one for a probe that did not pass."""
    opened = history.noted[-1].wall if history.noted else ""
    made = []
    for result in judgement.results:
        if result.verdict not in _OPEN:
            continue
        for smoke in _smokes(result):
            made.append(
                Ticket(
                    id=result.check if smoke is None else f"{result.check}.{smoke}",
                    swap=judgement.swap,
                    journal_sha256=journal_sha256,
                    opened=opened,
                    title=f"{result.check}: {result.summary}",
                    observed=[one.message for one in result.findings if smoke in (None, one.message.partition(":")[0])],
                    criteria=[_of_swap(history, result.check, smoke)],
                )
            )
    probe = judgement.probe
    if probe is None or probe.verdict == Verdict.PASS:
        return made
    short = {check: verdict for check, verdict in probe.checks.items() if verdict in _OPEN}
    observed = [f"{check}: {verdict}" for check, verdict in short.items()] or [probe.error or "it came to no verdict"]
    return [
        *made,
        Ticket(
            id=f"probe.{probe.plan}",
            swap=judgement.swap,
            journal_sha256=journal_sha256,
            opened=opened,
            title=f"probe {probe.plan}: {probe.verdict or 'no verdict'}; its question is not answered",
            observed=observed,
            criteria=_of_probe(history, probe, ["verdict", *short]),
        ),
    ]


def later_swap(judgement: CustodyJudgement, history: CustodyHistory) -> Later:
    """A swap as a later run."""
    started, probe = history.started, judgement.probe
    names = started.smokes if started else ()
    sent = {
        name: frozenset(one.rec.request_sha256 for when in ("before", "after") for one in history.smokes(name, when))
        for name in names
    }
    return Later(
        began=history.noted[0].wall if history.noted else None,
        name=judgement.swap,
        swap={one.check: one.verdict.value for one in judgement.results},
        smokes=sent,
        required=frozenset(started.required_before if started else ()),
        plan=probe.plan if probe else None,
        ran=_ran(history),
        probe={"verdict": probe.verdict or "unknown", **probe.checks} if probe else {},
    )


def unmet(ticket: Ticket, later: Later) -> list[str]:
    """What of a ticket's criteria a later run does not show: one line each; empty: it may be closed."""
    lacking = []
    if not _after(later.began, ticket.opened):
        lacking.append(f"the run began {later.began or 'nobody says when'}, and must begin after {ticket.opened}")
    for one in ticket.criteria:
        if one.on == "probe":
            what, came_to = f"plan {one.plan}, check {one.check}", later.probe.get(one.check)
            reasons = list(_other_probe(one, later))
        else:
            what, came_to = f"swap, check {one.check}", later.swap.get(one.check)
            reasons = list(_other_swap(ticket, one, later))
        if reasons:
            lacking += [f"{what}: {reason}" for reason in reasons]
        elif came_to != one.verdict:
            lacking.append(f"{what}: {came_to or 'not run'}, and must be {one.verdict}")
    return lacking


def _other_probe(one: Criterion, later: Later) -> Iterator[str]:
    """Why a run does not answer the question of a probe's criterion."""
    if later.plan != one.plan or later.ran is None:
        yield f"plan {later.plan or 'none'} was run"
        return
    if one.plan_sha256 is not None and later.ran.plan_sha256 != one.plan_sha256:
        yield f"another plan of that name was run, {later.ran.plan_sha256 or 'unread'}, not {one.plan_sha256}"
    engine = later.ran.engine
    if engine is None or (engine == _SIMULATED if one.engine is None else engine != one.engine):
        yield f"ran on engine {engine or 'none'}, not on {one.engine or 'one that serves'}"


def _other_swap(ticket: Ticket, one: Criterion, later: Later) -> Iterator[str]:
    """Why a run does not answer the question of a swap's criterion."""
    if not later.swap:
        yield "not run"
        return
    if later.swap.get(JOURNAL) != Verdict.PASS:
        yield "its journal is damaged"
    if later.name != ticket.swap:
        yield f"the run is of swap {later.name or 'unknown'}, not of {ticket.swap or 'unknown'}"
    if one.smoke is not None and one.smoke not in later.smokes:
        yield f"smoke {one.smoke} is not among its own"
    elif one.smoke is not None and one.request_sha256 not in (None, *later.smokes[one.smoke]):
        yield f"smoke {one.smoke} sent another request"
    for name in one.artefacts:
        if name not in later.required:
            yield f"{name} is not required from before"


def _after(began: str | None, opened: str) -> bool:
    try:
        return began is not None and datetime.fromisoformat(began) > datetime.fromisoformat(opened)
    except (ValueError, TypeError):
        return False


def _of_swap(history: CustodyHistory, check: str, smoke: str | None) -> Criterion:
    sent = [one for when in ("before", "after") for one in history.smokes(smoke, when)] if smoke is not None else []
    started = history.started
    return Criterion(
        on="swap",
        plan=None,
        plan_sha256=None,
        engine=None,
        check=check,
        smoke=smoke,
        request_sha256=sent[0].rec.request_sha256 if sent else None,
        artefacts=started.required_before if started is not None and check == REQUIRED else [],
    )


def _of_probe(history: CustodyHistory, probe: Probe, checks: list[str]) -> list[Criterion]:
    found = _ran(history) or Ran(None, None, None)
    return [
        Criterion(
            on="probe",
            plan=probe.plan,
            plan_sha256=found.plan_sha256,
            engine=found.engine,
            check=check,
            smoke=None,
            request_sha256=None,
            artefacts=[],
        )
        for check in checks
    ]


def _ran(history: CustodyHistory) -> Ran | None:
    """What the last probe's archive is a run of; None: there is none."""
    ended = history.all(ProbeEnded)
    place = archive_of(history.folder, ended[-1].rec) if ended else None
    return ran(place) if place is not None else None


def _smokes(result: CheckResult) -> list[str | None]:
    """Smokes that a result's findings name; of any other check None, once."""
    if result.check != SMOKES:
        return [None]
    return list(dict.fromkeys(finding.message.partition(":")[0] for finding in result.findings)) or [None]
