"""``trace-whole``: the budget trace is complete and agrees with itself. Whatever is missing makes it unknown.

Streams of every rank and of the scheduler are there and were stopped in order with nothing dropped from the ring;
steps and output positions of a request follow one another; every step has its rows and its tokens, and every token
its row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from math import isfinite

from samestate.checks.base import CheckResult, Finding, Place
from samestate.checks.history import ArmHistory, History
from samestate.checks.marker_history import SCHEDULER_STREAM, RankTrace, RecorderStream, TracedStep, rank_traces
from samestate.checks.marker_probes import Probe, probes_of, probing_arms, unasked
from samestate.checks.marker_reconcile import Rule
from samestate.checks.verdicts import conclude, unknown

CHECK = "trace-whole"
ROUNDING = 1e-3
"""A logarithm of a probability near 1, in float32, may lie so far above 0."""


def trace_whole(history: History, rule: Rule) -> CheckResult:
    """Examine every traced step of every rank; under the frozen rule the scheduler need not be traced."""
    arms = probing_arms(history)
    findings = [finding for arm in arms for finding in gaps(arm, rule)]
    traces = [trace for arm in arms for ranks in rank_traces(arm.markers).values() for trace in ranks.values()]
    steps = sum(len(trace.steps) for trace in traces)
    tokens = sum(len(trace.tokens) for trace in traces)
    summary = f"{steps} steps and {tokens} tokens in {len(traces)} traces"
    if findings:
        summary = f"{summary}; {findings[0].message}"
    return conclude(CHECK, findings, unit="steps", examined=steps, summary=summary)


def gaps(arm: ArmHistory, rule: Rule) -> Iterator[Finding]:
    """Everything that an arm's trace lacks, or in which it contradicts itself."""
    yield from _streams(arm, rule)
    for probe in probes_of(arm):
        if probe.budget is not None:
            yield from _traced_everywhere(arm, probe)
    for request, evidence in unasked(arm):
        message = f"arm {arm.name}: request {request} is traced, and no answer of this arm goes by its id"
        yield unknown("unattributed_request", message, Place(arm=arm.name, request=request), evidence)
    asked = {request: probe for probe in probes_of(arm) for request in probe.requests}
    for request, ranks in rank_traces(arm.markers).items():
        of = asked.get(request)
        place = of.place if of else Place(arm=arm.name, request=request)
        greedy = of is not None and of.sent.rec.temperature == 0
        for trace in ranks.values():
            for code, said, where in (*_contradictions(arm, trace), *(_not_led(trace) if greedy else ())):
                message = f"arm {arm.name}: rank {trace.rank}, request {request}: {said}"
                yield unknown(code, message, place.model_copy(update={"rank": trace.rank}), where)


# --- streams ----------------------------------------------------------------------------------


def _streams(arm: ArmHistory, rule: Rule) -> Iterator[Finding]:
    markers, place = arm.markers, Place(arm=arm.name)
    recorder = markers.recorder
    if recorder is None:
        yield unknown("missing_recorder", f"arm {arm.name}: no rank has a recorder_started record", place)
    else:
        expected = recorder.rec.ranks
        there = {seen.rec.rank for stream in markers.rank_streams for seen in stream.started}
        for rank in sorted(set(range(expected)) - there):
            message = f"arm {arm.name}: rank {rank} of {expected} recorded nothing"
            yield unknown("missing_rank", message, Place(arm=arm.name, rank=rank), [recorder.where])
        parallel = arm.engine.rec.tensor_parallel
        if parallel != expected:
            message = f"arm {arm.name}: the recorder names {expected} ranks, the engine {parallel}"
            yield unknown("wrong_ranks", message, place, [recorder.where, arm.engine.where])
    if rule is Rule.POST_STOP and markers.scheduler is None:
        message = f"arm {arm.name}: no {SCHEDULER_STREAM} stream: nobody witnessed what was trimmed"
        yield unknown("missing_scheduler", message, place)
    for stream in markers.streams.values():
        if rule is Rule.POST_STOP or stream.name != SCHEDULER_STREAM:
            yield from _stream(arm, stream)


def _stream(arm: ArmHistory, stream: RecorderStream) -> Iterator[Finding]:
    """Started once, first; stopped once, last, with nothing dropped and as many records as it says."""
    rank = next((seen.rec.rank for seen in stream.started), None)
    place, name = Place(arm=arm.name, rank=rank), f"arm {arm.name}: {stream.name}"
    ends = [seen.where for seen in stream.stopped]
    if len(stream.started) != 1:
        where = [seen.where for seen in stream.started]
        yield unknown("recorder_starts", f"{name} was started {len(stream.started)} times, expected 1", place, where)
    if not stream.stopped:
        message = f"{name} has no recorder_stopped record: what it lost is not known"
        yield unknown("not_stopped", message, place)
    elif len(stream.stopped) > 1:
        yield unknown("recorder_ends", f"{name} was stopped {len(stream.stopped)} times, expected 1", place, ends)
    for seen in stream.stopped:
        if seen.rec.dropped:
            message = f"{name}: overflow, {seen.rec.dropped} records dropped from the ring"
            yield unknown("overflow", message, place, ends)
        here = stream.written + sum(one.stream == stream.stream for one in arm.interventions)
        if seen.rec.written != here:
            message = f"{name} wrote {seen.rec.written} records, {here} are here"
            yield unknown("records_lost", message, place, ends)
        if seen.n < stream.last:
            yield unknown("after_the_end", f"{name} has records after recorder_stopped", place, ends)
    numbers = [seen.rec.step for seen in stream.rows]
    if any(step <= before for before, step in pairwise(numbers)):
        message = f"{name}: a step's number comes again or falls; probes go one at a time"
        yield unknown("repeated_step", message, place, [seen.where for seen in stream.rows[:1]])
    yield from _own(arm, stream, rank, place)


def _own(arm: ArmHistory, stream: RecorderStream, rank: int | None, place: Place) -> Iterator[Finding]:
    """A rank's stream holds that rank's records, the scheduler's only the scheduler's."""
    of_scheduler = stream.name == SCHEDULER_STREAM
    ranks = {one.rec.rank for one in stream.requests} | {one.rec.rank for one in stream.rows}
    ranks |= {one.rec.rank for one in stream.committed}
    roles = {seen.rec.role for seen in stream.started}
    said = {one.rec.rank for one in stream.started} | {one.rec.rank for one in stream.stopped}
    foreign = bool(ranks) if of_scheduler else bool(stream.delivered or stream.dropped)
    wrong_role = roles - {"scheduler" if of_scheduler else "rank"}
    if foreign or wrong_role or len(said | ranks) > 1 or (said and (None in said) != of_scheduler):
        message = f"arm {arm.name}: {stream.name} holds records of another process"
        yield unknown("foreign_records", message, place, [seen.where for seen in stream.started])
    if not of_scheduler and rank is not None and stream.name != f"budget-{rank}":
        message = f"arm {arm.name}: {stream.name} is of rank {rank}"
        yield unknown("foreign_records", message, place, [seen.where for seen in stream.started])


def _traced_everywhere(arm: ArmHistory, probe: Probe) -> Iterator[Finding]:
    """Every rank of the engine traced the probe's request, and that one alone."""
    recorder = arm.markers.recorder
    if probe.answered is None:
        yield unknown("missing_answer", f"{probe.title}: no answer names its request", probe.place, probe.where)
        return
    if len(probe.requests) > 1:
        message = f"{probe.title}: {len(probe.requests)} traced requests go by its id: {', '.join(probe.requests)}"
        yield unknown("ambiguous_request", message, probe.place, probe.where)
    for rank in range(recorder.rec.ranks if recorder else 1):
        if rank not in probe.traces:
            yield unknown("missing_trace", f"{probe.title}: rank {rank} has no trace", probe.at_rank(rank), probe.where)


# --- one request on one rank ------------------------------------------------------------------

_Said = tuple[str, str, Iterable[str]]
"""Code, words, evidence."""


def _contradictions(arm: ArmHistory, trace: RankTrace) -> Iterator[_Said]:
    if len(trace.asked) != 1:
        where = [seen.where for seen in trace.asked]
        yield "missing_request", f"{len(trace.asked)} reasoning_request records, expected 1", where
    if trace.again:
        yield "repeated_step", "a step is recorded twice", trace.again
    slots = {seen.rec.slot for seen in trace.asked} | {step.rows.rec.slot for step in trace.steps if step.rows}
    if len(slots) > 1:
        yield "slot_changed", f"its slot changed: {sorted(slots)}", trace.evidence
    for before, step in pairwise(trace.steps):
        if step.step != before.step + 1:
            yield "lost_step", f"step {step.step} follows step {before.step}", [*before.evidence, *step.evidence]
    lines = [seen.n for seen in trace.asked[:1]]
    lines += [seen.n for step in trace.steps for seen in (step.rows, step.committed) if seen]
    if lines != sorted(lines):
        yield "out_of_order", "its records do not stand in the order of its steps", trace.evidence
    due = 0
    for step in trace.steps:
        if step.position != due:
            yield "lost_position", f"step {step.step} begins at position {step.position}, due at {due}", step.evidence
        due = step.position + len(step.tokens)
        yield from _step(arm, step)


def _not_led(trace: RankTrace) -> Iterator[_Said]:
    """Without a store and at temperature 0 a row's token is the one that leads it."""
    for one in trace.committed:
        if one.row is not None and not one.row.store and one.row.argmax != one.token:
            said = (
                f"step {one.step.step}: row {one.local} has no store, {one.row.argmax} leads it and {one.token} stands"
            )
            yield "step_contradicts", said, one.step.evidence
            return


def _step(arm: ArmHistory, step: TracedStep) -> Iterator[_Said]:
    """Rows 0, 1, …; as many tokens as rows at most, each from its own row; drafts before the last were accepted."""
    if step.rows is None or step.committed is None:
        half = "rows" if step.rows is None else "tokens"
        yield f"missing_{half}", f"step {step.step} has no {half}", step.evidence
        return
    rows, done = step.rows.rec.rows, step.committed.rec
    recorder = arm.markers.recorder
    k = recorder.rec.speculative_tokens if recorder else 0
    said = ""
    if step.rows.rec.position != done.position:
        said = f"rows at {step.rows.rec.position}, tokens at {done.position}"
    elif [row.local for row in rows] != list(range(len(rows))) or len(rows) > k + 1:
        said = f"rows {[row.local for row in rows]} with K = {k}"
    elif done.rows != list(range(len(done.tokens))) or len(done.tokens) > len(rows):
        said = f"{len(done.tokens)} tokens from rows {done.rows} of {len(rows)}"
    elif any(row.store != (row.stored is not None) for row in rows):
        said = "a store without an id, or an id without a store"
    elif not rows or rows[-1].drafted is not None:
        said = f"drafts {[row.drafted for row in rows]}: the last row is the bonus row, which has none"
    elif any(not isfinite(row.logprob) or row.logprob > ROUNDING for row in rows):
        said = "a logarithm of a probability that is above 0 or no number"
    elif any(rows[at].drafted != token for at, token in enumerate(done.tokens[:-1])):
        said = "goes on after a draft that was not accepted"
    if said:
        yield "step_contradicts", f"step {step.step}: {said}", step.evidence
