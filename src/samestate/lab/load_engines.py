"""A load on engines of our own: one after another, each served and watched as a latency plan's, into one folder.

The folder has an archive's plan and streams and is never sealed: no analyzer judges a load, so no verdict can rest on
it. What its records show is `samestate.checks.latency_load`'s to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from samestate.engines.base import EngineError, EngineSpec
from samestate.engines.served import ServedVllm, StreamingClient
from samestate.engines.server import RunningServer
from samestate.evidence.archive import ArchiveError, ArchiveWriter
from samestate.evidence.records import OperationName
from samestate.evidence.stream import StreamWriter
from samestate.lab.errors import RunError
from samestate.lab.load_driver import Level, LoadDriver
from samestate.lab.load_run import LoadPlan, phases, record
from samestate.lab.run import Progress
from samestate.lab.services import MakeService, Services
from samestate.plans.errors import PlanError
from samestate.plans.lengths import evaluate
from samestate.plans.load import CONTROL, plan_json
from samestate.plans.model import ArmPlan, Plan

OFF = (OperationName.COLD, OperationName.REPEAT)
ON = (OperationName.COLD, OperationName.RELOAD)


class LoadRequest(NamedTuple):
    """What to run, on what, into which folder."""

    plan: Plan
    """A latency plan; its trials are not made."""
    model: Path
    out: Path
    """Must not exist, or be empty."""
    levels: Sequence[Level]
    requests: int
    """Of every phase."""
    seed: int
    packages: Path | None
    make_service: MakeService
    make_engine: Callable[[EngineSpec], ServedVllm] = ServedVllm


def run_load(request: LoadRequest, progress: Progress) -> None:
    """All levels on every arm's engine. Raises `RunError`; the folder then holds what was recorded until there."""
    try:
        folder = ArchiveWriter.create(request.out, plan_json(request.plan))
    except (ArchiveError, OSError) as error:
        raise RunError(str(error)) from None
    try:
        with ExitStack() as closing:
            data = Path(closing.enter_context(TemporaryDirectory(prefix="samestate-")))
            services = Services(request.make_service, data, folder.log_path)
            closing.callback(services.close)
            for arm in request.plan.arms:
                services.plan(arm, request.packages, request.plan.engine.external_cache_bytes)
                _run_arm(request, arm, folder, services, progress)
    except EngineError as error:
        raise RunError(str(error), error.log_tail) from None
    finally:
        folder.abandon()


def _run_arm(request: LoadRequest, arm: ArmPlan, folder: ArchiveWriter, services: Services, progress: Progress) -> None:
    plan = request.plan
    engine = request.make_engine(_spec(request, arm, folder, services))
    client = StreamWriter(folder.arm_dir(arm.name) / "client.jsonl", arm.name, "client")
    try:
        progress.stage(f"{arm.name}: start")
        block_size = plan.engine.settings.get("block_size")
        services.begin(arm, block_size if isinstance(block_size, int) else None, client)
        c = engine.start().checkpoint_interval
        asked = LoadPlan(
            levels=request.levels,
            lengths=_lengths(plan, c),
            requests=request.requests,
            attempts=OFF if arm.name == CONTROL else ON,
            output_tokens=plan.output_tokens,
            template=plan.template,
            seed=request.seed,
            run="",
        )
        progress.stage(f"{arm.name}: load")
        driver = LoadDriver(lambda: connected(engine.url), plan.output_tokens, plan.seed)
        told = partial(progress.operation, arm.name)
        for phase in phases(engine, driver, asked, told):
            record(client, phase)
            services.require_alive(arm)
        progress.stage(f"{arm.name}: stop")
        alive = services.alive(arm)
        engine.close()
        services.end(arm, alive=alive, client=client)
    finally:
        with suppress(EngineError):
            engine.close()
        client.close()


def connected(url: str) -> StreamingClient:
    """One client of many: it begins its next request at once. Raises `EngineError`."""
    client = StreamingClient(RunningServer(url), settle=0.0)
    client.connect()
    return client


def _lengths(plan: Plan, c: int) -> list[int]:
    try:
        return [evaluate(length, c) for length in plan.lengths]
    except PlanError as error:
        raise RunError(str(error)) from None


def _spec(request: LoadRequest, arm: ArmPlan, folder: ArchiveWriter, services: Services) -> EngineSpec:
    plan, on = request.plan, arm.connector != "none"
    return EngineSpec(
        arm=arm.name,
        model=request.model,
        settings=plan.engine.settings | arm.settings,
        serve_args=plan.engine.serve_args,
        connector=arm.connector,
        external_cache_bytes=plan.engine.external_cache_bytes,
        audit_level="metadata" if on else "off",
        save_delay_ms=0,
        fault=None,
        stream_dir=folder.arm_dir(arm.name),
        log_path=folder.log_path(arm.name),
        core=plan.engine.core,
        connector_options=services.connector_options(arm),
        packages=request.packages if on else None,
        service=services.address(arm),
        repair=arm.repair,
    )
