"""The candidate of a swap: made of what is declared, upon the incumbent's own base, and else like the incumbent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from samestate.checks.base import CheckResult, Finding
from samestate.checks.custody_compare import compare, listed
from samestate.checks.custody_history import CustodyHistory, Noted, nothing, values
from samestate.checks.verdicts import conclude, fail, not_exercised, unknown
from samestate.evidence import custody_records as c

COMPOSITION = "custody-composition"


def composition(history: CustodyHistory) -> CheckResult:
    """The candidate is what it is declared to be, upon the incumbent's own base, and differs in nothing else."""
    records = history.all(c.CompositionSeen)
    candidate = next((one for one in records if one.rec.role == "candidate"), None)
    if candidate is None:
        if c.Step.CANDIDATE_START in history.began:
            return nothing(COMPOSITION, "missing_composition", "nobody says what the candidate is made of", "builds")
        return not_exercised(COMPOSITION, "no_candidate", "no candidate was started", unit="builds")
    findings = list(_made_of(history, candidate, records))
    before = history.first(c.SnapshotTaken, "before")
    taken = [one for one in history.all(c.SnapshotTaken) if one.rec.when == "candidate"]
    allowed = history.started.candidate_differs if history.started else []
    for snapshot in taken:
        if before is None:
            findings.append(unknown("missing_before", "no snapshot of the incumbent to hold the candidate against"))
            continue
        if all(listed(one.name, allowed) for one in before.rec.fields):
            findings.append(unknown("nothing_compared", "the candidate may differ in every field, so none was held"))
        for finding in compare(before, snapshot, [], allowed):
            findings.append(finding.model_copy(update={"message": f"candidate, {finding.message}"}))
    if not taken:
        findings.append(unknown("missing_candidate", "no snapshot of the candidate was taken"))
    layers = len(candidate.rec.layers)
    made = f"{candidate.rec.name} on {candidate.rec.base}, {layers} layers by hash"
    summary = f"{made}; {len(findings)} beyond what is declared"
    return conclude(COMPOSITION, findings, unit="builds", examined=len(taken), summary=summary)


def _made_of(history: CustodyHistory, candidate: Noted, records: Sequence[Noted]) -> Iterator[Finding]:
    rec, where = candidate.rec, [candidate.where]
    if rec.base_sha256 is None:
        message = f"base {rec.base}: the candidate's own hash of it is missing; candidate.sources names its folder"
        yield unknown("missing_base", message, None, where)
    before = history.first(c.SnapshotTaken, "before")
    own = values(before.rec.fields).get(f"sources.{rec.base}") if before else None
    if own is None or own.value is None:
        yield unknown("missing_base", f"base {rec.base}: the incumbent's hash of it is missing", None, where)
    elif rec.base_sha256 is not None and own.value != rec.base_sha256:
        yield fail("other_base", f"base {rec.base}: is not what the incumbent runs on", None, where)
    for reference in records:
        if reference.rec.role == "reference" and reference.rec.sha256 == rec.base_sha256:
            yield fail("reference_as_base", f"{rec.name}: is built on the reference {reference.rec.name}", None, where)
    for layer in rec.layers:
        if layer.seen is None:
            yield unknown("missing_layer", f"layer {layer.name}: its file could not be read", None, where)
        elif layer.seen != layer.declared:
            yield fail("other_layer", f"layer {layer.name}: has other bytes than declared", None, where)
