"""A served engine as its client sees it: timed streams, counters, resets; against a server that plays its part."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from samestate.engines import served
from samestate.engines.base import Ask, EngineError, EngineSpec
from samestate.engines.openai_client import COMPLETIONS, ClientError
from samestate.engines.served import RESET, ServedVllm, StreamingClient, read_metrics, started_in
from samestate.engines.server import RunningServer, ServerSpec
from samestate.evidence.latency_records import TIER_LOADED_BYTES
from samestate.evidence.records import EXTERNAL_HITS, LOCAL_HITS, PREEMPTIONS

from .serving import Played, Playing, playing, said, streamed

METRICS = """\
# HELP vllm:num_preemptions_total Cumulative number of preemptions.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="samestate"} 2.0
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0"} 1792.0
# TYPE vllm:external_prefix_cache_hits_total counter
vllm:external_prefix_cache_hits_total{engine="0"} 3584.0
vllm:prefix_cache_hits_created{engine="0"} 1.76e+09
# TYPE vllm:kv_offload_tier_loaded_bytes_total counter
vllm:kv_offload_tier_loaded_bytes_total{tier="a"} 100.0
vllm:kv_offload_tier_loaded_bytes_total{tier="b"} 11.0
"""


def chunk(token_ids: list[int] | None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": "", "token_ids": token_ids, "finish_reason": None} | more
    return {"id": "cmpl-t1-N32.cold", "model": "tiny", "choices": [choice]}


USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}
STREAM = streamed(
    chunk([]),
    chunk([5]),
    chunk([6, 7]),
    chunk([8], finish_reason="length"),
    {"id": "cmpl-t1-N32.cold", "model": "tiny", "choices": [], "usage": USAGE},
)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "SETTLE_SECONDS", 0.0)


def spec(folder: Path, connector: str = "none") -> EngineSpec:
    return EngineSpec(
        arm="control",
        model=folder,
        settings={},
        serve_args=[],
        connector=connector,
        external_cache_bytes=0,
        audit_level="off",
        save_delay_ms=0,
        fault=None,
        stream_dir=folder,
        log_path=folder / "engine.log",
    )


@contextmanager
def client(stream: Played = STREAM, reset: Any = None) -> Iterator[tuple[StreamingClient, Playing]]:
    others = {
        "/v1/models": said({"data": [{"id": "tiny"}]}),
        "/metrics": Played(body=METRICS.encode(), content_type="text/plain; version=0.0.4; charset=utf-8"),
        RESET: said({"success": True} if reset is None else reset),
    }
    with playing(stream, others) as server:
        made = StreamingClient(RunningServer(server.url))
        made.connect()
        yield made, server
        made.close()


def test_every_event_is_timed_and_its_tokens_counted() -> None:
    with client() as (made, server):
        (answer,) = made.generate([Ask("t1-N32.cold", [1, 2, 3])], 4, 42, True)
        assert answer.token_ids == [5, 6, 7, 8]
        assert (answer.request, answer.cached_tokens, answer.finish_reason) == ("cmpl-t1-N32.cold-0", 2, "length")
        timing = answer.timing
        assert timing is not None
        assert [tokens for _, tokens in timing.events] == [0, 1, 2, 1, 0]
        times = [timing.began_ns, *(at for at, _ in timing.events), timing.done_ns]
        assert times == sorted(times)
        assert (timing.attempts, timing.concurrency) == (1, 1)
        assert timing.peer == server.url.removeprefix("http://")
        (sent,) = [json.loads(one.body) for one in server.seen if one.path == COMPLETIONS]
    assert (sent["prompt"], sent["max_tokens"], sent["seed"], sent["temperature"]) == ([1, 2, 3], 4, 42, 0.0)
    assert (sent["stream"], sent["ignore_eos"], sent["request_id"]) == (True, True, "t1-N32.cold")
    assert sent["return_token_ids"] is True


def test_a_stream_without_its_end_marker_is_no_answer() -> None:
    cut = STREAM._replace(chunks=STREAM.chunks[:-1])
    with client(cut) as (made, server):
        with pytest.raises(ClientError, match=r"without \[DONE\]"):
            made.generate([Ask("t1-N32.cold", [1])], 4, 42, True)
        assert sum(one.path == COMPLETIONS for one in server.seen) == 1, "nothing is tried again"


def test_a_server_without_token_ids_cannot_be_timed() -> None:
    with client(streamed(chunk(None))) as (made, _), pytest.raises(ClientError, match="no token ids"):
        made.generate([Ask("t1-N32.cold", [1])], 4, 42, True)


def test_requests_run_alone() -> None:
    with client() as (made, _), pytest.raises(EngineError, match="a timed one runs alone"):
        made.generate([Ask("a", [1]), Ask("b", [1])], 4, 42, True)


def test_counters_are_sums_over_labels() -> None:
    with client() as (made, _):
        counted = made.counters()
    assert counted.values[PREEMPTIONS] == 2.0
    assert counted.values[LOCAL_HITS] == 1792.0
    assert counted.values[EXTERNAL_HITS] == 3584.0
    assert counted.values[TIER_LOADED_BYTES] == 111.0
    assert counted.missing == ["vllm:prefix_cache_queries", "vllm:external_prefix_cache_queries"]


def test_an_announced_counter_without_a_value_is_zero_and_an_unknown_one_is_not_there() -> None:
    values = read_metrics("# TYPE vllm:prefix_cache_hits_total counter\n\n# TYPE python_gc counter\npython_gc 3\n")
    assert values == {LOCAL_HITS: 0.0}


def test_a_reset_is_of_the_local_cache_alone() -> None:
    with client() as (made, server):
        done = made.reset_local_cache()
        (sent,) = [one for one in server.seen if one.path.startswith("/reset")]
    assert (done.local_reset, done.external_kept, done.attempts) == (True, True, 1)
    assert "reset_external=false" in sent.path


def test_a_reset_that_is_refused_is_not_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "RESET_SECONDS", 0.0)
    with client(reset={"success": False}) as (made, _):
        assert made.reset_local_cache().local_reset is False


def test_what_was_never_started_says_so(tmp_path: Path) -> None:
    engine = ServedVllm(spec(tmp_path))
    with pytest.raises(EngineError, match="was not started"):
        engine.counters()
    engine.close()
    with pytest.raises(EngineError, match="did not say what it serves"):
        started_in(tmp_path, "control")


@pytest.mark.parametrize(("own", "expected"), [(None, "1"), ("4", "4")])
def test_both_arms_leave_as_many_cores_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str | None, expected: str
) -> None:
    """vLLM alone would take one more from an engine with a connector."""
    monkeypatch.delenv(served.RESERVED_CPUS, raising=False)
    if own is not None:
        monkeypatch.setenv(served.RESERVED_CPUS, own)
    made: list[ServerSpec] = []
    monkeypatch.setattr(served, "ServedEngine", made.append)
    for connector in ("none", "native"):
        ServedVllm(spec(tmp_path, connector))
    assert [one.environment[served.RESERVED_CPUS] for one in made] == [expected, expected]
    assert [one.core.connector for one in made if one.core] == ["none", "native"]
