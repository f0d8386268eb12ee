"""What the page instruments saw in an arm: transfer jobs with their pages, states computed, blocks assigned, waits.

Kept only for engines that say they are watched above ``metadata``, so that other runs cost nothing here.

Page rows stay in the archive. Of a record of rows only its place and hashes are kept; a check that wants the
rows reads that line again, job by job, and lets go of them. So memory does not grow with page rows, no temporary
file is needed (``/tmp`` may be memory), and bytes that changed since they were verified are refused.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice
from typing import Any, Literal, NamedTuple

from samestate.checks.seen import MissingEvidence, Seen
from samestate.evidence import records as r
from samestate.evidence.stream import Passed, Stored

Direction = Literal["save", "load"]
Moment = Literal["submitted", "completed"]
NEVER = 2**63 - 1
RECORDS_AT_HAND = 8
"""Records whose rows are in memory at a time: more than a job has sides."""

PAGE_LEVELS = ("digest", "poison")
"""Audit levels at which pages are read."""
PAGE_RECORDS: tuple[type[r.Record], ...] = (
    r.EngineStarted,
    r.Allocated,
    r.StateComputed,
    r.BlocksAssigned,
    r.SaveSubmitted,
    r.SaveCompleted,
    r.SaveDelayed,
    r.SaveWaited,
    r.LoadSubmitted,
    r.LoadCompleted,
    r.PagesDigested,
    r.PagesPoisoned,
    r.GuardsChecked,
)


class Steps:
    """When the scheduler made its batches: time and line of each, in order."""

    def __init__(self) -> None:
        self._t = array("q")
        self._n = array("q")

    def add(self, t_ns: int, n: int) -> None:
        """The next batch stands on line `n`. Raises OverflowError, and adds nothing, for absurd numbers."""
        time, line = array("q", (t_ns, n))
        self._t.append(time)
        self._n.append(line)

    def line_at(self, t_ns: int) -> int:
        """Line of the last batch at or before `t_ns`; -1 when there is none."""
        count = bisect_right(self._t, t_ns)
        return self._n[count - 1] if count else -1

    def time_of(self, n: int) -> int | None:
        """When the batch on line `n` was made."""
        at = bisect_left(self._n, n)
        return self._t[at] if at < len(self._n) and self._n[at] == n else None

    def after(self, t_ns: int, count: int) -> int:
        """When the `count`-th batch after `t_ns` was made; `NEVER` without one."""
        at = bisect_right(self._t, t_ns) + count - 1
        return self._t[at] if at < len(self._t) else NEVER


class Computed(NamedTuple):
    """A step ends on a boundary in this block. It stands there before the step has run."""

    t_ns: int
    request: str
    boundary: int
    where: str


class Assigned(NamedTuple):
    """A block went to a request."""

    t_ns: int
    request: str
    where: str


class Wait(NamedTuple):
    """The worker blocked until a job was done; `t_ns` is when that was over."""

    t_ns: int
    waited_ns: int
    where: str
    timed_out: bool
    """The worker gave up, and went on with the job open."""


class Rows(NamedTuple):
    """The rows of one side of a job, where they lie."""

    t_ns: int
    """When they were written."""
    request: str
    where: str
    stored: Stored
    alike: bytes
    """Equal for equal rows of two records, as long as both write them alike."""
    shelf: _Shelf

    @property
    def rows(self) -> list[r.PageRow]:
        """Read from the archive; alike rows are one list while they are at hand. Raises MissingEvidence."""
        return self.shelf.rows(self)


class _Shelf:
    """The rows that were read last: those of a job and its sides."""

    def __init__(self) -> None:
        self._held: OrderedDict[bytes, list[r.PageRow]] = OrderedDict()

    def rows(self, wanted: Rows) -> list[r.PageRow]:
        held = self._held.get(wanted.alike)
        if held is not None:
            return held
        line = wanted.stored.read()
        if line is None or not isinstance(line.rec, r.PagesDigested):
            message = f"{wanted.where} cannot be read again as it was when the archive was verified"
            raise MissingEvidence("changed_while_judged", message)
        self._held[wanted.alike] = line.rec.rows
        if len(self._held) > RECORDS_AT_HAND:
            self._held.popitem(last=False)
        return line.rec.rows


@dataclass(slots=True)
class Transfer:
    """One save or load of one rank."""

    rank: int
    job: int
    direction: Direction
    submitted: Seen[r.SaveSubmitted] | Seen[r.LoadSubmitted] | None = None
    completions: list[Seen[r.SaveCompleted] | Seen[r.LoadCompleted]] = field(default_factory=list)
    delayed: Seen[r.SaveDelayed] | None = None
    pages: dict[tuple[r.PageSide, Moment], Rows] = field(default_factory=dict)
    poisoned: Seen[r.PagesPoisoned] | None = None
    guards: Seen[r.GuardsChecked] | None = None

    @property
    def request(self) -> str:
        """Whose job it is; empty: not recorded."""
        if self.submitted is not None and self.submitted.rec.request:
            return self.submitted.rec.request
        return next((seen.request for seen in self.pages.values()), "")

    @property
    def parts(self) -> list[r.TransferPart]:
        """What it says that it moves."""
        return self.submitted.rec.parts if self.submitted else []

    @property
    def boundary(self) -> int | None:
        """B, as a load describes itself."""
        return (
            self.submitted.rec.boundary if self.submitted and isinstance(self.submitted.rec, r.LoadSubmitted) else None
        )

    @property
    def t_ns(self) -> int:
        """When it was submitted, or first seen."""
        if self.submitted is not None:
            return self.submitted.t_ns
        seen = [one.t_ns for one in (self.poisoned, *self.pages.values()) if one is not None]
        return min(seen, default=NEVER)

    @property
    def due_ns(self) -> int:
        """Before this its completion is held back."""
        return self.delayed.t_ns + self.delayed.rec.delay_ms * 1_000_000 if self.delayed else self.t_ns

    @property
    def evidence(self) -> list[str]:
        """Where it stands."""
        return [one.where for one in (self.submitted, *self.pages.values(), *self.completions) if one is not None]

    def sides(self, *, readable: bool) -> list[tuple[r.PageSide, Moment]]:
        """What must be recorded of its pages, in the order in which bytes flow; `readable`: the tier can be read."""
        source, stored, destination = r.PageSide.SOURCE, r.PageSide.STORED, r.PageSide.DESTINATION
        path: list[tuple[r.PageSide, Moment]]
        if self.direction == "save":
            path = [(source, "submitted"), (source, "completed"), (stored, "completed")]
        else:
            path = [(stored, "submitted"), (destination, "completed")]
        return [at for at in path if readable or at[0] is not stored]

    def rows(self, side: r.PageSide, moment: Moment) -> list[r.PageRow]:
        """The rows of one side, read from the archive; none when they were not recorded. Raises MissingEvidence."""
        seen = self.pages.get((side, moment))
        return seen.rows if seen else []


class PageHistory:
    """Fills itself from records, stream by stream, the one with `EngineStarted` first; times order them across."""

    def __init__(self) -> None:
        self._shelf = _Shelf()
        self._transfers: list[Transfer] = []
        self._sorted: list[Transfer] | None = None
        self._current: dict[tuple[int, int, Direction], Transfer] = {}
        self._watched = False
        self._allocated: dict[str, list[tuple[int, int]]] = {}
        self.computed: dict[tuple[int, int], list[Computed]] = {}
        """By engine group and block, in order."""
        self.assigned: dict[int, list[Assigned]] = {}
        """By block, in order: all groups share one pool."""
        self.owners: set[str] = set()
        """Requests whose blocks are recorded by the steps that gave them out."""
        self.waits: dict[tuple[int, int], list[Wait]] = {}
        """By rank and job, in order."""

    @property
    def delayed(self) -> bool:
        """Whether the completion of any save was held back."""
        return any(one.delayed for one in self._transfers)

    @property
    def transfers(self) -> list[Transfer]:
        """All jobs by the time of their submission."""
        if self._sorted is None:
            self._sorted = sorted(self._transfers, key=lambda one: (one.t_ns, one.rank))
        return self._sorted

    def allocated_line(self, request: str, t_ns: int) -> int:
        """Line of the last allocation for a load of `request` at or before `t_ns`; -1: none is recorded."""
        return max((n for t, n in self._allocated.get(request, ()) if t <= t_ns), default=-1)

    def assigned_after(self, block: int, t_ns: int) -> Iterator[Assigned]:
        """Who got a block after `t_ns`, in order."""
        owners = self.assigned.get(block, [])
        return islice(owners, bisect_right(owners, t_ns, key=_time), None)

    def computed_until(self, group: int, block: int, t_ns: int) -> Iterator[Computed]:
        """What a block was to hold until `t_ns`, the latest first."""
        held = self.computed.get((group, block), [])
        return (held[at] for at in range(bisect_right(held, t_ns, key=_time) - 1, -1, -1))

    def take(self, seen: Seen[Any], passed: Passed) -> None:
        """Index one of `PAGE_RECORDS`."""
        match seen.rec:
            case r.EngineStarted() as rec:
                self._watched = rec.audit_level in PAGE_LEVELS
            case _ if not self._watched:
                return
            case r.Allocated() as rec:
                if rec.external_tokens:
                    self._allocated.setdefault(rec.request, []).append((seen.t_ns, seen.n))
                self._assign(seen, rec.request, rec.block_ids)
            case r.BlocksAssigned() as rec:
                self.owners.add(rec.request)
                self._assign(seen, rec.request, rec.blocks)
            case r.StateComputed() as rec:
                for group, block in rec.blocks:
                    held = Computed(seen.t_ns, rec.request, rec.boundary, seen.where)
                    self.computed.setdefault((group, block), []).append(held)
            case _:
                self._transfer(seen, passed)

    def _assign(self, seen: Seen[Any], request: str, blocks: list[list[int]]) -> None:
        for block in {block for group in blocks for block in group}:
            self.assigned.setdefault(block, []).append(Assigned(seen.t_ns, request, seen.where))

    def _transfer(self, seen: Seen[Any], passed: Passed) -> None:
        self._sorted = None
        match seen.rec:
            case r.SaveWaited() as rec:
                for job in rec.jobs:
                    wait = Wait(seen.t_ns, rec.waited_ns, seen.where, rec.timed_out)
                    self.waits.setdefault((rec.rank, job), []).append(wait)
            case r.SaveSubmitted() | r.LoadSubmitted():
                one = self._job(seen, "submitted")
                if one.submitted is not None:
                    one = self._new(seen)
                one.submitted = seen
            case r.SaveCompleted() | r.LoadCompleted():
                self._job(seen, "completed").completions.append(seen)
            case r.SaveDelayed():
                self._job(seen, "submitted").delayed = seen
            case r.PagesDigested() as rec:
                one = self._job(seen, rec.moment)
                # From there on the text has all that decides the rows; a key may be spelled otherwise.
                alike = sha256(passed.body[max(passed.body.find(b'"rows":'), 0) :]).digest()
                rows = Rows(seen.t_ns, rec.request, seen.where, passed.stored, alike, self._shelf)
                one.pages[rec.side, rec.moment] = rows
            case r.PagesPoisoned():
                self._job(seen, "submitted").poisoned = seen
            case r.GuardsChecked():
                self._job(seen, "completed").guards = seen

    def _job(self, seen: Seen[Any], moment: Moment) -> Transfer:
        """The job that a record belongs to. A number that was completed and is submitted again is a new job."""
        current = self._current.get(_key(seen.rec))
        if current is None or (moment == "submitted" and current.completions):
            return self._new(seen)
        return current

    def _new(self, seen: Seen[Any]) -> Transfer:
        rank, job, direction = _key(seen.rec)
        one = self._current[rank, job, direction] = Transfer(rank, job, direction)
        self._transfers.append(one)
        return one


def _time(one: Assigned | Computed) -> int:
    return one.t_ns


def _key(rec: Any) -> tuple[int, int, Direction]:
    if isinstance(rec, r.PagesDigested):
        return rec.rank, rec.job, rec.direction
    loads = (r.LoadSubmitted, r.LoadCompleted, r.PagesPoisoned, r.GuardsChecked)
    return rec.rank, rec.job, "load" if isinstance(rec, loads) else "save"
