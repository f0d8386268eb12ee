"""Faults of loads: bytes that never arrive, arrive too late or from another page, or are lost afterwards."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from math import prod

import numpy as np
from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata, TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.utils.torch_utils import get_dtype_size
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.kv_offload.base import TransferResult

from samestate.cache.host_worker import PageCopies, when_copied
from samestate.instruments.faults import Audited, FaultError, LiveFault, Undo
from samestate.instruments.offloading_transfers import WatchedWorker
from samestate.instruments.page_faults import CopyFault, host_worker, orders, recurrent_groups, specs

Origins = dict[tuple[int, int], np.ndarray]
"""By group and position of the entry: where in the tier its last save went."""


def noted(watched: WatchedWorker, undo: Undo, name: str) -> set[int]:
    """The jobs that `watched` is given from now on by its method `name`."""
    submit = getattr(watched, name)
    jobs: set[int] = set()

    def noting(job_id: int, *sides: object, **options: object) -> bool:
        jobs.add(job_id)
        return bool(submit(job_id, *sides, **options))

    undo.patch(watched, name, noting)
    return jobs


# --- other bytes ----------------------------------------------------------------------------------


class MissingEntry(CopyFault):
    """A load leaves the convolution's state of the first layer out, beside the recurrence's."""

    @override
    def act(self, on: Audited, undo: Undo) -> None:
        first = on.config.kv_cache_groups[get_offloading_group_ids(on.config)[recurrent_groups(on)[0]]].kv_cache_spec
        assert isinstance(first, MambaSpec)
        if len(first.shapes) < 2:
            raise FaultError("fault 'missing-entry': needs layers with a convolution's state beside the recurrent one")
        self._convolution = prod(first.shapes[0]) * get_dtype_size(first.dtypes[0])
        super().act(on, undo)

    @override
    def route(self, copies: list[PageCopies], states: list[int], num_blocks: int) -> list[PageCopies]:
        return [
            _from(one, self._convolution, one.page_bytes - self._convolution)
            if (one.group, one.ref) == (states[0], 0)
            else one
            for one in copies
        ]


def _from(one: PageCopies, begin: int, size: int) -> PageCopies:
    """A part of the pages, on both sides."""
    skipped = np.uint64(begin)
    return one._replace(device=one.device + skipped, tier=one.tier + skipped, page_bytes=size)


class HalvesSwapped(CopyFault):
    """Keys and values of every attention page change places, as where block-first is taken for keys-first."""

    @override
    def route(self, copies: list[PageCopies], states: list[int], num_blocks: int) -> list[PageCopies]:
        return [half for one in copies for half in ([one] if one.group in states else _halves(one))]


def _halves(one: PageCopies) -> Iterable[PageCopies]:
    half = one.page_bytes // 2
    first, second = _from(one, 0, half), _from(one, half, half)
    return first._replace(tier=second.tier), second._replace(tier=first.tier)


class WideColumn(CopyFault):
    """Indexes the state's table by the width of attention pages: the state lands in the block of another column."""

    @override
    def route(self, copies: list[PageCopies], states: list[int], num_blocks: int) -> list[PageCopies]:
        attention = next(one for one in copies if one.group not in states)
        return [_into(one, int(attention.blocks[0])) if one.group == states[0] else one for one in copies]


def _into(one: PageCopies, block: int) -> PageCopies:
    """The same pages, all in this block of the device."""
    steps = block - one.blocks.astype(np.int64)
    return one._replace(device=(one.device.astype(np.int64) + steps * one.block_stride).astype(np.uint64))


class OtherOrigin(CopyFault):
    """Knows where in the tier other prompts' states lie."""

    def __init__(self) -> None:
        self._saved: list[Origins] = []

    @override
    def saved(self, copies: list[PageCopies], states: list[int]) -> list[PageCopies]:
        if origins := {(one.group, one.ref): one.tier for one in copies if one.group == states[0]}:
            self._saved.append(origins)
        return copies

    def others(self, one: PageCopies) -> np.ndarray:
        """As many pages as `one` has, of the last other state of its entry."""
        key = one.group, one.ref
        found = [origins[key] for origins in self._saved if key in origins and not set(origins[key]) & set(one.tier)]
        if not found:
            raise FaultError("no other state was saved since the fault was armed; run another prompt first")
        return np.full_like(one.tier, found[-1][-1])


class ReadDuringEviction(OtherOrigin):
    """The tier gives a slot away while it is read: another prompt's state arrives."""

    @override
    def route(self, copies: list[PageCopies], states: list[int], num_blocks: int) -> list[PageCopies]:
        return [one._replace(tier=self.others(one)) if one.group == states[0] else one for one in copies]


class SecondReload(OtherOrigin):
    """The first load takes the state out of its slot, and another one moves in; the second load finds that."""

    @override
    def route(self, copies: list[PageCopies], states: list[int], num_blocks: int) -> list[PageCopies]:
        moved_in = [one._replace(device=one.tier, tier=self.others(one)) for one in copies if one.group == states[0]]
        return [*copies, *moved_in]


class CrossedRequests(LiveFault):
    """Two requests that load in one step get each other's states."""

    roles = (KVConnectorRole.WORKER,)

    @override
    def act(self, on: Audited, undo: Undo) -> None:
        states, connector = recurrent_groups(on), on.inner.connector_worker
        blocks_per_row, start = connector.spec.blocks_per_chunk, connector.start_kv_transfers

        def crossed(metadata: OffloadingConnectorMetadata) -> None:
            jobs = list(metadata.load_jobs.values())
            if len(jobs) > 1:
                _exchange(jobs[0], jobs[1], states, blocks_per_row)
            start(metadata)

        undo.patch(connector, "start_kv_transfers", crossed)


def _exchange(one: TransferJob, other: TransferJob, states: list[int], blocks_per_row: int) -> None:
    mine, theirs = (orders(job.dst_spec, job.src_spec, blocks_per_row) for job in (one, other))
    for group in states:
        if len(mine[group].rows) != len(theirs[group].rows):
            raise FaultError("fault 'crossed-requests': needs two loads of equally many states")
        rows = mine[group].rows, theirs[group].rows
        mine[group], theirs[group] = mine[group]._replace(rows=rows[1]), theirs[group]._replace(rows=rows[0])
    for job, given in ((one, mine), (other, theirs)):
        job.dst_spec, job.src_spec = specs(given, type(job.src_spec))


# --- no bytes, late bytes, lost bytes -------------------------------------------------------------


class EarlyLoadComplete(LiveFault):
    """A load is reported as done before its bytes have arrived: nobody waited for the copies' stream."""

    roles = (KVConnectorRole.WORKER,)
    COPY_SECONDS = 0.1
    """Copies begin so much later."""

    @override
    def act(self, on: Audited, undo: Undo) -> None:
        watched, worker = host_worker(on)
        under_way: list[Future[TransferResult]] = []
        undo.callback(lambda: [copied.exception() for copied in under_way])
        loads = noted(watched, undo, "submit_load")

        def report(job_id: int, copied: Future[TransferResult]) -> TransferResult | None:
            if job_id not in loads:
                return when_copied(job_id, copied)
            under_way.append(copied)
            return TransferResult(job_id=job_id, success=True)

        def route(copies: list[PageCopies], load: bool) -> list[PageCopies]:
            if load:
                time.sleep(self.COPY_SECONDS)
            return copies

        undo.patch(worker, "report", report)
        undo.patch(worker, "route", route)


class SwallowedFailure(LiveFault):
    """Jobs of one direction fail, and the connector takes them for done."""

    roles = (KVConnectorRole.WORKER,)
    of_loads: bool

    @override
    def act(self, on: Audited, undo: Undo) -> None:
        watched, worker = host_worker(on)
        get_finished = watched.get_finished
        failing = noted(watched, undo, "submit_load" if self.of_loads else "submit_store")

        def report(job_id: int, copied: Future[TransferResult]) -> TransferResult | None:
            result = when_copied(job_id, copied)
            if result is None or job_id not in failing:
                return result
            return TransferResult(job_id=job_id, success=False)

        undo.patch(worker, "route", lambda copies, load: [] if load is self.of_loads else copies)
        undo.patch(worker, "report", report)
        undo.patch(watched, "get_finished", lambda: [replace(result, success=True) for result in get_finished()])


class SwallowedLoadFailure(SwallowedFailure):
    """A load fails, and its tokens are credited all the same."""

    of_loads = True


class FreshState(LiveFault):
    """The states arrive, and are empty again when the step begins: a flag says that there is nothing to go on from."""

    roles = (KVConnectorRole.WORKER,)

    @override
    def act(self, on: Audited, undo: Undo) -> None:
        watched, worker = host_worker(on)
        states, get_finished = recurrent_groups(on), watched.get_finished
        loads = noted(watched, undo, "submit_load")
        filled: deque[list[PageCopies]] = deque()
        """Of every load under way; they end in the order in which they are copied."""

        def route(copies: list[PageCopies], load: bool) -> list[PageCopies]:
            if load:
                filled.append([one for one in copies if one.group in states])
            return copies

        def finished() -> list[TransferResult]:
            results = get_finished()
            for _ in [result for result in results if result.job_id in loads]:
                for one in filled.popleft():
                    for page in one.device:
                        ctypes.memset(int(page), 0, one.page_bytes)
            return results

        undo.patch(worker, "route", route)
        undo.patch(watched, "get_finished", finished)
