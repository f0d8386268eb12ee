"""What the client asked, held against the plan: ``probes``, ``attempts``, ``gates`` and ``answer``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from samestate.checks.base import CheckResult, Finding, Place
from samestate.checks.history import ArmHistory, History, MissingEvidence
from samestate.checks.marker_body import other_body
from samestate.checks.marker_probes import Probe, all_probes, probes_of
from samestate.checks.seen import Seen
from samestate.checks.verdicts import conclude, fail, not_exercised, unknown
from samestate.evidence.canonical import sha256_hex, token_digest
from samestate.evidence.probe_records import SAMPLING, GateReceipt, ProbeSent
from samestate.evidence.record_base import PatchedFunction
from samestate.plans import markers as marker_plans
from samestate.plans.model import MarkerPlan, ProbePlan

PROBES, ATTEMPTS, GATES, ANSWER = "probes", "attempts", "gates", "answer"
FORCED_ROWS, ORDINARY_ROWS = 8, 272
"""Of the sampling gate, exactly."""
SELFTEST_ROWS = (6, 108)
"""Of the self-test, exactly: at three settings, alone and in company, two steps."""
KERNELS = ("cuda", "triton-interpreter", "cpu")
SAMPLING_CODE = ("vllm.v1.sample.", "vllm.v1.worker.gpu.sample.", "vllm.utils.cpu_triton_utils")
"""Where vLLM's sampling code lies: a gate names functions of these modules."""
NO_HASH = "0" * 64
OK = 200


def planned(history: History) -> MarkerPlan:
    """What the plan says of probes; raises MissingEvidence in a plan without."""
    if history.plan.markers is None:
        raise MissingEvidence("no_marker_plan", f"plan {history.plan.name} has no probes")
    return history.plan.markers


def planned_arms(history: History) -> list[ArmHistory]:
    """The plan's arms; raises MissingEvidence where one is not in the archive."""
    return [history.arm(arm.name) for arm in history.plan.arms]


# --- probes -----------------------------------------------------------------------------------


def probes(history: History) -> CheckResult:
    """Every arm sent the planned probes, in order, with the planned parameters, and each was answered once."""
    plan = planned(history)
    arms = planned_arms(history)
    findings = [finding for arm in arms for finding in _sequence(arm, plan)]
    for arm in arms:
        expected = {probe.name: probe for probe in plan.probes}
        for probe in probes_of(arm):
            if probe.name in expected:
                findings += [*_answers(probe), *_text(probe), *_asked(history, plan, expected[probe.name], probe)]
    sent = sum(len(arm.markers.sent) for arm in arms)
    answered = sum(len(arm.markers.answered) for arm in arms)
    due = len(plan.probes) * len(arms)
    summary = f"{sent}/{due} probes sent, {answered} answered, {len(arms)} arms"
    return conclude(PROBES, findings, unit="probes", examined=sent, summary=summary)


def _sequence(arm: ArmHistory, plan: MarkerPlan) -> Iterator[Finding]:
    order = [probe.name for probe in plan.probes]
    sent = [seen.rec.probe for seen in arm.markers.sent]
    place = Place(arm=arm.name)
    if len(arm.engines) != 1:
        message = f"arm {arm.name}: {len(arm.engines)} engine starts, planned 1"
        make = fail if arm.engines else unknown
        yield make("engine_starts", message, place, [seen.where for seen in arm.engines])
    for name in order:
        if name not in sent:
            message = f"arm {arm.name}: probe {name} was not sent"
            yield unknown("missing_probe", message, place.model_copy(update={"case": name, "op": name}))
    for seen in arm.markers.sent:
        if seen.rec.probe not in order:
            yield fail("unplanned_probe", f"arm {arm.name}: {seen.rec.probe} is not in the plan", place, [seen.where])
    once = [name for name in dict.fromkeys(sent) if name in order]
    if once != [name for name in order if name in once]:
        yield fail("out_of_order", f"arm {arm.name}: sent {', '.join(once)}, planned {', '.join(order)}", place)
    ends = [(seen.rec.probe, seen.where) for seen in arm.markers.answered]
    ends += [(seen.rec.probe, seen.where) for seen in arm.markers.failed]
    for name, where in ends:
        if name not in order:
            yield fail("unplanned_probe", f"arm {arm.name}: {name} was answered and is not in the plan", place, [where])


def _answers(probe: Probe) -> Iterator[Finding]:
    """One answer, after it was sent and before the next probe is, with HTTP 200."""
    markers = probe.arm.markers
    answers = [seen for seen in markers.answered if seen.rec.probe == probe.name]
    for failed in (seen for seen in markers.failed if seen.rec.probe == probe.name):
        message = f"{probe.title}: got no answer: {failed.rec.error}"
        yield unknown("probe_failed", message, probe.place, [failed.where])
    if not answers:
        yield unknown("missing_answer", f"{probe.title}: no probe_answered record", probe.place, probe.where)
    if len(answers) > 1:
        wheres = [seen.where for seen in answers]
        yield fail("repeated_answer", f"{probe.title}: {len(answers)} answers", probe.place, wheres)
    following = min((seen.n for seen in markers.sent if seen.n > probe.sent.n), default=None)
    for seen in answers[:1]:
        if seen.rec.status != OK:
            yield unknown("probe_failed", f"{probe.title}: HTTP {seen.rec.status}", probe.place, [seen.where])
        if seen.n < probe.sent.n or (following is not None and seen.n > following):
            message = f"{probe.title}: was not answered before the next one was sent; probes go one at a time"
            yield fail("overlap", message, probe.place, probe.where)


def _text(probe: Probe) -> Iterator[Finding]:
    """What the server said is what was hashed when it came."""
    rec = probe.answered.rec if probe.answered else None
    if rec is not None:
        text = (rec.reasoning or "") + (rec.content or "")
        if sha256_hex(text.encode(errors="surrogatepass")) != rec.text_sha256:
            yield unknown("wrong_text", f"{probe.title}: the text is not what its hash says", probe.place, probe.where)


def _asked(history: History, plan: MarkerPlan, wanted: ProbePlan, probe: Probe) -> Iterator[Finding]:
    """What was sent is what the plan says, and the prompt is the resolved one."""
    sent = probe.sent.rec
    resolved = history.resolved.markers
    if resolved is None:
        raise MissingEvidence("missing_resolved", "resolved.json names no ids of markers and stops")
    digests = {one.sha256 for one in history.resolved.inputs if one.case == probe.name}
    yield from other_body(history.plan, wanted, probe, digests)
    expected = {
        "address": marker_plans.address(plan),
        "budget": wanted.budget,
        "max_tokens": wanted.max_tokens,
        "temperature": marker_plans.temperature(history.plan, wanted),
        "top_p": wanted.top_p,
        "stop_token_ids": resolved.stop_ids.get(probe.name, []),
        "ignore_eos": history.plan.ignore_eos,
    }
    for field, value in expected.items():
        if getattr(sent, field) != value:
            message = f"{probe.title}: {field} {getattr(sent, field)!r}, planned {value!r}"
            yield fail("not_as_planned", message, probe.place, [probe.sent.where])
    if probe.answered is None:
        return
    if not probe.answered.rec.prompt_token_ids:
        message = f"{probe.title}: the server returned no ids of its prompt"
        yield unknown("missing_prompt", message, probe.place, [probe.answered.where])
        return
    prompt = token_digest(probe.answered.rec.prompt_token_ids)
    if digests != {prompt}:
        message = f"{probe.title}: the server's prompt ids are not those of resolved.json"
        yield fail("wrong_prompt", message, probe.place, [probe.answered.where])


# --- attempts ---------------------------------------------------------------------------------


def attempts(history: History) -> CheckResult:
    """One attempt a probe, no retry allowed, and no more probes than the plan allows."""
    plan = planned(history)
    findings: list[Finding] = []
    sent = 0
    for arm in planned_arms(history):
        counts = Counter(seen.rec.probe for seen in arm.markers.sent)
        sent += len(arm.markers.sent)
        for name, count in counts.items():
            if count > 1:
                evidence = [seen.where for seen in arm.markers.sent if seen.rec.probe == name]
                findings.append(fail("sent_again", f"{name}: sent {count} times", _place(arm, name), evidence))
        if len(arm.markers.sent) > plan.allowed_probes:
            message = f"arm {arm.name}: {len(arm.markers.sent)} probes sent, {plan.allowed_probes} allowed"
            findings.append(fail("too_many_probes", message, Place(arm=arm.name)))
        findings += [finding for seen in arm.markers.sent for finding in _one_attempt(arm, seen, plan)]
    summary = f"{sent} probes, one attempt each, {plan.retries} retries allowed"
    return conclude(ATTEMPTS, findings, unit="probes", examined=sent, summary=summary)


def _one_attempt(arm: ArmHistory, seen: Seen[ProbeSent], plan: MarkerPlan) -> Iterator[Finding]:
    rec = seen.rec
    if rec.attempt != 1 or rec.retries_allowed != plan.retries:
        message = f"{rec.probe}: attempt {rec.attempt}, {rec.retries_allowed} retries allowed; planned 1 and 0"
        yield fail("retried", message, _place(arm, rec.probe), [seen.where])


def _place(arm: ArmHistory, name: str) -> Place:
    return Place(arm=arm.name, case=name, op=name)


# --- gates ------------------------------------------------------------------------------------


def gates(history: History) -> CheckResult:
    """Every planned gate left a receipt, passed, before the arm's first probe, on the sources that served it."""
    plan = planned(history)
    if not plan.gates:
        return not_exercised(GATES, "no_gate", "the plan asks for no gate", unit="receipts")
    findings: list[Finding] = []
    examined = 0
    for arm in planned_arms(history):
        first = min((seen.n for seen in arm.markers.sent), default=None)
        findings += _one_gate(arm)
        for gate in plan.gates:
            receipts = [seen for seen in arm.markers.gates if seen.rec.gate == gate]
            examined += len(receipts)
            if not receipts:
                message = f"arm {arm.name}: no receipt of gate {gate}"
                findings.append(unknown("missing_receipt", message, Place(arm=arm.name)))
            for seen in receipts:
                findings += [*_receipt(arm, seen, plan), *_in_time(arm, seen, first), *_same_sources(arm, seen)]
    summary = f"{examined} receipts: " + "; ".join(
        dict.fromkeys(_said(seen.rec) for arm in planned_arms(history) for seen in arm.markers.gates)
    )
    return conclude(GATES, findings, unit="receipts", examined=examined, summary=summary)


def _said(rec: GateReceipt) -> str:
    guard = f", guard {rec.guard}" if rec.guard else ""
    forced, ordinary = (
        f"{rec.forced_right}/{rec.forced_rows} forced",
        f"{rec.ordinary_same}/{rec.ordinary_rows} ordinary",
    )
    return f"{rec.gate} {'passed' if rec.ok else 'failed'} ({forced}, {ordinary}, {rec.kernel}{guard})"


def _receipt(arm: ArmHistory, seen: Seen[GateReceipt], plan: MarkerPlan) -> Iterator[Finding]:
    """It passed, over as many rows as it must have, all of them right, under the planned guard."""
    rec, place = seen.rec, Place(arm=arm.name)
    if rec.guard != plan.guard:
        message = (
            f"arm {arm.name}: gate {rec.gate} ran under guard {rec.guard or 'none'}, planned {plan.guard or 'none'}"
        )
        yield fail("wrong_guard", message, place, [seen.where])
    lacking = [
        said
        for said, lacks in (
            (f"reason {rec.reason!r} though it passed", rec.ok and rec.reason is not None),
            (f"kernel {rec.kernel!r}, which is none of {', '.join(KERNELS)}", rec.kernel not in KERNELS),
            ("no function of vLLM's sampling code", not rec.functions),
            ("functions that are no sampling code", any(not _sampling_code(one) for one in rec.functions)),
            ("no hash of the gate's source", rec.source_sha256 == NO_HASH),
        )
        if lacks
    ]
    if lacking:
        message = f"arm {arm.name}: gate {rec.gate}: {'; '.join(lacking)}"
        yield unknown("gate_not_identified", message, place, [seen.where])
    if not rec.ok:
        message = f"arm {arm.name}: gate {rec.gate} did not pass: {rec.reason or 'no reason given'}"
        yield fail("gate_failed", message, place, [seen.where])
        return
    if rec.forced_right != rec.forced_rows or rec.ordinary_same != rec.ordinary_rows:
        yield fail("gate_contradicts", f"arm {arm.name}: {_said(rec)}", place, [seen.where])
    expected = (FORCED_ROWS, ORDINARY_ROWS) if rec.gate == SAMPLING else SELFTEST_ROWS
    if expected != (rec.forced_rows, rec.ordinary_rows):
        message = f"arm {arm.name}: {_said(rec)}: other rows than the gate has"
        yield unknown("gate_rows", message, place, [seen.where])


def _sampling_code(function: PatchedFunction) -> bool:
    return function.module.startswith(SAMPLING_CODE) and function.source_sha256 != NO_HASH


def _one_gate(arm: ArmHistory) -> Iterator[Finding]:
    """All receipts of an arm are of one gate's source, and each gate ran once."""
    receipts = arm.markers.gates
    where = [seen.where for seen in receipts]
    if len({seen.rec.source_sha256 for seen in receipts}) > 1:
        yield unknown("gates_differ", f"arm {arm.name}: its gates are of different sources", Place(arm=arm.name), where)
    if len({seen.rec.gate for seen in receipts}) < len(receipts):
        yield unknown("gate_repeated", f"arm {arm.name}: a gate has two receipts", Place(arm=arm.name), where)


def _in_time(arm: ArmHistory, seen: Seen[GateReceipt], first: int | None) -> Iterator[Finding]:
    if first is not None and seen.n > first:
        message = f"arm {arm.name}: gate {seen.rec.gate} has its receipt after the first probe was sent"
        yield fail("gate_late", message, Place(arm=arm.name), [seen.where])


def _same_sources(arm: ArmHistory, seen: Seen[GateReceipt]) -> Iterator[Finding]:
    """A function that a gate and the engine's recorder, guard or repair both name had one source before."""
    recorder = arm.markers.recorder
    functions = [*(recorder.rec.functions if recorder else ())]
    functions += [one for applied in arm.interventions for one in applied.rec.functions]
    watched = {(one.module, one.qualname): one.source_sha256 for one in functions}
    for one in seen.rec.functions:
        if watched.get((one.module, one.qualname), one.source_sha256) != one.source_sha256:
            message = f"arm {arm.name}: gate {seen.rec.gate} ran another {one.module}.{one.qualname} than the engine"
            yield unknown("gate_sources", message, Place(arm=arm.name), [seen.where])


# --- answer -----------------------------------------------------------------------------------


def answer(history: History) -> CheckResult:
    """Answers that the plan knows are given exactly; with weights that cannot answer there is none to compare."""
    wanted = {probe.name: probe.answer for probe in planned(history).probes if probe.answer is not None}
    if not wanted:
        return not_exercised(ANSWER, "not_evaluated", "not evaluated: the plan knows no answer", unit="answers")
    findings: list[Finding] = []
    examined = 0
    for probe in all_probes(history):
        if probe.name not in wanted or probe.answered is None:
            continue
        examined += 1
        findings += _text(probe)
        content = (probe.answered.rec.content or "").strip()
        if content != wanted[probe.name]:
            message = f"{probe.title}: answered {content[:80]!r}, the plan knows {wanted[probe.name]!r}"
            findings.append(fail("wrong_answer", message, probe.place, probe.where))
    summary = f"{examined - len(findings)}/{examined} answers exact"
    return conclude(ANSWER, findings, unit="answers", examined=examined, summary=summary)
