"""Which controls are on in this engine, what each is made of, and what its autotuned kernels ran with."""

from __future__ import annotations

import inspect
import os
from typing import Literal

import msgspec
from vllm.v1.executor.abstract import Executor

from samestate.evidence.controls import (
    CAPTURE_LIMIT,
    CAPTURE_LIMIT_VARIABLE,
    CAPTURE_VARIABLE,
    MATCHED_SCHEDULE,
    REPAIR,
    TUNER_PROFILE,
    sources_sha256,
)
from samestate.evidence.records import (
    CallCaptured,
    CallsCounted,
    Control,
    EnvironmentObserved,
    KernelsSelected,
    StoragesDigested,
)
from samestate.instruments import repairs
from samestate.instruments.call_capture import capture_in_worker, captured_in_worker
from samestate.instruments.environment import observed_in_worker
from samestate.instruments.storages import digested_in_worker
from samestate.instruments.tuner_profile import selected_in_worker, watching


def controls_in_force(repair: str | None, schedule_sha256: str | None) -> list[Control]:
    """The full set, those that are off too. `schedule_sha256`: of the matched schedule, where it was put on."""
    watch = watching()
    profile = watch.sha256 if watch else None
    mended = sources_sha256({repairs.__name__: inspect.getsource(repairs)}) if repair else None
    made_of = {TUNER_PROFILE: profile, MATCHED_SCHEDULE: schedule_sha256, REPAIR: mended}
    return [Control(name=name, on=sha256 is not None, sha256=sha256) for name, sha256 in made_of.items()]


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


def begin_capture(executor: Executor) -> None:
    """Watch the modules that the environment names, on every rank. Raises ValueError for one that is not there."""
    names = [name for name in os.environ.get(CAPTURE_VARIABLE, "").split(",") if name]
    if names:
        limit = os.environ.get(CAPTURE_LIMIT_VARIABLE, str(CAPTURE_LIMIT))
        if not limit.isdecimal():
            raise ValueError(f"{CAPTURE_LIMIT_VARIABLE}: must be a count, not {limit!r}")
        executor.collective_rpc(capture_in_worker, args=(names, int(limit)))


def captured(executor: Executor) -> list[CallCaptured | CallsCounted]:
    """Every captured call of every rank; empty where nothing was watched."""
    if not os.environ.get(CAPTURE_VARIABLE):
        return []
    found: list[CallCaptured | CallsCounted] = []
    for answer in executor.collective_rpc(captured_in_worker):
        calls, counted = msgspec.json.decode(answer, type=tuple[list[CallCaptured], list[CallsCounted]])
        found += [*calls, *counted]
    return found
