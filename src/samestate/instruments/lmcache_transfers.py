"""Transfers of LMCache's `LMCacheMPConnector`, as its worker side hands them to LMCache's server.

LMCache is not imported here: the adapter works on the connector that it is given, of release 0.5.5 or 0.5.6.

- A job is one store or retrieve operation. The server answers it through a future (``DeviceMessagingFuture``), which
  the worker polls once a step, before it gives a request's blocks back; before it preempts, 0.5.6 waits for the
  open stores, and goes on with a warning after ``lmcache.mp.mq_timeout``; 0.5.5 does not wait.
- B is the operation's own end.
- The server copies a retrieve wholly or answers False (``retrieve`` in its lmcache_driven_transfer.py): a load's bytes
  are those of its parts. Of a store it may leave out what it has already, and does not say so: a save's bytes are None.
- Stored bytes lie in the server's memory and are not read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from typing_extensions import override

from samestate.evidence.records import TransferGroup
from samestate.evidence.stream import StreamWriter
from samestate.instruments.jobs import JobAdapter, part_of
from samestate.instruments.layout import engine_groups
from samestate.instruments.lmcache_pages import Operation, PagePlan
from samestate.instruments.pages import Layout
from samestate.instruments.transfers import Guard

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
    from vllm.v1.kv_cache_interface import KVCacheConfig

CONNECTOR = ("lmcache.integration.vllm.lmcache_mp_connector", "LMCacheMPConnector")
"""Module and name of LMCache's class. vLLM's tree has another one of this name, without hybrid groups."""
OBJECT_GROUPS = "samestate.separate_object_groups"
"""Key in the connector's extra config: whether the server was started with ``--separate-object-groups``.
The server cannot be asked. Which pages it moves depends on it; left out, those are reported that move either way."""


def is_lmcache(connector: object) -> bool:
    """Whether it is LMCache's own multiprocess connector, or a subclass."""
    return any((cls.__module__, cls.__name__) == CONNECTOR for cls in type(connector).__mro__)


class Job(NamedTuple):
    """One open transfer."""

    job: int
    load: bool
    bytes: int
    future: Any
    """None: it was dropped before it reached the server."""
    query: Callable[[], bool]
    """The future's own poll, unwatched."""
    due: float
    """When it may be reported at the earliest, monotonic seconds."""


class LMCacheAdapter(JobAdapter):
    """Stands before the worker's two submissions and on the futures that they leave."""

    def __init__(
        self,
        inner: KVConnectorBase_V1,
        config: KVCacheConfig,
        rank: int,
        stream: StreamWriter,
        guard: Guard,
        save_delay_ms: int,
    ) -> None:
        super().__init__(config, rank, stream, guard, save_delay_ms)
        self._worker = inner.worker_adapter
        self._separate = inner._vllm_config.kv_transfer_config.get_from_extra_config(OBJECT_GROUPS, None)
        self._open: dict[int, Job] = {}
        self._next = 0

    @override
    def watch(self) -> None:
        worker = self._worker
        worker.submit_store_request = partial(self._submit, worker.submit_store_request, load=False)
        worker.submit_retrieve_request = partial(self._submit, worker.submit_retrieve_request, load=True)
        worker.get_finished = partial(self._polled, worker.get_finished)
        worker.get_finished_with_lazy_offload = partial(self._polled, worker.get_finished_with_lazy_offload)

    @override
    def watch_pages(self, layout: Layout, poison: bool) -> None:
        self.audit_pages(layout, [group.engine_group for group in self._groups], None, poison)

    @override
    def groups(self) -> list[TransferGroup]:
        return self._groups

    @cached_property
    def _groups(self) -> list[TransferGroup]:
        """One for each engine group that the worker registered."""
        moved = sorted({info.engine_group_id for info in self._worker.engine_group_infos})
        by_engine_group = engine_groups(self._config)
        return [
            TransferGroup(
                group=index,
                engine_group=engine_group,
                entries=len(by_engine_group[engine_group].layers),
                bytes_per_block=by_engine_group[engine_group].effective_bytes
                * len(by_engine_group[engine_group].layers),
                tokens_per_block=by_engine_group[engine_group].tokens_per_block,
            )
            for index, engine_group in enumerate(moved)
        ]

    @cached_property
    def _plan(self) -> PagePlan:
        return PagePlan.of(self._worker, self._separate)

    @override
    def step(self, metadata: KVConnectorMetadata) -> None:
        """The orders are read where the worker hands them to the server."""

    # --- submission -----------------------------------------------------------------------------

    def _submit(
        self, submit: Callable[..., None], request_id: str, op: Operation, *args: Any, load: bool, **kw: Any
    ) -> None:
        """Stands before a submission. What the worker drops (server down, not its turn to write) is no job."""
        worker = self._worker
        if not self.watching or not worker.is_healthy or not (load or worker.is_kv_writer):
            submit(request_id, op, *args, **kw)
            return
        job, self._next = self._next, self._next + 1
        begun: list[int] = []
        self._guard(lambda: begun.append(self._submitted(job, request_id, op, load)))
        before = self._future(request_id, load)
        try:
            submit(request_id, op, *args, **kw)
        finally:
            after = self._future(request_id, load)
            if begun:
                self._guard(lambda: self._follow(job, load, begun[0], after if after is not before else None))

    def _future(self, request: str, load: bool) -> Any:
        """What the worker keeps for the request, or None."""
        if load:
            return self._worker.retrieve_futures.get(request, (None,))[0]
        return self._worker.store_futures.get(request)

    def _submitted(self, job: int, request: str, op: Operation, load: bool) -> int:
        """Record it; bytes of its parts."""
        runs = self._plan.loaded(op) if load else self._plan.saved(op)
        parts = [part_of(self._groups[run.group], run.first, len(run.blocks)) for run in runs]
        if not load:
            self.save_began(job, request, parts, runs, None)
        else:
            self.load_began(job, request, op.end, parts, None, runs)
            if self._pages and torch.accelerator.is_available():
                # The event that the server waits for was recorded before the poison.
                torch.accelerator.synchronize()
        return sum(part.bytes for part in parts)

    # --- completion -----------------------------------------------------------------------------

    def _follow(self, job: int, load: bool, size: int, future: Any) -> None:
        """Watch the future that a submission left; there is none when the worker dropped it after all."""
        delay = 0 if load else self.save_delay_ms / 1000
        query = future.query if future is not None else lambda: True
        self._open[job] = Job(job, load, size, future, query, time.monotonic() + delay)
        if future is None:
            self._completed(job, ok=False)
            return
        future.query = partial(self._query, self._open[job])
        future.wait = partial(self._wait, self._open[job], future.wait)

    def _query(self, job: Job) -> bool:
        """The future's poll: done when the server is, and not before a delay is over."""
        try:
            done = job.query()
        except Exception:
            self._guard(lambda: self._completed(job.job, ok=False))
            raise
        if not done or time.monotonic() < job.due:
            return False
        self._guard(lambda: self._completed(job.job, ok=bool(job.future.result_)))
        return True

    def _wait(self, job: Job, wait: Callable[[float | None], bool], timeout: float | None = None) -> bool:
        """The future's wait, delay included. The blocks may be reused as soon as it returns."""
        was_open = job.job in self._open
        started = time.monotonic()
        done = wait(timeout)
        ended = time.monotonic()
        if done and ended < job.due:
            left = job.due - ended
            allowed = left if timeout is None else min(left, max(0.0, started + timeout - ended))
            time.sleep(allowed)
            done = time.monotonic() >= job.due
        if was_open and not job.load and self.watching:
            waited_ns = int((time.monotonic() - started) * 1e9)
            self._guard(lambda: self._waited(job.job, waited_ns, timed_out=not done))
        return done

    def _polled(self, poll: Callable[..., Any], *args: Any) -> Any:
        """The worker's poll of its futures, and of those that it no longer keeps.

        It keeps one store a request: a second one takes the place of the first, done or not. When the
        server is down it lets go of all.
        """
        healthy = self._worker.is_healthy
        answer = poll(*args)
        for job in list(self._open.values()):
            self._guard(partial(self._poll_one, job, healthy))
        return answer

    def _poll_one(self, job: Job, healthy: bool) -> None:
        try:
            done = self._query(job)
        except Exception:
            return  # recorded as failed; the worker meets the same error where it looks itself
        if not done and not healthy:
            self._completed(job.job, ok=False)

    def _completed(self, job: int, *, ok: bool) -> None:
        done = self._open.pop(job, None)
        if done is None:
            return
        self.ended(job, load=done.load, ok=ok, moved=done.bytes if ok and done.load else None)

    def _waited(self, job: int, waited_ns: int, *, timed_out: bool) -> None:
        if job in self._open:
            self.read_pages(job, load=False)
        self.waited_for([job], waited_ns, timed_out=timed_out)
