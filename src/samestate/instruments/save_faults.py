"""Faults of saves: the wrong block, the wrong key, copies that are not made, not waited for, or made too late."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, PrepareStoreOutput, ReqContext, TransferResult

from samestate.cache.host_worker import PageCopies, when_copied
from samestate.evidence.records import BatchRow, BatchSource
from samestate.instruments.faults import Audited, LiveFault, Undo
from samestate.instruments.load_faults import SwallowedFailure
from samestate.instruments.page_faults import CopyFault, GroupOrder, OrderFault, host_worker, recurrent_groups
from samestate.instruments.pages import NULL_BLOCK
from samestate.instruments.schedule import batch

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
    from vllm.v1.request import Request

Offers = dict[str, list[tuple[int, int, int]]]
"""By request: (vLLM's group, block, boundary) of every state that the scheduler offers to the connector."""


# --- which block, under which key -----------------------------------------------------------------


class NullBlockSaved(OrderFault):
    """A save reads the null block."""

    @override
    def on_save(self, order: GroupOrder) -> GroupOrder:
        return order._replace(blocks=[NULL_BLOCK] * len(order.blocks))


class OfferFault(LiveFault):
    """Changes which states are offered to the connector."""

    roles = (KVConnectorRole.SCHEDULER,)

    @override
    def act(self, on: Audited, undo: Undo) -> None:
        on_new_request, build_connector_meta = on.inner.on_new_request, on.inner.build_connector_meta
        self.prompt_tokens: dict[str, int] = {}

        def remember(request: Request) -> None:
            self.prompt_tokens[request.request_id] = request.num_prompt_tokens
            on_new_request(request)

        def build(output: SchedulerOutput) -> KVConnectorMetadata:
            if state := output.kv_connector_block_state:
                state.boundary_state_offloads = self.offers(output, state)
            return build_connector_meta(output)

        undo.patch(on.inner, "on_new_request", remember)
        undo.patch(on.inner, "build_connector_meta", build)

    @abstractmethod
    def offers(self, output: SchedulerOutput, state: KVConnectorBlockState) -> Offers:
        """What to offer instead of ``state.boundary_state_offloads``."""


class LateOffer(OfferFault):
    """Offers a boundary's state in a later step, and of the block that the request then runs in."""

    def __init__(self) -> None:
        self._waiting: Offers = {}

    @abstractmethod
    def comes(self, row: BatchRow) -> bool:
        """Whether this is the step, of a request whose states wait."""

    @override
    def offers(self, output: SchedulerOutput, state: KVConnectorBlockState) -> Offers:
        made: Offers = {}
        step = batch(output, 0, BatchSource.CONNECTOR)
        for row in step.rows if step else ():
            tables = state.get_block_ids(row.request)
            if row.request in self._waiting and tables is not None and self.comes(row):
                waiting = self._waiting.pop(row.request)
                made[row.request] = [(group, int(tables[group][-1]), end) for group, _, end in waiting]
        self._waiting |= state.boundary_state_offloads
        return made


class ScratchSaved(LateOffer):
    """A mirror of the table is a step behind: saved is the block that the request has moved on to."""

    @override
    def comes(self, row: BatchRow) -> bool:
        return True


class TrimmedKey(LateOffer):
    """Saves the state of prompt and output under the key of the prompt alone."""

    @override
    def comes(self, row: BatchRow) -> bool:
        return row.start >= self.prompt_tokens[row.request]


class WrongGrid(OfferFault):
    """In a batch, every request's states are taken from where those of the first one lie."""

    @override
    def offers(self, output: SchedulerOutput, state: KVConnectorBlockState) -> Offers:
        firsts: dict[tuple[int, int], int] = {}
        return {
            request: [(group, firsts.setdefault((group, end), block), end) for group, block, end in offered]
            for request, offered in state.boundary_state_offloads.items()
        }


# --- copies ---------------------------------------------------------------------------------------


class UnsavedGroup(CopyFault):
    """One recurrent group is left out of every save, and its key is published all the same."""

    @override
    def saved(self, copies: list[PageCopies], states: list[int]) -> list[PageCopies]:
        return [one for one in copies if one.group != states[0]]


class DuplicateKeepsDamage(LiveFault):
    """A key that is there keeps its damaged bytes: the later, right save of it is skipped and reported as done.

    While it is armed nothing is found, so that a prefix is computed again, and its pages are handed over again.
    """

    roles = (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER)

    @override
    def act(self, on: Audited, undo: Undo) -> None:
        if on.role is KVConnectorRole.SCHEDULER:
            self._hand_over_again(on, undo)
        else:
            self._keep_what_is_there(on, undo)

    def _hand_over_again(self, on: Audited, undo: Undo) -> None:
        manager = on.inner.scheduler.manager
        prepare_store = manager.prepare_store

        def prepare(keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
            prepared = prepare_store(keys, req_context)
            if prepared is None:
                return None
            chunks = {key: manager._policy.get(key) for key in keys}
            there = [key for key in keys if chunks[key] is not None]
            spec = manager._get_load_store_spec(there, [chunks[key] for key in there])
            return replace(prepared, keys_to_store=there, store_spec=spec)

        undo.patch(manager, "lookup", lambda key, req_context: LookupResult.MISS)
        undo.patch(manager, "prepare_store", prepare)

    def _keep_what_is_there(self, on: Audited, undo: Undo) -> None:
        _, worker = host_worker(on)
        states, known = recurrent_groups(on), set[int]()

        def route(copies: list[PageCopies], load: bool) -> list[PageCopies]:
            if load:
                return copies
            new = [one for one in copies if not known & {int(page) for page in one.tier}]
            known.update(int(page) for one in copies for page in one.tier)
            return [one._replace(page_bytes=one.page_bytes // 2) if one.group == states[0] else one for one in new]

        undo.patch(worker, "route", route)


class FailedPutVisible(SwallowedFailure):
    """A save fails, and its key is found afterwards."""

    of_loads = False


class LateCopies(LiveFault):
    """Saves are copied long after they were submitted."""

    roles = (KVConnectorRole.WORKER,)
    COPY_SECONDS = 0.1
    """A copy begins this long after its save was submitted."""
    waits: bool
    """Whether the worker waits for a save before its blocks are given away."""

    @override
    def act(self, on: Audited, undo: Undo) -> None:
        watched, worker = host_worker(on)
        submit_store = watched.submit_store
        under_way: dict[int, Future[TransferResult]] = {}
        begins: deque[float] = deque()
        saves: set[int] = set()
        undo.callback(lambda: [copied.exception() for copied in under_way.values()])

        def store(job_id: int, *sides: object) -> bool:
            saves.add(job_id)
            begins.append(time.monotonic() + self.COPY_SECONDS)
            accepted = submit_store(job_id, *sides)
            self.submitted(job_id, watched.due)
            return accepted

        def report(job_id: int, copied: Future[TransferResult]) -> TransferResult | None:
            if job_id not in saves:
                return when_copied(job_id, copied)
            under_way[job_id] = copied
            return self.reported(job_id, copied)

        def route(copies: list[PageCopies], load: bool) -> list[PageCopies]:
            if not load and begins:
                time.sleep(max(0.0, begins.popleft() - time.monotonic()))
            return copies

        undo.patch(watched, "submit_store", store)
        undo.patch(worker, "report", report)
        undo.patch(worker, "route", route)
        if not self.waits:
            undo.patch(watched, "wait", lambda job_ids: None)

    def submitted(self, job_id: int, due: dict[int, float]) -> None:
        """A save was handed over; `due`: until when completions are held back."""

    def reported(self, job_id: int, copied: Future[TransferResult]) -> TransferResult | None:
        """What to report of a save."""
        return when_copied(job_id, copied)


class EarlyComplete(LateCopies):
    """A save is reported as done when it was submitted, and copied only later."""

    waits = True

    @override
    def submitted(self, job_id: int, due: dict[int, float]) -> None:
        due.pop(job_id, None)

    @override
    def reported(self, job_id: int, copied: Future[TransferResult]) -> TransferResult | None:
        return TransferResult(job_id=job_id, success=True)


class OverwrittenBeforeRead(LateCopies):
    """A block is given to another request while a save still has to read it: nobody waits."""

    waits = False
    COPY_SECONDS = 1.0
