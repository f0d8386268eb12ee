"""What the server says of itself and of the requests: ``usage``, ``echo``, ``identity`` and ``anomalies``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from samestate.checks.base import CheckResult, Finding, Place
from samestate.checks.budget_oracle import Markers
from samestate.checks.history import ArmHistory, History, MissingEvidence
from samestate.checks.marker_body import body_of
from samestate.checks.marker_history import RecorderStream
from samestate.checks.marker_patches import patches
from samestate.checks.marker_probes import Probe, all_probes, markers_of
from samestate.checks.marker_sent import planned, planned_arms
from samestate.checks.seen import Seen
from samestate.checks.verdicts import conclude, fail, not_exercised, unknown
from samestate.evidence.canonical import sha256_hex
from samestate.evidence.marker_records import RecorderStarted
from samestate.evidence.probe_records import ProbeSent

USAGE, ECHO, IDENTITY, ANOMALIES = "usage", "echo", "identity", "anomalies"
DRAFTS, ASYNCHRONOUS = "speculative_config.num_speculative_tokens", "scheduler_config.async_scheduling"
NEEDED = ("process", "model_sha256")
"""Values without which an identity names nothing."""
_BODY = {
    "model": ("model",),
    "budget": ("thinking_token_budget",),
    "max_tokens": ("max_tokens", "max_completion_tokens"),
    "temperature": ("temperature",),
    "top_p": ("top_p",),
    "stop_token_ids": ("stop_token_ids",),
    "ignore_eos": ("ignore_eos",),
}
"""Fields of `ProbeSent`, by their names in an OpenAI request's body, of which the last one that is there counts. Handed
to an engine, they go by their own names."""
_ABSENT: dict[str, Any] = {"budget": None, "stop_token_ids": [], "ignore_eos": False}
"""What a field that the body leaves out means; a body must say the others."""


def over_http(history: History) -> list[Probe]:
    """Probes that went to a server, where the plan's do; none where they go to the engine itself."""
    return [] if planned(history).route == "engine" else all_probes(history)


# --- usage ------------------------------------------------------------------------------------


def usage(history: History) -> CheckResult:
    """The server's counts of prompt, completion and reasoning tokens, made again from the ids."""
    found = over_http(history)
    if not found:
        return not_exercised(
            USAGE, "no_server", "probes went to the engine itself, which counts nothing", unit="counts"
        )
    answered = [probe for probe in found if probe.answered is not None]
    findings = [finding for probe in answered for finding in _usage(probe)]
    examined = 3 * len(answered)
    summary = f"{examined - len(findings)}/{examined} counts are those of the ids"
    return conclude(USAGE, findings, unit="counts", examined=examined, summary=summary)


def _usage(probe: Probe) -> Iterator[Finding]:
    if probe.answered is None:
        return
    rec, markers = probe.answered.rec, markers_of(probe.arm)
    if not rec.prompt_token_ids or not rec.token_ids:
        message = f"{probe.title}: the server returned no token ids to count"
        yield unknown("missing_tokens", message, probe.place, [probe.answered.where])
        return
    counted = {
        "prompt": len(rec.prompt_token_ids),
        "completion": len(rec.token_ids),
        "reasoning": reasoning_tokens(rec.prompt_token_ids, rec.token_ids, markers),
    }
    for name, expected in counted.items():
        said = getattr(rec.usage, name)
        if said is None:
            message = f"{probe.title}: the server does not say how many {name} tokens there were"
            yield unknown("usage_missing", message, probe.place, [probe.answered.where])
        elif said != expected:
            message = f"{probe.title}: the server says {said} {name} tokens, the ids give {expected}"
            yield fail("usage_differs", message, probe.place, [probe.answered.where])


def reasoning_tokens(prompt: Sequence[int], tokens: Sequence[int], markers: Markers) -> int:
    """Output tokens within reasoning, begun in the prompt or in the output; markers themselves are not counted."""
    every = [*prompt, *tokens]
    inside, count, at = False, 0, 0
    while at < len(every):
        marker = next((one for one in (markers.start, markers.end) if tuple(every[at : at + len(one)]) == one), None)
        if marker is not None:
            inside = marker == markers.start
            at += len(marker)
            continue
        count += inside and at >= len(prompt)
        at += 1
    return count


# --- echo -------------------------------------------------------------------------------------


def echo(history: History) -> CheckResult:
    """What was sent is what the body said, and what the server says that it took."""
    names = _BODY if planned(history).route == "chat" else {field: (field,) for field in _BODY if field != "model"}
    findings: list[Finding] = []
    examined = 0
    for probe in all_probes(history):
        findings += _body(probe, names)
        examined += len(names)
        if probe.answered is not None:
            findings += _echoed(probe)
            examined += len(probe.answered.rec.echo)
    return conclude(ECHO, findings, unit="fields", examined=examined, summary=f"{examined} fields of body and echo")


def _body(probe: Probe, fields: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    sent = probe.sent.rec
    if sha256_hex(sent.body.encode()) != sent.body_sha256:
        yield unknown("wrong_body", f"{probe.title}: the body is not what its hash says", probe.place, probe.where)
    body = body_of(sent)
    if body is None:
        yield unknown("wrong_body", f"{probe.title}: the body is no JSON object", probe.place, probe.where)
        return
    for field, names in fields.items():
        said = next((body[name] for name in reversed(names) if name in body), _ABSENT.get(field, ...))
        if said is ... or _differ(said, getattr(sent, field)):
            told = "nothing" if said is ... else repr(said)
            message = f"{probe.title}: the body says {told} of {field}, the record {getattr(sent, field)!r}"
            yield fail("body_differs", message, probe.place, [probe.sent.where])


def _echoed(probe: Probe) -> Iterator[Finding]:
    if probe.answered is None:
        return
    echoed = probe.answered.rec.echo
    if "model" not in echoed:
        message = f"{probe.title}: the server does not say which model answered"
        yield unknown("echo_missing", message, probe.place, [probe.answered.where])
    for field, value in echoed.items():
        if field not in ProbeSent.__struct_fields__:
            message = f"{probe.title}: the server echoes {field}, which is no field of what was sent"
            yield unknown("echo_unknown", message, probe.place, [probe.answered.where])
        elif _differ(value, getattr(probe.sent.rec, field)):
            message = f"{probe.title}: {field} {getattr(probe.sent.rec, field)!r} was sent, the server took {value!r}"
            yield fail("echo_differs", message, probe.place, probe.where)


def _differ(left: Any, right: Any) -> bool:
    """1 and 1.0 are one number; True is none."""
    return isinstance(left, bool) != isinstance(right, bool) or left != right


# --- identity ---------------------------------------------------------------------------------


def identity(history: History) -> CheckResult:
    """Engine and model are the same before and after; recorder, guard and repairs are those of the plan."""
    findings: list[Finding] = []
    examined = 0
    for arm in planned_arms(history):
        findings += [*_before_and_after(arm), *_recorded(history, arm)]
        examined += sum(len(seen.rec.values) for seen in arm.markers.identities)
    summary = f"{examined} values, the same before and after" if not findings else findings[0].message
    return conclude(IDENTITY, findings, unit="values", examined=examined, summary=summary)


def _before_and_after(arm: ArmHistory) -> Iterator[Finding]:
    place, read = Place(arm=arm.name), arm.markers.identities
    when = [seen.rec.when for seen in read]
    if when != ["before", "after"]:
        message = f"arm {arm.name}: identity was read {', '.join(when) or 'never'}; expected before, after"
        yield unknown("missing_identity", message, place, [seen.where for seen in read])
        return
    before, after = read
    first = min((seen.n for seen in arm.markers.sent), default=before.n)
    ends = [seen.n for seen in arm.markers.answered] + [seen.n for seen in arm.markers.failed]
    if before.n > first or after.n < max(ends, default=after.n):
        message = f"arm {arm.name}: the probes lie not between the two readings of its identity"
        yield unknown("identity_misplaced", message, place, [before.where, after.where])
    for seen in read:
        lacking = [*seen.rec.missing, *(name for name in NEEDED if not seen.rec.values.get(name))]
        if lacking:
            message = f"arm {arm.name}: {', '.join(lacking)} could not be read {seen.rec.when} the probes"
            yield unknown("missing_identity", message, place, [seen.where])
    for name in sorted(before.rec.values.keys() | after.rec.values.keys()):
        ours, theirs = (seen.rec.values.get(name) for seen in read)
        if _differ(ours, theirs):
            message = f"arm {arm.name}: {name} was {ours!r} before the probes and {theirs!r} after"
            yield unknown("identity_drift", message, place, [before.where, after.where])


def _recorded(history: History, arm: ArmHistory) -> Iterator[Finding]:
    """The recorder's markers are the plan's, its K the arm's, and the scheduler's recorder says the same."""
    recorder, resolved = arm.markers.recorder, history.resolved.markers
    if recorder is None:
        raise MissingEvidence("missing_recorder", f"arm {arm.name}: no rank has a recorder_started record")
    if resolved is None:
        raise MissingEvidence("missing_resolved", "resolved.json names no ids of markers")
    place, rec = Place(arm=arm.name), recorder.rec
    speculation = next((one.speculation for one in history.plan.arms if one.name == arm.name), None)
    drafts = speculation.drafts if speculation else 0
    if rec.speculative_tokens != drafts:
        message = f"arm {arm.name}: K = {rec.speculative_tokens}, planned {drafts}"
        yield fail("wrong_speculation", message, place, [recorder.where])
    if (rec.start_ids, rec.end_ids) != (resolved.start_ids, resolved.end_ids):
        message = (
            f"arm {arm.name}: the engine's markers are {rec.start_ids} and {rec.end_ids}, resolved.json has others"
        )
        yield unknown("other_markers", message, place, [recorder.where])
    yield from _one_engine(history, arm, recorder)
    yield from _scheduler(arm, arm.markers.scheduler)
    yield from patches(planned(history), arm)


def _one_engine(history: History, arm: ArmHistory, recorder: Seen[RecorderStarted]) -> Iterator[Finding]:
    """What the identity says of checkpoint, process, versions, K and scheduling, others of the archive say too."""
    engine, rec, place = arm.engine, recorder.rec, Place(arm=arm.name)
    expected: dict[str, Any] = {
        "model": history.resolved.model.name,
        "model_sha256": history.resolved.model.sha256,
        "process": engine.rec.process,
        DRAFTS: rec.speculative_tokens,
        ASYNCHRONOUS: rec.asynchronous,
        "vllm": engine.rec.versions.get("vllm"),
        **{f"version.{name}": version for name, version in engine.rec.versions.items()},
    }
    for seen in arm.markers.identities:
        for name in sorted(expected.keys() & seen.rec.values.keys()):
            if _differ(seen.rec.values[name], expected[name]):
                message = f"arm {arm.name}: its identity says {name} {seen.rec.values[name]!r}, the archive has "
                message += f"{expected[name]!r} of it"
                yield unknown("identity_contradicts", message, place, [seen.where, engine.where, recorder.where])
    settings = engine.rec.settings
    for name, recorded in ((DRAFTS, rec.speculative_tokens), (ASYNCHRONOUS, rec.asynchronous)):
        if name == ASYNCHRONOUS and name not in settings:
            message = f"arm {arm.name}: the engine does not say whether it schedules asynchronously"
            yield unknown("missing_setting", message, place, [engine.where])
        elif name in settings and _differ(settings[name], recorded):
            message = f"arm {arm.name}: {name} is {settings[name]!r} by the engine, {recorded!r} by the recorder"
            yield unknown("recorder_contradicts", message, place, [engine.where, recorder.where])
    simulated = engine.rec.engine == "sim"
    for stream in arm.markers.streams.values():
        for started in stream.started:
            if simulated and (started.rec.functions or started.rec.runner != "v1"):
                message = f"arm {arm.name}: {stream.name} names a runner or functions of vLLM, the engine is simulated"
                yield unknown("recorder_contradicts", message, place, [started.where, engine.where])
            elif not simulated and not started.rec.functions:
                message = f"arm {arm.name}: {stream.name} names no function that its recorder watches"
                yield unknown("missing_functions", message, place, [started.where])


def _scheduler(arm: ArmHistory, scheduler: RecorderStream | None) -> Iterator[Finding]:
    recorder = arm.markers.recorder
    for seen in scheduler.started if scheduler else ():
        for field in ("ranks", "runner", "speculative_tokens", "asynchronous", "start_ids", "end_ids"):
            ours, theirs = getattr(recorder.rec if recorder else None, field, None), getattr(seen.rec, field)
            if ours != theirs:
                message = f"arm {arm.name}: {field} is {theirs!r} by the scheduler's recorder, {ours!r} by the ranks'"
                yield unknown("recorders_differ", message, Place(arm=arm.name), [seen.where])


# --- anomalies --------------------------------------------------------------------------------


def anomalies(history: History) -> CheckResult:
    """Whatever the client found odd, listed; a judgement of none of it."""
    answered = [(probe, probe.answered) for probe in all_probes(history) if probe.answered is not None]
    findings = [
        unknown("anomaly", f"{probe.title}: {said}", probe.place, [seen.where])
        for probe, seen in answered
        for said in seen.rec.anomalies
    ]
    summary = f"{len(findings)} anomalies in {len(answered)} answers"
    return conclude(ANOMALIES, findings, unit="answers", examined=len(answered), summary=summary)
