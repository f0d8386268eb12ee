"""Checks of a latency study: one output for every input, nothing that takes time, one request at a time, whole times.

Times decide nothing here; these checks say whether they may be read at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address

from samestate.checks.base import CheckResult, Finding, Place
from samestate.checks.history import ArmHistory, History
from samestate.checks.latency_paths import ActualPath
from samestate.checks.latency_sample import Sample, samples
from samestate.checks.seen import Seen
from samestate.checks.verdicts import conclude, fail, unknown
from samestate.evidence.latency_records import RequestTimed
from samestate.plans.repetitions import repeated_arms

OUTPUTS = "latency-outputs"
INSTRUMENTS = "latency-instruments"
SERIAL = "latency-serial"
TIMES = "latency-times"


def outputs(history: History) -> CheckResult:
    """Every input has one output, over all conditions and repetitions, warm-ups too (requirements 98, 99).

    Where requests that reused nothing differ, the engines lay nothing to reuse: unknown, not a fail.
    """
    by_case: dict[str, list[Sample]] = {}
    for one in samples(history):
        by_case.setdefault(one.case, []).append(one)
    findings: list[Finding] = []
    for case, mine in by_case.items():
        findings += _one_output(case, mine)
        findings += _lengths(history, mine)
    for planned in repeated_arms(history.plan):
        if planned.name not in history.arms:
            message = f"arm {planned.name} is planned and not in the archive: its outputs are not known"
            findings.append(unknown("missing_arm", message, Place(arm=planned.name)))
    distinct = {one.output for mine in by_case.values() for one in mine if one.output is not None}
    if len(by_case) > 1 and len(distinct) == 1:
        message = f"{len(by_case)} inputs have one and the same output: it does not depend on the prompt"
        findings.append(unknown("vacuous", message))
    bad = {finding.place.case for finding in findings}
    requests = sum(map(len, by_case.values()))
    measured = sum(one.measured for mine in by_case.values() for one in mine)
    summary = (
        f"{len(by_case) - len(bad & by_case.keys())}/{len(by_case)} inputs have one output each, over {requests} "
        f"requests ({measured} measured)"
    )
    return conclude(OUTPUTS, findings, unit="inputs", examined=len(by_case), summary=summary)


def _one_output(case: str, mine: list[Sample]) -> Iterator[Finding]:
    for one in mine:
        if one.output is None:
            yield unknown("missing_output", f"arm {one.arm}: {one.op} has no output", _place(one), one.evidence)
    given = [one for one in mine if one.output is not None]
    if len({one.output for one in given}) < 2:
        return
    computed = [one for one in given if one.path is ActualPath.RECOMPUTE]
    references = {one.output for one in computed}
    if len(references) != 1:
        message = f"{case}: {len(references) or 'no'} outputs of requests that computed all of it: nothing to hold by"
        evidence = [where for one in computed for where in one.evidence]
        yield unknown("cold_differs", message, Place(case=case), evidence)
        return
    for one in given:
        if one.output not in references:
            message = f"arm {one.arm}: {one.op} ({one.path or 'path unknown'}) continues otherwise than computed cold"
            yield fail("output_differs", message, _place(one), one.evidence)


def _lengths(history: History, mine: list[Sample]) -> Iterator[Finding]:
    planned = history.plan.output_tokens
    for one in mine:
        if one.output is not None and one.generated != planned and history.plan.ignore_eos:
            message = f"arm {one.arm}: {one.op} generated {one.generated} tokens, planned {planned}"
            yield fail("wrong_length", message, _place(one), one.evidence)


def instruments(history: History) -> CheckResult:
    """Nothing watched, delayed or recorded beyond metadata in any arm (requirement 105)."""
    findings: list[Finding] = []
    names = [arm.name for arm in history.plan.arms]
    for name in names:
        arm = history.arm(name)
        engine, place = arm.engine, Place(arm=name)
        level = engine.rec.audit_level
        if level not in (None, "metadata"):
            message = f"arm {name}: watched at level {level}, which reads pages: its times measure that too"
            findings.append(fail("instrument_level", message, place, [engine.where]))
        if arm.pages.delayed:
            findings.append(fail("saves_delayed", f"arm {name}: its saves were held back", place))
        if arm.markers.streams:
            findings.append(fail("sampler_recorded", f"arm {name}: its sampler was recorded", place))
        if engine.rec.engine != "vllm":
            message = f"arm {name}: the engine was {engine.rec.engine}, whose times are no model's"
            findings.append(unknown("not_an_engine", message, place, [engine.where]))
    summary = f"metadata at most in {len(names)} arms" if not findings else findings[0].message
    return conclude(INSTRUMENTS, findings, unit="arms", examined=len(names), summary=summary)


def serial(history: History) -> CheckResult:
    """One request at a time, over a loopback connection, none of them repeated (requirement 95)."""
    findings: list[Finding] = []
    peers: set[str] = set()
    examined = 0
    for planned in history.plan.arms:
        arm = history.arm(planned.name)
        timed = sorted((seen for of_op in arm.timed.values() for seen in of_op), key=lambda seen: seen.rec.began_ns)
        examined += len(timed)
        before: Seen[RequestTimed] | None = None
        for seen in timed:
            peers.add(seen.rec.peer)
            findings += _alone(arm, seen, before)
            before = seen
        if arm.concurrency > 1:
            message = f"arm {arm.name}: {arm.concurrency} requests in one step: another client was there"
            findings.append(fail("not_serial", message, Place(arm=arm.name)))
    summary = f"{examined} requests, one at a time, to {', '.join(sorted(peers)) or 'nobody'}"
    return conclude(SERIAL, findings, unit="requests", examined=examined, summary=summary)


def _alone(arm: ArmHistory, seen: Seen[RequestTimed], before: Seen[RequestTimed] | None) -> Iterator[Finding]:
    rec, place = seen.rec, Place(arm=arm.name, op=seen.rec.op, request=seen.rec.request)
    name = f"arm {arm.name}: {rec.op}"
    if not _loopback(rec.peer):
        yield fail("not_loopback", f"{name} went to {rec.peer}, which is no loopback address", place, [seen.where])
    if rec.concurrency != 1:
        yield fail("not_serial", f"{name} was one of {rec.concurrency} open requests", place, [seen.where])
    if rec.attempts != 1:
        yield fail("retried", f"{name} went out {rec.attempts} times", place, [seen.where])
    if before is not None and rec.began_ns < before.rec.done_ns:
        message = f"{name} began before {before.rec.op} was done"
        yield fail("not_serial", message, place, [before.where, seen.where])


def _loopback(peer: str) -> bool:
    host = peer.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def times(history: History) -> CheckResult:
    """Every planned request was timed once, in an order that time can have, with the host's load before and after."""
    findings: list[Finding] = []
    examined = warm = 0
    for one in samples(history):
        examined += 1
        warm += not one.measured
        findings += _timed(history, one)
    summary = f"{examined - warm} measured and {warm} warm-up requests timed, host sampled around each"
    if findings:
        summary = f"{len(findings)} of {examined} requests: {findings[0].message}"
    return conclude(TIMES, findings, unit="requests", examined=examined, summary=summary)


def _timed(history: History, one: Sample) -> Iterator[Finding]:
    arm, place, name = history.arm(one.arm), _place(one), f"arm {one.arm}: {one.op}"
    if len(one.timed) != 1:
        many = len(one.timed)
        make = fail if many else unknown
        yield make("not_timed_once", f"{name} was timed {many} times", place, [seen.where for seen in one.timed])
        return
    seen = one.timed[0]
    rec = seen.rec
    stamps = [rec.began_ns, *(event.at_ns for event in rec.events), rec.done_ns]
    if stamps != sorted(stamps):
        yield fail("times_reversed", f"{name}: its events are not in the order of their times", place, [seen.where])
    if rec.request != one.request:
        message = f"{name}: the timed request {rec.request} is not the one that answered, {one.request}"
        yield fail("other_request", message, place, [seen.where])
    tokens = sum(event.tokens for event in rec.events)
    if tokens != one.generated:
        message = f"{name}: its events brought {tokens} tokens, its output has {one.generated}"
        yield fail("tokens_disagree", message, place, [seen.where])
    started = [begun.t_ns for begun in arm.started if begun.rec.op == one.op]
    ends = [end.t_ns for end in arm.ends.get(one.op, ())]
    if len(started) == len(ends) == 1 and not started[0] <= rec.began_ns <= rec.done_ns <= ends[0]:
        yield fail("outside_operation", f"{name}: its times lie outside its operation", place, [seen.where])
    if one.first_token is None:
        yield unknown("no_token", f"{name}: no event brought a token", place, [seen.where])
    when = sorted(sampled.rec.when for sampled in arm.hosts.get(one.op, ()))
    if when != ["after", "before"]:
        message = f"{name}: the host was not sampled once before and once after"
        yield unknown("host_not_sampled", message, place)


def _place(one: Sample) -> Place:
    return Place(arm=one.arm, case=one.case, op=one.op, request=one.request)
