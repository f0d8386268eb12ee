"""What happened to each request of every arm with a connector, and when: from records alone, judged by nobody.

Times are milliseconds of the host's monotonic clock since the operation started. They order what
happened; whether they are measurements is the judgement's to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from samestate.checks.history import ArmHistory, History, MissingEvidence, Row
from samestate.checks.seen import Seen
from samestate.evidence.records import OperationName, OperationOutput, OperationStarted
from samestate.plans.operations import boundary as strict_boundary
from samestate.plans.scenarios import CANDIDATE

ANSWERED = "answered"
MAX_BATCHES_DRAWN = 64
"""Prompt batches of a request that are drawn one by one."""
_SHORTEST_MS = 1e-6


class Batch(NamedTuple):
    """Tokens [start, end) of a request, computed in one step."""

    start: int
    end: int
    first: bool


class Event(NamedTuple):
    """Something that happened once, or lasted; `ends` of None: it never ended, as far as is recorded."""

    name: str
    begins: float
    ends: float | None
    detail: str
    where: str


class Tokens(NamedTuple):
    """The request on its token axis, [0, n)."""

    n: int
    interval: int
    """C, tokens."""
    restored: int | None
    """B, the farthest that any rank reports; None: nothing loaded, or not reported."""
    strict: int | None
    """Where B belongs under the strict prefix, for a reload that loaded."""
    credited: int | None
    """p: where the first batch starts."""
    batches: list[Batch]
    """Of the prompt."""


class RequestTimeline(NamedTuple):
    """One generation."""

    op: str
    name: OperationName
    reuses: bool
    """It loaded, or was credited tokens that it did not compute."""
    tokens: Tokens
    events: list[Event]
    steps: list[float]
    """When each batch with this request was made."""
    length: float
    """Milliseconds until the last thing that the engine did for it; the answer may come later."""


class CaseTimeline(NamedTuple):
    """The generations of one case of one arm, those that reuse first."""

    arm: str
    case: str
    tokens: int
    requests: list[RequestTimeline]

    @property
    def name(self) -> str:
        """The case; outside the candidate, the arm too."""
        return self.case if self.arm == CANDIDATE else f"{self.arm} {self.case}"


def timelines(history: History) -> list[CaseTimeline]:
    """The cases that each arm with a connector started, in order, and the candidate's whatever it has.

    Raises MissingEvidence without candidate or C.
    """
    history.arm(CANDIDATE)
    interval = history.resolved.checkpoint_interval
    arms = (arm for arm in history.arms.values() if arm.connected or arm.name == CANDIDATE)
    return [case for arm in arms for case in _cases(arm, interval)]


def _cases(arm: ArmHistory, interval: int) -> list[CaseTimeline]:
    by_case: dict[str, list[RequestTimeline]] = {}
    lengths: dict[str, int] = {}
    for started in arm.started:
        output = arm.output(started.rec.op)
        if output is not None:
            by_case.setdefault(started.rec.case, []).append(_request(arm, started, output, interval))
            lengths.setdefault(started.rec.case, started.rec.prompt_tokens)
    return [
        CaseTimeline(arm.name, case, lengths[case], sorted(requests, key=lambda request: not request.reuses))
        for case, requests in by_case.items()
    ]


def _request(
    arm: ArmHistory, started: Seen[OperationStarted], output: Seen[OperationOutput], interval: int
) -> RequestTimeline:
    op, request, zero = started.rec.op, output.rec.request, started.t_ns
    rows = list(arm.schedule(op) or ())
    events = sorted(_events(arm, op, request, rows, zero), key=lambda event: event.begins)
    times = (arm.steps.time_of(row.n) for row in rows)
    steps = [(time - zero) / 1e6 for time in times if time is not None]
    boundaries = [load.submitted.rec.boundary for load in arm.loads.get(request, ())]
    return RequestTimeline(
        op=op,
        name=started.rec.name,
        reuses=bool(boundaries) or bool(rows and rows[0].start),
        tokens=_tokens(started.rec, interval, rows, boundaries, drops=bool(arm.engines) and arm.drops_last_block),
        events=events,
        steps=steps,
        length=max([_SHORTEST_MS, *steps, *(event.ends or event.begins for event in events if event.name != ANSWERED)]),
    )


def _tokens(
    started: OperationStarted, interval: int, rows: list[Row], boundaries: list[int | None], *, drops: bool
) -> Tokens:
    n = started.prompt_tokens
    known = [boundary for boundary in boundaries if boundary is not None]
    prompt = [Batch(row.start, row.end, index == 0) for index, row in enumerate(rows) if row.start < n]
    reload = bool(boundaries and n and started.name is OperationName.RELOAD)
    return Tokens(
        n=n,
        interval=interval,
        restored=max(known, default=None),
        strict=strict_boundary(n, interval, drops_last=drops) if reload else None,
        credited=rows[0].start if rows else None,
        batches=prompt[:MAX_BATCHES_DRAWN],
    )


def _events(arm: ArmHistory, op: str, request: str, rows: list[Row], zero: int) -> Iterator[Event]:
    def at(t_ns: int) -> float:
        return (t_ns - zero) / 1e6

    for asked in arm.lookups.get(request, ()):
        rec = asked.rec
        found = "asked again later" if rec.matched_tokens is None else f"{rec.matched_tokens:,} tokens found"
        local = f", {rec.local_tokens:,} local" if rec.local_tokens else ""
        detail = f"{found} of {rec.queried_tokens:,}{local}{', asynchronous' if rec.is_async else ''}"
        yield Event("lookup", at(asked.t_ns), at(asked.t_ns), detail, asked.where)
    for given in arm.allocated.get(request, ()):
        blocks = sum(map(len, given.rec.block_ids))
        detail = f"{blocks:,} blocks, {given.rec.external_tokens:,} tokens to be loaded"
        yield Event("allocation", at(given.t_ns), at(given.t_ns), detail, given.where)
    for load in arm.loads.get(request, ()):
        sent, done = load.submitted, load.completed
        reported = "B not reported" if sent.rec.boundary is None else f"B = {sent.rec.boundary:,}"
        if done is None:
            moved = "never completed"
        elif not done.rec.ok:
            moved = "failed"
        else:
            moved = "bytes not reported" if done.rec.bytes is None else f"{done.rec.bytes:,} bytes"
        yield Event(
            f"load, rank {sent.rec.rank}",
            at(sent.t_ns),
            at(done.t_ns) if done else None,
            f"{reported}, {moved}",
            sent.where,
        )
    first = rows[0] if rows else None
    if first is not None and (time := arm.steps.time_of(first.n)) is not None:
        detail = f"p = {first.start:,}, {first.scheduled:,} scheduled"
        yield Event("first batch", at(time), at(time), detail, first.where)
    for rank in sorted(arm.ranks):
        saves = arm.saves.done.get((rank, request), ())
        if saves:
            jobs = len({saved.where for saved in saves})
            detail = f"{jobs} completed, {sum(saved.part.bytes for saved in saves):,} bytes"
            times = [at(saved.submitted_ns) for saved in saves]
            yield Event(f"saves submitted, rank {rank}", min(times), max(times), detail, saves[0].where)
    for over in arm.finished.get(request, ()):
        yield Event("finished", at(over.t_ns), at(over.t_ns), "the scheduler told the connector", over.where)
    for ended in arm.ends.get(op, ()):
        detail = "ok" if ended.rec.ok else f"failed: {ended.rec.error}"
        yield Event(ANSWERED, at(ended.t_ns), at(ended.t_ns), detail, ended.where)


def require_timelines(history: History) -> tuple[list[CaseTimeline], str]:
    """The timelines, or none and why."""
    try:
        return timelines(history), ""
    except MissingEvidence as missing:
        return [], str(missing)
