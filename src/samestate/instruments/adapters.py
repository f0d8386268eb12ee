"""Which adapter reads the transfers of a connector."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from samestate.cache.dictionary import DictionaryConnector
from samestate.evidence.records import TransferGroup
from samestate.evidence.stream import StreamWriter
from samestate.instruments.dictionary_transfers import DictionaryAdapter
from samestate.instruments.lmcache_transfers import LMCacheAdapter, is_lmcache
from samestate.instruments.offloading_transfers import OffloadingAdapter
from samestate.instruments.pages import Layout
from samestate.instruments.transfers import Guard, TransferAdapter

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
    from vllm.v1.kv_cache_interface import KVCacheConfig


def adapter_for(
    inner: KVConnectorBase_V1,
    config: KVCacheConfig,
    rank: int,
    stream: StreamWriter,
    guard: Guard,
    save_delay_ms: int,
) -> TransferAdapter | None:
    """The adapter for this connector's class, or None: its transfers are then ``not_reported``.

    A `MultiConnector` with one child is that child.
    """
    child = innermost(inner)
    adapter: TransferAdapter | None = None
    if isinstance(child, OffloadingConnector):
        adapter = OffloadingAdapter(child, config, rank, stream, guard, save_delay_ms)
    elif isinstance(child, DictionaryConnector):
        adapter = DictionaryAdapter(child, config, rank, stream, guard, save_delay_ms)
    elif is_lmcache(child):
        adapter = LMCacheAdapter(child, config, rank, stream, guard, save_delay_ms)
    return adapter if adapter is None or child is inner else NestedAdapter(adapter)


def innermost(connector: KVConnectorBase_V1) -> KVConnectorBase_V1:
    """The connector itself, or the one inside `MultiConnector`s that have a single child."""
    while isinstance(connector, MultiConnector) and len(connector.sub_connectors) == 1:
        (connector,) = connector.sub_connectors
    return connector


class NestedAdapter(TransferAdapter):
    """The adapter of a connector inside others: takes their wrapping off the scheduler's orders."""

    def __init__(self, adapter: TransferAdapter) -> None:
        self._adapter = adapter

    @override
    def watch(self) -> None:
        self._adapter.watch()

    @override
    def watch_pages(self, layout: Layout, poison: bool) -> None:
        self._adapter.watch_pages(layout, poison)

    @override
    def attend(self, watching: bool, digesting: bool) -> None:
        self._adapter.attend(watching, digesting)

    @override
    def forward_ran(self) -> None:
        self._adapter.forward_ran()

    @override
    def groups(self) -> list[TransferGroup]:
        return self._adapter.groups()

    @override
    def step(self, metadata: KVConnectorMetadata) -> None:
        while isinstance(metadata, MultiKVConnectorMetadata):
            (metadata,) = metadata.metadata
        self._adapter.step(metadata)
