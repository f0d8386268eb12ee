"""Which controls are on in this engine, what each is made of, and what its autotuned kernels ran with."""

from __future__ import annotations

import inspect
import os
from typing import Literal

import msgspec
from vllm.config import VllmConfig
from vllm.v1.executor.abstract import Executor

from samestate.evidence.controls import (
    CAPTURE_LIMIT,
    CAPTURE_LIMIT_VARIABLE,
    CAPTURE_VARIABLE,
    ENGINE_REPAIRS,
    EVERY_MODULE,
    MATCHED_SCHEDULE,
    REPAIR,
    TRACE_LIMIT,
    TRACE_STEPS,
    TUNER_PROFILE,
    sources_sha256,
)
from samestate.evidence.marker_records import REPAIRS
from samestate.evidence.records import (
    CallCaptured,
    CallsCounted,
    Control,
    EnvironmentObserved,
    InterventionApplied,
    KernelsSelected,
    ModulesListed,
    StepTraced,
    StoragesDigested,
)
from samestate.instruments import repairs, topk_repair
from samestate.instruments.call_capture import capture_in_worker, captured_in_worker
from samestate.instruments.environment import observed_in_worker
from samestate.instruments.module_trace import attend_in_worker, trace_in_worker, traced_in_worker
from samestate.instruments.storages import digested_in_worker
from samestate.instruments.tuner_profile import selected_in_worker, watching


def controls_in_force(repair: str | None, schedule_sha256: str | None) -> list[Control]:
    """The full set, those that are off too. `schedule_sha256`: of the matched schedule, where it was put on."""
    watch = watching()
    profile = watch.sha256 if watch else None
    asked = [*([repair] if repair else []), *engine_repairs()]
    modules = {topk_repair if name in ENGINE_REPAIRS else repairs for name in asked}
    mended = sources_sha256({one.__name__: inspect.getsource(one) for one in modules}) if modules else None
    made_of = {TUNER_PROFILE: profile, MATCHED_SCHEDULE: schedule_sha256, REPAIR: mended}
    return [Control(name=name, on=sha256 is not None, sha256=sha256) for name, sha256 in made_of.items()]


def engine_repairs() -> list[str]:
    """Repairs of the engine itself that its processes were told to put on, whoever told them."""
    return [name for name in os.environ.get(REPAIRS, "").split(",") if name in ENGINE_REPAIRS]


def repairs_in_force(executor: Executor, repair: str | None) -> list[InterventionApplied]:
    """Every engine repair as each rank has it. Raises ValueError where one that is asked for is not in force."""
    asked = engine_repairs()
    if repair in ENGINE_REPAIRS and repair not in asked:
        raise ValueError(f"repair {repair!r}: the engine's processes were not told of it ({REPAIRS})")
    if not asked:
        return []
    answers = executor.collective_rpc(topk_repair.in_force_in_worker)
    return [msgspec.json.decode(answer, type=InterventionApplied) for answer in answers]


def kernels_selected(executor: Executor) -> list[KernelsSelected]:
    """What every rank's autotuned kernels ran with; empty where no rank watches them."""
    answers = executor.collective_rpc(selected_in_worker)
    return [msgspec.json.decode(answer, type=KernelsSelected) for answer in answers if answer is not None]


def environments(executor: Executor) -> list[EnvironmentObserved]:
    """What every rank's process stands on."""
    return [
        msgspec.json.decode(answer, type=EnvironmentObserved) for answer in executor.collective_rpc(observed_in_worker)
    ]


def storages(executor: Executor, moment: Literal["start", "end"]) -> list[StoragesDigested]:
    """Every rank's named parameters and buffers, digested."""
    answers = executor.collective_rpc(digested_in_worker, args=(moment,))
    return [msgspec.json.decode(answer, type=StoragesDigested) for answer in answers]


def begin_capture(executor: Executor, config: VllmConfig) -> None:
    """Watch the modules that the environment names, on every rank. Raises ValueError for one that is not there."""
    names, limit = _captured_names(), os.environ.get(CAPTURE_LIMIT_VARIABLE)
    if names and limit is not None and not limit.isdecimal():
        raise ValueError(f"{CAPTURE_LIMIT_VARIABLE}: must be a count, not {limit!r}")
    if tracing():
        if not config.model_config.enforce_eager:
            raise ValueError(f"{CAPTURE_VARIABLE}: outputs of a compiled model are not seen; add --enforce-eager")
        executor.collective_rpc(trace_in_worker, args=(TRACE_STEPS, int(limit or TRACE_LIMIT)))
    if named := [name for name in names if name != EVERY_MODULE]:
        executor.collective_rpc(capture_in_worker, args=(named, int(limit or CAPTURE_LIMIT)))


def tracing() -> bool:
    """Whether all modules of the decoder layers are watched."""
    return EVERY_MODULE in _captured_names()


def attend(executor: Executor, op: str | None) -> None:
    """Of the modules' trace: what comes is operation `op`, one request that runs alone; None: nothing of the kind."""
    executor.collective_rpc(attend_in_worker, args=(op,))


def captured(executor: Executor) -> list[CallCaptured | CallsCounted | ModulesListed | StepTraced]:
    """Every captured call and every traced step of every rank; empty where nothing was watched."""
    found: list[CallCaptured | CallsCounted | ModulesListed | StepTraced] = []
    if not _captured_names():
        return found
    for answer in executor.collective_rpc(captured_in_worker):
        calls, counted = msgspec.json.decode(answer, type=tuple[list[CallCaptured], list[CallsCounted]])
        found += [*calls, *counted]
    for answer in executor.collective_rpc(traced_in_worker):
        found += msgspec.json.decode(answer, type=list[ModulesListed | StepTraced])
    return found


def _captured_names() -> list[str]:
    return [name for name in os.environ.get(CAPTURE_VARIABLE, "").split(",") if name]
