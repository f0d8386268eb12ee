"""A small latency plan on served engines, from frozen plan to study; no time in it is held against anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from quiet import Silent
from samestate.checks.analyzers import judge, source_sha256
from samestate.checks.base import Verdict
from samestate.checks.history import History
from samestate.engines.served import ServedVllm, StreamingClient
from samestate.engines.server import ServedEngine, ServerSpec
from samestate.evidence.archive import Archive
from samestate.evidence.latency_records import RequestTimed
from samestate.evidence.records import OperationName
from samestate.lab.live_latency import LivePlan, measure
from samestate.lab.run import RunRequest, run_plan
from samestate.plans.latency import side_by_side
from samestate.plans.load import freeze, load
from samestate.plans.model import Connector
from samestate.reports.latency_waterfall import waterfalls

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.deep]


def test_one_pair_of_served_engines_passes_and_names_every_path(tiny_model: Path, tmp_path: Path) -> None:
    plan = load("latency")
    assert plan.latency is not None
    update = {
        "lengths": ["C+1"],
        "output_tokens": 8,
        "repetitions": ["forward"],
        "latency": plan.latency.model_copy(update={"trials": 1}),
    }
    plan = freeze(plan.model_copy(update=update), source_sha256(plan.analyzer.id))
    request = RunRequest(plan, tiny_model, tmp_path / "archive", ServedVllm, None, None, None, [])
    archive = Archive.open(run_plan(request, Silent()).archive)
    judgement = judge(archive)
    assert judgement.verdict is Verdict.PASS, [one for one in judgement.results if one.verdict is not Verdict.PASS]
    study = judgement.latency
    assert study is not None
    assert (study.requests, study.measured, study.counted) == (10, 5, 5)
    paths = {one.condition: one.actual for one in study.attempted}
    assert paths["OFF cold"] == paths["ON cold"] == {"recompute": 1}
    assert paths["ON reload"] == {"external-memory": 1}
    (speed,) = study.copies
    assert (speed.arm, speed.rank, speed.route) == ("candidate", 0, "host-to-host")
    assert 1e8 < speed.rate < 1e12
    (cost,) = study.reloads
    assert cost.inputs == 1, cost.note
    assert cost.copying == pytest.approx(cost.moved[0] / speed.rate)
    (waterfall,) = waterfalls(History.read(archive))
    assert [piece.name for piece in waterfall.pieces][:5] == ["arrival", "lookup", "queue", "load", "schedule"]
    for arm in ("control", "candidate"):
        timed = [line.rec for line in archive.records(arm, "client") if isinstance(line.rec, RequestTimed)]
        assert {sum(event.tokens for event in one.events) for one in timed} == {8}


@pytest.mark.regression
def test_served_engines_of_two_ranks_load_on_both(tiny_model: Path, tmp_path: Path) -> None:
    """A served engine of several ranks did not start on CPU where the host has one memory node."""
    plan = load("latency")
    assert plan.latency is not None
    update = {
        "lengths": ["C+1"],
        "output_tokens": 4,
        "repetitions": ["forward"],
        "latency": plan.latency.model_copy(update={"trials": 1, "warmups": 0}),
        "engine": plan.engine.model_copy(update={"serve_args": ["--tensor-parallel-size", "2"]}),
    }
    plan = freeze(plan.model_copy(update=update), source_sha256(plan.analyzer.id))
    request = RunRequest(
        plan, tiny_model, tmp_path / "archive", ServedVllm, None, None, None, list(plan.engine.serve_args)
    )
    judgement = judge(Archive.open(run_plan(request, Silent()).archive))
    assert judgement.verdict is Verdict.PASS, [one for one in judgement.results if one.verdict is not Verdict.PASS]
    assert judgement.latency is not None
    assert [one.rank for one in judgement.latency.copies] == [0, 1]
    assert {one.condition: one.actual for one in judgement.latency.attempted}["ON reload"] == {"external-memory": 1}


def test_engines_side_by_side_take_turns_and_pass(tiny_model: Path, tmp_path: Path) -> None:
    plan = load("latency")
    assert plan.latency is not None
    update = {
        "lengths": ["C+1"],
        "output_tokens": 8,
        "latency": plan.latency.model_copy(update={"trials": 1, "warmups": 0}),
    }
    connectors: dict[Connector, str | None] = dict.fromkeys(("none", "native", "samestate-memory"))
    plan = side_by_side(plan.model_copy(update=update), connectors)
    plan = freeze(plan, source_sha256(plan.analyzer.id))
    request = RunRequest(plan, tiny_model, tmp_path / "archive", ServedVllm, None, None, None, [])
    judgement = judge(Archive.open(run_plan(request, Silent()).archive))
    assert judgement.verdict is Verdict.PASS, [one for one in judgement.results if one.verdict is not Verdict.PASS]
    assert judgement.latency is not None
    assert [one.arm for one in judgement.latency.copies] == ["native", "samestate-memory"]
    assert {one.condition: one.actual for one in judgement.latency.attempted if one.condition.endswith("reload")} == {
        "native reload": {"external-memory": 1},
        "samestate-memory reload": {"external-memory": 1},
    }


def test_a_live_server_tells_its_paths_by_counters(tiny_model: Path, tmp_path: Path) -> None:
    settings = load("latency").engine.settings
    server = ServedEngine(ServerSpec("live", tiny_model, settings, [], tmp_path / "server.log"))
    client = StreamingClient(server)
    try:
        client.connect()
        assert client.block_size() == 1792
        asked = LivePlan([1793], 1, 0, 4, "ledger-en", 42, None, "here")
        answers = list(measure(client, asked, lambda done, total, op: None))
    finally:
        client.close()
    assert [one.attempted for one in answers] == [OperationName.COLD, OperationName.REPEAT, OperationName.RELOAD]
    cold, repeat, reload = ((one.grown("vllm:prefix_cache_hits"), one.generation.token_ids) for one in answers)
    assert cold[0] == reload[0] == 0, "without a cache outside, a reset leaves nothing to reload"
    assert repeat[0] == 1792
    assert cold[1] == repeat[1] == reload[1]
