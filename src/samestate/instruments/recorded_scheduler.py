"""vLLM's schedulers, recorded where no one else reaches them: in an engine core's own process.

Named to vLLM through its ``scheduler_cls``. The engine that starts the core says by environment
variables where to write: it shares no memory with the core, and its configuration is left alone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm.config import SchedulerConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from samestate.instruments import recorder
from samestate.instruments.schedule import record_schedule

STREAM_DIR = "SAMESTATE_STREAM_DIR"
ARM = "SAMESTATE_ARM"


class _Recorded:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        stream = recorder.stream(Path(os.environ[STREAM_DIR]), os.environ[ARM], "scheduler")
        record_schedule(self, stream)

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        recorder.flush()  # a core that dies leaves what it did
        return super().update_from_output(*args, **kwargs)  # type: ignore[misc]

    def shutdown(self) -> None:
        super().shutdown()  # type: ignore[misc]
        recorder.close()


class RecordedScheduler(_Recorded, Scheduler):
    """vLLM's scheduler, its batches on record."""


class RecordedAsyncScheduler(_Recorded, AsyncScheduler):
    """vLLM's asynchronous scheduler, its batches on record."""


def record_in_core(config: SchedulerConfig, stream_dir: Path, arm: str) -> None:
    """Let the engine core that will be started with `config` record its schedule into `stream_dir`.

    Raises:
        ValueError: vLLM would take a scheduler that has no recorded form.

    """
    recorded = {Scheduler: RecordedScheduler, AsyncScheduler: RecordedAsyncScheduler}
    chosen = config.get_scheduler_cls()
    if chosen not in recorded:
        raise ValueError(f"the scheduler {chosen.__name__} cannot be recorded; leave out --scheduler-cls")
    config.scheduler_cls = f"{__name__}.{recorded[chosen].__name__}"
    os.environ.update({STREAM_DIR: str(stream_dir), ARM: arm})
