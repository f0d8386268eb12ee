"""``paired-``, ``reload-``, ``controls-`` and ``repetition-equality``: token by token, nothing tolerated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from samestate.checks.base import CheckResult, Finding, Place, Verdict
from samestate.checks.first_module import FirstModule, first_module
from samestate.checks.geometry import unattributable
from samestate.checks.history import REFERENCE, ArmHistory, History
from samestate.checks.seen import Seen
from samestate.checks.verdicts import conclude, fail, not_exercised, unknown
from samestate.evidence.records import OperationName, OperationOutput
from samestate.plans.repetitions import repeated_arms
from samestate.plans.scenarios import CANDIDATE, CONTROL

PAIRED = "paired-equality"
RELOAD = "reload-equality"
CONTROLS = "controls-equal"
REPETITION = "repetition-equality"
UNIT = "comparisons"


class Side(NamedTuple):
    """One generation: an operation of an arm."""

    arm: ArmHistory
    op: str

    def __str__(self) -> str:
        return f"{self.arm.name} {self.op}"


class Comparison(NamedTuple):
    """Two generations that must agree."""

    case: str
    reference: Side
    subject: Side
    output_tokens: int
    """As planned."""


def first_difference(left: Sequence[int | str], right: Sequence[int | str]) -> int | None:
    """Zero-based index of the first token, or piece of text, that differs or is there on one side only; None: equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def paired_equality(history: History) -> CheckResult:
    """Candidate against control, every generation.

    Engines that differ where neither reused anything do not compute alike (separate launches choose their kernels
    anew, for one). That is laid to the candidate only where the control repeats itself over launches, as
    `controls_equal` shows; and nothing is where the control does not even repeat itself within this run.
    """
    control, candidate = history.arm(CONTROL), history.arm(CANDIDATE)
    pairs = [
        Comparison(case.id, Side(control, op.op), Side(candidate, op.op), op.output_tokens)
        for case, op in history.generations()
    ]
    findings, equal = _compare(history, pairs)
    if controls_equal(history).verdict is not Verdict.PASS:
        findings = _not_laid_to_reuse(findings, pairs)
    findings = _under_noise(history, findings)
    return _conclude(PAIRED, findings, len(pairs), f"{equal}/{len(pairs)} generations equal")


def _not_laid_to_reuse(findings: list[Finding], pairs: list[Comparison]) -> list[Finding]:
    """Differences where nothing was reused, and others of the same case, are unknown."""
    cold = {pair.subject.op: pair for pair in pairs if all(map(_reused_nothing, (pair.reference, pair.subject)))}
    differing = {found.place.op for found in findings if found.code == "tokens_differ"}
    apart = {cold[op].case for op in differing if op in cold and op.endswith(f".{OperationName.COLD.value}")}
    found = []
    for one in findings:
        pair = cold.get(one.place.op or "")
        if one.code != "tokens_differ" or (pair is None and one.place.case not in apart):
            found.append(_no_module(one, pair))
            continue
        why = "their cold runs differ too" if pair is None else "neither reused anything"
        message = (
            f"{one.message}, and {why}: not repeatable, the two engines do not compute alike, and nothing can be laid "
            "to reuse (--reference shows whether the control repeats itself)"
        )
        named = _named(pair) if pair is not None else None
        found.append(_unknown("cold_differs", message, one, named))
    return found


def _no_module(finding: Finding, cold: Comparison | None) -> Finding:
    """Cold runs of other steps: where modules were traced, that none is named."""
    if finding.code != "geometry_mismatch" or cold is None or cold.subject.op not in cold.subject.arm.traced:
        return finding
    return _unknown(finding.code, finding.message, finding, _named(cold))


def _named(pair: Comparison) -> FirstModule:
    (arm, op), (other, again) = pair.reference, pair.subject
    return first_module(arm, op, other, again)


def _unknown(code: str, message: str, of: Finding, named: FirstModule | None) -> Finding:
    """`of` as unknown, with what the modules' traces show."""
    if named is None:
        return unknown(code, message, of.place, of.evidence)
    place = of.place.model_copy(update={"layer": named.module, "rank": named.rank})
    return unknown(code, f"{message}; {named.message}", place, [*of.evidence, *named.evidence])


class Unrepeated(NamedTuple):
    """A second cold run of the control that is not as the first."""

    op: str
    why: str
    evidence: list[str]


def _unrepeated(history: History) -> Unrepeated | None:
    """Where the control computed one prompt cold twice, in the same steps, and answered or computed otherwise.

    Equal answers may be luck: where modules were traced, their outputs must be equal too, or the difference be lost
    within its step.
    """
    control = history.arm(CONTROL)
    pairs = [pair for pair in _reload_pairs(history, control) if all(map(_reused_nothing, pair[1:3]))]
    for pair in pairs:
        for one in _pair(history, pair):
            if one.code == "tokens_differ":
                return Unrepeated(pair.subject.op, "differs too", list(one.evidence))
    for pair in pairs:
        named = _named(pair)
        if named.lasting:
            return Unrepeated(pair.subject.op, f"computes otherwise: {named.message}", list(named.evidence))
    return None


def _under_noise(history: History, findings: list[Finding]) -> list[Finding]:
    """Differences of a candidate whose control does not repeat itself are unknown. Without any, it is not looked at."""
    unrepeated = _unrepeated(history) if any(one.code == "tokens_differ" for one in findings) else None
    if unrepeated is None:
        return findings
    said = f"not repeatable: {CONTROL} {unrepeated.op} is a second cold run and {unrepeated.why}"
    return [
        unknown("not_repeatable", f"{one.message}, {said}", one.place, [*one.evidence, *unrepeated.evidence])
        if one.code == "tokens_differ"
        else one
        for one in findings
    ]


def _reused_nothing(side: Side) -> bool:
    schedule = side.arm.schedule(side.op)
    return schedule is not None and len(schedule) > 0 and schedule[0].start == 0


def reload_equality(history: History) -> CheckResult:
    """Reload against cold within the candidate; the control's own repeatability is shown apart.

    A control has no connector, so its reload is a second cold run: where that differs, no difference of the
    candidate can be laid to reuse.
    """
    findings, summaries, examined = list[Finding](), list[str](), 0
    for name in (CANDIDATE, CONTROL):
        pairs = _reload_pairs(history, history.arm(name))
        found, equal = _compare(history, pairs)
        if name == CANDIDATE:
            examined = len(pairs)
            findings += _under_noise(history, found)
        else:
            by_op = {pair.subject.op: pair for pair in pairs}
            findings += [_not_repeatable(finding, by_op[finding.place.op or ""]) for finding in found]
        summaries.append(f"{name} {equal}/{len(pairs)}")
    return _conclude(RELOAD, findings, examined, f"reloads equal to cold: {', '.join(summaries)}")


def _reload_pairs(history: History, arm: ArmHistory) -> list[Comparison]:
    """Every reload of an arm, against the cold run of its case."""
    cold = {case.id: op.op for case, op in history.generations(OperationName.COLD)}
    return [
        Comparison(case.id, Side(arm, cold[case.id]), Side(arm, op.op), op.output_tokens)
        for case, op in history.generations(OperationName.RELOAD)
        if case.id in cold
    ]


def controls_equal(history: History) -> CheckResult:
    """This run's control against the control of another archive, every generation."""
    if REFERENCE not in history.arms:
        return not_exercised(CONTROLS, "no_reference", "no reference control in this archive", unit=UNIT)
    control, reference = history.arm(CONTROL), history.arm(REFERENCE)
    if control.imported_from is not None and control.imported_from == reference.imported_from:
        message = "control and reference are copies of one arm: comparing them shows nothing"
        return not_exercised(CONTROLS, "same_source", message, unit=UNIT)
    pairs = [
        Comparison(case.id, Side(reference, op.op), Side(control, op.op), op.output_tokens)
        for case, op in history.generations()
    ]
    findings, equal = _compare(history, pairs)
    return _conclude(CONTROLS, findings, len(pairs), f"{equal}/{len(pairs)} control generations equal to the reference")


def repetition_equality(history: History) -> CheckResult:
    """Same input, same tokens: every generation of every arm against the same one of the first repetition.

    It counts inputs: the pairs are no trials, and stand beside those within a repetition, never among them.
    """
    times = len(history.plan.repetitions)
    if times < 2:
        return not_exercised(REPETITION, "not_planned", "the plan has one repetition", unit=UNIT)
    findings, summaries, unlike = list[Finding](), list[str](), set[tuple[str, str | None]]()
    inputs = {(case.id, op.role) for case, op in history.generations()}
    for planned in history.plan.arms:
        generations = list(history.generations(arm=planned.name))
        arms = [history.arm(one.name) for one in repeated_arms(history.plan) if one.arm.name == planned.name]
        equal = 0
        for case, op in generations:
            found = [
                finding
                for arm in arms[1:]
                for finding in _again(
                    history, Comparison(case.id, Side(arms[0], op.op), Side(arm, op.op), op.output_tokens)
                )
            ]
            equal += not found
            findings += found
            unlike |= {(case.id, op.role)} if found else set()
        findings += _one_for_all(arms[0], [op.op for _, op in generations], len(inputs))
        summaries.append(f"{planned.name} {equal}/{len(generations)} generations")
    alike = len(inputs) - len(unlike)
    summary = f"{alike}/{len(inputs)} inputs continue alike in {times} repetitions: {', '.join(summaries)}"
    return conclude(REPETITION, findings, unit="inputs", examined=len(inputs), summary=summary)


def _again(history: History, pair: Comparison) -> list[Finding]:
    """One generation and the same of a later repetition: of one prompt, or they say nothing of each other."""
    digests = [
        {seen.rec.prompt_sha256 for seen in side.arm.started if seen.rec.op == side.op}
        for side in (pair.reference, pair.subject)
    ]
    if digests[0] != digests[1] or len(digests[0]) != 1:
        place = Place(arm=pair.subject.arm.name, case=pair.case, op=pair.subject.op)
        return [unknown("other_prompt", f"{pair.subject} and {pair.reference} were not asked one prompt", place)]
    return _pair(history, pair)


def _one_for_all(arm: ArmHistory, ops: list[str], inputs: int) -> Iterator[Finding]:
    """Outputs that do not depend on their prompt are alike whatever happened."""
    outputs = {tuple(seen.rec.token_ids) for op in ops if (seen := arm.output(op)) is not None}
    if len(outputs) <= 1 < inputs:
        message = f"arm {arm.name}: {inputs} inputs, {len(outputs)} distinct outputs: they do not depend on the prompt"
        yield unknown("vacuous", message, Place(arm=arm.name))


def _compare(history: History, pairs: Iterable[Comparison]) -> tuple[list[Finding], int]:
    """Findings, and how many pairs are equal and of the planned length."""
    findings, equal = list[Finding](), 0
    for pair in pairs:
        found = _pair(history, pair)
        equal += not found
        findings += found
    return findings, equal


def _pair(history: History, pair: Comparison) -> list[Finding]:
    place = Place(arm=pair.subject.arm.name, case=pair.case, op=pair.subject.op)
    seen = [side.arm.output(side.op) for side in (pair.reference, pair.subject)]
    left, right = seen
    if left is None or right is None:
        absent = " and ".join(
            str(side) for side, out in zip((pair.reference, pair.subject), seen, strict=True) if not out
        )
        return [unknown("missing_output", f"no output of {absent} to compare", place)]
    evidence = [left.where, right.where]
    findings = list[Finding]()
    for side, output in ((pair.reference, left), (pair.subject, right)):
        findings += wrong_length(history, str(side), output, pair.output_tokens, place)
    index = first_difference(left.rec.token_ids, right.rec.token_ids)
    if index is None:
        return findings
    message = f"{pair.subject} differs from {pair.reference} from token {index} on"
    reference, subject = (side.arm.schedule(side.op) for side in (pair.reference, pair.subject))
    complete = history.whole(pair.subject.arm.name)
    parted = unattributable(reference, subject, history.resolved.checkpoint_interval, complete=complete)
    if parted is None:
        findings.append(fail("tokens_differ", message, place, evidence))
    else:
        message = f"{message}, and cannot be attributed: {parted.message}"
        findings.append(unknown("geometry_mismatch", message, place, [*evidence, *parted.evidence]))
    return findings


def wrong_length(
    history: History, name: str, output: Seen[OperationOutput], planned: int, place: Place
) -> Iterator[Finding]:
    """An output that is not as long as the plan wants it."""
    length = len(output.rec.token_ids)
    if length == 0 or length > planned or (history.plan.ignore_eos and length != planned):
        yield fail("wrong_length", f"{name}: {length} tokens, planned {planned}", place, [output.where])


def _not_repeatable(finding: Finding, pair: Comparison) -> Finding:
    """A control that differs from itself says nothing of reuse, and makes every comparison doubtful."""
    if finding.code != "tokens_differ":
        return finding
    return _unknown("control_not_repeatable", f"{finding.message}: not repeatable", finding, _named(pair))


def _conclude(check: str, findings: list[Finding], examined: int, summary: str) -> CheckResult:
    return conclude(check, findings, unit=UNIT, examined=examined, summary=summary)
