"""Whether what the ranks committed and what the API delivered are one thing, under either of two rules.

``marker-frozen-v1``: exactly the same ids; 76 against 75 is unknown. ``marker-post-stop-v1``: the API's ids are an
exact prefix, the finish explains where it ends, and every id past it is witnessed by the scheduler's record of the
trim. Workers commit every accepted token without a stop check, and an asynchronous step may run ahead of a stop; so at
most K + (K+1) ids follow. Anything else is unknown, never a pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum

from samestate.checks.base import CheckResult, Finding
from samestate.checks.history import History
from samestate.checks.marker_history import RankTrace
from samestate.checks.marker_probes import Probe, all_probes, budgeted, markers_of, resident
from samestate.checks.verdicts import conclude, unknown
from samestate.evidence.marker_records import RecorderStarted

CHECK = "trace-reconciled"


class Rule(StrEnum):
    """How trace and API must agree; each is an analyzer of its own."""

    FROZEN = "marker-frozen-v1"
    POST_STOP = "marker-post-stop-v1"


def trace_reconciled(history: History, rule: Rule) -> CheckResult:
    """Hold every rank's committed ids of every probe against the API's, by `rule`."""
    probes = budgeted(history)
    by_probe = [(probe, list(objections(probe, rule))) for probe in probes]
    findings = [finding for _, found in by_probe for finding in found]
    free = [probe for probe in all_probes(history) if probe.budget is None]
    findings += [finding for probe in free for finding in _untraced(probe)]
    agreeing = [probe for probe, found in by_probe if not found]
    longest = max((length for probe in agreeing for length in tail_lengths(probe).values()), default=0)
    beyond = f", at most {longest} tokens past a stop" if longest else ""
    summary = f"{len(agreeing)}/{len(probes)} requests: trace and API agree{beyond}"
    summary = f"{summary}; {len(free)} without a budget are untraced" if free else summary
    return conclude(CHECK, findings, unit="requests", examined=len(probes), summary=summary)


def tail_lengths(probe: Probe) -> dict[int, int]:
    """Committed ids past the API's, by rank; 0 also where the trace is the shorter one."""
    return {rank: max(0, len(trace.tokens) - len(probe.tokens)) for rank, trace in probe.traces.items()}


def objections(probe: Probe, rule: Rule) -> Iterator[Finding]:
    """Why a probe's trace does not reconcile; nothing: it does. All are unknown. Raises MissingEvidence."""
    if probe.answered is None:
        yield unknown("missing_answer", f"{probe.title}: no probe_answered record", probe.place, probe.where)
        return
    if not probe.traces:
        said = f"{len(probe.requests)} traced requests go by its id" if probe.requests else "no rank traced it"
        yield unknown("missing_trace", f"{probe.title}: {said}", probe.place, probe.where)
        return
    if not probe.tokens:
        yield unknown("missing_tokens", f"{probe.title}: the API returned no token ids", probe.place, probe.where)
        return
    for rank, trace in probe.traces.items():
        yield from _of_this_request(probe, rank, trace)
        yield from (_exact if rule is Rule.FROZEN else _prefix)(probe, rank, trace)
    if rule is Rule.POST_STOP:
        yield from _finish(probe)
        yield from _deliveries(probe)
        for rank, trace in probe.traces.items():
            yield from _by_step(probe, rank, trace)
            yield from _tail(probe, rank, trace)


def _untraced(probe: Probe) -> Iterator[Finding]:
    """A probe without a budget has no trace: its finish must still explain where its tokens end."""
    if probe.answered is None or not probe.tokens:
        yield unknown("missing_answer", f"{probe.title}: no answer with token ids", probe.place, probe.where)
        return
    yield from _finish(probe)


def _of_this_request(probe: Probe, rank: int, trace: RankTrace) -> Iterator[Finding]:
    """The traced request is the one that was asked."""
    prompt = probe.answered.rec.prompt_token_ids if probe.answered else []
    expected = {
        "budget": probe.budget,
        "prompt_tokens": len(prompt),
        "resident": resident(prompt, markers_of(probe.arm)),
    }
    for seen in trace.asked:
        for field, value in expected.items():
            traced = getattr(seen.rec, field)
            if traced != value:
                message = f"{probe.title}: rank {rank} traced {field} {traced}, the client's records give {value}"
                yield unknown("another_request", message, probe.at_rank(rank), [seen.where, *probe.where])


def _exact(probe: Probe, rank: int, trace: RankTrace) -> Iterator[Finding]:
    if trace.tokens != probe.tokens:
        message = f"{_sizes(probe, rank, trace)}: not the same"
        yield unknown("output_mismatch", message, probe.at_rank(rank), [*trace.evidence, *probe.where])


def _prefix(probe: Probe, rank: int, trace: RankTrace) -> Iterator[Finding]:
    if trace.tokens[: len(probe.tokens)] != probe.tokens:
        message = f"{_sizes(probe, rank, trace)}: the API's ids are no prefix of the trace"
        yield unknown("output_mismatch", message, probe.at_rank(rank), [*trace.evidence, *probe.where])


def _sizes(probe: Probe, rank: int, trace: RankTrace) -> str:
    alike = next(
        (at for at, pair in enumerate(zip(trace.tokens, probe.tokens, strict=False)) if pair[0] != pair[1]),
        min(len(trace.tokens), len(probe.tokens)),
    )
    sizes = f"{len(trace.tokens)} trace tokens, {len(probe.tokens)} API tokens, the first {alike} agree"
    return f"{probe.title}: rank {rank}: {sizes}"


def declared_stops(probe: Probe) -> set[int]:
    """Ids that end the request: its own, and the engine's ends of sequence unless ignored. Raises MissingEvidence."""
    own = set(probe.sent.rec.stop_token_ids)
    return own if probe.sent.rec.ignore_eos else own | set(probe.arm.engine.rec.eos_token_ids)


def _finish(probe: Probe) -> Iterator[Finding]:
    """Finished by the first declared stop id, at the end; or by length, at exactly the cap."""
    if probe.answered is None:
        return
    rec, cap = probe.answered.rec, probe.sent.rec.max_tokens
    stops = declared_stops(probe)
    first = next((at for at, token in enumerate(rec.token_ids) if token in stops), None)
    said = ""
    match rec.finish_reason:
        case "stop" if first is None:
            said = f"finished by 'stop' ({rec.stop_reason!r}) without a declared stop id"
        case "stop" if first != len(rec.token_ids) - 1:
            said = f"stop id {rec.token_ids[first or 0]} at {first}, and {len(rec.token_ids)} tokens delivered"
        case "stop" if rec.stop_reason != rec.token_ids[-1] and not _is_eos(probe, rec.stop_reason):
            said = f"stopped by {rec.token_ids[-1]}, the API says {rec.stop_reason!r}"
        case "stop" if len(rec.token_ids) > cap:
            said = f"{len(rec.token_ids)} tokens, the cap is {cap}"
        case "length" if first is not None:
            said = f"finished by 'length' with stop id {rec.token_ids[first]} at {first}"
        case "length" if len(rec.token_ids) != cap:
            said = f"finished by 'length' after {len(rec.token_ids)} tokens, the cap is {cap}"
        case "stop" | "length":
            return
        case other:
            said = f"finished by {other!r}: neither 'stop' nor 'length'"
    yield unknown("finish_unexplained", f"{probe.title}: {said}", probe.place, probe.where)


def _is_eos(probe: Probe, stop_reason: int | str | None) -> bool:
    """An end of sequence has no stop reason."""
    return stop_reason is None and probe.tokens[-1] in probe.arm.engine.rec.eos_token_ids


def _deliveries(probe: Probe) -> Iterator[Finding]:
    """The scheduler's own account of every step gives the API's ids, one after the other, and ends as the API says."""
    if probe.answered is None or not probe.delivered:
        message = f"{probe.title}: the scheduler recorded no delivery"
        yield unknown("missing_delivery", message, probe.place, probe.where)
        return
    kept: list[int] = []
    for index, seen in enumerate(probe.delivered):
        rec, last = seen.rec, index == len(probe.delivered) - 1
        said = ""
        if rec.position != len(kept):
            said = f"a delivery at {rec.position}, due at {len(kept)}"
        elif rec.after > len(rec.before):
            said = f"kept {rec.after} of {len(rec.before)} tokens"
        elif not last and (rec.after < len(rec.before) or rec.finish_reason is not None):
            said = f"trimmed or over at {rec.position}, and delivered again"
        if said:
            yield unknown("delivery_contradicts", f"{probe.title}: {said}", probe.place, [seen.where])
            return
        kept += rec.before[: rec.after]
    end, api = probe.delivered[-1], probe.answered.rec
    if kept != api.token_ids:
        message = (
            f"{probe.title}: the scheduler delivered {len(kept)} tokens, the API {len(api.token_ids)}: not the same"
        )
        yield unknown("delivery_contradicts", message, probe.place, [end.where, *probe.where])
    if (end.rec.finish_reason, end.rec.stop_reason) != (api.finish_reason, api.stop_reason):
        mine, theirs = (f"{one.finish_reason!r} ({one.stop_reason!r})" for one in (end.rec, api))
        message = f"{probe.title}: the scheduler ended it by {mine}, the API by {theirs}"
        yield unknown("finish_contradicts", message, probe.place, [end.where, *probe.where])


def _by_step(probe: Probe, rank: int, trace: RankTrace) -> Iterator[Finding]:
    """One delivery a step, of all that the step committed, at most K+1 tokens; the steps after them were dropped."""
    delivered, count = [seen.rec.before for seen in probe.delivered], len(probe.delivered) + len(probe.dropped)
    steps = [step.tokens for step in trace.steps if step.tokens]
    recorder = probe.arm.markers.recorder
    most = recorder.rec.speculative_tokens + 1 if recorder else 0
    where = [seen.where for seen in probe.delivered[:1]]
    if delivered != steps[: len(delivered)] or len(steps) != count:
        message = f"{probe.title}: rank {rank} took {len(steps)} steps, the scheduler took {count}, or took others"
        yield unknown("steps_not_delivered", message, probe.at_rank(rank), where)
    longest = max(map(len, delivered), default=0)
    if longest > most:
        message = f"{probe.title}: the scheduler took {longest} tokens in one step, at most {most} are explained"
        yield unknown("delivery_too_long", message, probe.at_rank(rank), where)


def _tail(probe: Probe, rank: int, trace: RankTrace) -> Iterator[Finding]:
    """Every id past the API's is one that the scheduler trimmed or dropped, in that order, and there are few."""
    recorder = probe.arm.markers.recorder
    tail = trace.tokens[len(probe.tokens) :]
    if recorder is None or (not tail and not probe.dropped and not _trimmed(probe)):
        return
    trimmed, dropped = _trimmed(probe), [token for seen in probe.dropped for token in seen.rec.tokens]
    evidence = [*(seen.where for seen in probe.delivered[-1:]), *(seen.where for seen in probe.dropped)]
    where = [*evidence, *(trace.steps[-1].evidence if trace.steps else [])]
    if tail != [*trimmed, *dropped]:
        message = (
            f"{probe.title}: rank {rank}: {_listed(tail)} past the API's end, "
            f"the scheduler trimmed {_listed(trimmed)} and dropped {_listed(dropped)}"
        )
        yield unknown("tail_not_witnessed", message, probe.at_rank(rank), where)
    if any(seen.n < probe.delivered[-1].n for seen in probe.dropped if probe.delivered):
        message = f"{probe.title}: a step was dropped before the request was over"
        yield unknown("dropped_early", message, probe.at_rank(rank), where)
    yield from _too_long(probe, rank, recorder.rec, len(trimmed), len(dropped), where)


def _too_long(
    probe: Probe, rank: int, recorder: RecorderStarted, trimmed: int, dropped: int, where: list[str]
) -> Iterator[Finding]:
    k = recorder.speculative_tokens
    ahead = k + 1 if recorder.asynchronous else 0
    if trimmed > k or dropped > ahead or len(probe.dropped) > int(recorder.asynchronous):
        message = (
            f"{probe.title}: rank {rank}: {trimmed} tokens trimmed, {dropped} dropped in {len(probe.dropped)} steps; "
            f"at most {k} and {ahead} in one are explained (K = {k})"
        )
        yield unknown("tail_too_long", message, probe.at_rank(rank), where)


def _trimmed(probe: Probe) -> list[int]:
    """What the step that ended the request committed past its end."""
    return [token for seen in probe.delivered[-1:] for token in seen.rec.before[seen.rec.after :]]


def _listed(tokens: Sequence[int]) -> str:
    shown = ", ".join(map(str, tokens[:8]))
    return f"[{shown}{', …' if len(tokens) > 8 else ''}]"
