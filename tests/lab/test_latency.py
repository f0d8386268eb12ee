"""A latency run through the lab, on an engine that answers as a served one does: what it leaves, in which order."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from typing_extensions import override

from samestate.checks.analyzers import Judgement, judge, source_sha256
from samestate.checks.base import Verdict
from samestate.engines.base import Ask, Generation, Timing
from samestate.engines.sim import SimEngine
from samestate.evidence import records as r
from samestate.evidence.archive import Archive
from samestate.evidence.latency_records import HostSampled, RequestTimed
from samestate.lab.run import RunRequest, run_plan
from samestate.plans.load import freeze, load
from samestate.plans.model import Plan

from .conftest import QuietProgress

Requests = Callable[..., RunRequest]
PEER = "127.0.0.1:4711"


class Timed(SimEngine):
    """The simulated engine, its answers dressed as streams."""

    prepared = 0

    @override
    def prepare(self) -> None:
        Timed.prepared += 1

    @override
    def generate(self, asks: Sequence[Ask], output_tokens: int, seed: int, ignore_eos: bool) -> list[Generation]:
        began = time.monotonic_ns()
        (answer,) = super().generate(asks, output_tokens, seed, ignore_eos)
        events = [(time.monotonic_ns(), 1) for _ in answer.token_ids]
        timing = Timing(PEER, 1, 1, began, time.monotonic_ns(), events)
        return [answer._replace(timing=timing)]


@pytest.fixture
def plan() -> Plan:
    plan = load("latency")
    assert plan.latency is not None
    update = {
        "engine": plan.engine.model_copy(update={"settings": {"block_size": 16, "max_model_len": 2048}}),
        "lengths": ["60C-1", "60C"],
        "output_tokens": 4,
        "latency": plan.latency.model_copy(update={"trials": 2}),
    }
    return freeze(plan.model_copy(update=update), source_sha256("latency-v1"))


@pytest.fixture
def judged(plan: Plan, request_for: Requests) -> tuple[Archive, Judgement]:
    Timed.prepared = 0
    archive = Archive.open(run_plan(request_for(plan, make_engine=Timed), QuietProgress()).archive)
    return archive, judge(archive)


def test_only_the_engine_keeps_it_from_a_pass(judged: tuple[Archive, Judgement]) -> None:
    """No time of a simulated engine is a measurement; all else is as it must be."""
    archive, judgement = judged
    assert archive.arms == ["candidate", "candidate-2", "control", "control-2"]
    against = {one.check for one in judgement.results if one.verdict in (Verdict.FAIL, Verdict.UNKNOWN)}
    assert against == {"latency-instruments"}, [one for one in judgement.results if one.check in against]
    study = judgement.latency
    assert study is not None
    assert (study.requests, study.measured, study.counted) == (60, 40, 0)
    assert study.not_counted[0].endswith("ran the simulated engine")


def test_host_and_times_stand_around_each_request(judged: tuple[Archive, Judgement]) -> None:
    records = [line.rec for line in judged[0].records("candidate", "client")]
    mine = [rec for rec in records if getattr(rec, "op", None) == "t1-N960.reload"]
    kinds = [type(rec) for rec in mine]
    assert kinds == [
        r.CountersRead,
        HostSampled,
        r.OperationStarted,
        r.OperationOutput,
        RequestTimed,
        r.OperationEnded,
        HostSampled,
        r.CountersRead,
    ]
    (timed,) = [rec for rec in mine if isinstance(rec, RequestTimed)]
    assert (timed.peer, timed.concurrency, timed.attempts) == (PEER, 1, 1)
    assert sum(event.tokens for event in timed.events) == 4


def test_nothing_works_beside_what_is_timed(judged: tuple[Archive, Judgement]) -> None:
    assert Timed.prepared == 0


def test_other_plans_sample_no_host(request_for: Requests, small: Plan, tmp_path: Path) -> None:
    archive = Archive.open(run_plan(request_for(small), QuietProgress()).archive)
    assert not [line for line in archive.records("candidate", "client") if isinstance(line.rec, HostSampled)]
