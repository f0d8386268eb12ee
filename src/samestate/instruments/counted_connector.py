"""A `MultiConnector` that counts what its child answers, and carries these counts and the child's to ``/metrics``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

from samestate.instruments import audit_metrics

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

OWN = "AuditConnector"
"""Our own counts among those of the children."""


class CountedConnector(MultiConnector):
    """Counts; says nothing of when. Counting never changes an answer."""

    _inner: ClassVar[dict[str, Any]] = {}
    """Classes of inner connectors by name, as the process that serves ``/metrics`` knows them: vLLM looks names up
    among its own alone, and a server whose log cannot name a connector dies of it."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._counts = audit_metrics.AuditCounts()
        self._credits: dict[str, int] = {}
        """Tokens found for a request, local and outside, until blocks are allocated for them."""

    def _count_lookup(self, request: Request, local: int, matched: int | None) -> None:
        result = "wait" if matched is None else "hit" if matched else "miss"
        self._counts.add(audit_metrics.LOOKUPS, 1, result)
        if matched:
            self._credits[request.request_id] = local + matched

    def _count_reload(self, request: Request, external: int, interval: int) -> None:
        credited = self._credits.pop(request.request_id, external)
        if not external:
            return
        self._counts.add(audit_metrics.RELOADS)
        self._counts.add(audit_metrics.RELOADED_TOKENS, external)
        if audit_metrics.impossible(credited, request.num_tokens, interval):
            self._counts.add(audit_metrics.BOUNDARY_FAULTS)

    def _forget(self, request: Request) -> None:
        """The request is over."""
        self._credits.pop(request.request_id, None)

    @override
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        stats = super().get_kv_connector_stats()
        taken = self._counts.take()
        if taken is not None:
            stats = stats if stats is not None else MultiKVConnectorStats()
            stats[OWN] = taken
        return stats

    @classmethod
    @override
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        found = MultiKVConnectorStats()
        for name, value in (data or {}).items():
            if name == OWN:
                found[name] = OffloadingConnectorStats(data=value) if isinstance(value, dict) else value
            elif isinstance(value, dict) and name in cls._inner:
                if (made := cls._inner[name].build_kv_connector_stats(data=value)) is not None:
                    found[name] = made
            else:
                try:
                    found.data.update(super().build_kv_connector_stats({name: value}).data)
                except ValueError:  # a name of somebody else's: no line in the log is worth a server
                    continue
        return found

    @classmethod
    @override
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVConnectorPromMetrics:
        for inner, _ in cls._get_connector_classes_and_configs(vllm_config):
            cls._inner[inner.__name__] = inner
        made = super().build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        own = audit_metrics.AuditProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        made._prom_metrics[OWN] = own
        return made
