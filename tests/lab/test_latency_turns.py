"""Connectors side by side through the lab: engines take turns, and what a run shows that did not is found."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from samestate.checks.analyzers import Judgement, judge, source_sha256
from samestate.checks.base import CheckResult, Verdict
from samestate.checks.latency_side import BOUNDARY, RELOADS, TURNS
from samestate.engines.base import Ask, Generation, Timing
from samestate.engines.sim import SimEngine
from samestate.evidence import records as r
from samestate.evidence.archive import Archive
from samestate.lab import latency_turns
from samestate.lab.run import RunRequest, run_plan
from samestate.plans.latency import SIDE_V1, side_by_side, trials, turns
from samestate.plans.load import freeze, load
from samestate.plans.model import Connector, Plan
from samestate.reports.words import grid

from .conftest import QuietProgress

Requests = Callable[..., RunRequest]
ARMS = ["control", "native", "dictionary"]


class Timed(SimEngine):
    """The simulated engine, its answers dressed as streams."""

    early_ns = 0
    """By how much every request of one arm claims to have begun earlier."""

    @override
    def generate(self, asks: Sequence[Ask], output_tokens: int, seed: int, ignore_eos: bool) -> list[Generation]:
        began = time.monotonic_ns()
        (answer,) = super().generate(asks, output_tokens, seed, ignore_eos)
        began -= self.early_ns
        events = [(time.monotonic_ns(), 1) for _ in answer.token_ids]
        return [answer._replace(timing=Timing("127.0.0.1:4711", 1, 1, began, time.monotonic_ns(), events))]


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
    connectors: dict[Connector, str | None] = dict.fromkeys(("none", "native", "dictionary"))
    return freeze(side_by_side(plan.model_copy(update=update), connectors), source_sha256(SIDE_V1))


def run(plan: Plan, request_for: Requests, **more: Any) -> tuple[Archive, Judgement]:
    archive = Archive.open(run_plan(request_for(plan, **({"make_engine": Timed} | more)), QuietProgress()).archive)
    return archive, judge(archive)


def result(judgement: Judgement, check: str) -> CheckResult:
    return next(one for one in judgement.results if one.check == check)


def test_only_the_engine_keeps_it_from_a_pass(plan: Plan, request_for: Requests) -> None:
    archive, judgement = run(plan, request_for)
    assert sorted(archive.arms) == sorted(ARMS)
    against = {one.check for one in judgement.results if one.verdict in (Verdict.FAIL, Verdict.UNKNOWN)}
    assert against == {"latency-instruments"}, [one for one in judgement.results if one.check in against]
    assert result(judgement, TURNS).examined == 6 * (2 + 3 + 3)
    assert result(judgement, RELOADS).examined == result(judgement, BOUNDARY).examined == 6
    assert [row.arm for row in judgement.table] == ["native"] * 6 + ["dictionary"] * 6
    made = grid(judgement)
    assert made.headings[:2] == ["engine", "case"]
    assert {line.cells[0] for line in made.rows} == {"native", "dictionary"}
    study = judgement.latency
    assert study is not None
    assert study.pairs == 1
    assert list(dict.fromkeys(one.condition for one in study.cells)) == [
        "OFF cold",
        "OFF repeat",
        *(f"{arm} {name}" for arm in ARMS[1:] for name in ("cold", "repeat", "reload")),
    ]
    assert {one.name for one in study.comparisons} == {
        "OFF cold / native reload",
        "OFF cold / dictionary reload",
        "native cold / OFF cold",
        "dictionary cold / OFF cold",
        "dictionary reload / native reload",
    }
    assert study.break_even.startswith("native: break-even")
    assert "dictionary: break-even" in study.break_even


def test_every_engine_begins_as_often(plan: Plan) -> None:
    taken = turns(plan)
    assert [arms[0] for _, arms in taken] == ARMS * 2
    assert all(sorted(arms) == sorted(ARMS) for _, arms in taken)
    assert [trial for trial, _ in taken] == trials(plan)


def test_the_archive_shows_the_turns(plan: Plan, request_for: Requests) -> None:
    archive, _ = run(plan, request_for)
    started = [
        (line.t_ns, arm, line.rec.case)
        for arm in ARMS
        for line in archive.records(arm, "client")
        if isinstance(line.rec, r.OperationStarted)
    ]
    order = list(dict.fromkeys((arm, case) for _, arm, case in sorted(started)))
    assert order[:4] == [
        ("control", "w1-N959"),
        ("native", "w1-N959"),
        ("dictionary", "w1-N959"),
        ("native", "w1-N960"),
    ]


def test_other_turns_than_planned_are_found(plan: Plan, request_for: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency_turns, "turns", lambda plan: [(trial, ARMS) for trial in trials(plan)])
    found = result(run(plan, request_for)[1], TURNS)
    assert found.verdict is Verdict.FAIL
    assert [one.code for one in found.findings] == ["out_of_turn"]
    assert "turn 4: arm control made w1-N960, planned was arm native" in found.findings[0].message


def test_engines_that_overlap_are_found(plan: Plan, request_for: Requests) -> None:
    def make(spec: Any) -> Timed:
        engine = Timed(spec)
        engine.early_ns = 10**10 if spec.arm == "dictionary" else 0
        return engine

    found = result(run(plan, request_for, make_engine=make)[1], TURNS)
    assert found.verdict is Verdict.FAIL
    assert "engines_overlap" in {one.code for one in found.findings}
    assert any("before arm dictionary was done" in one.message for one in found.findings)


def test_a_wrong_boundary_of_one_engine_is_its_own(plan: Plan, request_for: Requests) -> None:
    """Only `native` has the fault; the other engine's rows stay as they are."""

    def make(spec: Any) -> Timed:
        return Timed(spec._replace(fault="full-lookup" if spec.arm == "native" else None))

    judgement = run(plan, request_for, make_engine=make)[1]
    found = result(judgement, BOUNDARY)
    assert found.verdict is Verdict.FAIL
    assert {one.place.arm for one in found.findings} == {"native"}


def test_an_engine_that_did_not_come_is_unknown(plan: Plan, request_for: Requests, tmp_path: Path) -> None:
    class Lost(Exception):
        pass

    class Dying(Timed):
        @override
        def reset_local_cache(self) -> Any:
            raise Lost

    def make(spec: Any) -> Timed:
        return Dying(spec) if spec.arm == "dictionary" else Timed(spec)

    with pytest.raises(Lost):
        run_plan(request_for(plan, make_engine=make), QuietProgress())
    judgement = judge(Archive.open(tmp_path / "archive"))
    assert judgement.verdict is Verdict.UNKNOWN
    assert result(judgement, TURNS).verdict is Verdict.UNKNOWN
