"""Run a plan: arm after arm on fresh engines, into an archive that is sealed only when all is done."""

from __future__ import annotations

import errno
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
from samestate.engines.services import ServiceError
from samestate.evidence.archive import ArchiveError, ArchiveWriter
from samestate.evidence.records import (
    AttemptEnded,
    AttemptStarted,
    ContactLevel,
    ContactReached,
    EngineStarted,
    Outcome,
    PlanResolved,
)
from samestate.evidence.stream import StreamWriter
from samestate.lab.control import SealedControl, open_control, require_same_model
from samestate.lab.errors import RunError
from samestate.lab.ledger import Ledger
from samestate.lab.operate import Operator
from samestate.lab.resolve import Resolution, planned_cases, require_room, resolve
from samestate.lab.services import MakeService, Services, no_service
from samestate.lab.source import source_commit, source_sha256
from samestate.lab.turns import Turns
from samestate.models.catalogue import ModelError, identity
from samestate.plans.load import CONTROL, plan_json
from samestate.plans.model import ArmPlan, Plan
from samestate.plans.operations import workload
from samestate.plans.repetitions import repeated_arms

__all__ = ["REFERENCE_ARM", "Progress", "RunError", "RunRequest", "RunResult", "run_plan"]

REFERENCE_ARM = "reference-control"
"""Name under which another archive's control is imported beside a live one."""

BYTES_PER_OUTPUT_TOKEN = 1024
"""What an output token costs in an archive, at most: its schedule records of two sources."""


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
    armed: Mapping[str, str | None] = MappingProxyType({})
    """Faults to arm while the engine runs: by operation, which one it must find armed; no other operation finds any."""


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
        refusal = RunError(str(error)) if isinstance(error, ArchiveError) else _disk_error(error, request)
        _conclude(request, number, Outcome.EXCLUDED, str(refusal), None)
        raise refusal from error
    attempt = _Attempt(request, archive, progress, control, number or 1)
    try:
        attempt.run()
        with attempt.timed("seal"):
            seal = _seal(archive)
    except BaseException as error:
        outcome, cause = _explain(error, request, entered=attempt.entered)
        with suppress(OSError, ValueError):
            archive.attempts.append(AttemptEnded(outcome=outcome, reason=_one_line(cause)))
        with suppress(OSError):
            archive.abandon()
        _conclude(request, number, outcome, _one_line(cause), None)
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
    if request.packages is None and (released := [arm.release for arm in request.plan.arms if arm.release]):
        raise RunError(f"release: the plan is for {released[0]}, and no folder with that release was given")
    if request.control and request.reference:
        raise RunError("--control and --reference: with --control no live control is left to compare; give one")
    if request.fault and all(arm.connector == "none" for arm in request.plan.arms):
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
        with ExitStack() as closing:
            self._services = self._make_services(closing)
            engines = [self._request.make_engine(self._spec(arm)) for arm in self._live]
            for engine in engines:
                closing.callback(_close_quietly, engine)
            for arm, engine, following in zip(self._live, engines, [*engines[1:], None], strict=True):
                self._run_arm(arm, engine, following)
        self._archive.attempts.append(AttemptEnded(outcome=Outcome.COMPLETED, reason=None))

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
        )

    def _run_arm(self, arm: ArmPlan, engine: Engine, following: Engine | None) -> None:
        """Start, operate and close one engine, its service around it; the next one may warm up meanwhile."""
        client = StreamWriter(self._archive.arm_dir(arm.name) / "client.jsonl", arm.name, "client")
        try:
            with self.timed(f"{arm.name}: start"):
                self._reach(ContactLevel.HOST)
                self._services.begin(arm, self._interval(), client)
                started = engine.start()
                self._reach(ContactLevel.MODEL)
                resolution = self._resolve(engine, started)
            if following is not None:
                following.prepare()
            client.append(PlanResolved(resolved_sha256=self._resolved_sha256))
            with self.timed(f"{arm.name}: operations"):
                self._operate(arm, engine, client, resolution)
            with self.timed(f"{arm.name}: stop"):
                alive = self._services.alive(arm)
                engine.close()
                self._services.end(arm, alive=alive, client=client)
        finally:
            client.close()

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
        operator = Operator(self._plan, self._turns, engine, client, self._request.armed)

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


def _explain(error: BaseException, request: RunRequest, *, entered: bool) -> tuple[Outcome, BaseException]:
    """How the attempt ended, and the exception that says so to the caller."""
    match error:
        case KeyboardInterrupt():
            return Outcome.INTERRUPTED, error
        case RunError():
            # The lab's own refusals come before the first request: nothing entered the sample.
            return Outcome.EXCLUDED, error
        case EngineError() | ServiceError():
            return Outcome.FAILED if entered else Outcome.EXCLUDED, RunError(str(error), error.log_tail)
        case ArchiveError():
            return Outcome.FAILED, RunError(str(error))
        case OSError():
            return Outcome.FAILED, _disk_error(error, request)
        case _:
            return Outcome.FAILED, error


def _disk_error(error: OSError, request: RunRequest) -> RunError:
    what = error.strerror or str(error)
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return RunError(f"{error.filename or request.out}: {what}; check the path and its permissions")
    plan = request.plan
    work = workload(plan)
    output_tokens = work.output_tokens * (1 if plan.scenario else work.engine_starts)
    megabytes = 1 + output_tokens * BYTES_PER_OUTPUT_TOKEN // 10**6
    return RunError(f"{request.out}: {what}; the archive needs about {megabytes} MB: make room or choose another --out")


def _one_line(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "stopped by the user"
    text = " ".join(str(error).split())
    return text if isinstance(error, RunError | EngineError | ServiceError) else f"{type(error).__name__}: {text}"
