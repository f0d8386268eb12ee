"""``budget-close``: reasoning closed where the budget says, forced on the exact row, once.

Two sources. The API's own ids show whether a close that the policy forces is there, whatever the trace says. The rows
of a trace that is whole, agreed on by all ranks and reconciled show on which row the store was, and name it. The policy
is ``upstream-count-v1`` (`samestate.checks.budget_oracle`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from samestate.checks.base import CheckResult, Finding
from samestate.checks.budget_oracle import Decision, Markers, decide_outputs
from samestate.checks.history import ArmHistory, History, MissingEvidence
from samestate.checks.marker_classes import closes
from samestate.checks.marker_history import Committed, RankTrace
from samestate.checks.marker_probes import Probe, budgeted, markers_of, probes_of
from samestate.checks.marker_ranks import disagreements
from samestate.checks.marker_reconcile import Rule, objections
from samestate.checks.marker_whole import gaps
from samestate.checks.verdicts import conclude, fail, not_exercised, unknown

CHECK = "budget-close"


class Case(NamedTuple):
    """A probe's delivered tokens, and what the policy says of each of them."""

    probe: Probe
    markers: Markers
    decisions: list[Decision]
    """One a delivered token."""

    @property
    def due(self) -> int | None:
        """The first output position at which the policy forces; None: nowhere."""
        return next((at for at, one in enumerate(self.decisions) if one.forced is not None), None)


def budget_close(history: History, rule: Rule) -> CheckResult:
    """Judge every probe with a budget: by its delivered ids always, by its rows where the trace can be trusted."""
    probes = budgeted(history)
    untrusted = {name: why for arm in _arms(probes) for name, why in mistrusted(arm, rule).items()}
    findings: list[Finding] = []
    due = judged = 0
    for probe in probes:
        case = case_of(probe)
        why = untrusted.get((probe.arm.name, probe.name), "")
        if case is None:
            findings.append(unknown("missing_answer", f"{probe.title}: no answer to judge", probe.place, probe.where))
            continue
        found = list(_violations(case, trusted=not why))
        if why and not found:
            message = (
                f"{probe.title}: {len(case.decisions)} delivered tokens keep to the budget, the rows cannot say: {why}"
            )
            found.append(unknown("trace_not_usable", message, probe.place, probe.where))
        judged += 1
        due += case.due is not None
        findings += found
    summary = f"{judged}/{len(probes)} requests judged, a close was due in {due}"
    if not due and not findings:
        return not_exercised(CHECK, "no_close_due", f"{summary}: no budget was spent", unit="requests")
    if findings:
        summary = f"{summary}; {findings[0].message}"
    return conclude(CHECK, findings, unit="requests", examined=judged, summary=summary)


def _arms(probes: Sequence[Probe]) -> list[ArmHistory]:
    return list({probe.arm.name: probe.arm for probe in probes}.values())


def case_of(probe: Probe) -> Case | None:
    """What the policy says of a probe; None: no answer, or no budget. Raises MissingEvidence without markers."""
    if probe.answered is None or probe.budget is None or not probe.tokens:
        return None
    markers = markers_of(probe.arm)
    decisions = decide_outputs(probe.answered.rec.prompt_token_ids, probe.tokens, markers, probe.budget)
    return Case(probe, markers, decisions[:-1])


def mistrusted(arm: ArmHistory, rule: Rule) -> dict[tuple[str, str], str]:
    """Probes of an arm whose rows prove nothing, by (arm, probe), with the reason; the others are not in it."""
    against_arm, against = "", dict[str, str]()
    for finding in (*gaps(arm, rule), *disagreements(arm)):
        if finding.place.case is None:
            against_arm = against_arm or finding.message
        else:
            against.setdefault(finding.place.case, finding.message)
    found = {}
    for name, objection in _by_probe(arm, rule):
        why = against_arm or against.get(name, "") or objection
        if why:
            found[arm.name, name] = why
    return found


def _by_probe(arm: ArmHistory, rule: Rule) -> Iterator[tuple[str, str]]:
    for probe in probes_of(arm):
        try:
            first = next(objections(probe, rule), None)
        except MissingEvidence as missing:
            yield probe.name, str(missing)
        else:
            yield probe.name, first.message if first else ""


# --- what is wrong ----------------------------------------------------------------------------


def _violations(case: Case, *, trusted: bool) -> Iterator[Finding]:
    """Per rank where the rows can say; else by the delivered ids alone."""
    ranks = case.probe.traces.values() if trusted else []
    for begin, end in _unforced(case):
        if not ranks:
            yield _not_closed(case, begin, end)
        for trace in ranks:
            yield _not_closed(case, begin, end, trace)
    for trace in ranks:
        yield from _stores(case, trace)


def _unforced(case: Case) -> Iterator[tuple[int, int]]:
    """Runs ``[begin, end)`` of delivered positions where the policy forces an id and another one stands."""
    wrong = [at for at in range(len(case.decisions)) if _missed(case, at)]
    for _, run in groupby(enumerate(wrong), key=lambda pair: pair[1] - pair[0]):
        places = [at for _, at in run]
        yield places[0], places[-1] + 1


def _not_closed(case: Case, begin: int, end: int, trace: RankTrace | None = None) -> Finding:
    """The close that is due at `begin` is not there."""
    probe, tokens, decision = case.probe, case.probe.tokens, case.decisions[begin]
    later = next((close.position for close in closes(tokens, case.markers) if close.position >= begin), None)
    if later is None:
        course = f"reasoning ran on to the end, {len(tokens) - begin} tokens past the budget"
    else:
        course = f"reasoning closed at {later}, {later - begin} late" if later > begin else "another id closed it"
    said = (
        f"budget {probe.budget}, id {decision.forced} due at {begin} ({decision.count} tokens counted), "
        f"{tokens[begin]} committed; {course}"
    )
    code, on_row, evidence = ("not_closed" if later is None else "closed_late"), "", probe.where
    if trace is not None:
        code, on_row = _row_said(code, trace.committed[begin], decision)
        evidence = [*trace.committed[begin].step.evidence, *probe.where]
    place = probe.at_rank(trace.rank) if trace else probe.place
    rank = f"rank {trace.rank}, " if trace else ""
    return fail(code, f"{rank}{_named(probe)}: {said}{on_row}", place, evidence)


def _row_said(code: str, committed: Committed, decision: Decision) -> tuple[str, str]:
    """What the exact row and its neighbours hold of the store that was due."""
    row, rows = committed.row, committed.step.rows.rec.rows if committed.step.rows else []
    at = f"; row {committed.local} of step {committed.step.step}"
    if row is not None and row.store:
        if row.stored == decision.forced:
            return "forced_row_masked", f"{at} held the store, and another id was committed"
        return "wrong_id_stored", f"{at} held a store of {row.stored}"
    others = [other.local for other in rows if other.store]
    if others:
        return "store_on_wrong_row", f"{at} held no store, row {', '.join(map(str, others))} did"
    return ("budget_ignored" if code == "not_closed" else code), f"{at} held no store, nor did another"


def _stores(case: Case, trace: RankTrace) -> Iterator[Finding]:
    """Stores on committed rows that the policy does not have, or of another id."""
    for committed, decision in zip(trace.committed, case.decisions, strict=False):
        row = committed.row
        late = committed.position > 0 and _missed(case, committed.position - 1)  # `_not_closed` tells it
        if row is not None and not row.store and decision.forced == committed.token and not late:
            yield _not_stored(case, trace, committed, decision)
        if row is None or not row.store or row.stored == decision.forced:
            continue
        if decision.forced is not None and committed.token != decision.forced:
            continue  # `_not_closed` tells it
        code, why = _unwanted(case, committed, decision)
        taken = "committed" if committed.token == row.stored else f"overridden by {committed.token}"
        message = (
            f"rank {trace.rank}, {_named(case.probe)}: id {row.stored} stored on row {committed.local} of step "
            f"{committed.step.step}, position {committed.position}, and {taken}: {why}"
        )
        yield fail(code, message, case.probe.at_rank(trace.rank), [*committed.step.evidence, *case.probe.where])


def _missed(case: Case, at: int) -> bool:
    """Whether the policy forces an id at a delivered position and another one stands there."""
    return case.decisions[at].forced not in (None, case.probe.tokens[at])


def _not_stored(case: Case, trace: RankTrace, committed: Committed, decision: Decision) -> Finding:
    """The due id stands there, and nothing forced it: the budget code writes whatever leads without it."""
    message = (
        f"rank {trace.rank}, {_named(case.probe)}: id {decision.forced} due at {committed.position} "
        f"({decision.count} tokens counted) was committed, and row {committed.local} of step {committed.step.step} "
        "held no store"
    )
    where = [*committed.step.evidence, *case.probe.where]
    return fail("not_stored", message, case.probe.at_rank(trace.rank), where)


def _unwanted(case: Case, committed: Committed, decision: Decision) -> tuple[str, str]:
    budget = case.probe.budget
    match decision.why:
        case "within":
            return "closed_early", f"{decision.count} of {budget} tokens counted"
        case "closed":
            before = [close.position for close in closes(case.probe.tokens[: committed.position], case.markers)]
            closed = f", at {before[-1]}" if before else ""
            if before and before[-1] >= committed.step.position:
                closed += ", by a draft that this step accepted"
            return "closed_twice", f"reasoning was closed already{closed}"
        case "outside":
            return "forced_outside", "reasoning had not begun"
        case "spent" | "closing":
            return "wrong_id_stored", f"id {decision.forced} was due"


def _named(probe: Probe) -> str:
    request = probe.answered.rec.request if probe.answered else "?"
    return f"request {request} ({probe.title})"
