"""What the budget recorder's two sides share: the environment that asks for it, and the rings of this process."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import util
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from samestate.evidence.marker_records import TRACE_ARM, TRACE_CAPACITY, TRACE_FOLDER, RecorderStarted
from samestate.evidence.record_base import PatchedFunction
from samestate.evidence.records import InterventionApplied
from samestate.instruments import interventions, recorder
from samestate.instruments.budget_ring import BudgetRing
from samestate.instruments.budget_sources import BudgetRecorderError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.samestate")
"""Below vLLM's own, so that what it says is seen where vLLM's log is."""

CAPACITY = 4096
"""Records of the ring where the environment names no number; a step of one request writes two or three."""

REMEMBERED = 65_536
"""Requests that are remembered, far more than run at once: what is asked of one comes within a few steps of its end."""

_rings: dict[str, BudgetRing] = {}
"""By process name of the stream."""
_beside_scheduler: list[PatchedFunction] = []


class Trace(NamedTuple):
    """What the environment asks for."""

    folder: Path
    arm: str
    capacity: int


class Remembered:
    """Names of requests; the oldest are forgotten beyond `REMEMBERED`."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, name: str) -> bool:
        """Remember a name; False where it was remembered already."""
        if name in self._names:
            return False
        self._names[name] = None
        if len(self._names) > REMEMBERED:
            del self._names[next(iter(self._names))]
        return True


def asked(environ: Mapping[str, str] = os.environ) -> Trace | None:
    """The trace that is asked for; None for none. Raises `BudgetRecorderError` for a request that is not whole."""
    folder = environ.get(TRACE_FOLDER, "")
    if not folder:
        return None
    arm = environ.get(TRACE_ARM, "")
    if not arm:
        raise BudgetRecorderError(f"{TRACE_ARM}: is not set; {TRACE_FOLDER} needs the name of the arm beside it")
    capacity = environ.get(TRACE_CAPACITY) or str(CAPACITY)
    if not capacity.isdecimal() or int(capacity) < 1:
        raise BudgetRecorderError(f"{TRACE_CAPACITY}: {capacity!r} is no number of records; use 1 or more")
    return Trace(Path(folder), arm, int(capacity))


def beside_scheduler(functions: list[PatchedFunction]) -> None:
    """What the recorder wraps beside the scheduler in its process, for the scheduler's stream to name."""
    _beside_scheduler.extend(functions)


def open_ring(config: VllmConfig, functions: list[PatchedFunction], rank: int | None) -> BudgetRing | None:
    """The ring of rank `rank` of this process, or of its scheduler (None).

    None where no trace is asked for, and where none can be made: requests are being served by then, so
    that is logged, and the stream is missing from the arm.
    """
    process = "budget-scheduler" if rank is None else f"budget-{rank}"
    try:
        trace = asked()
        if trace is None:
            return None
        ring = BudgetRing(recorder.stream(trace.folder, trace.arm, process), rank, trace.capacity)
        ring.put(_started(config, functions, rank, trace.capacity))
    except Exception as error:
        logger.error("samestate: no %s.jsonl is written: %s", process, " ".join(f"{error}".split()))
        return None
    ring.drain()
    if rank is not None:
        interventions.watch(lambda record: _take(ring, record))
    _rings[process] = ring
    # vLLM's processes end as multiprocessing's children do, which run no atexit functions; a main process runs both.
    util.Finalize(None, ring.stop, exitpriority=100)
    return ring


def _take(ring: BudgetRing, record: InterventionApplied) -> None:
    """At once: a step may need all of the ring."""
    ring.put(record)
    ring.drain()


def _started(config: VllmConfig, functions: list[PatchedFunction], rank: int | None, capacity: int) -> RecorderStarted:
    reasoning = config.reasoning_config
    return RecorderStarted(
        role="scheduler" if rank is None else "rank",
        rank=rank,
        ranks=config.parallel_config.tensor_parallel_size,
        runner="v2" if config.use_v2_model_runner else "v1",
        capacity=capacity,
        speculative_tokens=config.num_speculative_tokens,
        asynchronous=bool(config.scheduler_config.async_scheduling),
        start_ids=list((reasoning and reasoning.reasoning_start_token_ids) or []),
        end_ids=list((reasoning and reasoning.reasoning_end_token_ids) or []),
        functions=functions if rank is not None else [*functions, *_beside_scheduler],
    )


@contextmanager
def unseen(ring: BudgetRing) -> Iterator[None]:
    """Whatever observation raises is counted as a lost record and never reaches serving."""
    try:
        yield
    except Exception as error:
        ring.lose(error)


def stop() -> None:
    """End every trace of this process in order."""
    for ring in list(_rings.values()):
        ring.stop()
    _rings.clear()


os.register_at_fork(after_in_child=_rings.clear)
