"""``eos-absent`` and ``non-vacuity``: the outputs are such that comparing them can show something."""

from __future__ import annotations

from collections.abc import Sequence

from samestate.checks.base import CheckResult, Finding, Place
from samestate.checks.boundary import reloads
from samestate.checks.history import History
from samestate.checks.transfers import rank_bytes
from samestate.checks.verdicts import conclude, fail, unknown
from samestate.evidence.records import EXTERNAL_HITS
from samestate.plans.scenarios import CANDIDATE, CONTROL

EOS_ABSENT = "eos-absent"
NON_VACUITY = "non-vacuity"
MIN_DISTINCT = 4
"""A generation with fewer distinct tokens says little about the state it came from."""


def eos_absent(history: History) -> CheckResult:
    """No generation of any arm holds an end-of-sequence id that tokenizer, model or config know."""
    findings: list[Finding] = []
    examined = 0
    known: set[int] = set()
    for arm in history.arms.values():
        ids = set(arm.engine.rec.eos_token_ids)
        known |= ids
        if not ids:
            message = f"arm {arm.name}: the engine names no end-of-sequence id"
            findings.append(unknown("no_eos_known", message, Place(arm=arm.name), [arm.engine.where]))
        for case, op in history.generations(arm=arm.name):
            output = arm.output(op.op)
            place = Place(arm=arm.name, case=case.id, op=op.op)
            if output is None:
                findings.append(unknown("missing_output", f"arm {arm.name}: {op.op} has no output", place))
                continue
            examined += 1
            met = [index for index, token in enumerate(output.rec.token_ids) if token in ids]
            if met:
                message = f"arm {arm.name}: {op.op} holds an end-of-sequence id at token {met[0]}"
                findings.append(fail("eos_in_output", message, place, [output.where]))
    met_in = sum(finding.code == "eos_in_output" for finding in findings)
    summary = f"{met_in or 'none'} of {examined} generations hold an end-of-sequence id ({len(known)} known)"
    return conclude(EOS_ABSENT, findings, unit="generations", examined=examined, summary=summary)


def non_vacuity(history: History) -> CheckResult:
    """Something was reused, the control reused nothing, and the outputs depend on their prompts."""
    hits = sum(1 for reload in reloads(history) if any(rank_bytes(reload.loads).values()))
    findings = control_reused(history)
    if not hits:
        message = "no reload of the candidate moved a byte: nothing was tested"
        findings.append(unknown("vacuous", message, Place(arm=CANDIDATE)))
    return with_varied_outputs(history, findings, f"{hits} reloads moved bytes")


def with_varied_outputs(history: History, found: Sequence[Finding], reused: str) -> CheckResult:
    """``non-vacuity``: what was `found` about reuse, and outputs that are too uniform to show anything."""
    findings = list(found)
    examined = 0
    for name in [arm.name for arm in history.plan.arms]:
        arm = history.arm(name)
        outputs: set[tuple[int, ...]] = set()
        prompts = {(case.id, op.role) for case, op in history.generations(arm=name)}
        for case, op in history.generations(arm=name):
            output = arm.output(op.op)
            if output is None:
                continue
            examined += 1
            ids = output.rec.token_ids
            outputs.add(tuple(ids))
            short = op.output_tokens < MIN_DISTINCT <= history.plan.output_tokens
            if len(set(ids)) < MIN_DISTINCT and not short:
                message = f"arm {name}: {op.op} has {len(set(ids))} distinct tokens, fewer than {MIN_DISTINCT}"
                findings.append(unknown("vacuous", message, Place(arm=name, case=case.id, op=op.op), [output.where]))
        if len(outputs) <= 1 < len(prompts):
            message = (
                f"arm {name}: {len(prompts)} inputs, {len(outputs)} distinct outputs: they do not depend on the prompt"
            )
            findings.append(unknown("vacuous", message, Place(arm=name)))
    summary = f"{reused}, {examined} generations varied" if not findings else findings[0].message
    return conclude(NON_VACUITY, findings, unit="generations", examined=examined, summary=summary)


def control_reused(history: History) -> list[Finding]:
    """External reuse in the control, which makes it no reference."""
    arm = history.arm(CONTROL)
    findings = [
        unknown("vacuous", f"the control loaded for request {request}", Place(arm=CONTROL, request=request))
        for request in arm.loads
    ]
    for case, op in history.generations(arm=CONTROL):
        if arm.counter(op.op, EXTERNAL_HITS):
            message = f"the control counts external hits in {op.op}"
            findings.append(
                unknown("vacuous", message, Place(arm=CONTROL, case=case.id, op=op.op), arm.evidence(op.op))
            )
    return findings
