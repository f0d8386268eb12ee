"""What happened, indexed for checks: one pass over the streams of an archive, the one that verifies them.

Only what checks ask for is kept. Schedule rows are kept as four integers each; of completed saves
only what they moved; page rows, by far the most numerous, stay in the archive (`page_history`). ``FaultArmed``
records are skipped, and the fault tag is kept apart from the attempt, for display alone.
"""

from __future__ import annotations

import gc
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from samestate.checks.marker_history import MARKER_RECORDS, MarkerHistory
from samestate.checks.opaque_groups import told_by_scheduler
from samestate.checks.page_history import PAGE_RECORDS, PageHistory, Steps
from samestate.checks.seen import MissingEvidence, Seen
from samestate.evidence import records as r
from samestate.evidence.archive import ATTEMPTS_NAME, Archive
from samestate.evidence.canonical import sha256_hex
from samestate.evidence.inputs import Inputs
from samestate.evidence.latency_records import CopyMeasured, HostSampled, LoadPhase, RequestTimed
from samestate.evidence.places import place
from samestate.evidence.records import Line
from samestate.evidence.stream import Defect, Passed
from samestate.plans.model import Plan, ResolvedPlan
from samestate.plans.operations import Case, PlannedOperation, cases
from samestate.plans.scenarios import CANDIDATE

__all__ = [
    "REFERENCE",
    "ArmHistory",
    "Attempt",
    "History",
    "Load",
    "MissingEvidence",
    "Row",
    "Saved",
    "Saves",
    "Schedule",
]

REFERENCE = "reference-control"

M = TypeVar("M", Plan, ResolvedPlan)


class Row(NamedTuple):
    """One request in one step."""

    start: int
    scheduled: int
    drafted: int
    stream: str
    n: int

    @property
    def where(self) -> str:
        """``arms/candidate/scheduler.jsonl:17``."""
        return place(self.stream, self.n)

    @property
    def shape(self) -> tuple[int, int, int]:
        """What two schedules are compared by."""
        return self[:3]

    @property
    def end(self) -> int:
        """Tokens computed after the step, if every draft is accepted."""
        return self.start + self.scheduled


class Schedule:
    """The rows of one request as one source saw them, in step order."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._cells = array("q")
        self.times: list[int] = []
        """When the first and the last row were written; empty without a row."""

    def add(self, seen: Seen[r.BatchScheduled], row: r.BatchRow) -> None:
        """Append a row of a record of the stream. Raises OverflowError, and adds nothing, for absurd numbers."""
        self._cells.extend(array("q", (seen.n, row.start, row.scheduled, row.drafted)))
        self.times = [*self.times[:1], seen.t_ns]

    def __len__(self) -> int:
        return len(self._cells) // 4

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int) -> Row:
        """Row `index`, from 0; IndexError outside."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        n, start, scheduled, drafted = self._cells[4 * index : 4 * index + 4]
        return Row(start, scheduled, drafted, self._stream, n)


@dataclass(slots=True)
class Load:
    """A load and its completion, if there is one."""

    submitted: Seen[r.LoadSubmitted]
    completed: Seen[r.LoadCompleted] | None = None


class Saved(NamedTuple):
    """What a completed save moved for one transfer group."""

    n: int
    """Line of the completion in its worker's stream."""
    submitted_ns: int
    part: r.TransferPart
    where: str
    """Of the submission."""
    completed_ns: int


@dataclass(slots=True)
class Saves:
    """Saves of an arm. Of those that completed well only the parts are kept."""

    submitted: int = 0
    done: dict[tuple[int, str], list[Saved]] = field(default_factory=dict)
    """By (rank, request): parts of the saves that completed well, in order."""
    open: dict[tuple[int, int], Seen[r.SaveSubmitted]] = field(default_factory=dict)
    """By (rank, job): submitted and not (yet) completed."""
    unpaired: list[Seen[r.SaveSubmitted] | Seen[r.SaveCompleted]] = field(default_factory=list)
    """Job numbers used again before completion, and completions without a submission."""
    failed: list[Seen[r.SaveCompleted]] = field(default_factory=list)
    unlike: list[Seen[r.SaveCompleted]] = field(default_factory=list)
    """Completed with other bytes than their submission describes, where a connector reports any."""


@dataclass(slots=True)
class ArmHistory:
    """One arm. Client records are by operation id, engine records by request id."""

    name: str
    imported_from: str | None
    """Hash of the seal that the arm was copied from; None: it ran live."""
    streams: list[str]
    source_plan_sha256: str | None = None
    """Hash of the plan that an imported arm was recorded under, where that is another plan."""
    source_plan: Plan | None = None
    """That plan; None also when it cannot be read."""
    engines: list[Seen[r.EngineStarted]] = field(default_factory=list)
    ranks: dict[int, Seen[r.RankRegistered]] = field(default_factory=dict)
    """By rank, the first registration."""
    ranks_again: list[Seen[r.RankRegistered]] = field(default_factory=list)
    """Registrations of ranks that had registered."""
    schedulers: list[Seen[r.SchedulerConfigured]] = field(default_factory=list)
    resolved: list[Seen[r.PlanResolved]] = field(default_factory=list)
    started: list[Seen[r.OperationStarted]] = field(default_factory=list)
    outputs: dict[str, list[Seen[r.OperationOutput]]] = field(default_factory=dict)
    ends: dict[str, list[Seen[r.OperationEnded]]] = field(default_factory=dict)
    stopped: list[Seen[r.EngineStopped]] = field(default_factory=list)
    killed: list[Seen[r.EngineKilled]] = field(default_factory=list)
    services: list[Seen[r.ServiceStarted]] = field(default_factory=list)
    services_over: list[Seen[r.ServiceStopped]] = field(default_factory=list)
    interventions: list[Seen[r.InterventionApplied]] = field(default_factory=list)
    sealed_at: str | None = None
    """Of an imported arm: when the archive that it comes from was sealed. UTC, RFC 3339; None: it cannot be read."""
    selected: list[Seen[r.KernelsSelected]] = field(default_factory=list)
    environments: list[Seen[r.EnvironmentObserved]] = field(default_factory=list)
    storages: list[Seen[r.StoragesDigested]] = field(default_factory=list)
    calls: list[Seen[r.CallCaptured]] = field(default_factory=list)
    listings: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    """Outputs of traced steps, by rank and number of the listing."""
    traced: dict[str, list[Seen[r.StepTraced]]] = field(default_factory=dict)
    """Traced steps by operation."""
    resets: dict[str, list[Seen[r.CacheReset]]] = field(default_factory=dict)
    counters: dict[str, list[Seen[r.CountersRead]]] = field(default_factory=dict)
    lookups: dict[str, list[Seen[r.Lookup]]] = field(default_factory=dict)
    allocated: dict[str, list[Seen[r.Allocated]]] = field(default_factory=dict)
    finished: dict[str, list[Seen[r.RequestFinished]]] = field(default_factory=dict)
    schedules: dict[tuple[str, r.BatchSource], Schedule] = field(default_factory=dict)
    preempted: dict[str, list[str]] = field(default_factory=dict)
    """Request id -> where it was preempted."""
    steps: Steps = field(default_factory=Steps)
    concurrency: int = 0
    """Most requests in one step."""
    loads: dict[str, list[Load]] = field(default_factory=dict)
    stray_loads: list[Seen[r.LoadCompleted]] = field(default_factory=list)
    saves: Saves = field(default_factory=Saves)
    pages: PageHistory = field(default_factory=PageHistory)
    """Empty unless the arm's engine says that its pages were read."""
    markers: MarkerHistory = field(default_factory=MarkerHistory)
    timed: dict[str, list[Seen[RequestTimed]]] = field(default_factory=dict)
    hosts: dict[str, list[Seen[HostSampled]]] = field(default_factory=dict)
    copies: list[Seen[CopyMeasured]] = field(default_factory=list)
    phases: list[Seen[LoadPhase]] = field(default_factory=list)

    @property
    def engine(self) -> Seen[r.EngineStarted]:
        """What the arm's engine says of itself; raises MissingEvidence."""
        if not self.engines:
            raise MissingEvidence("missing_engine", f"arm {self.name}: no engine_started record")
        return self.engines[0]

    @property
    def drops_last_block(self) -> bool:
        """Whether a hit of the arm's engine gives up its last whole block; raises MissingEvidence."""
        return self.engine.rec.settings.get(r.DROPS_LAST_BLOCK) is True

    @property
    def connected(self) -> bool:
        """Whether the arm's engine says that it has a connector."""
        return bool(self.engines) and self.engines[0].rec.connector is not None

    def output(self, op: str) -> Seen[r.OperationOutput] | None:
        """The first output of an operation; `coverage` judges whether there are more."""
        seen = self.outputs.get(op)
        return seen[0] if seen else None

    def schedule(self, op: str, source: r.BatchSource = r.BatchSource.SCHEDULER) -> Schedule | None:
        """Batch rows of an operation's request; None: no output, or no row."""
        output = self.output(op)
        return self.schedules.get((output.rec.request, source)) if output else None

    def resumed(self, request: str, t_ns: int) -> Row | None:
        """First batch after the allocation that a load submitted at `t_ns` fills: p is its start."""
        schedule = self.schedules.get((request, r.BatchSource.SCHEDULER))
        allocated = self.pages.allocated_line(request, t_ns)
        return next((row for row in schedule or () if row.n > allocated), None)

    def counter(self, op: str, name: str) -> float | None:
        """After minus before, around an operation; None: not readable both times."""
        values: dict[str, float] = {}
        for seen in self.counters.get(op, ()):
            if name in seen.rec.values and name not in seen.rec.missing:
                values[seen.rec.when] = seen.rec.values[name]
        return values["after"] - values["before"] if len(values) == 2 else None

    def evidence(self, op: str) -> list[str]:
        """Where the counters around an operation stand."""
        return [seen.where for seen in self.counters.get(op, ())]


class Attempt(NamedTuple):
    """An attempt, without its fault tag."""

    number: int
    plan_sha256: str
    arms: list[str]
    control_seal_sha256: str | None
    reference_seal_sha256: str | None
    source: str
    """The samestate that ran: ``commit 0123456789ab``, or ``source …`` by the hash of its files."""
    where: str
    contacts: list[r.ContactLevel]
    """Levels reached before the end, in order."""
    ends: list[Seen[r.AttemptEnded]]
    """One, unless the run was cut or the archive contradicts itself."""
    strays: list[str]
    """Records after the first end."""
    t_ns: int = 0
    """When it began, by the host's monotonic clock."""
    opened_at: str | None = None
    """The same by the wall: UTC, RFC 3339, milliseconds."""


@dataclass(slots=True)
class History:
    """A run, as checks see it."""

    plan_sha256: str | None
    resolved_sha256: str | None
    seal_sha256: str | None
    defects: list[Defect]
    inputs: Inputs
    arms: dict[str, ArmHistory]
    attempts: list[Attempt]
    records: int
    """Records read, attempts included."""
    fault: str | None
    """For display. No check reads it."""
    _plan: Plan | None
    _resolved: ResolvedPlan | None
    contents_read: list[tuple[dict[str, ArmHistory], object]] = field(default_factory=list)
    """What `prefix_identity` made of which arms, so that the table need not work it out again."""

    @classmethod
    def read(cls, archive: Archive) -> History:
        """Index an archive. Damage never raises: it is in `defects`."""
        collecting = gc.isenabled()
        gc.disable()  # reading makes many objects and no cycles: looking for these took a quarter of the time
        try:
            return _Reader(archive).history()
        finally:
            if collecting:
                gc.enable()

    @property
    def plan(self) -> Plan:
        """The plan; raises MissingEvidence."""
        if self._plan is None:
            raise MissingEvidence("missing_plan", "plan.json is missing or cannot be read")
        return self._plan

    @property
    def resolved(self) -> ResolvedPlan:
        """What the started engine added to the plan; raises MissingEvidence."""
        if self._resolved is None:
            raise MissingEvidence("missing_resolved", "resolved.json is missing or cannot be read")
        return self._resolved

    def cases(self, arm: str) -> list[Case]:
        """The planned cases of an arm under the resolved C; raises MissingEvidence."""
        return cases(self.plan, self.resolved.checkpoint_interval, arm)

    def generations(
        self, name: r.OperationName | None = None, arm: str = CANDIDATE
    ) -> Iterator[tuple[Case, PlannedOperation]]:
        """Planned generations of an arm, in order; only those called `name`, if given.

        In a matrix all arms have the same ones.
        """
        for case in self.cases(arm):
            for op in case.operations:
                if op.name is not r.OperationName.RESET and name in (None, op.name):
                    yield case, op

    def arm(self, name: str) -> ArmHistory:
        """An arm; raises MissingEvidence."""
        if name not in self.arms:
            raise MissingEvidence("missing_arm", f"the archive has no arm {name}")
        return self.arms[name]

    @property
    def ordered(self) -> list[ArmHistory]:
        """All arms: the planned ones as the plan lists them, then the others."""
        planned = [arm.name for arm in self._plan.arms] if self._plan else []
        return [self.arms[name] for name in dict.fromkeys([*planned, *self.arms]) if name in self.arms]

    @property
    def candidates(self) -> list[ArmHistory]:
        """The planned arms with a connector, in order; raises MissingEvidence."""
        return [self.arm(planned.name) for planned in self.plan.arms if planned.connector != "none"]

    def follows(self, arm: str) -> str | None:
        """The arm whose external cache a planned arm finds; None: it finds an empty one."""
        return next((planned.follows for planned in self.plan.arms if planned.name == arm), None)

    def whole(self, arm: str) -> bool:
        """Whether the arm's files are sealed and undamaged: only then does a record that is not there say anything."""
        damaged = any(defect.where.startswith(f"arms/{arm}/") for defect in self.defects)
        return self.seal_sha256 is not None and not damaged

    @property
    def attempt(self) -> Attempt:
        """The attempt that this archive holds; raises MissingEvidence."""
        if not self.attempts:
            raise MissingEvidence("missing_attempt", "attempts.jsonl has no attempt_started record")
        return self.attempts[-1]


def _source(rec: r.AttemptStarted) -> str:
    commit, edited, _ = (rec.source_commit or "").partition("+changes")
    return f"commit {commit[:12]}{edited}" if commit else f"source {rec.source_sha256[:12]}"


def _list_modules(arm: ArmHistory, seen: Seen[r.ModulesListed]) -> None:
    arm.listings.setdefault((seen.rec.rank, seen.rec.listing), seen.rec.outputs)


def _register(arm: ArmHistory, seen: Seen[r.RankRegistered]) -> None:
    if seen.rec.rank in arm.ranks:
        arm.ranks_again.append(seen)
    else:
        arm.ranks[seen.rec.rank] = seen


class _Arms(dict[str, ArmHistory]):
    """Arms by name; one that is asked for the first time is empty."""

    def __missing__(self, name: str) -> ArmHistory:
        self[name] = ArmHistory(name, None, [])
        return self[name]


class _Reader:
    """Fills a History while the archive is verified: every byte of a stream is read, hashed and decoded once."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._records = 0
        self._fault: str | None = None
        self._attempts: list[Attempt] = []
        self._opened_at: str | None = None
        self._arms = _Arms()
        self._absurd: defaultdict[str, list[Defect]] = defaultdict(list)
        self._open_loads: dict[tuple[str, int, int], Load] = {}
        self._handlers: dict[type[r.Record], Callable[[ArmHistory, Any], None]] = {
            r.EngineStarted: lambda arm, seen: arm.engines.append(seen),
            r.RankRegistered: _register,
            r.SchedulerConfigured: lambda arm, seen: arm.schedulers.append(seen),
            r.PlanResolved: lambda arm, seen: arm.resolved.append(seen),
            r.OperationStarted: lambda arm, seen: arm.started.append(seen),
            r.OperationOutput: lambda arm, seen: arm.outputs.setdefault(seen.rec.op, []).append(seen),
            r.OperationEnded: lambda arm, seen: arm.ends.setdefault(seen.rec.op, []).append(seen),
            r.EngineStopped: lambda arm, seen: arm.stopped.append(seen),
            r.EngineKilled: lambda arm, seen: arm.killed.append(seen),
            r.ServiceStarted: lambda arm, seen: arm.services.append(seen),
            r.ServiceStopped: lambda arm, seen: arm.services_over.append(seen),
            r.InterventionApplied: lambda arm, seen: arm.interventions.append(seen),
            r.KernelsSelected: lambda arm, seen: arm.selected.append(seen),
            r.CallCaptured: lambda arm, seen: arm.calls.append(seen),
            r.ModulesListed: _list_modules,
            r.StepTraced: lambda arm, seen: arm.traced.setdefault(seen.rec.op, []).append(seen),
            r.StoragesDigested: lambda arm, seen: arm.storages.append(seen),
            r.EnvironmentObserved: lambda arm, seen: arm.environments.append(seen),
            r.CacheReset: lambda arm, seen: arm.resets.setdefault(seen.rec.op, []).append(seen),
            r.CountersRead: lambda arm, seen: arm.counters.setdefault(seen.rec.op, []).append(seen),
            r.Lookup: lambda arm, seen: arm.lookups.setdefault(seen.rec.request, []).append(seen),
            r.Allocated: lambda arm, seen: arm.allocated.setdefault(seen.rec.request, []).append(seen),
            r.RequestFinished: lambda arm, seen: arm.finished.setdefault(seen.rec.request, []).append(seen),
            r.BatchScheduled: self._batch,
            r.LoadSubmitted: self._load,
            r.LoadCompleted: self._loaded,
            r.SaveSubmitted: self._save,
            r.SaveCompleted: self._saved,
            RequestTimed: lambda arm, seen: arm.timed.setdefault(seen.rec.op, []).append(seen),
            HostSampled: lambda arm, seen: arm.hosts.setdefault(seen.rec.op, []).append(seen),
            CopyMeasured: lambda arm, seen: arm.copies.append(seen),
            LoadPhase: lambda arm, seen: arm.phases.append(seen),
            **dict.fromkeys(MARKER_RECORDS, lambda arm, seen: arm.markers.take(seen)),
        }
        self._paged = set(PAGE_RECORDS)
        self._defects = list(archive.verify(self._visit))

    def history(self) -> History:
        plan_json, resolved_json = self._archive.plan_json, self._archive.resolved_json
        arms = {name: self._describe(self._arms[name]) for name in self._archive.arms}
        return History(
            plan_sha256=sha256_hex(plan_json) if plan_json is not None else None,
            resolved_sha256=sha256_hex(resolved_json) if resolved_json is not None else None,
            seal_sha256=self._archive.seal_sha256,
            defects=self._defects,
            inputs=self._archive.packed_inputs,
            arms=arms,
            attempts=self._attempts,
            records=self._records,
            fault=self._fault,
            _plan=self._model(Plan, plan_json, "plan.json"),
            _resolved=self._model(ResolvedPlan, resolved_json, "resolved.json"),
        )

    def _model(self, model: type[M], data: bytes | None, name: str) -> M | None:
        if data is None:
            self._defects.append(Defect(name, "missing"))
            return None
        try:
            return model.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            path = ".".join(map(str, first["loc"]))
            self._defects.append(Defect(name, f"not a valid {model.__name__}: {path}: {first['msg']}"))
            return None

    def _visit(self, name: str, passed: Passed) -> None:
        """A line of a stream, whose name inside the archive is `name`."""
        self._records += 1
        line = passed.line
        if name == ATTEMPTS_NAME:
            self._attempt(line)
            return
        arm = name.split("/", 2)[1]
        seen = Seen(line.rec, name, line.n, line.t_ns)
        try:
            self._take(self._arms[arm], seen, passed)
        except (OverflowError, ValueError) as error:
            self._absurd[arm].append(Defect(seen.where, f"holds numbers that no run can have ({error})"))

    def _attempt(self, line: Line) -> None:
        where, attempts = place("attempts.jsonl", line.n), self._attempts
        match line.rec:
            case r.AttemptStarted() as rec:
                self._fault = rec.fault
                seals = (rec.control_seal_sha256, rec.reference_seal_sha256)
                source = _source(rec)
                begun = (line.t_ns, self._opened_at)
                attempts.append(
                    Attempt(rec.attempt, rec.plan_sha256, rec.arms, *seals, source, where, [], [], [], *begun)
                )
            case r.AttemptEnded() as rec if attempts:
                attempts[-1].ends.append(Seen(rec, "attempts.jsonl", line.n, line.t_ns))
            case r.ContactReached() as rec if attempts and not attempts[-1].ends:
                attempts[-1].contacts.append(rec.level)
            case r.StreamOpened() as rec:
                self._opened_at = rec.wall_time
            case r.StreamClosed():
                pass
            case _:
                if attempts:
                    attempts[-1].strays.append(where)

    def _describe(self, arm: ArmHistory) -> ArmHistory:
        """Add what an arm's folder says beside its streams."""
        name = arm.name
        arm.imported_from = self._archive.imported_from(name)
        arm.sealed_at = self._archive.sealed_at(name)
        arm.streams = self._archive.streams(name)
        if (source_plan := self._archive.source_plan_json(name)) is not None:
            arm.source_plan_sha256 = sha256_hex(source_plan)
            arm.source_plan = self._model(Plan, source_plan, f"arms/{name}/source-plan.json")
        schedulers = [seen.rec for seen in arm.schedulers]
        arm.ranks = {
            rank: seen._replace(rec=told_by_scheduler(seen.rec, schedulers)) for rank, seen in arm.ranks.items()
        }
        self._defects += self._absurd[name]
        return arm

    def _take(self, arm: ArmHistory, seen: Seen[Any], passed: Passed) -> None:
        kind = type(seen.rec)
        handler = self._handlers.get(kind)
        if handler is not None:
            handler(arm, seen)
        if kind in self._paged:
            arm.pages.take(seen, passed)

    def _batch(self, arm: ArmHistory, seen: Seen[r.BatchScheduled]) -> None:
        rec, schedules = seen.rec, arm.schedules
        if rec.source is r.BatchSource.SCHEDULER:
            arm.steps.add(seen.t_ns, seen.n)
        arm.concurrency = max(arm.concurrency, len(rec.rows))
        for row in rec.rows:
            key = (row.request, rec.source)
            schedule = schedules.get(key)
            if schedule is None:
                schedule = schedules[key] = Schedule(seen.stream)
            schedule.add(seen, row)
        for request in rec.preempted:
            arm.preempted.setdefault(request, []).append(seen.where)

    def _load(self, arm: ArmHistory, seen: Seen[r.LoadSubmitted]) -> None:
        load = Load(seen)
        arm.loads.setdefault(seen.rec.request, []).append(load)
        self._open_loads[arm.name, seen.rec.rank, seen.rec.job] = load

    def _loaded(self, arm: ArmHistory, seen: Seen[r.LoadCompleted]) -> None:
        load = self._open_loads.pop((arm.name, seen.rec.rank, seen.rec.job), None)
        if load is None:
            arm.stray_loads.append(seen)
        else:
            load.completed = seen

    def _save(self, arm: ArmHistory, seen: Seen[r.SaveSubmitted]) -> None:
        key = (seen.rec.rank, seen.rec.job)
        earlier = arm.saves.open.pop(key, None)
        if earlier is not None:
            arm.saves.unpaired.append(earlier)
        arm.saves.open[key] = seen
        arm.saves.submitted += 1

    def _saved(self, arm: ArmHistory, seen: Seen[r.SaveCompleted]) -> None:
        submitted = arm.saves.open.pop((seen.rec.rank, seen.rec.job), None)
        if submitted is None:
            arm.saves.unpaired.append(seen)
        elif not seen.rec.ok:
            arm.saves.failed.append(seen)
        else:
            if seen.rec.bytes not in (None, sum(part.bytes for part in submitted.rec.parts)):
                arm.saves.unlike.append(seen)
            done = arm.saves.done.setdefault((seen.rec.rank, submitted.rec.request or ""), [])
            done += [Saved(seen.n, submitted.t_ns, part, submitted.where, seen.t_ns) for part in submitted.rec.parts]
