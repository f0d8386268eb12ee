"""What our tiers count, under vLLM's naming. vLLM's own ``vllm:kv_offload_tiering_*`` stand beside them."""

from __future__ import annotations

import threading
from collections import defaultdict

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingMetricMetadata

DAMAGED_PAGES = "vllm:kv_offload_tier_damaged_pages"
MISSES = "vllm:kv_offload_tier_misses"
STORED_PAGES = "vllm:kv_offload_tier_stored_pages"
STORED_BYTES = "vllm:kv_offload_tier_stored_bytes"
UNSTORED_PAGES = "vllm:kv_offload_tier_unstored_pages"
LOADED_PAGES = "vllm:kv_offload_tier_loaded_pages"
LOADED_BYTES = "vllm:kv_offload_tier_loaded_bytes"
PAUSES = "vllm:kv_offload_tier_pauses"
PAUSED = "vllm:kv_offload_tier_paused"
FAMILIES = "vllm:kv_offload_tier_families"
FAMILY_BYTES = "vllm:kv_offload_tier_family_bytes"
ORPHAN_BYTES = "vllm:kv_offload_tier_orphan_bytes"
EVICTED_FAMILIES = "vllm:kv_offload_tier_evicted_families"
READS, WRITES = "reads", "writes"
"""What is paused."""


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """All of them, for Prometheus."""
    tier, tier_reason, tier_what = ("tier",), ("tier", "reason"), ("tier", "what")
    return {
        DAMAGED_PAGES: OffloadingCounterMetadata(
            "Pages found damaged, short, long or under another key, and never served, labeled by tier.", tier
        ),
        MISSES: OffloadingCounterMetadata(
            "Pages that a tier could not give, labeled by tier and reason: absent, lost, damaged, failed, slow, "
            "paused, unopened or adapter.",
            tier_reason,
        ),
        STORED_PAGES: OffloadingCounterMetadata("Pages written to a tier, labeled by tier.", tier),
        STORED_BYTES: OffloadingCounterMetadata("Bytes of the pages written to a tier, labeled by tier.", tier),
        UNSTORED_PAGES: OffloadingCounterMetadata(
            "Pages that a tier did not write, labeled by tier and reason: present, no-room, failed, slow, paused, "
            "unopened or adapter.",
            tier_reason,
        ),
        LOADED_PAGES: OffloadingCounterMetadata("Whole pages read from a tier, labeled by tier.", tier),
        LOADED_BYTES: OffloadingCounterMetadata("Bytes of the whole pages read from a tier, labeled by tier.", tier),
        PAUSES: OffloadingCounterMetadata(
            "How often reads or writes of a tier were left out after failures, labeled by tier and what.", tier_what
        ),
        PAUSED: OffloadingGaugeMetadata(
            "Whether reads or writes of a tier are left out now, labeled by tier and what.", tier_what
        ),
        FAMILIES: OffloadingGaugeMetadata("Families that a tier holds, labeled by tier.", tier),
        FAMILY_BYTES: OffloadingGaugeMetadata("Bytes of the families that a tier holds, labeled by tier.", tier),
        ORPHAN_BYTES: OffloadingGaugeMetadata("Bytes that no restorable prefix needs, labeled by tier.", tier),
        EVICTED_FAMILIES: OffloadingCounterMetadata("Families evicted from a tier, labeled by tier.", tier),
    }


class Counts:
    """Counters of one tier, until the scheduler asks for them. Thread-safe."""

    def __init__(self) -> None:
        self.tier = "?"
        """Label, known once the tier is part of an engine."""
        self._lock = threading.Lock()
        self._counters: defaultdict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
        self._gauges: dict[tuple[str, tuple[str, ...]], float] = {}
        self.totals: defaultdict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
        """Since the beginning."""

    def add(self, metric: str, value: float = 1, *labels: str) -> None:
        """Count; `labels`: those behind ``tier``."""
        with self._lock:
            self._counters[metric, labels] += value
            self.totals[metric, labels] += value

    def gauge(self, metric: str, value: float, *labels: str) -> None:
        """Set a gauge; `labels`: those behind ``tier``."""
        with self._lock:
            self._gauges[metric, labels] = value

    def take(self) -> OffloadingConnectorStats:
        """What was counted since the last call."""
        stats = OffloadingConnectorStats()
        with self._lock:
            counters, self._counters = self._counters, defaultdict(float)
            gauges = dict(self._gauges)
        for (metric, labels), value in counters.items():
            stats.increase_counter(metric, value, (self.tier, *labels))
        for (metric, labels), value in gauges.items():
            stats.set_gauge(metric, value, (self.tier, *labels))
        return stats
