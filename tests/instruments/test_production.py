"""The audit in production: files rotate, counts reach Prometheus, spans are made, and its own failures reach nobody."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry, Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorPromMetrics,
    MultiKVConnectorStats,
)

from samestate.evidence.records import (
    Allocated,
    AnyRecord,
    EngineGroup,
    EngineStopped,
    EntryKind,
    LoadCompleted,
    LoadSubmitted,
    Lookup,
    RequestFinished,
    SaveCompleted,
    SaveSubmitted,
    SaveWaited,
    SchedulerConfigured,
    StreamClosed,
    StreamOpened,
    TransferPart,
)
from samestate.evidence.stream import Defect, StreamWriter, read_stream
from samestate.instruments import audit_metrics, tracing
from samestate.instruments.audit_metrics import AuditCounts, AuditProm, impossible
from samestate.instruments.connector import AuditConnector
from samestate.instruments.rotation import AuditConfigError, Limits, RotatingWriter, limits_of
from samestate.instruments.taps import TappedWriter
from samestate.instruments.tracing import LOAD, LOOKUP, REQUEST_ID, SAVE, OpenTelemetrySpans, spans_of

C = 256
PROMPT = [7_654_321 + n for n in range(2 * C + 5)]
"""Token ids that nothing else here looks like."""


# --- files that rotate ----------------------------------------------------------------------------


def records_of(path: Path) -> list[AnyRecord]:
    """Of a stream that is whole."""
    read = list(read_stream(path))
    assert [one for one in read if isinstance(one, Defect)] == []
    return [one.rec for one in read if not isinstance(one, Defect)]


def configured() -> SchedulerConfigured:
    group = EngineGroup(
        group=0,
        entry_kind=EntryKind.RECURRENT,
        spec="MambaSpec",
        tokens_per_block=C,
        layers=["a"],
        page_bytes=1,
        effective_bytes=1,
    )
    return SchedulerConfigured(block_size=C, saves_within_steps=False, engine_groups=[group])


def write_steps(writer: RotatingWriter, steps: int) -> None:
    for step in range(steps):
        writer.append(RequestFinished(request=f"{step}-" + "x" * 200))
        writer.flush()


def test_files_rotate_and_the_oldest_go(tmp_path: Path) -> None:
    writer = RotatingWriter(tmp_path, "live", "scheduler", Limits(2000, 3))
    writer.append(configured())
    write_steps(writer, 60)
    writer.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 3
    numbers = sorted(int(name.split(".")[1]) for name in names)
    assert numbers == list(range(numbers[0], numbers[0] + 3))
    assert numbers[0] > 2, "the first files are gone"
    for name in names:
        first, second, *_, last = records_of(tmp_path / name)
        assert isinstance(first, StreamOpened)
        assert second == configured(), "a file can be read without those before it"
        assert last == StreamClosed(dropped=0)
        assert (tmp_path / name).stat().st_size < 2000 + 1000
    steps = [
        int(one.request.partition("-")[0])
        for name in sorted(names, key=lambda one: int(one.split(".")[1]))
        for one in records_of(tmp_path / name)
        if isinstance(one, RequestFinished)
    ]
    assert steps == list(range(steps[0], 60)), "nothing between the files is lost"


def test_a_restart_goes_on_where_the_numbers_ended(tmp_path: Path) -> None:
    for _ in range(4):
        RotatingWriter(tmp_path, "live", "scheduler", Limits(10**6, 2)).close()
    (tmp_path / "worker-0.jsonl").write_text("somebody else's\n")
    RotatingWriter(tmp_path, "live", "scheduler", Limits(10**6, 2)).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "scheduler.4.jsonl",
        "scheduler.5.jsonl",
        "worker-0.jsonl",
    ]


def test_a_folder_that_goes_away_costs_records_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    writer = RotatingWriter(folder, "live", "scheduler", Limits(2000, 2))
    writer.append(EngineStopped())
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.write_text("in the way")
    write_steps(writer, 20)
    assert writer.dropped > 0
    assert writer.failure
    folder.unlink()
    writer.flush()
    writer.append(EngineStopped())
    writer.close()
    (path,) = folder.iterdir()
    assert EngineStopped() in records_of(path), "it goes on once the folder can be written again"
    writer.append(EngineStopped())
    writer.lose("too late")
    writer.flush()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rotate_bytes": 1}, "samestate.rotate_bytes: 1 is no whole number of at least 65536"),
        ({"rotate_bytes": 1 << 20}, "samestate.keep_files: None"),
        ({"rotate_bytes": 1 << 20, "keep_files": 1}, "samestate.keep_files: 1"),
        ({"rotate_bytes": "64MiB", "keep_files": 8}, "samestate.rotate_bytes: '64MiB'"),
    ],
)
def test_wrong_limits_are_one_line(options: dict[str, Any], says: str) -> None:
    with pytest.raises(AuditConfigError) as refused:
        limits_of(options)
    assert str(refused.value).startswith(says)


def test_without_limits_nothing_rotates() -> None:
    assert limits_of({"stream_dir": "/records"}) is None
    assert limits_of({"rotate_bytes": 1 << 20, "keep_files": 2}) == Limits(1 << 20, 2)


# --- hooks ------------------------------------------------------------------------------------------


class Inner:
    """A connector that finds `found` tokens, and remembers what it was asked."""

    def __init__(self, found: int | None) -> None:
        self.found = found
        self.calls: list[str] = []

    def get_num_new_matched_tokens(self, request: Any, local: int) -> tuple[int | None, bool]:
        self.calls.append("lookup")
        return self.found, True

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        self.calls.append("alloc")

    def build_connector_meta(self, output: Any) -> str:
        self.calls.append("meta")
        return "orders"

    def build_connector_worker_meta(self) -> None:
        self.calls.append("worker meta")

    def request_finished_all_groups(self, request: Any, blocks: Any) -> tuple[bool, None]:
        self.calls.append("finished")
        return False, None

    def get_kv_connector_stats(self) -> None:
        return None

    def shutdown(self) -> None:
        self.calls.append("shutdown")


class Blocks:
    """What vLLM's manager allocates."""

    blocks = ([SimpleNamespace(block_id=1)],)

    def new_empty(self) -> Blocks:
        return self


def audit(folder: Path, found: int | None, spans: Any = None) -> AuditConnector:
    """An audit around `Inner`, as its start leaves it; no engine."""
    made = AuditConnector.__new__(AuditConnector)
    made._connectors = [Inner(found)]  # type: ignore[list-item]
    made._requests_to_connector = {}
    made._extra_async_saves = {}
    made._all_support_hma = True
    made._role = KVConnectorRole.SCHEDULER
    made._counts = AuditCounts()
    made._credits = {}
    made._spans = spans
    made._side = "scheduler"
    made._interval = C
    made._recurrent = {0: C}
    made._warned = made._forward_seen = False
    made._step = 0
    made._adapter = None
    made._level = "metadata"
    made._switch("metadata")
    writer = StreamWriter(folder / "scheduler.jsonl", "live", "scheduler", tolerant=True)
    made._stream = TappedWriter(writer, [made._counts.transfer], made._failed)  # type: ignore[assignment]
    return made


REQUEST = SimpleNamespace(
    request_id="request-1", num_tokens=len(PROMPT), prompt_token_ids=PROMPT, cache_salt=None, trace_headers=None
)
STEP = SimpleNamespace(
    scheduled_new_reqs=[SimpleNamespace(req_id="request-1", num_computed_tokens=2 * C, block_ids=([1],))],
    scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[]),
    scheduled_spec_decode_tokens={},
    num_scheduled_tokens={"request-1": 5},
    preempted_req_ids=set(),
    kv_connector_block_state=None,
)


def serve(made: AuditConnector) -> list[Any]:
    """One request through all hooks of the scheduler's side and one of the worker's: what serving gets back."""
    got: list[Any] = [made.get_num_new_matched_tokens(REQUEST, 0)]  # type: ignore[arg-type]
    got.append(made.update_state_after_alloc(REQUEST, Blocks(), made._connectors[0].found or 0))  # type: ignore
    got.append(made.build_connector_meta(STEP).metadata)  # type: ignore[arg-type]
    got.append(made.request_finished_all_groups(REQUEST, ([1],)))  # type: ignore[arg-type]
    got.append(made.build_connector_worker_meta())
    made.shutdown()
    return got


def counted(made: AuditConnector) -> dict[tuple[str, tuple[str, ...]], float]:
    stats = made.get_kv_connector_stats()
    if stats is None:
        return {}
    values = stats.data["AuditConnector"].data["data"]
    return {(name, tuple(labels)): value for name, of in values.items() for labels, value in of.items()}


ANSWERS = [(2 * C, True), None, ("orders",), (False, None), None]


def test_a_request_is_counted_and_nothing_of_its_prompt_is_written(tmp_path: Path) -> None:
    made = audit(tmp_path, 2 * C)
    assert serve(made) == ANSWERS
    assert counted(made) == {
        (audit_metrics.LOOKUPS, ("hit",)): 1,
        (audit_metrics.RELOADS, ()): 1,
        (audit_metrics.RELOADED_TOKENS, ()): 2 * C,
    }
    kinds = [type(one) for one in records_of(tmp_path / "scheduler.jsonl")]
    assert {Lookup, Allocated, RequestFinished} <= set(kinds)
    assert "7654" not in (tmp_path / "scheduler.jsonl").read_text()
    assert counted(made) == {}, "what was taken is counted once"


@pytest.mark.parametrize(("found", "result"), [(0, "miss"), (None, "wait"), (C, "hit")])
def test_look_ups_are_counted_by_their_result(tmp_path: Path, found: int | None, result: str) -> None:
    made = audit(tmp_path, found)
    made.get_num_new_matched_tokens(REQUEST, 0)  # type: ignore[arg-type]
    assert counted(made) == {(audit_metrics.LOOKUPS, (result,)): 1}


@pytest.mark.parametrize("found", [len(PROMPT), len(PROMPT) - 1, C + 1])
def test_a_boundary_that_cannot_be_a_states_is_counted(tmp_path: Path, found: int) -> None:
    made = audit(tmp_path, found)
    serve(made)
    assert counted(made)[audit_metrics.BOUNDARY_FAULTS, ()] == 1


@pytest.mark.parametrize(
    ("credited", "known", "interval", "wrong"),
    [
        (512, 513, 256, False),
        (512, 512, 256, True),
        (511, 512, 256, True),
        (256, 512, 256, False),
        (511, 512, 0, False),
    ],
)
def test_which_boundaries_cannot_be(credited: int, known: int, interval: int, wrong: bool) -> None:
    assert impossible(credited, known, interval) is wrong


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("injected")


@pytest.mark.parametrize(
    ("name", "errors"),
    [
        ("Lookup", 1),
        ("Allocated", 1),
        ("batch", 1),
        ("RequestFinished", 1),
        ("recorder.release", 1),
        ("_count_lookup", 1),
        ("_count_reload", 1),
        ("_stream.flush", 2),
        ("_spans.lookup", 1),
    ],
)
def test_an_exception_in_a_hook_never_reaches_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, errors: int
) -> None:
    made = audit(tmp_path, 2 * C, SimpleNamespace(lookup=lambda *_: None))
    if name.startswith("_"):
        target: Any = made
        *path, last = name.split(".")
        for step in path:
            target = getattr(target, step)
        monkeypatch.setattr(target, last, broken)
    else:
        monkeypatch.setattr(f"samestate.instruments.connector.{name}", broken)
    assert serve(made) == ANSWERS, "the request goes on"
    inner: Any = made._connectors[0]
    assert inner.calls == ["lookup", "alloc", "meta", "finished", "worker meta", "shutdown"]
    assert counted(made)[audit_metrics.ERRORS, ("scheduler",)] == errors
    assert made._stream.dropped >= errors, "the evidence says that it is incomplete"


def test_a_listener_that_fails_is_an_error_and_the_record_is_written(tmp_path: Path) -> None:
    failures: list[Exception] = []
    writer = StreamWriter(tmp_path / "worker-0.jsonl", "live", "worker-0", tolerant=True)
    tapped = TappedWriter(writer, [broken], failures.append)
    tapped.append(EngineStopped())
    tapped.close()
    assert EngineStopped() in records_of(tmp_path / "worker-0.jsonl")
    assert [str(one) for one in failures] == ["injected"]


def test_transfers_are_counted() -> None:
    counts = AuditCounts()
    for record in (
        LoadCompleted(rank=0, job=1, ok=True, bytes=1),
        LoadCompleted(rank=0, job=2, ok=False, bytes=None),
        SaveCompleted(rank=0, job=3, ok=False, bytes=None),
        SaveWaited(rank=0, jobs=[3], waited_ns=500_000_000, timed_out=False),
    ):
        counts.transfer(record)
    stats = counts.take()
    assert stats is not None
    assert stats.data["data"] == {
        audit_metrics.FAILED_TRANSFERS: {("load",): 1, ("save",): 1},
        audit_metrics.WAITS: {(): 1},
        audit_metrics.WAIT_SECONDS: {(): 0.5},
    }


# --- the way to /metrics ----------------------------------------------------------------------------


def prometheus(registry: CollectorRegistry) -> AuditProm:
    types: Any = {Counter: partial(Counter, registry=registry), Gauge: partial(Gauge, registry=registry)}
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import Histogram

    types[Histogram] = None
    config = SimpleNamespace(kv_transfer_config=None)
    return AuditProm(config, types, ["model_name", "engine"], {0: ["tiny", "0"]})


def test_counts_reach_prometheus_through_vllms_own_way() -> None:
    scheduler, worker, registry = AuditCounts(), AuditCounts(), CollectorRegistry()
    scheduler.gauge(audit_metrics.INTERVAL, C)
    scheduler.add(audit_metrics.ERRORS, 1, "scheduler")
    worker.add(audit_metrics.ERRORS, 2, "worker")
    both = MultiKVConnectorStats(data={"AuditConnector": worker.take()}).aggregate(
        MultiKVConnectorStats(data={"AuditConnector": scheduler.take()})
    )
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(both.to_dict()), type=dict[str, dict[str, Any]])
    assert AuditConnector.build_kv_connector_stats(sent) is not None
    metrics = MultiKVConnectorPromMetrics.__new__(MultiKVConnectorPromMetrics)
    metrics._prom_metrics = {"AuditConnector": prometheus(registry)}
    metrics.observe(both.to_dict())
    base = {"model_name": "tiny", "engine": "0"}
    assert registry.get_sample_value("vllm:samestate_audit_interval_tokens", base) == C
    assert registry.get_sample_value("vllm:samestate_audit_errors_total", base | {"side": "worker"}) == 2
    assert registry.get_sample_value("vllm:samestate_audit_errors_total", base | {"side": "scheduler"}) == 1
    assert registry.get_sample_value("vllm:samestate_audit_reloads_total", base) == 0, "there before the first one"


def test_a_connector_that_vllm_does_not_know_by_name_costs_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = AuditCounts()
    counts.add(audit_metrics.RELOADS)
    stats = counts.take()
    assert stats is not None
    sent = {"SamestateConnector": {"types": {}, "data": {}}, "AuditConnector": stats.to_dict()}
    with pytest.raises(ValueError, match="SamestateConnector"):
        MultiConnector.build_kv_connector_stats(dict(sent))
    made = AuditConnector.build_kv_connector_stats(dict(sent))
    assert made is not None
    assert list(made.data) == ["AuditConnector"]
    from samestate.cache.connector import SamestateConnector

    monkeypatch.setitem(AuditConnector._inner, "SamestateConnector", SamestateConnector)
    made = AuditConnector.build_kv_connector_stats(dict(sent))
    assert made is not None
    assert set(made.data) == {"SamestateConnector", "AuditConnector"}
    assert AuditConnector.build_kv_connector_stats(None) == MultiKVConnectorStats()


# --- spans ------------------------------------------------------------------------------------------

PART = TransferPart(group=0, first_block=0, pages=2, bytes=8, boundary=2 * C)


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> OpenTelemetrySpans:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return OpenTelemetrySpans(provider.get_tracer("samestate"))


def test_look_ups_loads_and_saves_are_spans(
    spans: OpenTelemetrySpans, exporter: InMemorySpanExporter, tmp_path: Path
) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    asked = SimpleNamespace(**vars(REQUEST) | {"trace_headers": {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}})
    made = audit(tmp_path, 2 * C, spans)
    made.get_num_new_matched_tokens(asked, 0)  # type: ignore[arg-type]
    spans.record(LoadSubmitted(rank=0, job=1, request="request-1", boundary=2 * C, parts=[PART]))
    spans.record(SaveSubmitted(rank=0, job=1, request=None, parts=[PART]))
    spans.record(SaveCompleted(rank=0, job=1, ok=False, bytes=None))
    spans.record(LoadCompleted(rank=0, job=1, ok=True, bytes=8))
    spans.record(LoadCompleted(rank=0, job=9, ok=True, bytes=8))  # of one that nobody saw begin
    lookup, save, load = exporter.get_finished_spans()
    assert [one.name for one in (lookup, save, load)] == [LOOKUP, SAVE, LOAD]
    assert lookup.context is not None
    assert f"{lookup.context.trace_id:032x}" == trace, "it belongs to the request's own trace"
    assert lookup.attributes == {
        REQUEST_ID: "request-1",
        "samestate.queried_tokens": len(PROMPT),
        "samestate.local_tokens": 0,
        "samestate.result": "hit",
        "samestate.matched_tokens": 2 * C,
    }
    assert lookup.start_time <= lookup.end_time  # type: ignore[operator]
    assert (load.attributes or {})["samestate.boundary"] == 2 * C
    assert (load.attributes or {})[REQUEST_ID] == "request-1"
    assert load.status.status_code is StatusCode.UNSET
    assert save.status.status_code is StatusCode.ERROR


def test_transfers_that_nobody_reports_do_not_pile_up(
    spans: OpenTelemetrySpans, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "MOST_OPEN", 3)
    for job in range(10):
        spans.record(SaveSubmitted(rank=0, job=job, request=None, parts=[PART]))
    assert len(exporter.get_finished_spans()) == 7


@pytest.mark.parametrize(("endpoint", "made"), [(None, False), ("http://127.0.0.1:4317", True)])
def test_spans_are_made_where_vllms_tracing_is_on(endpoint: str | None, made: bool) -> None:
    config = SimpleNamespace(observability_config=SimpleNamespace(otlp_traces_endpoint=endpoint))
    assert (spans_of(config) is not None) is made
    assert spans_of(SimpleNamespace()) is None


def test_without_opentelemetry_there_are_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    assert spans_of(SimpleNamespace(observability_config=SimpleNamespace(otlp_traces_endpoint="x"))) is None
