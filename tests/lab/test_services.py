"""The servers beside the engines of a run, on the simulated engine and a service that only says what was done to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from samestate.engines.base import EngineSpec
from samestate.engines.services import Service, ServiceError, ServiceSpec
from samestate.engines.sim import SimEngine
from samestate.evidence.archive import Archive
from samestate.evidence.records import AttemptEnded, Scalar, ServiceStarted, ServiceStopped
from samestate.lab.run import RunError, RunRequest, run_plan
from samestate.plans.load import with_connector
from samestate.plans.model import ArmPlan, Plan, PromptPlan, StepPlan

from .conftest import QuietProgress

Requests = Callable[..., RunRequest]


class Told(Service):
    """A service that keeps a list of what it was told."""

    def __init__(self, spec: ServiceSpec, *, dies_after: int = 10**6, refuses: bool = False) -> None:
        self.spec = spec
        self.told: list[str] = []
        self.asked = 0
        self._dies_after = dies_after
        self._refuses = refuses
        assert spec.data_dir.is_dir()

    @property
    def address(self) -> str:
        return "127.0.0.1:1"

    @property
    def connector_options(self) -> Mapping[str, Scalar]:
        return {"lmcache.mp.own": 1}

    def start(self, checkpoint_interval: int) -> ServiceStarted:
        self.told.append(f"start {checkpoint_interval}")
        if self._refuses:
            raise ServiceError("arm candidate: no server today; come back", "its log\n")
        return ServiceStarted(
            service="lmcache", version="1", options={"chunk_size": checkpoint_interval}, continues=False
        )

    def alive(self) -> bool:
        self.asked += 1
        return bool(self.told) and self.told[-1] != "stop" and self.asked <= self._dies_after

    def stop(self) -> int:
        self.told.append("stop")
        return 3


class Makers:
    """Makes services, and engines that keep their spec."""

    def __init__(self, **conduct: object) -> None:
        self.services: list[Told] = []
        self.specs: dict[str, EngineSpec] = {}
        self._conduct = conduct

    def service(self, spec: ServiceSpec) -> Service:
        self.services.append(Told(spec, **self._conduct))  # type: ignore[arg-type]
        return self.services[-1]

    def engine(self, spec: EngineSpec) -> SimEngine:
        self.specs[spec.arm] = spec
        return SimEngine(spec._replace(connector="none" if spec.connector == "none" else "native"))


@pytest.fixture
def plan(small: Plan) -> Plan:
    return with_connector(small, "lmcache", options={"l1_size_gb": 0.5, "lmcache.mp.own": 1})


def client(archive: Archive, arm: str) -> list[ServiceStarted | ServiceStopped]:
    records = (line.rec for line in archive.records(arm, "client"))
    return [rec for rec in records if isinstance(rec, ServiceStarted | ServiceStopped)]


def run(plan: Plan, makers: Makers, request_for: Requests, progress: QuietProgress) -> Archive:
    request = request_for(plan, make_engine=makers.engine, make_service=makers.service)
    return Archive.open(run_plan(request, progress).archive)


def test_an_arm_has_its_service_around_it_and_its_own_options(
    plan: Plan, request_for: Requests, progress: QuietProgress
) -> None:
    makers = Makers()
    archive = run(plan, makers, request_for, progress)
    (service,) = makers.services
    assert (service.spec.arm, service.spec.connector, service.spec.options) == (
        "candidate",
        "lmcache",
        {"l1_size_gb": 0.5, "lmcache.mp.own": 1},
    )
    assert service.spec.log_path == archive.root / "arms" / "candidate" / "service.log"
    assert service.told[:3] == ["stop", "start 16", "stop"]
    assert not service.spec.data_dir.exists()
    assert (makers.specs["candidate"].service, makers.specs["control"].service) == ("127.0.0.1:1", None)
    assert makers.specs["candidate"].connector_options == {"lmcache.mp.own": 1}
    started, stopped = client(archive, "candidate")
    assert started == ServiceStarted(service="lmcache", version="1", options={"chunk_size": 16}, continues=False)
    assert stopped == ServiceStopped(service="lmcache", alive=True, kept=False, leftovers=3)
    assert client(archive, "control") == []


def test_each_repetition_has_a_server_of_its_own(plan: Plan, request_for: Requests, progress: QuietProgress) -> None:
    makers = Makers()
    repeated = plan.model_copy(update={"repetitions": ["forward", "reverse"], "lengths": ["60C"]})
    archive = run(repeated, makers, request_for, progress)
    assert [service.spec.arm for service in makers.services] == ["candidate", "candidate-2"]
    first, second = (service.spec for service in makers.services)
    assert first.data_dir != second.data_dir
    assert second.log_path == archive.root / "arms" / "candidate-2" / "service.log"
    for service in makers.services:
        assert service.told[:3] == ["stop", "start 16", "stop"]
    for arm in ("candidate", "candidate-2"):
        started, stopped = client(archive, arm)
        assert isinstance(started, ServiceStarted) and isinstance(stopped, ServiceStopped)
        assert (started.continues, stopped.kept) == (False, False)


def following(plan: Plan) -> Plan:
    """Three engines after one another: the service kept, then restarted."""
    control, candidate = plan.arms
    third = ArmPlan(name="candidate-3", connector="lmcache", follows="candidate-2", service="restarted")
    update = {
        "lengths": [],
        "operations": [],
        "arms": [control, candidate, ArmPlan(name="candidate-2", connector="lmcache", follows="candidate"), third],
        "prompts": [PromptPlan(name="trunk", tokens="60C+7")],
        "scenario": [StepPlan(prompts=["trunk"], arm=arm) for arm in ("candidate", "candidate-2", "candidate-3")],
    }
    return plan.model_copy(update=update)


def test_arms_that_follow_share_it_and_one_finds_it_restarted(
    plan: Plan, request_for: Requests, progress: QuietProgress
) -> None:
    makers = Makers()
    archive = run(following(plan), makers, request_for, progress)
    (service,) = makers.services
    assert service.told[:5] == ["stop", "start 16", "stop", "start 16", "stop"]
    seen = [client(archive, arm) for arm in ("candidate", "candidate-2", "candidate-3")]
    assert [started.continues for started, _ in seen] == [False, True, False]  # type: ignore[union-attr]
    assert [stopped.kept for _, stopped in seen] == [True, True, False]  # type: ignore[union-attr]


def refused(plan: Plan, makers: Makers, request_for: Requests, progress: QuietProgress) -> tuple[RunError, Archive]:
    with pytest.raises(RunError) as error:
        run(plan, makers, request_for, progress)
    return error.value, Archive.open(request_for(plan).out)


def ended(archive: Archive) -> AttemptEnded:
    return next(line.rec for line in archive.attempts() if isinstance(line.rec, AttemptEnded))


def test_one_that_dies_while_the_arm_runs_ends_the_run_at_that_operation(
    plan: Plan, request_for: Requests, progress: QuietProgress
) -> None:
    makers = Makers(dies_after=4)
    error, archive = refused(plan, makers, request_for, progress)
    assert str(error).startswith("arm candidate: its service died or no longer answers; see its service.log")
    assert archive.seal_sha256 is None
    assert ended(archive).outcome == "failed"
    assert makers.services[0].asked == 5
    assert makers.services[0].told[-1] == "stop"


def test_one_that_died_between_two_arms_is_not_taken_for_kept(
    plan: Plan, request_for: Requests, progress: QuietProgress
) -> None:
    # Asked after the trunk, at the end of its arm, and before the next one begins.
    error, archive = refused(following(plan), Makers(dies_after=2), request_for, progress)
    assert str(error).startswith("arm candidate-2: its service died")
    assert archive.seal_sha256 is None


def test_one_that_cannot_start_is_its_own_line_and_log(
    plan: Plan, request_for: Requests, progress: QuietProgress
) -> None:
    error, archive = refused(plan, Makers(refuses=True), request_for, progress)
    assert (str(error), error.log_tail) == ("arm candidate: no server today; come back", "its log\n")
    assert archive.seal_sha256 is None


def test_without_a_maker_lmcache_is_refused(plan: Plan, request_for: Requests, progress: QuietProgress) -> None:
    with pytest.raises(RunError, match="connector 'lmcache' needs its server, and this run can start none"):
        run_plan(request_for(plan, make_engine=Makers().engine), progress)


def test_a_service_that_must_know_c_too_early_is_refused(
    plan: Plan, request_for: Requests, progress: QuietProgress, tmp_path: Path
) -> None:
    engine = plan.engine.model_copy(update={"settings": {"max_model_len": 2048}})
    backwards = plan.model_copy(update={"engine": engine, "arms": [*reversed(plan.arms)]})
    error, _ = refused(backwards, Makers(), request_for, progress)
    assert "must know C before the engine says it; put the control first" in str(error)
