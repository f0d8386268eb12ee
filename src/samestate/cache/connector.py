"""The connector to put into a server: vLLM's `OffloadingConnector` with families in memory and stores behind it.

Load it by name::

    --kv-transfer-config '{"kv_connector": "SamestateConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "samestate.cache.connector",
      "kv_connector_extra_config": {"cpu_bytes_to_use": 1073741824,
        "secondary_tiers": [{"type": "samestate-disk", "url": "file:///var/cache/samestate?budget=100GiB"}]}}'

It adds three things to the connector that it extends: it tells the stores what pages depend on (`identity`), once the
workers have said what they registered; it knows which requests have an adapter; and a reset of the external cache
clears the stores too.

``kv_connector_extra_config``, besides vLLM's own:
    eviction_policy: ``family-lru`` (the default) or ``family-value``.
    revision: The operator's word for what the weights are. Weight files are then not read.
    tenant: A further word that keeps engines apart.
    cuda_loads: Who loads on CUDA: ``copy`` (the default), ``auto``, ``staged`` or ``gather``; see
        `samestate.cache.cuda_loads`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.logger import init_logger

from samestate.cache import tier_metrics as metric
from samestate.cache.base import Groups, PageStore, StoreError
from samestate.cache.family_policy import FamilyPolicy
from samestate.cache.host_worker import own_no_name
from samestate.cache.identity import Identity, identity, require_stable_keys
from samestate.cache.identity_notes import NOTES, note
from samestate.cache.layout import RankLayout, group_kind, rank_layout, row_spans
from samestate.cache.spec import SamestateOffloadingSpec
from samestate.cache.stores.urls import open_store
from samestate.cache.tier import StoreTier
from samestate.cache.tier_metrics import Counts

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
    from vllm.v1.request import Request

logger = init_logger(__name__)

FORGET_SECONDS = 60.0
OWN_OPTIONS = ("revision", "tenant")


def complete(extra_config: dict[str, Any]) -> None:
    """Fill in what vLLM wants said and an operator need not say. Raises ValueError."""
    extra_config["spec_name"] = "SamestateOffloadingSpec"
    extra_config["spec_module_path"] = "samestate.cache.spec"
    extra_config.setdefault("eviction_policy", "family-lru")
    if extra_config.get("sync_load_budget_bytes"):
        raise ValueError(
            "kv_connector_extra_config.sync_load_budget_bytes: pages are loaded asynchronously only; leave it out"
        )
    for index, tier in enumerate(extra_config.setdefault("secondary_tiers", [])):
        if str(tier.get("type", "")).startswith("samestate-") and not isinstance(tier.get("url"), str):
            raise ValueError(f"secondary_tiers[{index}].url: missing; say where the pages lie, e.g. file:///folder")
    for name in OWN_OPTIONS:
        if not isinstance(extra_config.get(name, ""), str):
            raise ValueError(f"kv_connector_extra_config.{name}: {extra_config[name]!r} is no text")


class SamestateConnector(OffloadingConnector):
    """See the module. One object in the scheduler, one in every worker.

    Raises:
        ValueError: an option that does not fit; one line.
        IdentityError: keys or weights that cannot be told apart in a store; one line.

    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        self._extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        complete(self._extra)
        if self._extra["secondary_tiers"]:
            require_stable_keys(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = vllm_config
        self._layouts: list[RankLayout] = []
        self._adapted: set[str] = set()
        """Requests with an adapter."""
        self._memory = Counts()
        self._memory.tier = "0:primary"
        self._stores: dict[str, PageStore] = {}
        """Those that are open, by the tier's label."""
        if self.connector_scheduler is not None:
            self._configure_families()

    @classmethod
    @override
    def build_prom_metrics(cls, vllm_config: VllmConfig, *arguments: Any) -> KVConnectorPromMetrics:
        complete(vllm_config.kv_transfer_config.kv_connector_extra_config)
        return super().build_prom_metrics(vllm_config, *arguments)

    # --- worker ---------------------------------------------------------------------------------

    @override
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        assert self.connector_worker is not None
        spec: SamestateOffloadingSpec = self.connector_worker.spec
        return rank_layout(spec, self._kv_cache_config, spec.kv_caches) if spec.kv_caches else None

    @override
    def shutdown(self) -> None:
        worker = self.connector_worker.worker if self.connector_worker is not None else None
        region = getattr(worker, "_mmap_region", None)  # vLLM's own worker, on CUDA and XPU
        if region is not None:
            own_no_name(region)
        super().shutdown()

    # --- scheduler ------------------------------------------------------------------------------

    @property
    def policy(self) -> FamilyPolicy | None:
        """The memory tier's, where it goes by families."""
        policy = self._manager.primary_tier._policy
        return policy if isinstance(policy, FamilyPolicy) else None

    @property
    def tiers(self) -> dict[str, StoreTier]:
        """Our stores, by their label in metrics; vLLM's own secondary tiers may stand beside them."""
        numbered = enumerate(self._manager.secondary_tiers, 1)
        return {f"{number}:{tier.tier_type}": tier for number, tier in numbered if isinstance(tier, StoreTier)}

    @override
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """All workers have said what they registered: pages have a meaning from now on, and the stores are opened."""
        ranks = sorted((one for one in metadata.values() if isinstance(one, RankLayout)), key=lambda one: one.rank)
        spans = row_spans(ranks)
        naming = _Naming(
            lambda: identity(self._config, ranks, self._extra.get("revision"), self._extra.get("tenant", ""))
        )
        for label, tier in self.tiers.items():
            if self.policy is not None:
                tier.refill.in_memory = self.policy.has
            tier.open(partial(self._open, label, tier.url, naming, _groups(ranks)), spans, label, self._adapted)

    @override
    def on_new_request(self, request: Request) -> None:
        if request.lora_request is not None and self.tiers:
            self._adapted.add(request.request_id)
        super().on_new_request(request)

    @override
    def reset_cache(self) -> bool | None:
        """Clear the memory tier, then this engine's namespace in every store, whoever wrote there. False: not done."""
        done = super().reset_cache()
        cleared = [tier.forget(FORGET_SECONDS) for tier in self.tiers.values()]
        return bool(done) and all(cleared)

    @override
    def get_kv_connector_stats(self) -> OffloadingConnectorStats | None:
        stats = super().get_kv_connector_stats()
        for label, store in list(self._stores.items()):  # threads add
            if (orphans := store.orphan_bytes) is not None:
                self.tiers[label].counts.gauge(metric.ORPHAN_BYTES, orphans)
        if self.connector_scheduler is None or (policy := self.policy) is None:
            return stats
        index = policy.index
        self._memory.gauge(metric.FAMILIES, len(index))
        self._memory.gauge(metric.FAMILY_BYTES, index.bytes)
        self._memory.gauge(metric.ORPHAN_BYTES, index.orphan_bytes)
        new = index.evicted - self._memory.totals[metric.EVICTED_FAMILIES, ()]
        if new:
            self._memory.add(metric.EVICTED_FAMILIES, new)
        own = self._memory.take()
        return own.aggregate(stats) if stats is not None else own

    @property
    def _manager(self) -> TieringOffloadingManager:
        assert self.connector_scheduler is not None
        return self.connector_scheduler.manager

    def _open(self, label: str, url: str, naming: _Naming, groups: Groups) -> PageStore:
        store = _open(url, naming)
        store.describe(groups)
        self._stores[label] = store
        return store

    def _configure_families(self) -> None:
        if (policy := self.policy) is None:
            return
        config = self._kv_cache_config
        kinds = {i: group_kind(config.kv_cache_groups[i].kv_cache_spec) for i in get_offloading_group_ids(config)}
        policy.configure(
            pages=[group for group, kind in kinds.items() if kind == "pages"],
            states=[group for group, kind in kinds.items() if kind == "state"],
            row_bytes=self._manager.primary_tier.get_kv_memoryview().strides[0],
        )


class _Naming:
    """The engine's identity, made once, by whichever tier opens first; it may mean reading all weights."""

    def __init__(self, make: Callable[[], Identity]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: Identity | None = None

    def get(self) -> Identity:
        with self._lock:
            if self._made is None:
                began = time.monotonic()
                self._made = self._make()
                logger.info("pages are those of %s (%.1f s)", self._made.namespace, time.monotonic() - began)
            return self._made


def _groups(ranks: list[RankLayout]) -> Groups:
    kinds = {one.group: one.kind for one in ranks[0].groups}
    return Groups(
        frozenset(group for group, kind in kinds.items() if kind == "pages"),
        frozenset(group for group, kind in kinds.items() if kind == "state"),
    )


def _open(url: str, naming: _Naming) -> PageStore:
    """The store of this engine's namespace. One line in the log names what changed since this model's last engine."""
    named = naming.get()
    store, notes = open_store(url, named.namespace), open_store(url, NOTES)
    try:
        differs = note(notes, named)
    except StoreError:
        differs = []  # The store says itself what is wrong, when it is used.
    finally:
        notes.close()
    if differs:
        logger.warning(
            "%s: pages of %s are misses, they were kept for another engine: %s", url, named.label, "; ".join(differs)
        )
    return store
