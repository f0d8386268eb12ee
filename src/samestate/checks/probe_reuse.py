"""``probe-whole`` and ``probe-reuse``: all was asked and answered by one server, and something was reused at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from samestate.checks.base import CheckResult, Finding, Place
from samestate.checks.history import History
from samestate.checks.probe_equality import cold, warm
from samestate.checks.probe_history import Probed, by_case, interval, probed
from samestate.checks.verdicts import conclude, fail, not_exercised, unknown
from samestate.evidence.records import LOCAL_QUERIES, OperationName
from samestate.plans.black_box import SALTED, SERVER, SHARED_START

WHOLE = "probe-whole"
REUSE = "probe-reuse"
RELOAD = "probe-reload"
ROOM = 4
"""A cache so many times as large as the prompts since a first sighting has not lost it for want of room."""
_IDENTITY = ("model", "version", "vllm", "began", "max_model_len")
"""Of the server: the same before and after, or another one answered in between."""


def whole(history: History, analyzer: tuple[str, str]) -> CheckResult:
    """Plan, resolved plan and operations are one thing; every operation ended well; the server stayed the same.

    `analyzer`: id and source hash of the one that judges.
    """
    findings = [*_hashes(history, analyzer), *_operations(history), *_identity(history)]
    count = len(history.resolved.operations)
    summary = findings[0].message if findings else f"{count} operations of one plan, one server before and after"
    return conclude(WHOLE, findings, unit="operations", examined=count, summary=summary)


def _hashes(history: History, analyzer: tuple[str, str]) -> Iterator[Finding]:
    if {history.attempt.plan_sha256, history.resolved.plan_sha256} != {history.plan_sha256}:
        yield fail("wrong_plan", "the attempt or resolved.json is of another plan", evidence=[history.attempt.where])
    for seen in history.arm(SERVER).resolved:
        if seen.rec.resolved_sha256 != history.resolved_sha256:
            yield fail("wrong_resolved", "another resolved.json was run", evidence=[seen.where])
    if not history.arm(SERVER).resolved:
        yield unknown("missing_resolved", "no plan_resolved record")
    pinned = history.plan.analyzer
    if (pinned.id, pinned.source_sha256) != analyzer:
        message = f"the plan is frozen for {pinned.id} of another source than the {analyzer[0]} that judges"
        yield unknown("other_analyzer", message)


def _operations(history: History) -> Iterator[Finding]:
    arm, planned = history.arm(SERVER), history.resolved.operations
    started = Counter(seen.rec.op for seen in arm.started)
    answered = Counter(one.op for one in probed(history))
    for op in planned:
        place = Place(arm=SERVER, op=op)
        ends = arm.ends.get(op, [])
        if started[op] != 1 or answered[op] != 1 or len(ends) != 1 or not ends[0].rec.ok:
            message = f"{op}: started {started[op]} times, answered {answered[op]} times, ended {len(ends)} times"
            yield unknown("operation_incomplete", message, place, [end.where for end in ends])
    strange = {one.op for one in probed(history) if one.compared} - set(planned)
    for op in sorted(strange):
        yield fail("operation_not_planned", f"{op}: is not in resolved.json", Place(arm=SERVER, op=op))
    known = {one.case: one.sha256 for one in history.resolved.inputs}
    for seen in arm.started:
        rec = seen.rec
        if rec.op in planned and rec.name is not OperationName.INTERPOSER and rec.prompt_sha256 != known.get(rec.case):
            yield fail("wrong_prompt", f"{rec.op}: another prompt than planned", Place(case=rec.case), [seen.where])


def _identity(history: History) -> Iterator[Finding]:
    seen = {one.rec.when: one for one in history.arm(SERVER).markers.identities}
    if set(seen) != {"before", "after"}:
        yield unknown("missing_identity", "the server was not asked what it is before and after")
        return
    for name in _IDENTITY:
        before, after = (seen[when].rec.values.get(name) for when in ("before", "after"))
        if before != after:
            message = (
                f"{name} of the server was {before} before and {after} after: another one answered in between; "
                "where several stand behind one address, probe one of them"
            )
            yield unknown("server_changed", message, evidence=[seen["before"].where, seen["after"].where])


def reuse(history: History) -> CheckResult:
    """Something was reused, cold runs were cold, and salts keep prompts apart."""
    answers = probed(history)
    hits = sum(len(warm(some)) for some in by_case(answers).values())
    findings = [*_salts(history, answers), *_cold(answers)]
    if not hits:
        message = "nothing was ever reused, so nothing was tested: prompts are too short, or prefix caching is off"
        findings.append(unknown("vacuous", message))
    elif said := _constant(answers):
        findings.append(unknown("same_answers", f"{said}: a wrong state would not show"))
    summary = f"{hits} answers from reused state"
    late = _late(history, answers)
    findings += [finding for one in late for finding in _missed(history, one, answers)]
    if late:
        summary += f"; {len(late)} prompts missed at their first repeat ({', '.join(one.case for one in late[:3])})"
    return conclude(REUSE, findings, unit="answers", examined=hits, summary=summary)


def _constant(answers: list[Probed]) -> str | None:
    """Why no answer depends on its prompt, as far as is known; None: some do.

    Only prompts that were reused show anything; where that is one alone, the others say whether it is constant.
    """
    cases = [some for some in by_case(answers).values() if cold(some)]
    compared = {tuple(cold(some)[0].answer.tokens) for some in cases if warm(some)}
    everywhere = {tuple(cold(some)[0].answer.tokens) for some in cases}
    several = sum(bool(warm(some)) for some in cases) > 1 or len(cases) > 1 == len(everywhere)
    if len(compared) != 1:
        return None
    if several:
        return "all prompts have the same answer"
    if len(set(*compared)) < 2:
        return "one prompt alone was compared, and its answer is one token again and again; ask more --lengths"
    return None


def reload(history: History) -> CheckResult:
    """After a reset nothing is left in the local cache, and what is reused comes from outside."""
    reloads = [one for one in probed(history) if one.name is OperationName.RELOAD]
    resets = [seen for some in history.arm(SERVER).resets.values() for seen in some]
    if not reloads:
        message = "no reload: neither a reset nor an eviction was allowed"
        return not_exercised(RELOAD, "not_allowed", message, unit="reloads")
    findings = []
    for one in reloads if resets else []:
        if one.alone and one.local:
            message = f"{one.op}: {one.local:,} tokens hit in the local cache after its reset"
            findings.append(fail("reset_kept_local", message, one.place, one.where))
    outside = sum(bool(one.external) for one in reloads)
    left = sum(bool(one.alone and one.local) for one in reloads)
    if not outside and not findings:
        message = (
            f"{left} of {len(reloads)} prompts were still in the local cache"
            if left
            else f"none of {len(reloads)} prompts was found outside after it had left the local cache"
        )
        return not_exercised(RELOAD, "nothing_outside", message, unit="reloads")
    summary = findings[0].message if findings else f"{outside}/{len(reloads)} reloads went on from outside"
    return conclude(RELOAD, findings, unit="reloads", examined=len(reloads), summary=summary)


def _salts(history: History, answers: list[Probed]) -> Iterator[Finding]:
    """vLLM heeds salts; of another server it is only known then that its cold runs cannot be had so."""
    vllm = any(one.rec.values.get("vllm") is True for one in history.arm(SERVER).markers.identities)
    for one in answers:
        if vllm and one.op.endswith(SALTED) and (one.reused or 0) > SHARED_START:
            message = f"{one.op}: {one.reused:,} tokens were reused under another cache salt: salts keep nobody apart"
            yield fail("salt_ignored", message, one.place, one.where)


def _cold(answers: list[Probed]) -> Iterator[Finding]:
    """A prompt that nobody has sent before has nothing to reuse."""
    seen = set()
    for one in answers:
        if one.name is OperationName.COLD and not one.op.endswith(SALTED) and one.cold is False:
            message = f"{one.op}: {one.reused:,} tokens were reused for a prompt that is new, under a salt that is new"
            place = one.place
            yield (unknown if one.case in seen else fail)("reused_when_new", message, place, one.where)
        seen.add(one.case)


def _late(history: History, answers: list[Probed]) -> list[Probed]:
    """First repeats that were computed again, though a later one was not."""
    late = []
    for some in by_case(answers).values():
        repeats = [one for one in some if one.name is OperationName.REPEAT]
        could = bool(repeats) and (interval(history) or 1) < repeats[0].tokens
        if could and repeats[0].reused == 0 and warm(repeats[1:]):
            late.append(repeats[0])
    return late


def _missed(history: History, one: Probed, answers: list[Probed]) -> Iterator[Finding]:
    """vLLM keeps what it computes: a miss is its own where nobody else was there and there was room enough."""
    values = {name: value for seen in history.arm(SERVER).markers.identities for name, value in seen.rec.values.items()}
    capacity = values.get("capacity")
    ours = [other for other in answers if other.case == one.case and other.name is not OperationName.RELOAD]
    own = sum(other.tokens + other.beside for other in ours)
    room = isinstance(capacity, int) and capacity >= ROOM * own
    if values.get("vllm") is True and room and _queried(history, ours[0].op, ours[-1].op) == own:
        message = f"{one.op}: nothing was reused, and a later repeat reused something; nobody else was there meanwhile"
        yield fail("second_sighting_missed", message, one.place, one.where)


def _queried(history: History, first: str, last: str) -> int | None:
    """Tokens that anybody looked up from before an operation until after another one."""
    counters = history.arm(SERVER).counters
    before = [seen.rec.values.get(LOCAL_QUERIES) for seen in counters.get(first, ()) if seen.rec.when == "before"]
    after = [seen.rec.values.get(LOCAL_QUERIES) for seen in counters.get(last, ()) if seen.rec.when == "after"]
    if not before or not after or before[0] is None or after[-1] is None:
        return None
    return int(after[-1] - before[0])
