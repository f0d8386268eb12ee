"""``probe-equality``: answers for which state was reused against cold answers to the same prompt.

Cold against cold comes first: the floor. On an engine whose cold answers never differ in a bit, in company or alone,
equality is exact; else `samestate.checks.divergence` judges by the floor and the margins. What was cold and what was
reused is told by counters and usage, never by the name of an operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from samestate.checks.base import CheckResult, Finding, Verdict
from samestate.checks.divergence import Divergence, Judgement, Pair, Policy, Ruling, judge
from samestate.checks.history import History
from samestate.checks.probe_history import Probed, by_case, probed
from samestate.checks.verdicts import conclude, fail, unknown

CHECK = "probe-equality"
FLOOR = "probe-floor"
STATE_FAULT, TIE = "state_fault", "numerical_tie"
NEGLIGIBLE = 0.1
"""Nats that a correct answer may move, however exact the floor is: company, all that a probe can have, may leave a
prompt's chunks alone, and a reload never does. Calibrated in docs/results/divergence.md."""
SHORTEST = 2
"""Tokens of an answer that shows anything: a state that decodes on, not the last position of the prompt alone."""


def cold(answers: Sequence[Probed]) -> list[Probed]:
    """Those that were computed whole."""
    return [one for one in answers if one.cold is True]


def warm(answers: Sequence[Probed]) -> list[Probed]:
    """Those that went on from reused state."""
    return [one for one in answers if one.cold is False]


def ruled(history: History) -> tuple[Judgement, list[tuple[Probed, Divergence]]]:
    """The ruling of each warm answer. Raises MissingEvidence."""
    floor: list[Pair] = []
    pairs: list[Pair] = []
    ours: list[Probed] = []
    for case, answers in by_case(probed(history)).items():
        colds = cold(answers)
        if not colds:
            continue
        first, *others = colds
        floor += [Pair(case, first.answer, one.answer, split=bool(one.beside)) for one in others]
        pairs += [Pair(case, first.answer, one.answer) for one in warm(answers)]
        ours += warm(answers)
    judgement = judge(floor, pairs, Policy(negligible=NEGLIGIBLE))
    return judgement, list(zip(ours, judgement.divergences, strict=True))


def floor(history: History) -> CheckResult:
    """What cold answers to one prompt differ by. It decides nothing alone."""
    figures = ruled(history)[0].floor
    largest = "not measured" if figures.largest is None else f"{figures.largest:.3g} nats"
    summary = (
        f"{figures.pairs} pairs of cold answers, {figures.splits} in company: {figures.parted} part, the largest "
        f"displacement {largest}"
    )
    findings = []
    if not figures.pairs:
        message = "no prompt was computed twice: the server heeds no cache salt, and its cache was not reset"
        findings.append(unknown("floor_not_measured", message))
    return conclude(FLOOR, findings, unit="pairs", examined=figures.pairs, summary=summary)


def equality(history: History) -> CheckResult:
    """Every warm answer is its cold answer."""
    judgement, rows = ruled(history)
    findings = [finding for one, row in rows for finding in _finding(one, row, judgement)]
    findings += _missing(history)
    same = sum(row.position is None for _, row in rows)
    summary = f"{same}/{len(rows)} answers from reused state have the tokens of the cold ones"
    worst = next((one for one in findings if one.verdict is Verdict.FAIL), None)
    if worst is not None:
        summary += f"; state fault: {judgement.why}" if worst.code == STATE_FAULT else ""
    return conclude(CHECK, findings, unit="answers", examined=len(rows), summary=summary)


def _finding(one: Probed, row: Divergence, judgement: Judgement) -> Iterator[Finding]:
    """`row` against the cold answer, in the words of the ruling."""
    known = f"{one.op}: {one.reused:,} of {one.tokens:,} tokens reused"
    match row.ruling:
        case Ruling.STATE_FAULT if row.position is None and not _parts(judgement):
            message = f"{known}, the same tokens; {row.why}: other steps may explain it, as no token differs anywhere"
            yield unknown("logprobs_moved", message, one.place, one.where)
        case Ruling.STATE_FAULT:
            yield fail(STATE_FAULT, f"state fault: {known}; {row.why}", one.place, one.where)
        case Ruling.NUMERICAL_TIE:
            yield unknown(TIE, f"numerical tie: {known}; {row.why}", one.place, one.where)
        case Ruling.UNKNOWN if row.position is not None:
            yield unknown(
                "differs", f"unknown: {known}; it parts at token {row.position}; {row.why}", one.place, one.where
            )
        case Ruling.UNKNOWN if (row.displacement or 0.0) > NEGLIGIBLE:
            message = f"{known}, the same tokens, moved by {row.displacement:.3g} nats; {row.why}"
            yield unknown("logprobs_moved", message, one.place, one.where)
        case _:
            return


def _parts(judgement: Judgement) -> bool:
    """Some warm answer has other tokens than its cold one."""
    return any(row.position is not None for row in judgement.divergences)


def _missing(history: History) -> Iterator[Finding]:
    """Prompts without a cold answer, answers that are too short, and those of which nobody tells what was reused."""
    for case, answers in by_case(probed(history)).items():
        place = answers[0].place.model_copy(update={"op": None})
        where = answers[0].where
        untold = [one for one in answers if one.reused is None]
        short = sum(one.length < SHORTEST for one in answers)
        if short:
            message = f"{case}: {short} of {len(answers)} answers have fewer than {SHORTEST} tokens: too few to compare"
            yield unknown("too_short", message, place, where)
        if untold:
            apart = sum(list(one.answer.tokens) != list(answers[0].answer.tokens) for one in answers[1:])
            message = (
                f"{case}: neither usage nor counters tell what was reused, {apart} of {len(answers) - 1} later answers "
                "differ; let usage tell cached tokens (vLLM: --enable-prompt-tokens-details, SGLang: "
                "--enable-cache-report), or /metrics be read (llama.cpp: --metrics)"
            )
            yield unknown("reuse_not_told", message, place, where)
        elif not cold(answers):
            yield unknown("no_cold_answer", f"{case}: state was reused for every answer, the first too", place, where)
