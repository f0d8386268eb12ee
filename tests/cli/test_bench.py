"""`samestate bench`: what it refuses, what it would run, and a live server measured through its own counters."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from samestate.cli import bench
from samestate.cli.run import engine_maker
from samestate.engines.base import Ask, CounterValues, EngineError, Generation, ResetResult, Timing
from samestate.engines.served import ServedVllm
from samestate.evidence.records import EXTERNAL_HITS, LOCAL_HITS, LOCAL_QUERIES
from samestate.lab.run import RunRequest
from samestate.plans.load import load

Command = Callable[..., Result]
MS = 10**6
C = 64


class Answering:
    """A server with a local cache that loses its content on reset, and an external one that keeps it."""

    resets = True
    external = True
    others = 0
    """Tokens that somebody else looks up meanwhile."""
    answered: dict[str, list[int]]

    def __init__(self, server: Any) -> None:
        self.answered = {}
        self._local: set[tuple[int, ...]] = set()
        self._outside: set[tuple[int, ...]] = set()
        self._values = {LOCAL_QUERIES: 0.0, LOCAL_HITS: 0.0} | ({EXTERNAL_HITS: 0.0} if self.external else {})
        self._now = 0

    def connect(self) -> None:
        pass

    def close(self) -> None:
        pass

    def block_size(self) -> int | None:
        return C

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def counters(self) -> CounterValues:
        return CounterValues(dict(self._values), [])

    def reset_local_cache(self) -> ResetResult:
        if not self.resets:
            raise EngineError("404")
        self._local.clear()
        return ResetResult(local_reset=True, external_kept=True, running_kept=True, attempts=1)

    def generate(self, asks: Sequence[Ask], output_tokens: int, seed: int, ignore_eos: bool) -> list[Generation]:
        (ask,) = asks
        ids = tuple(ask.token_ids)
        boundary = C * ((len(ids) - 1) // C)
        prefix = ids[:boundary]
        local = boundary if prefix in self._local else 0
        outside = boundary if self.external and not local and prefix in self._outside else 0
        self._local.add(prefix)
        self._outside.add(prefix)
        self._values[LOCAL_QUERIES] += len(ids) + self.others
        self._values[LOCAL_HITS] += local
        if self.external:
            self._values[EXTERNAL_HITS] += outside
        began = self._now
        first = began + (len(ids) - local - outside) * MS
        events = [(first + at * MS, 1) for at in range(output_tokens)]
        self._now = done = events[-1][0] + MS
        token_ids = [sum(ids) % 97 + at for at in range(output_tokens)]
        timing = Timing("127.0.0.1:8000", 1, 1, began, done, events)
        return [Generation("r", token_ids, None, "length", local + outside, timing=timing)]


@pytest.fixture
def live(samestate: Command, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Run `bench --url` on such a server, and give the study."""

    def running(*arguments: object, **conduct: object) -> dict[str, Any]:
        monkeypatch.setattr(bench, "StreamingClient", type("Server", (Answering,), conduct))
        done = samestate("bench", "--url", "http://127.0.0.1:8000", "--json", "--length", "24C", *arguments)
        assert done.exit_code == 0, done.output
        study: dict[str, Any] = json.loads(done.stdout)["latency"]
        return study

    return running


def by_condition(study: dict[str, Any]) -> dict[str, dict[str, int]]:
    return {one["condition"]: one["actual"] for one in study["attempted"]}


def test_a_live_server_is_measured_with_its_own_counters(live: Callable[..., dict[str, Any]]) -> None:
    study = live("--trials", 3)
    assert by_condition(study) == {
        "ON cold": {"recompute": 3},
        "ON repeat": {"local": 3},
        "ON reload": {"external": 3},
    }
    assert (study["requests"], study["measured"], study["counted"], study["pairs"]) == (12, 9, 9, 0)
    ratios = {one["name"]: one for one in study["comparisons"]}
    assert ratios["ON cold / ON reload"]["first_token"] == pytest.approx(24.0)
    assert ratios["ON reload / ON repeat"]["first_token"] == pytest.approx(1.0)
    assert study["break_even"] == "break-even: reuse paid from 1,472 reused tokens on (measured: 1,472)"


def test_a_server_that_cannot_reset_is_asked_for_no_reload(live: Callable[..., dict[str, Any]]) -> None:
    study = live(resets=False, external=False)
    assert by_condition(study) == {"ON cold": {"recompute": 2}, "ON repeat": {"local": 2}}


def test_somebody_else_at_the_server_leaves_no_path(live: Callable[..., dict[str, Any]]) -> None:
    study = live(others=100)
    assert by_condition(study)["ON cold"] == {"unknown": 2}
    assert study["counted"] == 0
    assert "another client was there" in study["not_counted"][0]


def test_a_given_seed_shuffles_and_is_recorded(live: Callable[..., dict[str, Any]]) -> None:
    assert live("--randomize", "--seed", 5)["order"] == "shuffled by seed 5"
    drawn = live("--randomize")["order"]
    assert drawn.startswith("shuffled by seed ")
    assert live()["order"] == "ascending by trial, then by length"


def test_tables_say_that_a_live_server_gets_no_verdict(samestate: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "StreamingClient", Answering)
    done = samestate("bench", "--url", "http://127.0.0.1:8000", "--length", "24C")
    assert done.exit_code == 0, done.output
    assert "attempted against actual path" in done.stdout
    assert bench.NO_VERDICT in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--seed", "5"], "--seed: is the seed of --randomize"),
        (["--plan", "boundary"], "--plan: boundary measures no latency"),
        (["--url", "http://127.0.0.1:1", "--out", "there"], "--out: a server that runs already has its own"),
        (["--url", "http://127.0.0.1:1", "--connector", "native"], "--connector: a server that runs already"),
        (["--url", "http://127.0.0.1:1", "--connectors", "none,native"], "--connectors: a server that runs already"),
        (["--connector", "native", "--connectors", "none,native"], "--connector and --connectors: exclude each other"),
        (["--connectors", "native"], "--connectors: begins with none"),
        (["--connectors", "none"], "--connectors: begins with none"),
        (["--connectors", "none,native,native"], "--connectors: 'native' is there twice"),
        (["--connectors", "none,nativ"], "--connectors: no connector 'nativ'"),
        (["--interval", "64"], "--interval: an engine of our own says its C itself"),
        (["--length", "2D"], "no prompt length"),
        (["--length", "2C", "--length", "2C"], "--length: '2C' is there twice"),
        (["--url", "http://127.0.0.1:1"], "nobody answers there"),
        (["--url", "there"], "is no address of a server"),
    ],
)
def test_what_makes_no_sense_gets_one_line(samestate: Command, arguments: list[str], line: str) -> None:
    done = samestate("bench", *arguments)
    assert done.exit_code == 2
    assert line in done.stderr


def test_a_server_that_hides_its_block_size_needs_c(samestate: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    hiding = type("Hiding", (Answering,), {"block_size": lambda self: None})
    monkeypatch.setattr(bench, "StreamingClient", hiding)
    url = ("bench", "--url", "http://127.0.0.1:8000", "--json")
    done = samestate(*url, "--length", "2C")
    assert done.exit_code == 2
    assert "say C with --interval" in done.stderr
    assert samestate(*url, "--length", "24C", "--interval", C).exit_code == 0


def test_without_a_plan_a_quick_variant_runs(
    samestate: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkpoint: Path
) -> None:
    asked: list[RunRequest] = []

    def stopped(request: RunRequest) -> None:
        asked.append(request)
        raise EngineError("stopped here")

    monkeypatch.setattr("samestate.cli.run.engine_maker", lambda name, plan: None)
    monkeypatch.setattr("samestate.cli.run.model_folder", lambda plan, model: checkpoint)
    monkeypatch.setattr(bench, "run_request", stopped)
    samestate("bench", "--out", tmp_path / "a", "--randomize", "--seed", 3, "--connector", "samestate-memory")
    samestate("bench", "--out", tmp_path / "b", "--plan", "latency")
    quick, whole = (request.plan for request in asked)
    assert (quick.lengths, quick.output_tokens, quick.repetitions) == (["C+1", "2C+1"], 32, ["forward"])
    assert quick.latency is not None
    assert (quick.latency.trials, quick.latency.warmups, quick.latency.order_seed) == (2, 1, 3)
    assert [arm.connector for arm in quick.arms] == ["none", "samestate-memory"]
    assert quick.analyzer.source_sha256 is not None, "frozen before first contact"
    assert (whole.lengths, whole.repetitions) == (["2C-1", "2C", "3C"], ["forward", "reverse"])


def test_connectors_side_by_side_are_one_plan(
    samestate: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkpoint: Path
) -> None:
    asked: list[Any] = []

    def stopped(plan: Any) -> None:
        asked.append(plan)
        raise EngineError("stopped here")

    monkeypatch.setattr(bench, "whole_request", lambda plan, *given: plan)
    monkeypatch.setattr(bench, "run_request", stopped)
    samestate("bench", "--out", tmp_path / "a", "--connectors", "none,native,samestate-disk,lmcache-0.5.6")
    (plan,) = asked
    assert [(arm.name, arm.connector, arm.release) for arm in plan.arms] == [
        ("control", "none", None),
        ("native", "native", None),
        ("samestate-disk", "samestate-disk", None),
        ("lmcache", "lmcache", "0.5.6"),
    ]
    assert plan.latency.interleaved
    assert plan.analyzer.id == "latency-side-v1"
    assert plan.analyzer.source_sha256 is not None, "frozen before first contact"


def test_a_latency_plan_is_served_wherever_it_runs() -> None:
    pytest.importorskip("vllm")
    assert engine_maker("vllm", load("latency")) is ServedVllm
    assert engine_maker("vllm", load("boundary")) is not ServedVllm
