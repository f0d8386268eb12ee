"""`samestate bench` under load: what it refuses, a live server's phases, and what is run on engines of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
from click.testing import Result

from samestate.cli import bench, bench_load
from samestate.cli.bench_load import load_options, load_plan
from samestate.engines.base import Ask, Generation
from samestate.lab.errors import RunError
from samestate.lab.load_driver import Level
from samestate.lab.load_engines import LoadRequest
from samestate.plans.load import load

from .test_bench import Answering

Command = Callable[..., Result]
URL = ("bench", "--url", "http://127.0.0.1:8000")


class Shared(Answering):
    """One server behind many clients; its own clock goes on by one request at a time."""

    lock = Lock()

    def generate(self, asks: Sequence[Ask], output_tokens: int, seed: int, ignore_eos: bool) -> list[Generation]:
        with self.lock:
            return super().generate(asks, output_tokens, seed, ignore_eos)


@pytest.fixture
def live(samestate: Command, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    def running(*arguments: object, **conduct: object) -> dict[str, Any]:
        server = type("Server", (Shared,), conduct)(None)
        monkeypatch.setattr(bench, "StreamingClient", lambda *given: server)
        monkeypatch.setattr(bench_load, "StreamingClient", lambda *given: server)
        monkeypatch.setattr(bench_load, "connected", lambda url: server)
        done = samestate(*URL, "--json", "--length", "4C", "--interval", 256, *arguments)
        assert done.exit_code == 0, done.output
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    return running


def test_levels_and_phases_of_a_live_server(live: Callable[..., dict[str, Any]]) -> None:
    told = live("--concurrency", "1,2", "--requests", 3, "--seed", 5)
    assert told["seed"] == 5
    cells = told["load"]["cells"]
    assert [(one["level"], one["attempted"], one["paths"]) for one in cells] == [
        (level, attempted, {path: 3})
        for level in ("c1", "c2")
        for attempted, path in (("cold", "recompute"), ("repeat", "local"), ("reload", "external"))
    ]
    assert {one["engine"] for one in cells} == {"server"}
    assert [one["suffix"] for one in cells[:3]] == [[1024], [64], [64]]
    assert any("No verdict" in note for note in told["load"]["notes"])


def test_an_open_loop_of_a_live_server(live: Callable[..., dict[str, Any]]) -> None:
    cells = live("--rate", "50", "--requests", 4)["load"]["cells"]
    assert [(one["level"], one["rate"], one["concurrency"]) for one in cells] == [("r50", 50.0, None)] * 3
    assert all(one["latest"] is not None for one in cells)


def test_without_a_reset_there_is_no_reload(live: Callable[..., dict[str, Any]]) -> None:
    cells = live("--concurrency", "2", resets=False)["load"]["cells"]
    assert [(one["attempted"], one["requests"]) for one in cells] == [("cold", 8), ("repeat", 8)]


def test_a_path_that_the_counters_contradict_is_unknown(live: Callable[..., dict[str, Any]]) -> None:
    original = Answering.counters

    def lying(self: Answering) -> Any:
        values, missing = original(self)
        values = {name: 2 * value for name, value in values.items()}
        return type(original(self))(values, missing)

    cells = live("--concurrency", "2", "--requests", 2, counters=lying)["load"]["cells"]
    assert [one["paths"] for one in cells] == [{"recompute": 2}, {"unknown": 2}, {"unknown": 2}]


def test_the_table_names_the_seed_and_gives_no_verdict(samestate: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Shared(None)
    for module in (bench, bench_load):
        monkeypatch.setattr(module, "StreamingClient", lambda *given: server)
    monkeypatch.setattr(bench_load, "connected", lambda url: server)
    done = samestate(*URL, "--length", "4C", "--interval", 256, "--concurrency", 2, "--seed", 5)
    assert done.exit_code == 0, done.output
    assert "2 open" in done.stdout
    assert "seed 5" in done.stdout
    assert "No verdict" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--concurrency", "0"], "--concurrency: '0' is no list of whole numbers"),
        (["--concurrency", "1,,2"], "--concurrency: '1,,2' is no list"),
        (["--concurrency", "2,2"], "--concurrency: 2 is there twice"),
        (["--rate", "-1"], "--rate: '-1' is no list of requests a second"),
        (["--rate", "nan"], "--rate: 'nan' is no list"),
        (["--rate", "1,1"], "--rate: 1 is there twice"),
        (["--requests", "4"], "--requests: are those of a load"),
        (["--concurrency", "2", "--trials", "3"], "--trials: is for requests one at a time"),
        (["--rate", "2", "--randomize"], "--randomize: is for requests one at a time"),
        (["--rate", "2", "--connectors", "none,native"], "--connectors: is for requests one at a time"),
    ],
)
def test_what_makes_no_sense_gets_one_line(samestate: Command, arguments: list[str], line: str) -> None:
    done = samestate("bench", *arguments)
    assert done.exit_code == 2
    assert line in done.stderr


def test_a_phase_has_at_least_twice_as_many_as_run_at_once() -> None:
    options = load_options("1,8", "0.5", None, 3)
    assert options is not None
    assert options.levels == [Level(1, None), Level(8, None), Level(None, 0.5)]
    assert (options.requests, options.seed) == (16, 3)
    assert load_options(None, None, None, None) is None
    drawn = {made.seed for _ in range(3) if (made := load_options("1", None, None, None)) is not None}
    assert len(drawn) == 3, "a new seed each time, which is printed"


def test_the_engine_has_room_for_all_of_them() -> None:
    options = load_options("1,6", None, None, 3)
    assert options is not None
    settings = load_plan(load("latency"), options).engine.settings
    assert (settings["max_num_seqs"], settings["num_gpu_blocks_override"]) == (6, 96)


def test_engines_of_our_own_are_asked_for_the_load(
    samestate: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkpoint: Path
) -> None:
    asked: list[LoadRequest] = []

    def stopped(request: LoadRequest, progress: object) -> None:
        asked.append(request)
        raise RunError("stopped here")

    monkeypatch.setattr(bench_load, "model_folder", lambda plan, model: checkpoint)
    monkeypatch.setattr(bench_load, "run_load", stopped)
    done = samestate(
        "bench", "--concurrency", "1,2", "--rate", 0.5, "--out", tmp_path / "a", "--connector", "samestate-memory"
    )
    assert done.exit_code == 2
    assert "stopped here; what was recorded is in" in done.stderr
    (request,) = asked
    assert [level.name for level in request.levels] == ["c1", "c2", "r0.5"]
    assert [arm.connector for arm in request.plan.arms] == ["none", "samestate-memory"]
    assert request.plan.analyzer.source_sha256 is not None, "frozen before first contact"
