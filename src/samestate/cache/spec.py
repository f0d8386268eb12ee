"""The offloading specs: vLLM's own tiers on platforms whose device memory is host memory, and ours behind them.

`HostOffloadingSpec` is vLLM's memory tier and nothing else. Load it by name::

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"spec_name": "HostOffloadingSpec",
        "spec_module_path": "samestate.cache.spec", "cpu_bytes_to_use": 1073741824}}'

`SamestateOffloadingSpec` is vLLM's tiering: the memory tier in a region that all ranks share with the scheduler,
evicted by families, and stores behind it. It is loaded by `samestate.cache.connector.SamestateConnector`.

vLLM's scheduler side stays as it is: it aligns hybrid groups under the strict-prefix rule
(vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py). On CUDA and XPU the worker is vLLM's own too,
on CUDA loads of small pieces can be made otherwise (`cuda_loads`); elsewhere vLLM refuses, and `HostWorker` copies.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from typing_extensions import override
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingMetricMetadata, OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from samestate.cache import cuda_loads, tier_metrics
from samestate.cache.host_worker import HostWorker

TIERS = ("samestate-disk", "samestate-valkey", "samestate-object")
"""Types of secondary tiers. One class: the URL says what it is; the word is what metrics call it."""
POLICIES = {"family-lru": "FamilyPolicy", "family-value": "FamilyValuePolicy"}
"""Names for ``eviction_policy``."""


def _register() -> None:
    for tier in TIERS:
        with suppress(ValueError):  # Registered already: this module may be imported under two names.
            SecondaryTierFactory.register_tier(tier, "samestate.cache.tier", "StoreTier")
    for name, policy in POLICIES.items():
        with suppress(ValueError):
            CachePolicyFactory.register_cache_policy(name, "samestate.cache.family_policy", policy)


_register()


def _require_room(spec: CPUOffloadingSpec) -> None:
    if spec.config.worker_kv_bytes_per_block and not spec.num_chunks:
        raise ValueError(
            f"cpu_bytes_to_use={spec.extra_config['cpu_bytes_to_use']} holds no chunk: "
            f"one takes {spec.kv_bytes_per_chunk} bytes; raise it or lower blocks_per_chunk"
        )


def _is_host() -> bool:
    """Whether the device's memory is the host's."""
    return not (current_platform.is_cuda_alike() or current_platform.is_xpu())


class HostOffloadingSpec(CPUOffloadingSpec):
    """`CPUOffloadingSpec` that also works where the device is the host.

    Raises:
        ValueError: the canonical layout is asked for on such a platform, or the budget
            holds not even one chunk.

    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._host_worker: HostWorker | None = None
        _require_room(self)

    @override
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not _is_host():
            return super().get_worker(kv_caches)
        if self.config.canonical_layout:
            raise ValueError("canonical_layout is not supported by the host worker: leave it off")
        if self._host_worker is None:
            self._host_worker = HostWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)
        return self._host_worker


class SamestateOffloadingSpec(TieringOffloadingSpec):
    """`TieringOffloadingSpec` with families, that also works where the device is the host.

    Attributes:
        kv_caches: What the worker registered; None before, and on the scheduler's side.

    Raises:
        ValueError: the budget holds no chunk; chunks of several blocks, or the canonical layout, which stores
            could not tell apart; ``cuda_loads`` is no mode, or one that cannot be had here.

    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        _require_room(self)
        if config.canonical_layout:
            raise ValueError("canonical_layout is not supported by samestate's tiers: leave it off")
        if self.blocks_per_chunk != 1:
            raise ValueError(
                f"blocks_per_chunk={self.blocks_per_chunk}: samestate's tiers keep one block a page; "
                "leave blocks_per_chunk and block_size out of kv_connector_extra_config"
            )
        self._loads = cuda_loads.require_mode(self.extra_config.get(cuda_loads.OPTION, "copy"))
        self.kv_caches: CanonicalKVCaches | None = None
        self._host_worker: HostWorker | None = None

    @classmethod
    @override
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return super().build_metric_definitions(extra_config) | tier_metrics.definitions()

    @override
    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            manager = super().get_manager()
            # All ranks and the scheduler have the region open by now: without a name, nothing is left behind by a kill.
            region = self._scheduler_mmap
            if not region._creator:
                with suppress(FileNotFoundError):
                    Path(region.mmap_path).unlink()
            return manager
        return self._manager

    @override
    def create_worker(self, kv_caches: CanonicalKVCaches) -> CPUOffloadingWorker:
        worker: CPUOffloadingWorker = super().create_worker(kv_caches)
        if current_platform.is_cuda():
            try:
                cuda_loads.install(worker, self._loads)
            except ValueError:
                worker.shutdown()
                raise
        return worker

    @override
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        self.kv_caches = kv_caches
        if not _is_host():
            return super().get_worker(kv_caches)
        if self._host_worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._host_worker = HostWorker(kv_caches, self.blocks_per_chunk, self.num_chunks, region)
        return self._host_worker
