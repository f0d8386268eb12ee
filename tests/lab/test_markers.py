"""Marker runs on the simulated engine and on servers that play their part: records, order, and how they end badly."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from typing_extensions import override

from engines.serving import ANSWER, Played, playing, said
from samestate.checks.analyzers import judge, source_sha256
from samestate.checks.base import Verdict
from samestate.engines.base import EngineError, EngineSpec, ProbeAsk, ProbeResult
from samestate.engines.openai_client import CHAT
from samestate.engines.server import RunningServer, Server, ServerSpec
from samestate.engines.sim.budget import SimBudgetEngine
from samestate.evidence import probe_records as p
from samestate.evidence import records as r
from samestate.evidence.archive import Archive
from samestate.evidence.canonical import sha256_hex
from samestate.evidence.marker_records import BUDGET_FAULT, REPAIRS, SAMPLING_GUARD, TRACE_ARM, TRACE_FOLDER
from samestate.lab.run import RunError, RunRequest, run_plan
from samestate.models import scripts
from samestate.plans.load import freeze, load
from samestate.plans.model import Gate, Plan

from .conftest import QuietProgress

Requests = Callable[..., RunRequest]


def frozen(name: str, **markers: Any) -> Plan:
    plan = load(name)
    assert plan.markers is not None
    changed = plan.model_copy(update={"markers": plan.markers.model_copy(update=markers)})
    return freeze(changed, source_sha256(plan.analyzer.id))


@pytest.fixture
def grid() -> Plan:
    """Six probes of `budget-grid` on its arms without drafts and with three."""
    plan = load("budget-grid")
    assert plan.markers is not None
    wanted = ("never-b16", "resident3-b8", "close8-b8", "cap16-b16", "stop-answer3-b6", "unlimited")
    probes = [probe for probe in plan.markers.probes if probe.name in wanted]
    arms = [arm for arm in plan.arms if arm.name in ("none", "draft-3")]
    markers = plan.markers.model_copy(update={"probes": probes, "allowed_probes": len(probes)})
    changed = plan.model_copy(update={"markers": markers, "arms": arms})
    return freeze(changed, source_sha256(plan.analyzer.id))


def client(archive: Archive, arm: str) -> list[r.AnyRecord]:
    return [line.rec for line in archive.records(arm, "client")]


def kinds(records: list[r.AnyRecord]) -> list[str]:
    return [type(record).__name__ for record in records]


def receipt(gate: Gate, guard: str | None, *, ok: bool = True) -> p.GateReceipt:
    return p.GateReceipt(
        gate=gate,
        ok=ok,
        reason=None if ok else "a forced row kept no token",
        source_sha256="0" * 64,
        functions=[],
        kernel="cpu",
        forced_rows=8,
        forced_right=8 if ok else 7,
        ordinary_rows=272,
        ordinary_same=272,
        guard=guard,
    )


# --- into the engine -----------------------------------------------------------------------------


def test_a_run_leaves_what_its_analyzer_needs(grid: Plan, request_for: Requests) -> None:
    progress = QuietProgress()
    result = run_plan(request_for(grid, make_engine=SimBudgetEngine), progress)
    archive = Archive.open(result.archive)
    judgement = judge(archive, None)
    assert (judgement.verdict, judgement.analyzer) == (Verdict.PASS, "marker-post-stop-v1")
    assert judge(archive, "marker-frozen-v1").verdict is Verdict.UNKNOWN, "tails past a stop are not exact"
    for arm in ("none", "draft-3"):
        opened, resolved, before, *probes, after, closed = kinds(client(archive, arm))
        assert [opened, resolved, before, after, closed] == [
            "StreamOpened",
            "PlanResolved",
            "IdentityRead",
            "IdentityRead",
            "StreamClosed",
        ]
        assert probes == ["ProbeSent", "ProbeAnswered"] * 6


def test_what_is_asked_is_the_plans(grid: Plan, request_for: Requests) -> None:
    archive = Archive.open(run_plan(request_for(grid, make_engine=SimBudgetEngine), QuietProgress()).archive)
    sent = {record.probe: record for record in client(archive, "draft-3") if isinstance(record, p.ProbeSent)}
    one = sent["stop-answer3-b6"]
    assert (one.attempt, one.retries_allowed, one.address) == (1, 0, "engine")
    assert (one.budget, one.max_tokens, one.temperature, one.top_p) == (6, 32, 0.0, 1.0)
    assert one.stop_token_ids == [scripts.token("67")]
    assert one.body_sha256 == sha256_hex(one.body.encode())
    resolved = json.loads(archive.resolved_json or b"")
    assert resolved["markers"]["start_ids"] == [scripts.START]
    assert resolved["markers"]["stop_ids"] == {"stop-answer3-b6": [scripts.token("67")]}
    for record in client(archive, "none"):
        if isinstance(record, p.ProbeAnswered):
            (digest,) = [one["sha256"] for one in resolved["inputs"] if one["case"] == record.probe]
            assert archive.inputs[digest] == record.prompt_token_ids


def test_instruments_are_told_by_the_environment(request_for: Requests) -> None:
    told: list[EngineSpec] = []

    def make(spec: EngineSpec) -> SimBudgetEngine:
        told.append(spec)
        return SimBudgetEngine(spec)

    plan = frozen("budget-sampled", guard="split-top-p", repairs=["cpu-draft-rows"])
    result = run_plan(request_for(plan, make_engine=make, fault="lost-step"), QuietProgress())
    spec = told[1]
    assert spec.environment == {
        TRACE_FOLDER: str((result.archive / "arms" / "sampled-ngram-3").resolve()),
        TRACE_ARM: "sampled-ngram-3",
        SAMPLING_GUARD: "split-top-p",
        REPAIRS: "cpu-draft-rows",
        BUDGET_FAULT: "lost-step",
    }
    assert json.loads(str(spec.settings["speculative_config"])) == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 2,
    }
    (started,) = [
        line.rec for line in Archive.open(result.archive).attempts() if isinstance(line.rec, r.AttemptStarted)
    ]
    assert started.fault == "lost-step"


def test_a_probe_that_fails_ends_the_run_and_is_not_sent_again(grid: Plan, request_for: Requests) -> None:
    class Dies(SimBudgetEngine):
        asked = 0

        @override
        def probe(self, ask: ProbeAsk) -> ProbeResult:
            Dies.asked += 1
            if ask.request == "resident3-b8":
                raise EngineError("the engine's process died\n(exit code -9)")
            return super().probe(ask)

    with pytest.raises(RunError, match="process died"):
        run_plan(request_for(grid, make_engine=Dies), QuietProgress())
    archive = Archive.open(request_for(grid).out)
    assert archive.seal_sha256 is None
    records = client(archive, "none")
    assert kinds(records)[-2:] == ["ProbeFailed", "StreamClosed"]
    assert Dies.asked == sum(isinstance(record, p.ProbeSent) for record in records)
    (failure,) = [record for record in records if isinstance(record, p.ProbeFailed)]
    assert failure.error == "the engine's process died (exit code -9)"


def test_arms_must_read_texts_alike(grid: Plan, request_for: Requests) -> None:
    class Reads(SimBudgetEngine):
        @override
        def encode(self, text: str) -> list[int]:
            ids = super().encode(text)
            return ids if self._spec.arm == "none" or len(ids) == 1 else [*ids, 7]

    with pytest.raises(RunError, match="read the plan's texts as other tokens"):
        run_plan(request_for(grid, make_engine=Reads), QuietProgress())
    (ended,) = [
        line.rec for line in Archive.open(request_for(grid).out).attempts() if isinstance(line.rec, r.AttemptEnded)
    ]
    assert ended.outcome is r.Outcome.FAILED, "the first arm had asked already"


def test_a_control_is_not_lent(grid: Plan, request_for: Requests, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="compares no arms"):
        run_plan(request_for(grid, make_engine=SimBudgetEngine, control=tmp_path), QuietProgress())


# --- over an API ------------------------------------------------------------------------------------


class _Played(RunningServer):
    """A server that was told what to play, and is `ours` as far as its process goes."""

    @property
    @override
    def model(self) -> str:
        return "tiny"

    @override
    def start(self, waiting: Callable[[float], None] = lambda seconds: None) -> None:
        pass


Serving = Callable[..., Callable[[ServerSpec], Server]]


@pytest.fixture
def served() -> Iterator[Serving]:
    """What makes servers that answer as they are told."""
    with ExitStack() as serving:

        def making(
            usual: Played, others: Mapping[str, Played] = MappingProxyType({})
        ) -> Callable[[ServerSpec], Server]:
            server = serving.enter_context(playing(usual, others))
            return lambda spec: _Played(server.url)

        yield making


ALL = ANSWER | {"tokens": [3], "version": "0.32.0", "vllm_config": {"cache_config": {"block_size": 16, "ip": "x"}}}


def close_plan() -> Plan:
    plan = load("reasoning-close")
    assert plan.markers is not None
    arms = [arm.model_copy(update={"speculation": None}) for arm in plan.arms]
    return freeze(plan.model_copy(update={"arms": arms}), source_sha256(plan.analyzer.id))


def test_a_served_probe_is_sent_once_with_everything_on_record(request_for: Requests, served: Serving) -> None:
    request = request_for(close_plan(), make_server=served(said(ALL)), run_gate=receipt)
    result = run_plan(request, QuietProgress())
    records = client(Archive.open(result.archive), "candidate")
    (sent,) = [record for record in records if isinstance(record, p.ProbeSent)]
    body = json.loads(sent.body)
    assert (body["thinking_token_budget"], body["max_completion_tokens"]) == (64, 512)
    assert (body["temperature"], body["top_p"], body["reasoning_effort"]) == (0.6, 0.95, "max")
    assert body["return_token_ids"] is True
    assert (sent.address, sent.model) == ("/v1/chat/completions", "tiny")
    (answered,) = [record for record in records if isinstance(record, p.ProbeAnswered)]
    assert (answered.token_ids, answered.request, answered.stop_reason) == ([5, 6, 7], "chatcmpl-1", 7)
    assert answered.usage == p.ProbeUsage(prompt=2, completion=3, reasoning=1)
    assert answered.echo == {"model": "tiny"}
    assert answered.anomalies == ["the prompt's 2 tokens are not the 1 that were rendered before"]
    identity = next(record for record in records if isinstance(record, p.IdentityRead))
    assert identity.missing == ["process"]
    assert identity.values["cache_config.block_size"] == 16
    assert "cache_config.ip" not in identity.values


def test_gates_come_before_the_probe_and_stop_it(request_for: Requests, served: Serving) -> None:
    def fails(gate: Gate, guard: str | None) -> p.GateReceipt:
        return receipt(gate, guard, ok=gate != "sampling")

    request = request_for(close_plan(), make_server=served(said(ALL)), run_gate=fails)
    with pytest.raises(
        RunError, match=r"gate sampling did not pass \(a forced row kept no token\), so nothing was probed"
    ):
        run_plan(request, QuietProgress())
    records = client(Archive.open(request.out), "candidate")
    assert kinds(records) == ["StreamOpened", "GateReceipt", "GateReceipt", "StreamClosed"]


def test_a_refused_probe_keeps_its_status_and_no_address(request_for: Requests, served: Serving) -> None:
    busy = said({"error": {"message": "busy"}})._replace(status=429)
    request = request_for(close_plan(), make_server=served(said(ALL), {CHAT: busy}), run_gate=receipt)
    with pytest.raises(RunError, match="answered 429"):
        run_plan(request, QuietProgress())
    records = client(Archive.open(request.out), "candidate")
    (failure,) = [record for record in records if isinstance(record, p.ProbeFailed)]
    assert failure.status == 429
    assert failure.error.startswith(f"{CHAT}: answered 429 (busy)")
    assert sum(isinstance(record, p.ProbeSent) for record in records) == 1
