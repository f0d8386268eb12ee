"""What the audit counts while it serves, under vLLM's naming; a counter's ``_total`` is Prometheus' own.

Counts travel as the connector's own do: the scheduler's and the workers' are added up and reach ``/metrics`` with the
step's statistics.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any, NamedTuple

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

from samestate.evidence.records import AnyRecord, LoadCompleted, SaveCompleted, SaveWaited

ERRORS = "vllm:samestate_audit_errors"
LOOKUPS = "vllm:samestate_audit_lookups"
RELOADS = "vllm:samestate_audit_reloads"
RELOADED_TOKENS = "vllm:samestate_audit_reloaded_tokens"
BOUNDARY_FAULTS = "vllm:samestate_audit_boundary_faults"
FAILED_TRANSFERS = "vllm:samestate_audit_failed_transfers"
WAITS = "vllm:samestate_audit_waits"
WAIT_SECONDS = "vllm:samestate_audit_wait_seconds"
INTERVAL = "vllm:samestate_audit_interval_tokens"


class Definition(NamedTuple):
    """One metric."""

    documentation: str
    labels: tuple[str, ...] = ()
    gauge: bool = False


DEFINITIONS = {
    ERRORS: Definition("Observations of the audit that failed; serving went on, the record is lost.", ("side",)),
    LOOKUPS: Definition("Answers of the connector to look-ups, by result: hit, miss or wait.", ("result",)),
    RELOADS: Definition("Requests that blocks were allocated for to load state from outside."),
    RELOADED_TOKENS: Definition("Tokens that these loads stand for."),
    BOUNDARY_FAULTS: Definition(
        "Reloads whose credited prefix cannot be a recurrent state's: the whole prompt, or no multiple of C."
    ),
    FAILED_TRANSFERS: Definition("Loads and saves that were reported as failed.", ("direction",)),
    WAITS: Definition("How often a worker blocked for saves."),
    WAIT_SECONDS: Definition("Seconds that workers blocked for saves."),
    INTERVAL: Definition("C, the checkpoint interval in tokens; 0: the model has no recurrent state.", gauge=True),
}


class AuditCounts:
    """Counts of one process until its statistics are asked for. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: defaultdict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
        self._gauges: dict[str, float] = {}

    def add(self, metric: str, value: float = 1, *labels: str) -> None:
        """Count."""
        with self._lock:
            self._counts[metric, labels] += value

    def gauge(self, metric: str, value: float) -> None:
        """Say how it is from now on."""
        with self._lock:
            self._gauges[metric] = value

    def take(self) -> OffloadingConnectorStats | None:
        """What was counted since the last call; None: nothing."""
        with self._lock:
            counts, self._counts = self._counts, defaultdict(float)
            gauges, self._gauges = self._gauges, {}
        if not counts and not gauges:
            return None
        stats = OffloadingConnectorStats()
        for (metric, labels), value in counts.items():
            stats.increase_counter(metric, value, labels)
        for metric, value in gauges.items():
            stats.set_gauge(metric, value)
        return stats

    def transfer(self, record: AnyRecord) -> None:
        """Count what a worker's record says of transfers."""
        match record:
            case LoadCompleted(ok=False):
                self.add(FAILED_TRANSFERS, 1, "load")
            case SaveCompleted(ok=False):
                self.add(FAILED_TRANSFERS, 1, "save")
            case SaveWaited():
                self.add(WAITS)
                self.add(WAIT_SECONDS, record.waited_ns / 1e9)


def impossible(credited: int, known: int, interval: int) -> bool:
    """Whether no recurrent state stands for `credited` tokens of a request that has `known`. `interval`: C; 0: no such
    state, and nothing is said."""
    return interval > 0 and (credited >= known or credited % interval != 0)


class AuditProm(KVConnectorPromMetrics):
    """The metrics in the process that serves ``/metrics``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {
            name: (metric_types[Gauge] if one.gauge else metric_types[Counter])(
                name=name, documentation=one.documentation, labelnames=[*labelnames, *one.labels]
            )
            for name, one in DEFINITIONS.items()
        }
        for engine in per_engine_labelvalues.values():
            for name, one in DEFINITIONS.items():
                if not one.labels:
                    self._metrics[name].labels(*engine)  # there from the beginning, at 0

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what one step's statistics say."""
        engine = self.per_engine_labelvalues[engine_idx]
        for name, values in OffloadingConnectorStats(data=transfer_stats_data).data["data"].items():
            for labels, value in values.items():
                child = self._metrics[name].labels(*engine, *labels)
                child.set(value) if DEFINITIONS[name].gauge else child.inc(value)
