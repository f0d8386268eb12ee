"""What an arm recorded of reasoning budgets and served probes, indexed for checks: nothing is judged here.

Traces are by request and rank, as `samestate.evidence.marker_records` has them; probes are the client's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from samestate.checks.seen import Seen
from samestate.evidence import marker_records as m
from samestate.evidence import probe_records as p

RANK_STREAM, SCHEDULER_STREAM = "budget-", "budget-scheduler"
MARKER_RECORDS = (
    m.RecorderStarted,
    m.ReasoningRequest,
    m.LogitsRows,
    m.TokensCommitted,
    m.TokensDelivered,
    m.RunAheadDropped,
    m.RecorderStopped,
    p.IdentityRead,
    p.GateReceipt,
    p.ProbeSent,
    p.ProbeAnswered,
    p.ProbeFailed,
)


@dataclass(slots=True)
class RecorderStream:
    """One process of the recorder."""

    stream: str
    """``arms/candidate/budget-0.jsonl``."""
    started: list[Seen[m.RecorderStarted]] = field(default_factory=list)
    stopped: list[Seen[m.RecorderStopped]] = field(default_factory=list)
    requests: list[Seen[m.ReasoningRequest]] = field(default_factory=list)
    rows: list[Seen[m.LogitsRows]] = field(default_factory=list)
    committed: list[Seen[m.TokensCommitted]] = field(default_factory=list)
    delivered: list[Seen[m.TokensDelivered]] = field(default_factory=list)
    dropped: list[Seen[m.RunAheadDropped]] = field(default_factory=list)
    last: int = 0
    """Line of the last record that is not `RecorderStopped`, from 0."""

    @property
    def name(self) -> str:
        """``budget-0``."""
        return self.stream.rpartition("/")[2].removesuffix(".jsonl")

    @property
    def written(self) -> int:
        """Records of the ring that are here: all but `RecorderStopped`; `InterventionApplied` the arm has."""
        kept = (self.started, self.requests, self.rows, self.committed, self.delivered, self.dropped)
        return sum(len(records) for records in kept)


@dataclass(slots=True)
class MarkerHistory:
    """An arm's recorder streams and probes; empty for an arm without."""

    streams: dict[str, RecorderStream] = field(default_factory=dict)
    """By process: ``budget-0``, ``budget-scheduler``."""
    identities: list[Seen[p.IdentityRead]] = field(default_factory=list)
    gates: list[Seen[p.GateReceipt]] = field(default_factory=list)
    sent: list[Seen[p.ProbeSent]] = field(default_factory=list)
    answered: list[Seen[p.ProbeAnswered]] = field(default_factory=list)
    failed: list[Seen[p.ProbeFailed]] = field(default_factory=list)

    def take(self, seen: Seen[Any]) -> None:
        """Index one of `MARKER_RECORDS`."""
        match seen.rec:
            case p.IdentityRead():
                self.identities.append(seen)
            case p.GateReceipt():
                self.gates.append(seen)
            case p.ProbeSent():
                self.sent.append(seen)
            case p.ProbeAnswered():
                self.answered.append(seen)
            case p.ProbeFailed():
                self.failed.append(seen)
            case _:
                self._traced(seen)

    def _traced(self, seen: Seen[Any]) -> None:
        found = RecorderStream(seen.stream)
        stream = self.streams.setdefault(found.name, found)
        match seen.rec:
            case m.RecorderStarted():
                stream.started.append(seen)
            case m.RecorderStopped():
                stream.stopped.append(seen)
                return
            case m.ReasoningRequest():
                stream.requests.append(seen)
            case m.LogitsRows():
                stream.rows.append(seen)
            case m.TokensCommitted():
                stream.committed.append(seen)
            case m.TokensDelivered():
                stream.delivered.append(seen)
            case m.RunAheadDropped():
                stream.dropped.append(seen)
        stream.last = seen.n

    @property
    def any(self) -> bool:
        """Whether the arm recorded any of it."""
        return bool(self.streams or self.sent or self.answered or self.failed or self.gates or self.identities)

    @property
    def rank_streams(self) -> list[RecorderStream]:
        """Of processes that sample, by rank where the name says it."""
        return [self.streams[name] for name in sorted(self.streams) if name != SCHEDULER_STREAM]

    @property
    def scheduler(self) -> RecorderStream | None:
        """The scheduler's."""
        return self.streams.get(SCHEDULER_STREAM)

    @property
    def recorder(self) -> Seen[m.RecorderStarted] | None:
        """What the first rank's recorder says of itself; `trace-ranks` holds the others to it."""
        return next((seen for stream in self.rank_streams for seen in stream.started), None)


class TracedStep(NamedTuple):
    """One step of one request on one rank. None: that half of it is not recorded."""

    step: int
    rows: Seen[m.LogitsRows] | None
    committed: Seen[m.TokensCommitted] | None

    @property
    def position(self) -> int:
        """Output position that the step begins at."""
        found = self.committed or self.rows
        return found.rec.position if found else 0

    @property
    def tokens(self) -> list[int]:
        """That it committed."""
        return self.committed.rec.tokens if self.committed else []

    @property
    def evidence(self) -> list[str]:
        """Where it stands."""
        return [seen.where for seen in (self.rows, self.committed) if seen]

    def row(self, local: int) -> m.LogitsRow | None:
        """Its row `local`."""
        return next((row for row in self.rows.rec.rows if row.local == local), None) if self.rows else None


class Committed(NamedTuple):
    """A token that a rank took."""

    position: int
    token: int
    local: int | None
    """Its row; None: the trace does not say."""
    step: TracedStep

    @property
    def row(self) -> m.LogitsRow | None:
        """The exact row that it came from; None: not recorded."""
        return None if self.local is None else self.step.row(self.local)


class RankTrace(NamedTuple):
    """One request on one rank, its steps in order."""

    rank: int
    request: str
    asked: list[Seen[m.ReasoningRequest]]
    """One, if all is well."""
    steps: list[TracedStep]
    again: list[str]
    """Where a step is recorded a second time."""

    @property
    def committed(self) -> list[Committed]:
        """Every token that the rank took, tail included, in the order of its steps."""
        return [token for step in self.steps for token in _committed(step)]

    @property
    def tokens(self) -> list[int]:
        """Their ids."""
        return [token for step in self.steps for token in step.tokens]

    @property
    def evidence(self) -> list[str]:
        """Where it begins."""
        return [seen.where for seen in self.asked[:1]]


def _committed(step: TracedStep) -> Iterator[Committed]:
    if step.committed is None:
        return
    rec = step.committed.rec
    for index, token in enumerate(rec.tokens):
        local = rec.rows[index] if index < len(rec.rows) else None
        yield Committed(rec.position + index, token, local, step)


_Key = tuple[str, int]
"""Request, rank."""


def rank_traces(markers: MarkerHistory) -> dict[str, dict[int, RankTrace]]:
    """Traces by request, then by rank. A rank is what its records say, whatever stream they stand in."""
    asked: defaultdict[_Key, list[Seen[m.ReasoningRequest]]] = defaultdict(list)
    rows: defaultdict[_Key, defaultdict[int, list[Seen[m.LogitsRows]]]] = defaultdict(lambda: defaultdict(list))
    done: defaultdict[_Key, defaultdict[int, list[Seen[m.TokensCommitted]]]] = defaultdict(lambda: defaultdict(list))
    for stream in markers.rank_streams:
        for request in stream.requests:
            asked[request.rec.request, request.rec.rank].append(request)
        for logits in stream.rows:
            rows[logits.rec.request, logits.rec.rank][logits.rec.step].append(logits)
        for tokens in stream.committed:
            done[tokens.rec.request, tokens.rec.rank][tokens.rec.step].append(tokens)
    found: dict[str, dict[int, RankTrace]] = {}
    keys: set[_Key] = {*asked, *rows, *done}
    for key in sorted(keys):
        name, rank = key
        mine, taken = dict(rows[key]), dict(done[key])
        steps = [
            TracedStep(step, next(iter(mine.get(step, ())), None), next(iter(taken.get(step, ())), None))
            for step in sorted(mine.keys() | taken.keys())
        ]
        again = [seen.where for of_step in mine.values() for seen in of_step[1:]]
        again += [seen.where for of_step in taken.values() for seen in of_step[1:]]
        found.setdefault(name, {})[rank] = RankTrace(rank, name, asked.get(key, []), steps, again)
    return found
