"""Faults that move the wrong bytes: in the orders that a worker gets, or in the copies that it makes.

Orders are changed before the audit sees them, as a connector that is wrong about blocks would; copies
are changed behind it, as a copy engine that is wrong about bytes would. Where nothing else is said a fault
acts on the first recurrent transfer group, so that a report can be held against the group meant.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, GPULoadStoreSpec

from samestate.cache.host_worker import HostWorker, PageCopies
from samestate.instruments.faults import Audited, FaultError, LiveFault, Undo
from samestate.instruments.offloading_transfers import WatchedWorker


def recurrent_groups(on: Audited) -> list[int]:
    """Transfer groups that hold recurrent state. Raises `FaultError` when there is none."""
    groups = on.config.kv_cache_groups
    found = [
        transfer
        for transfer, engine in enumerate(get_offloading_group_ids(on.config))
        if isinstance(groups[engine].kv_cache_spec, MambaSpec)
    ]
    if not found:
        raise FaultError("a page fault needs a model with recurrent state")
    return found


# --- orders ---------------------------------------------------------------------------------------


class GroupOrder(NamedTuple):
    """What a job moves for one transfer group."""

    first: int
    """Index of the first block in the request's table."""
    blocks: list[int]
    rows: list[int]
    """Rows of the tier."""


def orders(device: GPULoadStoreSpec, tier: BlockIDsLoadStoreSpec, blocks_per_row: int) -> list[GroupOrder]:
    """A job by transfer group."""
    blocks, rows = iter(device.block_ids.tolist()), iter(tier.block_ids.tolist())
    return [
        GroupOrder(
            first,
            [next(blocks) for _ in range(size)],
            [next(rows) for _ in range(cdiv(size + first % blocks_per_row, blocks_per_row) if size else 0)],
        )
        for size, first in zip(device.group_sizes, device.block_indices, strict=True)
    ]


def specs(
    given: list[GroupOrder], tier_type: type[BlockIDsLoadStoreSpec]
) -> tuple[GPULoadStoreSpec, BlockIDsLoadStoreSpec]:
    """The inverse of `orders`."""
    device = GPULoadStoreSpec(
        [block for order in given for block in order.blocks],
        group_sizes=[len(order.blocks) for order in given],
        block_indices=[order.first for order in given],
    )
    return device, tier_type([row for order in given for row in order.rows])


class OrderFault(LiveFault):
    """Changes what the first recurrent group's part of a job says."""

    roles = (KVConnectorRole.WORKER,)

    def groups(self, states: list[int]) -> list[int]:
        """Which of the recurrent transfer groups it acts on."""
        return states[:1]

    def on_load(self, order: GroupOrder) -> GroupOrder:
        """The order to follow instead."""
        return order

    def on_save(self, order: GroupOrder) -> GroupOrder:
        """The order to follow instead."""
        return order

    @override
    def act(self, on: Audited, undo: Undo) -> None:
        groups = self.groups(recurrent_groups(on))
        blocks_per_row = on.inner.connector_worker.spec.blocks_per_chunk
        worker = on.inner.connector_worker.worker
        submit_store, submit_load = worker.submit_store, worker.submit_load

        def store(job_id: int, src_spec: GPULoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec) -> bool:
            given = orders(src_spec, dst_spec, blocks_per_row)
            for group in groups:
                given[group] = self.on_save(given[group])
            return submit_store(job_id, *specs(given, type(dst_spec)))

        def load(job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: GPULoadStoreSpec, **options: object) -> bool:
            given = orders(dst_spec, src_spec, blocks_per_row)
            for group in groups:
                given[group] = self.on_load(given[group])
            device, tier = specs(given, type(src_spec))
            return submit_load(job_id, tier, device, **options)

        undo.patch(worker, "submit_store", store)
        undo.patch(worker, "submit_load", load)


class StalePage(OrderFault):
    """A load brings the state that was saved last for other tokens, as an index with a recycled slot would."""

    def __init__(self) -> None:
        self._saved: list[int] = []

    @override
    def on_save(self, order: GroupOrder) -> GroupOrder:
        self._saved += order.rows
        return order

    @override
    def on_load(self, order: GroupOrder) -> GroupOrder:
        others = [row for row in self._saved if row not in order.rows]
        if order.rows and not others:
            raise FaultError(
                "fault 'stale-page': no other state was saved since it was armed; run another prompt first"
            )
        return order._replace(rows=others[-1:] * len(order.rows))


class MissingGroup(OrderFault):
    """A load leaves the group out."""

    @override
    def on_load(self, order: GroupOrder) -> GroupOrder:
        return order._replace(blocks=[], rows=[])


class AttentionOnly(MissingGroup):
    """A load leaves every recurrent group out, as a connector that knows attention alone."""

    @override
    def groups(self, states: list[int]) -> list[int]:
        return states


class PastSharedPrefix(OrderFault):
    """A load takes the last state of a longer prompt, past what the two share."""

    def __init__(self) -> None:
        self._saved: list[GroupOrder] = []

    @override
    def on_save(self, order: GroupOrder) -> GroupOrder:
        if order.rows:
            self._saved.append(order)
        return order

    @override
    def on_load(self, order: GroupOrder) -> GroupOrder:
        past = [other.rows[-1] for other in self._saved if other.first > order.first]
        return order._replace(rows=(past or order.rows)[-1:] * len(order.rows))


# --- copies ---------------------------------------------------------------------------------------


def host_worker(on: Audited) -> tuple[WatchedWorker, HostWorker]:
    """The watched worker and the host worker behind it. Raises `FaultError` for any other."""
    watched = on.inner.connector_worker.worker
    if not isinstance(watched, WatchedWorker) or not isinstance(watched.worker, HostWorker):
        raise FaultError("a fault of copies needs the host worker: use an engine on CPU, with the audit on")
    return watched, watched.worker


class CopyFault(LiveFault):
    """Changes the copies that are made."""

    roles = (KVConnectorRole.WORKER,)

    @override
    def act(self, on: Audited, undo: Undo) -> None:
        _, worker = host_worker(on)
        states, num_blocks = recurrent_groups(on), on.config.num_blocks

        def route(copies: list[PageCopies], load: bool) -> list[PageCopies]:
            return self.route(copies, states, num_blocks) if load else self.saved(copies, states)

        undo.patch(worker, "route", route)

    def route(self, copies: list[PageCopies], states: list[int], num_blocks: int) -> list[PageCopies]:
        """The copies to make for a load; `states` are the recurrent transfer groups."""
        return copies

    def saved(self, copies: list[PageCopies], states: list[int]) -> list[PageCopies]:
        """The copies to make for a save."""
        return copies


class ZeroPage(CopyFault):
    """The group's state arrives as zeros, which is a legal fresh state."""

    @override
    def route(self, copies: list[PageCopies], states: list[int], num_blocks: int) -> list[PageCopies]:
        self._zeros = np.zeros(max(one.page_bytes for one in copies), np.uint8)
        address = self._zeros.ctypes.data
        return [one._replace(tier=np.full_like(one.tier, address)) if one.group == states[0] else one for one in copies]


class SwappedLayers(CopyFault):
    """Two layers' states are exchanged; they are of the same shape."""

    @override
    def route(self, copies: list[PageCopies], states: list[int], num_blocks: int) -> list[PageCopies]:
        of_states = [index for index, one in enumerate(copies) if one.group in states]
        if len(of_states) < 2:
            raise FaultError("fault 'swapped-layers': needs two recurrent layers in a load")
        a, b = of_states[:2]
        swapped = list(copies)
        swapped[a] = copies[a]._replace(tier=copies[b].tier)
        swapped[b] = copies[b]._replace(tier=copies[a].tier)
        return swapped


class ShortCopy(CopyFault):
    """Half of the first layer's page is copied."""

    @override
    def route(self, copies: list[PageCopies], states: list[int], num_blocks: int) -> list[PageCopies]:
        return [
            one._replace(page_bytes=one.page_bytes // 2) if (one.group, one.ref) == (states[0], 0) else one
            for one in copies
        ]


class NeighbourWrite(CopyFault):
    """The load's highest block is also written to the block after it (before the lowest, at the cache's end)."""

    @override
    def route(self, copies: list[PageCopies], states: list[int], num_blocks: int) -> list[PageCopies]:
        last = max(copies, key=lambda one: int(one.blocks.max()))
        at, step = int(last.blocks.argmax()), 1
        if int(last.blocks[at]) + 1 == num_blocks:
            last = min(copies, key=lambda one: int(one.blocks.min()))
            at, step = int(last.blocks.argmin()), -1
        beside = np.array([int(last.device[at]) + step * last.block_stride], np.uint64)
        return [*copies, last._replace(device=beside, tier=last.tier[at : at + 1])]
