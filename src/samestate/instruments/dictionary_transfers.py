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
from samestate.evidence.records import TransferGroup, TransferPart
from samestate.evidence.stream import StreamWriter
from samestate.instruments.jobs import JobAdapter, part_of
from samestate.instruments.page_audit import Run
from samestate.instruments.pages import Layout
from samestate.instruments.transfers import Guard

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


class DictionaryAdapter(JobAdapter, Watcher):
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
        super().__init__(config, rank, stream, guard, save_delay_ms)
        self._inner = inner
        self._groups = [
            TransferGroup(
                group=index,
                engine_group=group.engine_group,
                entries=len(group.layers),
                bytes_per_block=group.bytes_per_block,
                tokens_per_block=group.tokens_per_block,
            )
            for index, group in enumerate(inner.geometry.groups)
        ]
        self._begun = 0.0

    @override
    def watch(self) -> None:
        self._inner.watcher = self

    @override
    def watch_pages(self, layout: Layout, poison: bool) -> None:
        assert self._inner.dictionary is not None
        tier = StoredTier(self._inner.dictionary)
        self.audit_pages(layout, [group.engine_group for group in self._groups], tier, poison)

    @override
    def groups(self) -> list[TransferGroup]:
        return self._groups

    @override
    def step(self, metadata: KVConnectorMetadata) -> None:
        """Nothing to note: a transfer names its request itself."""

    @override
    def saves_begin(self, saves: Sequence[Transfer]) -> None:
        self._begun = time.monotonic()
        for save in saves:
            self._observe(partial(self._save_begins, save))
        time.sleep(self.save_delay_ms / 1000)

    @override
    def save_ended(self, save: Transfer, moved: int) -> None:
        self._observe(lambda: self._save_ended(save, moved))

    @override
    def load_begins(self, load: Transfer) -> None:
        self._observe(lambda: self._load_begins(load))

    @override
    def load_ended(self, load: Transfer, moved: int) -> None:
        self._observe(lambda: self.ended(load.job, load=True, ok=True, moved=moved))

    def _observe(self, observation: Callable[[], None]) -> None:
        if self.watching:
            self._guard(observation)

    def _save_begins(self, save: Transfer) -> None:
        self.save_began(save.job, save.request, self._parts(save), _runs(save), StoredPages(save))

    def _save_ended(self, save: Transfer, moved: int) -> None:
        waited_ns = int((time.monotonic() - self._begun) * 1e9)
        self.read_pages(save.job, load=False)
        self.waited_for([save.job], waited_ns)
        self.ended(save.job, load=False, ok=True, moved=moved)

    def _load_begins(self, load: Transfer) -> None:
        parts = self._parts(load)
        boundary = max((part.boundary for part in parts), default=None)
        self.load_began(load.job, load.request, boundary, parts, StoredPages(load), _runs(load))

    def _parts(self, transfer: Transfer) -> list[TransferPart]:
        return [part_of(self._groups[part.group], part.first, len(part.blocks)) for part in transfer.parts]


def _runs(transfer: Transfer) -> list[Run]:
    return [Run(part.group, part.first, part.blocks) for part in transfer.parts]
