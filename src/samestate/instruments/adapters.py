"""Which adapter reads the transfers of a connector."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from samestate.evidence.stream import StreamWriter
from samestate.instruments.offloading_transfers import OffloadingAdapter
from samestate.instruments.transfers import Guard, TransferAdapter

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.kv_cache_interface import KVCacheConfig


def adapter_for(
    inner: KVConnectorBase_V1,
    config: KVCacheConfig,
    rank: int,
    stream: StreamWriter,
    guard: Guard,
    save_delay_ms: int,
) -> TransferAdapter | None:
    """The adapter for this connector's class, or None: its transfers are then ``not_reported``."""
    if isinstance(inner, OffloadingConnector):
        return OffloadingAdapter(inner, config, rank, stream, guard, save_delay_ms)
    return None
