"""Transfers of our own `DictionaryConnector`. They are synchronous, so a job begins and ends within one call.

A save that is held back is held back for real: the copy is made that much later, and the engine stands still
in `wait_for_save` until then. Submission, delay, wait and completion are all recorded, and pages are digested before
the delay and after it, so that an engine that did not stand still would be seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from typing_extensions import override
from vllm.v1.kv_offload.base import LoadStoreSpec

from samestate.cache.dictionary import DictionaryConnector
from samestate.cache.dictionary_pages import Dictionary, Watcher
from samestate.cache.families import Transfer
from samestate.cache.host_worker import TierPage
from samestate.evidence.records import (
    LoadCompleted,
    LoadSubmitted,
    SaveCompleted,
    SaveDelayed,
    SaveSubmitted,
    SaveWaited,
    TransferGroup,
    TransferPart,
)
from samestate.evidence.stream import StreamWriter
from samestate.instruments.layout import transfer_layers
from samestate.instruments.page_audit import PageAudit, Run
from samestate.instruments.pages import Layout
from samestate.instruments.transfers import Guard, TransferAdapter

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.kv_cache_interface import KVCacheConfig


class StoredPages(LoadStoreSpec):
    """The dictionary's side of a transfer."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer


class StoredTier:
    """Reads a dictionary for the page audit."""

    def __init__(self, dictionary: Dictionary) -> None:
        self._dictionary = dictionary

    def tier_pages(self, device: Sequence[Run], tier: StoredPages) -> Iterator[TierPage]:
        """The stored copies of a transfer's pages."""
        for page in self._dictionary.pages(tier.transfer):
            yield TierPage(page.group, page.layer, page.position, page.stored)


class DictionaryAdapter(TransferAdapter, Watcher):
    """Adapter for `DictionaryConnector`, and the watcher of its dictionary."""

    def __init__(
        self,
        inner: DictionaryConnector,
        config: KVCacheConfig,
        rank: int,
        stream: StreamWriter,
        guard: Guard,
        save_delay_ms: int,
    ) -> None:
        self._inner = inner
        self._config = config
        self._rank = rank
        self._stream = stream
        self._guard = guard
        self._save_delay_ms = save_delay_ms
        self._geometry = inner.geometry
        self._watching = True
        self._begun = 0.0
        self._pages: PageAudit | None = None
        self._all_pages: PageAudit | None = None

    @override
    def watch(self) -> None:
        self._inner.watcher = self

    @override
    def watch_pages(self, layout: Layout, poison: bool) -> None:
        layers = transfer_layers(self._config, [group.engine_group for group in self._geometry.groups])
        assert self._inner.dictionary is not None
        tier = StoredTier(self._inner.dictionary)
        self._pages = self._all_pages = PageAudit(self._rank, layout, layers, tier, poison, self._stream)

    @override
    def attend(self, watching: bool, digesting: bool) -> None:
        self._watching = watching
        self._pages = self._all_pages if digesting else None

    @override
    def groups(self) -> list[TransferGroup]:
        return [
            TransferGroup(
                group=index,
                engine_group=group.engine_group,
                entries=len(group.layers),
                bytes_per_block=group.bytes_per_block,
                tokens_per_block=group.tokens_per_block,
            )
            for index, group in enumerate(self._geometry.groups)
        ]

    @override
    def step(self, metadata: KVConnectorMetadata) -> None:
        """Nothing to note: a transfer names its request itself."""

    @override
    def forward_ran(self) -> None:
        if self._pages:
            self._pages.forward_ran()

    @override
    def saves_begin(self, saves: Sequence[Transfer]) -> None:
        self._begun = time.monotonic()
        for save in saves:
            self._observe(partial(self._save_begins, save))
        time.sleep(self._save_delay_ms / 1000)

    @override
    def save_ended(self, save: Transfer, moved: int) -> None:
        self._observe(lambda: self._save_ended(save, moved))

    @override
    def load_begins(self, load: Transfer) -> None:
        self._observe(lambda: self._load_begins(load))

    @override
    def load_ended(self, load: Transfer, moved: int) -> None:
        self._observe(lambda: self._load_ended(load, moved))

    def _observe(self, observation: Callable[[], None]) -> None:
        if self._watching:
            self._guard(observation)

    def _save_begins(self, save: Transfer) -> None:
        self._stream.append(SaveSubmitted(rank=self._rank, job=save.job, request=save.request, parts=self._parts(save)))
        if self._save_delay_ms:
            self._stream.append(SaveDelayed(rank=self._rank, job=save.job, delay_ms=self._save_delay_ms))
        if self._pages:
            self._pages.save_submitted(save.job, save.request, _runs(save), StoredPages(save))

    def _save_ended(self, save: Transfer, moved: int) -> None:
        waited_ns = int((time.monotonic() - self._begun) * 1e9)
        if self._pages:
            self._pages.save_completed(save.job)
        self._stream.append(SaveWaited(rank=self._rank, jobs=[save.job], waited_ns=waited_ns, timed_out=False))
        self._stream.append(SaveCompleted(rank=self._rank, job=save.job, ok=True, bytes=moved))

    def _load_begins(self, load: Transfer) -> None:
        parts = self._parts(load)
        boundary = max((part.boundary for part in parts), default=None)
        self._stream.append(
            LoadSubmitted(rank=self._rank, job=load.job, request=load.request, boundary=boundary, parts=parts)
        )
        if self._pages:
            self._pages.load_submitted(load.job, load.request, StoredPages(load), _runs(load))

    def _load_ended(self, load: Transfer, moved: int) -> None:
        if self._pages:
            self._pages.load_completed(load.job)
        self._stream.append(LoadCompleted(rank=self._rank, job=load.job, ok=True, bytes=moved))

    def _parts(self, transfer: Transfer) -> list[TransferPart]:
        parts = []
        for part in transfer.parts:
            group = self._geometry.groups[part.group]
            parts.append(
                TransferPart(
                    group=part.group,
                    first_block=part.first,
                    pages=len(part.blocks) * len(group.layers),
                    bytes=len(part.blocks) * group.bytes_per_block,
                    boundary=(part.first + len(part.blocks)) * group.tokens_per_block,
                )
            )
        return parts


def _runs(transfer: Transfer) -> list[Run]:
    return [Run(part.group, part.first, part.blocks) for part in transfer.parts]
