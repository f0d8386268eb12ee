"""Checks of what a latency study's requests reused: a path for each, a cold one cold, a reload from outside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from samestate.checks.base import CheckResult, Finding, Place
from samestate.checks.boundary import expected_ranks, reloads
from samestate.checks.credit import Credit
from samestate.checks.history import History
from samestate.checks.latency_paths import ActualPath
from samestate.checks.latency_sample import Sample, samples
from samestate.checks.parts import load_parts
from samestate.checks.transfers import confirmed, load_done
from samestate.checks.verdicts import conclude, fail, unknown
from samestate.evidence.records import EXTERNAL_HITS, LOCAL_HITS, OperationName
from samestate.plans.scenarios import CANDIDATE

PATHS = "latency-paths"
RELOADS = "latency-reloads"


def paths(history: History) -> CheckResult:
    """Every request's path is named by records that agree, and a cold one computed everything."""
    found = samples(history)
    findings = [finding for one in found for finding in _path(history, one)]
    taken = Counter(one.path.value for one in found if one.measured and one.path is not None)
    summary = ", ".join(f"{path} {count}" for path, count in sorted(taken.items())) or "no path is known"
    return conclude(PATHS, findings, unit="requests", examined=len(found), summary=f"measured: {summary}")


def _path(history: History, one: Sample) -> Iterator[Finding]:
    arm = history.arm(one.arm)
    place = Place(arm=one.arm, case=one.case, op=one.op, request=one.request)
    name = f"arm {one.arm}: {one.op}"
    if one.path is None:
        yield unknown("path_unknown", f"{name}: {one.taken.why}", place, one.evidence)
        return
    if one.path is ActualPath.EXTERNAL:
        yield unknown("place_unknown", f"{name}: {one.taken.why}", place, one.evidence)
    if one.condition.attempted is OperationName.COLD and one.path is not ActualPath.RECOMPUTE:
        message = f"{name}: attempted cold, and {one.credited} tokens were reused ({one.path.value})"
        yield unknown("cold_reused", message, place, one.evidence)
    schedule, output = arm.schedule(one.op), arm.output(one.op)
    if schedule and output is not None:
        credit = Credit(arm, schedule[0], place, whole=history.whole(one.arm))
        yield from credit.cached(output.rec.cached_tokens, output.where)
        if arm.connected and one.request is not None:
            yield from credit.looked_up(one.request, one.tokens)
    yield from _counted(history, one, place)


def _counted(history: History, one: Sample, place: Place) -> Iterator[Finding]:
    """The engine's own counters say the same as its schedule and lookup."""
    arm = history.arm(one.arm)
    answered = [seen for seen in arm.lookups.get(one.request or "", ()) if seen.rec.matched_tokens is not None]
    local = answered[-1].rec.local_tokens if answered else one.credited
    if one.credited is None or local is None:
        return
    expected = {LOCAL_HITS: local} | ({EXTERNAL_HITS: one.credited - local} if arm.connected else {})
    for counter, tokens in expected.items():
        counted, evidence = arm.counter(one.op, counter), arm.evidence(one.op)
        if counted is None:
            message = f"arm {one.arm}: {one.op}: {counter} cannot be read"
            yield unknown("counter_unreadable", message, place, evidence)
        elif counted != tokens:
            message = f"arm {one.arm}: {one.op}: {counter} counts {counted:.0f} tokens, schedule and lookup {tokens}"
            make = fail if history.whole(one.arm) else unknown
            yield make("counter_disagrees", message, place, evidence)


def reloaded(history: History) -> CheckResult:
    """Every explicit reload loaded bytes on every rank, with nothing local left, after a confirmed local-only reset."""
    arm = history.arm(CANDIDATE)
    ranks = expected_ranks(arm)
    checked = reloads(history)
    findings: list[Finding] = []
    good = 0
    for reload in checked:
        found: list[Finding] = list(confirmed(arm, reload.case, f"{reload.case}.{OperationName.RESET.value}"))
        for rank in sorted(ranks | set(reload.loads)):
            place = reload.place.model_copy(update={"rank": rank})
            if rank not in reload.loads:
                found.append(unknown("missing_rank", f"{reload.op}: rank {rank} records no load", place))
            for load in reload.loads.get(rank, ()):
                found += load_done(reload.op, load, place)
        found += load_parts(arm, reload)
        for seen in arm.lookups.get(reload.request or "", ()):
            if seen.rec.local_tokens:
                message = f"{reload.op}: {seen.rec.local_tokens} tokens were still in the local cache"
                found.append(unknown("local_hit", message, reload.place, [seen.where]))
        good += not found
        findings += found
    summary = f"{good}/{len(checked)} reloads loaded on {len(ranks)} rank(s), nothing local"
    return conclude(RELOADS, findings, unit="reloads", examined=len(checked), summary=summary)
