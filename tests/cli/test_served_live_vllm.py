"""What `samestate serve-args` prints, served as it stands; then watched and traced. Two starts of a real server."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from click.testing import CliRunner, Result

pytest.importorskip("vllm")
pytest.importorskip("grpc")
pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc")

from cli.collecting import Collector, Received
from samestate.cli import commands
from samestate.engines.lmcache_server import hold_port
from samestate.engines.processes import kill_session, log_tail, session_members
from samestate.engines.served import RESET
from samestate.engines.shared_memory import remove
from samestate.evidence.records import EXTERNAL_HITS, LOCAL_HITS, LoadCompleted
from samestate.evidence.stream import read_lines

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.deep]

OWN = (
    *("--max-model-len", "1024", "--max-num-seqs", "2", "--enforce-eager"),
    *("--kv-cache-memory-bytes", str(1 << 28), "--num-gpu-blocks-override", "24"),
    *("--host", "127.0.0.1", "--served-model-name", "tiny"),
)
"""Few blocks, so that a request soon wants those of the one before, whose saves are then waited for."""
OUTPUT = 4
TRACE = "0af7651916cd43dd8448eb211c80319c"
START_SECONDS = 300.0


class Printed(NamedTuple):
    line: str
    interval: int
    """C, as it stands beside the line."""


class Answer(NamedTuple):
    request: str
    tokens: list[int]
    cached: int


class Live:
    """A server that a shell was given the line of."""

    def __init__(self, line: str, port: int, log: Path, **more: str) -> None:
        """`more`: for its environment."""
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        # `python` and `vllm` are those of this environment, as in the shell that the line is pasted into.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = os.environ | {"PATH": path, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"} | more
        with log.open("wb") as out:
            self._shell = subprocess.Popen(
                ["sh", "-c", line], stdout=out, stderr=out, env=environment, start_new_session=True
            )
        self._client = httpx.Client(base_url=self.url, timeout=120, trust_env=False)
        try:
            self._await_health()
        except BaseException:  # a Ctrl-C too: nothing of it may stay
            self.close()
            raise

    def _await_health(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            assert self._shell.poll() is None and time.monotonic() < deadline, log_tail(self.log)
            time.sleep(0.25)

    def _answers(self) -> bool:
        try:
            return self._client.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def ask(self, prompt: list[int], **headers: str) -> Answer:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}
        done = self._client.post("/v1/completions", json=body | {"return_token_ids": True}, headers=headers)
        assert done.status_code == 200, done.text
        said = done.json()
        details = said["usage"]["prompt_tokens_details"] or {"cached_tokens": 0}
        return Answer(said["id"], said["choices"][0]["token_ids"], details["cached_tokens"])

    def forget(self) -> None:
        """Its own cache; the external one stays. A finished request's blocks are given back a little later."""
        deadline = time.monotonic() + 20
        while not self._client.post(RESET).json()["success"]:
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def counted(self, name: str, **labels: str) -> float:
        """The sum of a counter over the labels that are not named."""
        found = re.findall(rf"^{name}_total\{{(.*)\}} (\S+)$", self._client.get("/metrics").text, re.MULTILINE)
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(value) for said, value in found if all(one in said for one in wanted))

    def close(self) -> None:
        self._client.close()
        members = session_members(self._shell.pid)
        with suppress(ProcessLookupError):
            os.killpg(self._shell.pid, signal.SIGTERM)
        for _ in range(200):
            if len(session_members(self._shell.pid)) <= 1:
                break
            time.sleep(0.1)
        kill_session(self._shell)
        remove(members)


def prompt(seed: int, tokens: int) -> list[int]:
    return [2 + (seed * 31 + 7 * n * n) % 499 for n in range(tokens)]


def free_port() -> int:
    with hold_port() as held:
        return int(held.getsockname()[1])


def watched(url: str, *options: str) -> Result:
    return CliRunner().invoke(commands.samestate, ["watch", url, "--once", *options])


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def printed(folder: Path, collector: Collector) -> Printed:
    """What the command writes, asked of the installed vLLM; with tracing on."""
    own = [*OWN, "--port", str(free_port()), "--otlp-traces-endpoint", collector.endpoint]
    options = ["--connector", "samestate-disk", "--store", f"file://{folder / 'pages'}?budget=256MiB"]
    options += ["--memory", "64MiB", "--audit-dir", str(folder / "audit"), "--reset", "--serve-args", shlex.join(own)]
    done = subprocess.run(
        [sys.executable, "-m", "samestate", "serve-args", "qwen3-next-tiny", *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = re.search(r"^C = ([\d,]+) \(asked of ", done.stderr, re.MULTILINE)
    assert told, done.stderr
    return Printed(done.stdout, int(told[1].replace(",", "")))


class Traffic(NamedTuple):
    """A prompt cold, again, and again once the engine's own cache is gone; then a crowd."""

    live: Live
    interval: int
    cold: Answer
    repeat: Answer
    reload: Answer
    load_bytes: float
    """By vLLM's own counter, of that one reload."""
    hits: tuple[float, float]
    """Local and external tokens, by vLLM's own counters, before the crowd."""


@pytest.fixture(scope="module")
def traffic(printed: Printed, folder: Path) -> Iterator[Traffic]:
    (port,) = re.findall(r"--port (\d+)", printed.line)
    live = Live(printed.line, int(port), folder / "server.log")
    try:
        long = prompt(1, 3 * printed.interval + 5)
        cold, repeat = live.ask(long), live.ask(long)
        live.forget()
        reload = live.ask(long, traceparent=f"00-{TRACE}-b7ad6b7169203331-01")
        loaded, hits = (
            live.counted("vllm:kv_offload_load_bytes"),
            (live.counted(LOCAL_HITS), live.counted(EXTERNAL_HITS)),
        )
        with ThreadPoolExecutor(6) as crowd:
            list(crowd.map(lambda seed: live.ask(prompt(seed, 7 * printed.interval + 5)), range(2, 26)))
        yield Traffic(live, printed.interval, cold, repeat, reload, loaded, hits)
    finally:
        live.close()


def test_the_printed_line_is_served_and_what_its_engine_forgot_our_cache_gives_back(traffic: Traffic) -> None:
    boundary = 3 * traffic.interval
    assert [one.cached for one in (traffic.cold, traffic.repeat, traffic.reload)] == [0, boundary, boundary]
    assert traffic.hits == (boundary, boundary), "the repeat was a local hit, the reload an external one"
    assert traffic.cold.tokens == traffic.repeat.tokens == traffic.reload.tokens
    assert traffic.load_bytes > 0


def test_watch_shows_what_was_reused_and_waited_for_and_no_fault(traffic: Traffic) -> None:
    done = watched(traffic.live.url, "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["models"] == ["tiny"]
    assert facts["interval"] == traffic.interval
    assert 0 < facts["rates"]["local"] < 1
    assert 0 < facts["rates"]["external"] < 1
    by_source = facts["sources"]
    assert by_source["local_compute"] > by_source["external_kv_transfer"] >= 3 * traffic.interval
    assert by_source["local_cache_hit"] >= 3 * traffic.interval
    assert sum(by_source.values()) == facts["prompt_tokens"]
    audit = facts["audit"]
    assert audit["reloads"] >= 1
    # vLLM's own counter leaves out what a request reloads after it was preempted.
    assert audit["reloaded_tokens"] >= traffic.live.counted(EXTERNAL_HITS) >= 3 * traffic.interval
    assert audit["boundary_faults"] == 0
    assert audit["waits"] > 0 and audit["wait_seconds"] > 0
    assert facts["lookups"]["hit"] >= 1 and facts["lookups"]["miss"] >= 1
    assert facts["tier_misses"]["absent"] > 0
    assert facts["alarms"] == []
    text = watched(traffic.live.url).output
    assert f"C = {traffic.interval}; " in text
    assert "0 with a boundary that no state has" in text
    assert "external kv transfer" in text


def test_look_ups_loads_and_saves_reach_a_collector(traffic: Traffic, collector: Collector, folder: Path) -> None:
    def of_the_reload(span: Received) -> bool:
        return str(span.attributes.get("gen_ai.request.id", "")).startswith(traffic.reload.request)

    (load,) = collector.await_spans(lambda span: span.name == "samestate.load" and of_the_reload(span))
    assert load.attributes["samestate.bytes"] == traffic.load_bytes, "as many as vLLM itself counted"
    assert load.attributes["samestate.boundary"] == 3 * traffic.interval
    assert load.nanoseconds > 0
    records = [line.rec for line in read_lines(folder / "audit" / "worker-0.jsonl")]
    loads = [one for one in records if isinstance(one, LoadCompleted)]
    assert loads[0].bytes == traffic.load_bytes
    (lookup,) = collector.await_spans(lambda span: span.name == "samestate.lookup" and span.trace == TRACE)
    assert of_the_reload(lookup)
    assert lookup.attributes["samestate.result"] == "hit"
    assert lookup.attributes["samestate.matched_tokens"] == 3 * traffic.interval
    assert collector.await_spans(lambda span: span.name == "llm_request" and span.trace == TRACE), "vLLM's own"
    saves = collector.await_spans(lambda span: span.name == "samestate.save")
    assert saves and all(span.attributes["samestate.bytes"] > 0 for span in saves)


def test_a_collector_that_is_gone_costs_spans_and_no_answer(traffic: Traffic, collector: Collector) -> None:
    collector.close()
    assert traffic.live.ask(prompt(1, 3 * traffic.interval + 5)).tokens == traffic.cold.tokens
    assert json.loads(watched(traffic.live.url, "--json").stdout)["errors"] in (None, 0)
    traffic.live.close()


@pytest.fixture(scope="module")
def faulty(traffic: Traffic, printed: Printed, folder: Path) -> Iterator[tuple[Live, Collector]]:
    """The same line over the same pages, without tracing, with a fault in the audit's options.

    OpenTelemetry's own variable names a collector all the same: what anybody sends would come in.
    """
    traffic.live.close()
    other = Collector()
    line = re.sub(r"--otlp-traces-endpoint \S+", "", printed.line).rstrip().removesuffix("\\")
    line = re.sub(r"--port \d+", f"--port {(port := free_port())}", line)
    line = line.replace('"arm": "live",', '"arm": "live", "fault": "full-lookup",')
    live = Live(line, port, folder / "faulty.log", OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=other.endpoint)
    yield live, other
    live.close()
    other.close()


def test_without_tracing_there_are_no_spans_and_a_restart_goes_on_from_the_store(
    traffic: Traffic, faulty: tuple[Live, Collector]
) -> None:
    live, other = faulty
    again = live.ask(prompt(1, 3 * traffic.interval + 5))
    assert (again.tokens, again.cached) == (traffic.cold.tokens, 3 * traffic.interval)
    time.sleep(6)  # OpenTelemetry sends what it has every five seconds
    assert live.counted("vllm:kv_offload_tier_loaded_pages", tier="1:samestate-disk") > 0
    assert other.spans, "vLLM's processes tell of their own start"
    assert [span for span in other.spans if span.name.startswith("samestate")] == []


def test_watch_shows_a_fault_as_an_alarm_and_exit_code_1(traffic: Traffic, faulty: tuple[Live, Collector]) -> None:
    live, _ = faulty
    right = watched(live.url, "--json")
    assert right.exit_code == 0, right.output
    exact = prompt(90, 2 * traffic.interval)
    live.ask(exact)
    live.forget()
    live.ask(exact)
    done = watched(live.url, "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["alarms"] == ["1 reloads with a boundary that no state has"]
    assert "alarm: 1 reloads with a boundary that no state has" in watched(live.url).output
