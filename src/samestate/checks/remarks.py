"""What stands beside the seal, as results: amendments and signatures. An analyzer never reads either."""

from __future__ import annotations

from samestate.checks.analyzers import Judgement
from samestate.checks.base import CheckResult, Finding, Verdict
from samestate.checks.verdicts import conclude, unknown
from samestate.evidence.amendments import Amendment, Amendments
from samestate.evidence.signature import Signatures

AMENDMENTS = "amendments"
SIGNATURE = "signature"


def with_amendments(judgement: Judgement, amendments: Amendments) -> Judgement:
    """Show what was amended. A pass whose verdict was withdrawn, and amendments that are damaged, are unknown.

    A withdrawal holds for every judgement by the same analyzer id on this seal. It never makes less of a fail.
    """
    if not amendments.items and not amendments.defects:
        return judgement
    findings = [
        unknown("amendment_damaged", f"{where}: {what}", evidence=[where]) for where, what in amendments.defects
    ]
    findings += [_amendment(judgement, one) for one in amendments.items]
    withdrawn = sum(finding.code == "verdict_withdrawn" for finding in findings)
    count = len(amendments.items)
    summary = f"{count} amendment{'s' * (count != 1)}"
    if withdrawn:
        summary += f", {judgement.analyzer}'s verdict withdrawn"
    if amendments.defects:
        summary += f", {len(amendments.defects)} damaged"
    result = conclude(AMENDMENTS, findings, unit="amendments", examined=count, summary=summary)
    return _with(judgement, result)


def with_signatures(judgement: Judgement, signatures: Signatures, amendments: Amendments) -> Judgement:
    """Require a valid signature by a trusted key, and every amendment that it counted. Else unknown.

    An envelope that is damaged or forged beside a valid one is named in the summary alone: anybody can put one there.
    """
    findings = []
    intact = [one for one in signatures.valid if one.amendments == amendments.hashes[: len(one.amendments)]]
    if not signatures.valid:
        why = [f"{where}: {what}" for where, what in signatures.defects]
        others = f"; {signatures.others} by keys that are not trusted" if signatures.others else ""
        message = f"no valid signature by a trusted key{others}"
        findings.append(unknown("not_signed_by_trusted", message))
        findings += [
            unknown("signature_invalid", said, evidence=[defect.where])
            for said, defect in zip(why, signatures.defects, strict=True)
        ]
    for one in signatures.valid:
        if one not in intact:
            message = f"{one.file} counts {len(one.amendments)} amendments, which are not all there any more"
            findings.append(unknown("amendments_lost", message, evidence=[one.file]))
    keys = sorted({one.key_id[:12] for one in signatures.valid})
    summary = f"signed by {', '.join(keys)}" if keys else "no valid signature by a trusted key"
    if signatures.defects:
        summary += f"; {len(signatures.defects)} beside it invalid" if keys else f"; {len(signatures.defects)} invalid"
    if later := len(amendments.hashes) - max((len(one.amendments) for one in intact), default=0):
        summary += f"; {later} amendment{'s' * (later != 1)} not signed"
    result = conclude(SIGNATURE, findings, unit="signatures", examined=len(signatures.valid), summary=summary)
    return _with(judgement, result)


def _amendment(judgement: Judgement, one: Amendment) -> Finding:
    by = f" by {one.by}" if one.by else ""
    decided = f", decision {one.decision}" if one.decision else ""
    head = f"amendment {one.number}, {one.wall_time[:10]}{by}{decided}"
    about = f", on {one.finding}" if one.finding else ""
    said = f": {one.text}" if one.text else ""
    evidence = [f"{AMENDMENTS}/{one.number:04}.json"]
    if one.withdraws is None:
        return Finding(code="amended", verdict=Verdict.PASS, message=f"{head}{about}{said}", evidence=evidence)
    away = one.withdraws
    message = f"{head} withdraws the {away.verdict} of {away.analyzer} ({away.file}): {away.reason}{about}{said}"
    if away.analyzer == judgement.analyzer:
        return unknown("verdict_withdrawn", message, evidence=evidence)
    return Finding(code="other_verdict_withdrawn", verdict=Verdict.PASS, message=message, evidence=evidence)


def _with(judgement: Judgement, result: CheckResult) -> Judgement:
    """The judgement with one required result more. What is no pass makes a pass unknown, and leaves a fail a fail."""
    verdict = judgement.verdict
    if result.verdict is not Verdict.PASS and verdict is not Verdict.FAIL:
        verdict = Verdict.UNKNOWN
    return judgement.model_copy(
        update={
            "verdict": verdict,
            "results": [*judgement.results, result],
            "required": [*judgement.required, result.check],
        }
    )
