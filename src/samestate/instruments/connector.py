"""The audit connector: wraps one connector, delegates every call, writes down what happened.

Load it by name around the connector to be watched::

    --kv-transfer-config '{"kv_connector": "AuditConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "samestate.instruments.connector",
      "kv_connector_extra_config": {
        "connectors": [{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
                        "kv_connector_extra_config": {"cpu_bytes_to_use": 1073741824}}],
        "samestate": {"stream_dir": "/var/log/samestate", "arm": "live", "level": "metadata",
                      "rotate_bytes": 67108864, "keep_files": 8}}}'

It builds on vLLM's `MultiConnector` with one child, which delegates the whole connector interface
(hybrid groups, asynchronous loads, stats, metrics, events, handshake). Observation only reads, after
the child has answered, and its exceptions never reach serving: they are counted (`audit_metrics`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet

import torch
import vllm
from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorMetadata,
)
from vllm.logger import init_logger

from samestate.evidence.canonical import sha256_hex
from samestate.evidence.records import (
    Allocated,
    AnyRecord,
    BatchSource,
    FaultArmed,
    Lookup,
    RankRegistered,
    RequestFinished,
)
from samestate.instruments import audit_metrics, copy_speed, live_faults, recorder, repairs
from samestate.instruments.adapters import adapter_for
from samestate.instruments.counted_connector import CountedConnector
from samestate.instruments.layout import engine_groups, recurrent_blocks
from samestate.instruments.pages import Layout
from samestate.instruments.rotation import AuditConfigError, Limits, limits_of
from samestate.instruments.schedule import assigned_blocks, batch, computed_states
from samestate.instruments.taps import TappedWriter
from samestate.instruments.tracing import spans_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVConnectorKVEvents
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from samestate.evidence.stream import StreamWriter

logger = init_logger(__name__)

SUPPORTED = ("0.32.", "0.33.")
"""vLLM versions that this audit was run with."""
LEVELS = ("off", "metadata", "digest", "poison")


_live: WeakSet[AuditConnector] = WeakSet()


def set_level(level: str) -> None:
    """Switch every audit of this process to a level at or below the one that it started with.

    For measurements, which compare levels within one engine. Only safe while the engine is idle.
    Raises `AuditConfigError`.
    """
    for connector in _live:
        connector.attend(level)


class AuditConnector(CountedConnector):
    """One watched connector.

    Raises:
        AuditConfigError: not exactly one inner connector, unknown level, no ``stream_dir``.

    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if len(self._connectors) != 1:
            raise AuditConfigError(
                f"kv_connector_extra_config.connectors: {len(self._connectors)} given; "
                "the audit connector wraps exactly one (a MultiConnector may be it)"
            )
        options = self._kv_transfer_config.kv_connector_extra_config.get("samestate", {})
        level = options.get("level", "metadata")
        if level not in LEVELS:
            raise AuditConfigError(f"samestate.level: {level!r} is unknown; use one of {', '.join(LEVELS)}")
        self._level = level
        self._switch(level)
        _live.add(self)
        limits = limits_of(options)
        self._side = "worker" if role is KVConnectorRole.WORKER else "scheduler"
        self._spans = spans_of(vllm_config)
        self._recurrent = recurrent_blocks(kv_cache_config)
        self._interval = math.lcm(*self._recurrent.values()) if self._recurrent else 0
        self._forward_seen = False
        self._warned = False
        self._step = 0
        self._adapter = None
        if not self._watching:
            return
        if "stream_dir" not in options:
            raise AuditConfigError("samestate.stream_dir: missing; name a folder that the engine may write to")
        worker = role is KVConnectorRole.WORKER
        if not vllm.__version__.startswith(SUPPORTED):
            self._level = "metadata"
            self._switch(self._level)
            if not worker:
                logger.warning("samestate was not run with vLLM %s: level metadata only, unchecked", vllm.__version__)
        self._rank = vllm_config.parallel_config.rank
        process = f"worker-{self._rank}" if worker else "scheduler"
        try:
            self._stream = self._writer(Path(options["stream_dir"]), options.get("arm", "live"), process, limits)
        except OSError:
            self._level = "off"
            self._switch(self._level)
            logger.exception(
                "samestate: no stream can be written to %s; serving goes on unwatched", options["stream_dir"]
            )
            return
        if worker:
            self._adapter = adapter_for(
                self._connectors[0],
                kv_cache_config,
                self._rank,
                self._stream,
                self._observe,
                int(options.get("save_delay_ms", 0)),
            )
        if not worker and (repair := options.get("repair")):
            self._repair(repair)
        if fault := options.get("fault"):
            live_faults.arm_at_start(fault)
            self._record(lambda: FaultArmed(fault=fault, parameters={}))
        if not worker:
            self._counts.gauge(audit_metrics.INTERVAL, self._interval)
            live_faults.offer(self._connectors[0], role, kv_cache_config)

    def _writer(self, folder: Path, arm: str, process: str, limits: Limits | None) -> StreamWriter:
        """The stream, whose records of transfers are counted and traced as they are written. Raises OSError."""
        if limits is None:
            stream = recorder.stream(folder, arm, process)
        else:
            stream = recorder.rotating(folder, arm, process, limits)
        taps = [self._counts.transfer, *([self._spans.record] if self._spans else [])]
        return cast("StreamWriter", TappedWriter(stream, taps, self._failed))

    def _repair(self, name: str) -> None:
        """Put a repair onto the inner connector. Raises `RepairError`: an engine without it must not serve."""
        applied = repairs.apply(name, self._connectors[0])
        self._record(lambda: applied)

    def attend(self, level: str) -> None:
        """See `set_level`."""
        if level not in LEVELS or LEVELS.index(level) > LEVELS.index(self._level):
            raise AuditConfigError(f"level {level!r}: this audit started at {self._level}, which is the most it can do")
        self._switch(level)
        if self._adapter:
            self._adapter.attend(self._watching, self._digesting)

    def _switch(self, level: str) -> None:
        self._watching = level != "off"
        self._digesting = level in ("digest", "poison")
        self._poisoning = level == "poison"

    def _observe(self, observation: Callable[[], None]) -> None:
        """Run an observation; a failing one is counted as a lost record and logged once."""
        try:
            observation()
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self._counts.add(audit_metrics.ERRORS, 1, self._side)
        self._stream.lose(f"observation failed: {type(error).__name__}: {error}")
        if not self._warned:
            self._warned = True
            logger.error(
                "samestate: an observation failed; serving goes on, the evidence is incomplete", exc_info=error
            )

    def _record(self, make: Callable[[], AnyRecord | None]) -> None:
        if not self._watching:
            return

        def observation() -> None:
            if record := make():
                self._stream.append(record)

        self._observe(observation)

    # --- worker ---------------------------------------------------------------------------------

    @override
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._adapter:
            self._observe(self._adapter.watch)
        super().register_kv_caches(kv_caches)
        layout = self._observe_pages(kv_caches) if self._digesting else None
        config = self._kv_cache_config
        if self._watching:
            live_faults.offer(self._connectors[0], self._role, config)
        self._record(
            lambda: RankRegistered(
                rank=self._rank,
                world_size=self._vllm_config.parallel_config.world_size,
                num_blocks=config.num_blocks,
                engine_groups=engine_groups(config),
                transfer_groups=self._adapter.groups() if self._adapter else [],
                entries=layout.entries if layout else [],
                digest=layout.digest if layout else "",
            )
        )
        self._record(lambda: copy_speed.asked(self._rank, kv_caches))

    def _observe_pages(self, kv_caches: dict[str, torch.Tensor]) -> Layout | None:
        found: list[Layout] = []

        def observation() -> None:
            context = self._vllm_config.compilation_config.static_forward_context
            found.append(Layout(self._kv_cache_config, kv_caches, context))
            if self._adapter:
                self._adapter.watch_pages(found[0], self._poisoning)

        self._observe(observation)
        return found[0] if found else None

    @override
    def wait_for_layer_load(self, layer_name: str) -> None:
        super().wait_for_layer_load(layer_name)
        self._forward_ran()

    @override
    def finish_forward(self) -> None:
        super().finish_forward()
        self._forward_ran()

    def _forward_ran(self) -> None:
        """Once a step: the older runner tells each layer's read, the newer one the end of the forward pass."""
        if self._digesting and self._adapter and not self._forward_seen:
            self._forward_seen = True
            self._observe(self._adapter.forward_ran)

    @override
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._forward_seen = False
        if adapter := self._adapter:
            assert isinstance(connector_metadata, MultiKVConnectorMetadata)
            self._observe(lambda: adapter.step(connector_metadata.metadata[0]))

    @override
    def get_kv_connector_kv_cache_events(self) -> KVConnectorKVEvents | None:
        # Not delegated by MultiConnector, since events of several children cannot be merged.
        return self._connectors[0].get_kv_connector_kv_cache_events()

    @override
    def shutdown(self) -> None:
        super().shutdown()
        if self._watching:
            self._observe(lambda: recorder.release(self._stream))

    @override
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        # Once a step, after its transfers were polled: a worker that dies leaves what it did.
        if self._watching:
            self._observe(self._stream.flush)
        return super().build_connector_worker_meta()

    # --- scheduler ------------------------------------------------------------------------------

    @override
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        began_ns = time.time_ns()
        matched, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if self._watching:
            self._observe(lambda: self._count_lookup(request, num_computed_tokens, matched))
            if spans := self._spans:
                self._observe(lambda: spans.lookup(request, began_ns, num_computed_tokens, matched))
        self._record(
            lambda: Lookup(
                request=request.request_id,
                queried_tokens=request.num_tokens,
                local_tokens=num_computed_tokens,
                matched_tokens=matched,
                is_async=is_async,
                salt=sha256_hex(request.cache_salt.encode()) if request.cache_salt else "",
            )
        )
        return matched, is_async

    @override
    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self._watching:
            self._observe(lambda: self._count_reload(request, num_external_tokens, self._interval))
        self._record(
            lambda: Allocated(
                request=request.request_id,
                external_tokens=num_external_tokens,
                block_ids=[[block.block_id for block in group] for group in blocks.blocks],
            )
        )

    @override
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MultiKVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        step = self._step
        self._step += 1
        if self._watching:
            self._observe(lambda: self._append(self._step_records(scheduler_output, step)))
            self._observe(self._stream.flush)
        return metadata

    def _step_records(self, output: SchedulerOutput, step: int) -> Iterator[AnyRecord]:
        if self._digesting:
            yield from assigned_blocks(output, step)
        if record := batch(output, step, BatchSource.CONNECTOR):
            yield record
            if self._digesting:
                yield from computed_states(output, record, self._recurrent)

    def _append(self, records: Iterable[AnyRecord]) -> None:
        for record in records:
            self._stream.append(record)

    @override
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        answer = super().request_finished_all_groups(request, block_ids)
        self._forget(request)
        self._record(lambda: RequestFinished(request=request.request_id))
        return answer
