"""Run a plan: arm after arm on fresh engines, into an archive that is sealed only when all is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import NamedTuple, Protocol

import samestate
from samestate.engines.base import Engine, EngineError, EngineSpec
from samestate.engines.modules import missing_module
from samestate.engines.server import ServedEngine
from samestate.evidence.archive import ArchiveError, ArchiveWriter
from samestate.evidence.records import (
    AttemptEnded,
    AttemptStarted,
    ContactLevel,
    ContactReached,
    EngineKilled,
    EngineStarted,
    Outcome,
    PlanResolved,
)
from samestate.evidence.stream import StreamWriter
from samestate.lab.control import SealedControl, open_control, require_same_model
from samestate.lab.endings import disk_error, explain, one_line
from samestate.lab.errors import RunError
from samestate.lab.gates import RunGate, no_gates
from samestate.lab.host import sample
from samestate.lab.latency_turns import take_turns
from samestate.lab.ledger import Ledger
from samestate.lab.markers import MakeServer, MarkerRun, Means
from samestate.lab.operate import Operator
from samestate.lab.resolve import Resolution, planned_cases, require_room, resolve
from samestate.lab.services import MakeService, Services, no_service
from samestate.lab.source import source_commit, source_sha256
from samestate.lab.turns import Turns
from samestate.models.catalogue import ModelError, identity
from samestate.plans.load import CONTROL, plan_json
from samestate.plans.model import ArmPlan, MarkerPlan, Plan
from samestate.plans.repetitions import repeated_arms

__all__ = ["REFERENCE_ARM", "Progress", "RunError", "RunRequest", "RunResult", "run_plan"]

REFERENCE_ARM = "reference-control"
"""Name under which another archive's control is imported beside a live one."""


class RunRequest(NamedTuple):
    """What to run, on what, into which folder."""

    plan: Plan
    """Frozen."""
    model: Path
    out: Path
    """The archive's folder; must not exist, or be empty."""
    make_engine: Callable[[EngineSpec], Engine]
    """Cheap: it is called for every arm at the beginning."""
    fault: str | None
    """Fault to inject into the arms that have a connector."""
    control: Path | None
    """Sealed archive whose control arm stands in for a live one."""
    reference: Path | None
    """Sealed archive whose control arm is compared with the live one."""
    serve_args: list[str]
    """Those of the plan, ``engine.serve_args``: what is not in the plan would not be in its hash."""
    packages: Path | None = None
    """Folder with the connector's package in the release that the plan names; None: the environment's own."""
    make_service: MakeService = no_service
    """Makes the server beside an engine, where a connector has one."""
    ledger: Ledger | None = None
    """Where the attempt is spent before first contact; None: nobody counts."""
    engine: str | None = None
    """What `EngineStarted` will name; a control that ran on another is refused. None: not known beforehand."""
    make_server: MakeServer = ServedEngine
    """Makes the server of an arm whose plan asks over an API."""
    run_gate: RunGate = no_gates
    """Runs the gates of a marker plan."""
    armed: Mapping[str, str | None] = MappingProxyType({})
    """Faults to arm while the engine runs: by operation, which one it must find armed; no other operation finds any."""
    environment: Mapping[str, str] = MappingProxyType({})
    """Beside ours, for the processes of every engine: what instruments are told."""


class RunResult(NamedTuple):
    """A sealed archive."""

    archive: Path
    seal_sha256: str
    stages: dict[str, float]
    """Seconds by stage, in order."""


class Progress(Protocol):
    """Told how the run goes on."""

    def stage(self, name: str) -> None:
        """A stage begins, e.g. ``control: start``."""

    def operation(self, arm: str, done: int, total: int, op: str) -> None:
        """`op` is over, the `done`-th of the arm's `total` operations."""


def run_plan(request: RunRequest, progress: Progress) -> RunResult:
    """Run all live arms and seal the archive.

    Raises `RunError` for what cannot run. Once the archive exists every failure closes the
    engines, ends the attempt with its reason and leaves the archive without a seal;
    KeyboardInterrupt and unforeseen exceptions then go on unchanged.
    """
    control = _check(request)
    number = request.ledger.spend(request.out.name) if request.ledger else None
    try:
        archive = ArchiveWriter.create(request.out, plan_json(request.plan))
    except (ArchiveError, OSError) as error:
        refusal = (
            RunError(str(error)) if isinstance(error, ArchiveError) else disk_error(error, request.plan, request.out)
        )
        _conclude(request, number, Outcome.EXCLUDED, str(refusal), None)
        raise refusal from error
    attempt = _Attempt(request, archive, progress, control, number or 1)
    try:
        attempt.run()
        with attempt.timed("seal"):
            seal = _seal(archive)
    except BaseException as error:
        outcome, cause = explain(error, request.plan, request.out, entered=attempt.entered)
        with suppress(OSError, ValueError):
            archive.attempts.append(AttemptEnded(outcome=outcome, reason=one_line(cause)))
        with suppress(OSError):
            archive.abandon()
        _conclude(request, number, outcome, one_line(cause), None)
        if cause is error:
            raise
        raise cause from error
    _conclude(request, number, Outcome.COMPLETED, None, seal)
    return RunResult(request.out, seal, attempt.stages)


def _conclude(
    request: RunRequest, number: int | None, outcome: Outcome, reason: str | None, seal_sha256: str | None
) -> None:
    """Tell the ledger how the attempt ended. One that it is not told of counts as spent."""
    if request.ledger and number is not None:
        with suppress(OSError):
            request.ledger.conclude(number, outcome, reason, seal_sha256)


def _seal(archive: ArchiveWriter) -> str:
    """Seal, and say so when that is interrupted: the attempt itself is over, and ended well."""
    try:
        return archive.seal()
    except KeyboardInterrupt:
        raise KeyboardInterrupt("while sealing") from None


def _check(request: RunRequest) -> SealedControl | None:
    """Refuse what cannot run, before anything is written; open the archive that lends its control."""
    if request.plan.analyzer.source_sha256 is None:
        raise RunError(f"plan {request.plan.name}: is not frozen; freeze it with `samestate plan freeze`")
    if request.serve_args != request.plan.engine.serve_args:
        raise RunError("serve_args: are not those of the plan; put them into engine.serve_args and freeze it again")
    if not request.model.is_dir():
        raise RunError(f"{request.model}: no such model folder; build one with `samestate models build`")
    if request.engine == "vllm" and (missing := missing_module(request.model)):
        raise RunError(f"{request.model}: {missing}, or use --engine transformers")
    if request.packages is None and (released := [arm.release for arm in request.plan.arms if arm.release]):
        raise RunError(f"release: the plan is for {released[0]}, and no folder with that release was given")
    if request.control and request.reference:
        raise RunError("--control and --reference: with --control no live control is left to compare; give one")
    if request.plan.markers is not None and (request.control or request.reference):
        raise RunError(f"--control and --reference: plan {request.plan.name} compares no arms; leave them out")
    connected = request.plan.markers is not None or any(arm.connector != "none" for arm in request.plan.arms)
    if request.fault and not connected:
        raise RunError(f"--fault: plan {request.plan.name} has no arm with a connector, where faults act; leave it out")
    source = request.control or request.reference
    if source is None:
        return None
    if (times := len(request.plan.repetitions)) > 1:
        option = "--control" if request.control else "--reference"
        raise RunError(
            f"{option}: plan {request.plan.name} runs its own control in each of {times} repetitions; leave it out"
        )
    if _overlap(request.out, source):
        raise RunError(
            f"--out: {request.out} and {source} lie in each other, which would damage it; name another folder"
        )
    return open_control(source, request.plan, request.engine)


def _overlap(one: Path, other: Path) -> bool:
    one, other = one.resolve(), other.resolve()
    return one == other or one in other.parents or other in one.parents


class _Attempt:
    """One pass over the plan's arms. Writes everything but the seal."""

    def __init__(
        self,
        request: RunRequest,
        archive: ArchiveWriter,
        progress: Progress,
        control: SealedControl | None,
        number: int,
    ) -> None:
        self.stages: dict[str, float] = {}
        self._plan = request.plan
        self._request = request
        self._archive = archive
        self._progress = progress
        self._control = control
        running = [repeated.running for repeated in repeated_arms(self._plan)]
        self._live = [arm for arm in running if not (request.control and arm.name == CONTROL)]
        self._reached: set[ContactLevel] = set()
        self._number = number
        self._resolution: Resolution | None = None
        self._resolved_sha256 = ""
        self._inputs_written = False

    @property
    def entered(self) -> bool:
        """Whether a request was made: what ends before is excluded from the sample."""
        return ContactLevel.REQUEST in self._reached

    def run(self) -> None:
        self._begin()
        if self._plan.markers is not None:
            self._run_markers(self._plan.markers)
        else:
            self._run_arms()
        self._archive.attempts.append(AttemptEnded(outcome=Outcome.COMPLETED, reason=None))

    def _run_markers(self, markers: MarkerPlan) -> None:
        request = self._request
        means = Means(
            plan=self._plan,
            markers=markers,
            model=request.model,
            identity=self._model,
            make_engine=request.make_engine,
            make_server=request.make_server,
            run_gate=request.run_gate,
            fault=request.fault,
            timed=self.timed,
            reach=self._reach,
            report=self._progress,
        )
        MarkerRun(means, self._archive).run()

    def _run_arms(self) -> None:
        with ExitStack() as closing:
            self._services = self._make_services(closing)
            engines = [self._request.make_engine(self._spec(arm)) for arm in self._live]
            for engine in engines:
                closing.callback(_close_quietly, engine)
            if self._plan.latency is not None and self._plan.latency.interleaved:
                self._run_in_turns(engines)
                return
            for arm, engine, following in zip(self._live, engines, [*engines[1:], None], strict=True):
                self._run_arm(arm, engine, following)

    def _make_services(self, closing: ExitStack) -> Services:
        data = Path(closing.enter_context(TemporaryDirectory(prefix="samestate-")))
        services = Services(self._request.make_service, data, self._archive.log_path)
        for arm in self._live:
            services.plan(arm, self._request.packages, self._plan.engine.external_cache_bytes)
        closing.callback(services.close)
        return services

    @property
    def _fault(self) -> str | None:
        """What the archive is tagged with."""
        in_turn = {fault for fault in self._request.armed.values() if fault}
        return self._request.fault or (f"{len(in_turn)} in turn" if in_turn else None)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Announce a stage and keep how long it took."""
        self._progress.stage(stage)
        began = time.monotonic()
        try:
            yield
        finally:
            self.stages[stage] = time.monotonic() - began

    def _begin(self) -> None:
        """Log the attempt before any contact, then refuse the wrong model."""
        seal = self._control.seal_sha256 if self._control else None
        self._archive.attempts.append(
            AttemptStarted(
                attempt=self._number,
                plan_sha256=self._archive.plan_sha256,
                samestate_version=samestate.__version__,
                source_sha256=source_sha256(),
                source_commit=source_commit(),
                fault=self._fault,
                arms=[arm.name for arm in self._live],
                control_seal_sha256=seal if self._request.control else None,
                reference_seal_sha256=seal if self._request.reference else None,
                options={},
            )
        )
        self._archive.attempts.flush()
        with self.timed("identify"):
            try:
                self._model = identity(self._request.model)
            except ModelError as error:
                raise RunError(str(error)) from None
            if self._control is None:
                return
            require_same_model(self._control, self._model)
            # The same files under another folder name are the same model: keep the archive's words.
            self._model = self._control.resolution.resolved.model
            as_arm = CONTROL if self._request.control else REFERENCE_ARM
            self._archive.import_arm(self._control.archive, CONTROL, as_arm, other_plan=self._control.other_plan)

    def _spec(self, arm: ArmPlan) -> EngineSpec:
        connected = arm.connector != "none"
        instruments = self._plan.instruments
        return EngineSpec(
            arm=arm.name,
            model=self._request.model,
            settings=self._plan.engine.settings | arm.settings,
            serve_args=self._request.serve_args,
            connector=arm.connector,
            external_cache_bytes=self._plan.engine.external_cache_bytes,
            audit_level=instruments.audit_level if connected else "off",
            save_delay_ms=instruments.save_delay_ms if connected else 0,
            fault=self._request.fault if connected else None,
            stream_dir=self._archive.arm_dir(arm.name),
            log_path=self._archive.log_path(arm.name),
            core=self._plan.engine.core,
            connector_options=self._services.connector_options(arm),
            packages=self._request.packages if connected else None,
            service=self._services.address(arm),
            repair=arm.repair,
            environment=self._request.environment,
        )

    def _run_arm(self, arm: ArmPlan, engine: Engine, following: Engine | None) -> None:
        """Start, operate and close one engine, its service around it; the next one may warm up meanwhile."""
        client = StreamWriter(self._archive.arm_dir(arm.name) / "client.jsonl", arm.name, "client")
        try:
            resolution = self._begin_arm(arm, engine, client)
            if following is not None and self._plan.latency is None:  # it would work beside what is timed
                following.prepare()
            with self.timed(f"{arm.name}: operations"):
                self._operate(arm, engine, client, resolution)
            self._end_arm(arm, engine, client)
        finally:
            client.close()

    def _begin_arm(self, arm: ArmPlan, engine: Engine, client: StreamWriter) -> Resolution:
        """Start its service and its engine, and say which resolved plan it runs."""
        with self.timed(f"{arm.name}: start"):
            self._reach(ContactLevel.HOST)
            self._services.begin(arm, self._interval(), client)
            started = engine.start()
            self._reach(ContactLevel.MODEL)
            resolution = self._resolve(engine, started)
        client.append(PlanResolved(resolved_sha256=self._resolved_sha256))
        return resolution

    def _end_arm(self, arm: ArmPlan, engine: Engine, client: StreamWriter) -> None:
        with self.timed(f"{arm.name}: stop"):
            alive = self._services.alive(arm)
            self._end(arm, engine, client)
            self._services.end(arm, alive=alive, client=client)

    def _run_in_turns(self, engines: list[Engine]) -> None:
        """All engines at once, of which one at a time has a trial to make."""
        with ExitStack() as streams:
            operators: dict[str, Operator] = {}
            clients: list[StreamWriter] = []
            for arm, engine in zip(self._live, engines, strict=True):
                client = StreamWriter(self._archive.arm_dir(arm.name) / "client.jsonl", arm.name, "client")
                streams.callback(client.close)
                resolution = self._begin_arm(arm, engine, client)
                operators[arm.name] = Operator(self._plan, self._turns, engine, client, host=sample)
                clients.append(client)
            with self.timed("operations"):
                self._reach(ContactLevel.REQUEST)
                for arm_name, op, done, total in take_turns(self._plan, resolution, operators):
                    self._services.require_alive(next(arm for arm in self._live if arm.name == arm_name))
                    self._progress.operation(arm_name, done, total, op)
                self._write_inputs()
            for arm, engine, client in zip(self._live, engines, clients, strict=True):
                self._end_arm(arm, engine, client)

    def _end(self, arm: ArmPlan, engine: Engine, client: StreamWriter) -> None:
        if arm.ended == "killed":
            killed = engine.kill()
            client.append(EngineKilled(process=killed.process, processes=killed.processes))
        engine.close()

    @property
    def _lent(self) -> Resolution | None:
        """What the archive resolved whose control stands in for a live one."""
        return self._control.resolution if self._control and self._request.control else None

    def _interval(self) -> int | None:
        """C, as far as it is known before the arm's engine runs: a service may need it."""
        known = self._resolution or self._lent
        if known is not None:
            return known.resolved.checkpoint_interval
        size = self._plan.engine.settings.get("block_size")
        return size if isinstance(size, int) else None

    def _resolve(self, engine: Engine, started: EngineStarted) -> Resolution:
        """What the first engine (or the lent control) resolved; a later engine's own C is for the checks."""
        if self._resolution is None:
            c = self._lent.resolved.checkpoint_interval if self._lent else started.checkpoint_interval
            require_room(self._plan, c, started.max_model_len)
            self._resolution = self._lent or resolve(self._plan, c, self._model, engine.encode)
            self._turns = Turns(self._plan, self._resolution)
            if self._lent and self._control:
                self._turns.recorded(self._control.archive)
            self._write_inputs()
            self._resolved_sha256 = self._archive.write_resolved(self._resolution.json)
        return self._resolution

    def _operate(self, arm: ArmPlan, engine: Engine, client: StreamWriter, resolution: Resolution) -> None:
        planned = planned_cases(self._plan, resolution.resolved.checkpoint_interval, arm.name)
        total, done = sum(len(case.operations) for case in planned), count(1)
        self._reach(ContactLevel.REQUEST)
        sampled = {"host": sample} if self._plan.latency else {}
        operator = Operator(self._plan, self._turns, engine, client, self._request.armed, **sampled)

        def over(op: str) -> None:
            self._services.require_alive(arm)
            self._progress.operation(arm.name, next(done), total, op)

        operator.perform(planned, over)
        self._write_inputs()

    def _write_inputs(self) -> None:
        """Once, when every prompt is known: those that continue an answer are when the control has answered."""
        if self._turns.complete and not self._inputs_written:
            self._archive.write_inputs(self._turns.inputs)
            self._inputs_written = True

    def _reach(self, level: ContactLevel) -> None:
        """Log the first contact at a level, before it is made (or, for the model, as soon as it is known)."""
        if level in self._reached:
            return
        self._reached.add(level)
        self._archive.attempts.append(ContactReached(level=level))
        self._archive.attempts.flush()


def _close_quietly(engine: Engine) -> None:
    """Close after a failure: what went wrong first is what the user must read."""
    with suppress(EngineError):
        engine.close()
