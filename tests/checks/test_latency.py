"""Checks of a latency study: silent on study A's shape, and each firing where its rule is broken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from samestate.checks.analyzers import Judgement
from samestate.checks.base import Verdict
from samestate.evidence import records as r
from samestate.evidence.latency_records import HostSampled, RequestTimed, StreamEvent

from .builder import codes, result
from .latency_run import LatencyRun, build, small_plan

Spoil = Callable[[LatencyRun], None]
replace = msgspec.structs.replace
ONE = {"op": "t2-N32.reload"}
"""A measured request of the candidate."""


@pytest.fixture
def run() -> LatencyRun:
    return build()


def test_study_a_s_shape_passes(run: LatencyRun, tmp_path: Path) -> None:
    judgement = run.judge(tmp_path / "a")
    assert judgement.verdict is Verdict.PASS, [one for one in judgement.results if one.verdict is not Verdict.PASS]
    assert result(judgement, "latency-outputs").summary == (
        "12/12 inputs have one output each, over 120 requests (90 measured)"
    )
    assert result(judgement, "latency-times").summary == (
        "in each of 2 repetitions: 45 measured and 15 warm-up requests timed, host sampled around each"
    )
    assert [one.arms for one in judgement.repetitions] == [["control", "candidate"], ["candidate-2", "control-2"]]
    assert judgement.performance_eligible
    assert len(judgement.table) == 24
    assert {(row.tokens, row.boundary, row.credited, row.suffix) for row in judgement.table} == {
        (31, 16, 16, 15),
        (32, 16, 16, 16),
        (48, 32, 32, 16),
    }


def timed(**change: Any) -> Spoil:
    return lambda run: run.edit("candidate", RequestTimed, lambda rec: replace(rec, **change), **ONE)


def recorded(kind: type[Any], match: dict[str, object], **change: Any) -> Spoil:
    return lambda run: run.edit("candidate", kind, lambda rec: replace(rec, **change), **match)


def dropped(kind: type[Any], **match: object) -> Spoil:
    return lambda run: run.edit("candidate", kind, lambda rec: None, **match)


def a_step_of_two(run: LatencyRun) -> None:
    row = r.BatchRow(request="else", start=0, scheduled=1, drafted=0)

    def joined(rec: r.BatchScheduled) -> r.BatchScheduled:
        return replace(rec, rows=[*rec.rows, row]) if rec.rows[0].request == "candidate-t2-N32.cold-0" else rec

    run.edit("candidate", r.BatchScheduled, joined, source=r.BatchSource.SCHEDULER)


@pytest.mark.parametrize(
    ("check", "code", "verdict", "spoil"),
    [
        ("latency-instruments", "instrument_level", Verdict.FAIL, recorded(r.EngineStarted, {}, audit_level="digest")),
        ("latency-instruments", "not_an_engine", Verdict.UNKNOWN, recorded(r.EngineStarted, {}, engine="sim")),
        (
            "settings",
            "setting_differs",
            Verdict.FAIL,
            recorded(r.EngineStarted, {}, settings={"cache_config.block_size": 16, "cpu_worker.cpus": "0,1"}),
        ),
        ("latency-serial", "not_loopback", Verdict.FAIL, timed(peer="10.0.0.7:8000")),
        ("latency-serial", "not_loopback", Verdict.FAIL, timed(peer="cache.example:8000")),
        ("latency-serial", "not_serial", Verdict.FAIL, timed(concurrency=2)),
        ("latency-serial", "not_serial", Verdict.FAIL, a_step_of_two),
        ("latency-serial", "retried", Verdict.FAIL, timed(attempts=2)),
        ("latency-times", "not_timed_once", Verdict.UNKNOWN, dropped(RequestTimed, **ONE)),
        ("latency-times", "tokens_disagree", Verdict.FAIL, timed(events=[StreamEvent(at_ns=1, tokens=7)])),
        ("latency-times", "times_reversed", Verdict.FAIL, timed(done_ns=1)),
        ("latency-times", "other_request", Verdict.FAIL, timed(request="else")),
        ("latency-times", "outside_operation", Verdict.FAIL, timed(done_ns=10**12)),
        ("latency-times", "host_not_sampled", Verdict.UNKNOWN, dropped(HostSampled, when="after", **ONE)),
        ("latency-outputs", "output_differs", Verdict.FAIL, recorded(r.OperationOutput, ONE, token_ids=[1] * 8)),
        (
            "latency-outputs",
            "cold_differs",
            Verdict.UNKNOWN,
            recorded(r.OperationOutput, {"op": "t2-N32.cold"}, token_ids=[1] * 8),
        ),
        ("latency-outputs", "wrong_length", Verdict.FAIL, recorded(r.OperationOutput, ONE, token_ids=[1] * 7)),
        ("latency-outputs", "missing_output", Verdict.UNKNOWN, dropped(r.OperationOutput, **ONE)),
        ("latency-paths", "path_unknown", Verdict.UNKNOWN, dropped(r.Lookup, request="candidate-t2-N32.reload-0")),
        (
            "latency-paths",
            "counter_disagrees",
            Verdict.FAIL,
            recorded(r.CountersRead, {"when": "after", **ONE}, values={r.LOCAL_HITS: 0.0, r.EXTERNAL_HITS: 1.0}),
        ),
        (
            "latency-reloads",
            "reset_not_confirmed",
            Verdict.UNKNOWN,
            recorded(r.CacheReset, {"op": "t2-N32.reset"}, local_reset=False),
        ),
        (
            "latency-reloads",
            "external_not_kept",
            Verdict.UNKNOWN,
            recorded(r.CacheReset, {"op": "t2-N32.reset"}, external_kept=False),
        ),
        (
            "latency-reloads",
            "local_hit",
            Verdict.UNKNOWN,
            recorded(r.Lookup, {"request": "candidate-t2-N32.reload-0"}, local_tokens=16, matched_tokens=0),
        ),
        (
            "latency-reloads",
            "missing_rank",
            Verdict.UNKNOWN,
            dropped(r.LoadSubmitted, request="candidate-t2-N32.reload-0"),
        ),
        (
            "boundary",
            "wrong_boundary",
            Verdict.FAIL,
            recorded(r.LoadSubmitted, {"request": "candidate-t2-N32.reload-0"}, boundary=32),
        ),
    ],
)
def test_a_broken_rule_is_found(
    run: LatencyRun, tmp_path: Path, check: str, code: str, verdict: Verdict, spoil: Spoil
) -> None:
    spoil(run)
    judgement = run.judge(tmp_path / "a")
    assert code in codes(judgement, check)
    assert result(judgement, check).verdict is verdict
    assert judgement.verdict is not Verdict.PASS


def test_an_output_that_only_another_repetition_has_is_found(run: LatencyRun, tmp_path: Path) -> None:
    """Within each repetition all five conditions agree."""
    for arm in ("control-2", "candidate-2"):
        for op in ("cold", "repeat-1", *(("reload",) if arm == "candidate-2" else ())):
            run.edit(arm, r.OperationOutput, lambda rec: replace(rec, token_ids=[9] * 8), op=f"t1-N31.{op}")
    judgement = run.judge(tmp_path / "a")
    assert codes(judgement, "latency-outputs") == ["cold_differs"]
    assert judgement.latency is not None
    assert judgement.latency.counted == 80, "ten requests of one input do not count"


def test_a_prompt_that_was_there_already_is_not_cold(run: LatencyRun, tmp_path: Path) -> None:
    request = "control-t1-N48.cold-0"

    def begun(rec: r.BatchScheduled) -> r.BatchScheduled:
        row = rec.rows[0]
        if row.request != request or row.start:
            return rec
        return replace(rec, rows=[r.BatchRow(request=request, start=16, scheduled=32, drafted=0)])

    run.edit("control", r.BatchScheduled, begun)
    judgement = run.judge(tmp_path / "a")
    assert "cold_reused" in codes(judgement, "latency-paths")


def test_a_lost_arm_is_no_pass(run: LatencyRun, tmp_path: Path) -> None:
    del run.arms["control-2"]
    judgement = run.judge(tmp_path / "a")
    assert judgement.verdict is Verdict.UNKNOWN
    assert "missing_arm" in codes(judgement, "latency-outputs")
    assert judgement.latency is not None
    assert judgement.latency.pairs == 1


@pytest.mark.parametrize(
    ("connector", "path"),
    [
        ("samestate-memory", "external-memory"),
        ("samestate-disk", "external-disk"),
        ("samestate-valkey", "external-remote"),
        ("samestate-object", "external-remote"),
    ],
)
def test_every_place_behind_our_cache_has_its_path(tmp_path: Path, connector: str, path: str) -> None:
    judgement: Judgement = build(small_plan(connector)).judge(tmp_path / "a")
    assert result(judgement, "latency-paths").verdict is Verdict.PASS
    assert judgement.latency is not None
    reloads = judgement.latency.attempted[-1]
    assert (reloads.condition, reloads.actual) == ("ON reload", {path: 18})


def test_a_place_that_is_not_counted_is_not_guessed(tmp_path: Path) -> None:
    run = build(small_plan("samestate-disk"))
    for arm in ("candidate", "candidate-2"):

        def uncounted(rec: r.CountersRead) -> r.CountersRead:
            return replace(rec, values={name: value for name, value in rec.values.items() if name in r.COUNTERS})

        run.edit(arm, r.CountersRead, uncounted)
    judgement = run.judge(tmp_path / "a")
    assert set(codes(judgement, "latency-paths")) == {"place_unknown"}
    assert judgement.verdict is Verdict.UNKNOWN


def test_an_archive_of_another_plan_has_no_study(tmp_path: Path) -> None:
    from .builder import build as boundary_run

    assert boundary_run().judge(tmp_path / "a").latency is None
