from __future__ import annotations

from pathlib import Path

import pytest

from samestate.checks.base import Verdict
from samestate.evidence import records as r

from . import builder as b

CHECK = "coverage"
OP = "N32.interposer-1"
REQUEST = b.request_id("candidate", OP)


def test_silent_on_a_complete_run(tmp_path: Path) -> None:
    result = b.result(b.build(ranks=2).judge(tmp_path / "a"), CHECK)
    assert (result.verdict, result.findings) == (Verdict.PASS, [])


@pytest.mark.parametrize("arm", ["control", "candidate"])
def test_an_engine_that_did_not_stop_in_order_is_unknown(tmp_path: Path, arm: str) -> None:
    run = b.build()
    b.drop(run.client(arm), r.EngineStopped)
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict, finding.place.arm) == ("missing_engine_stop", Verdict.UNKNOWN, arm)


def test_what_the_connector_should_record_of_every_request(tmp_path: Path) -> None:
    run = b.build()
    b.drop(run.scheduler(), r.RequestFinished, request=REQUEST)
    kept = [rec for rec in run.scheduler() if not _of_connector(rec)]
    assert len(kept) < len(run.scheduler())
    run.scheduler()[:] = kept
    findings = b.result(run.judge(tmp_path / "a"), CHECK).findings
    assert [finding.code for finding in findings] == ["missing_batches", "missing_finish"]
    assert {(finding.place.op, finding.verdict) for finding in findings} == {(OP, Verdict.UNKNOWN)}


def test_blocks_that_no_step_gave_out_are_unknown_where_pages_are_read(tmp_path: Path) -> None:
    run = b.build(b.instrumented_plan())
    assert b.codes(run.judge(tmp_path / "a"), CHECK) == []
    b.drop(run.scheduler(), r.BlocksAssigned, request=REQUEST)
    finding = b.only(run.judge(tmp_path / "b"), CHECK)
    assert (finding.code, finding.verdict, finding.place.op) == ("missing_assignment", Verdict.UNKNOWN, OP)


def _of_connector(rec: r.Record) -> bool:
    return isinstance(rec, r.BatchScheduled) and (rec.source, rec.rows[0].request) == (r.BatchSource.CONNECTOR, REQUEST)


@pytest.mark.parametrize(
    ("reason", "verdict"), [("stop", Verdict.FAIL), ("abort", Verdict.FAIL), (None, Verdict.UNKNOWN)]
)
def test_an_answer_that_did_not_end_by_its_length(tmp_path: Path, reason: str | None, verdict: Verdict) -> None:
    run = b.build()
    b.edit(run.client(), r.OperationOutput, {"finish_reason": reason}, op=OP)
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict, finding.place.op) == ("wrong_finish", verdict, OP)


def test_an_answer_may_end_early_where_the_plan_lets_it(tmp_path: Path) -> None:
    run = b.build(b.small_plan().model_copy(update={"ignore_eos": False}))
    b.edit(run.client(), r.OperationOutput, {"finish_reason": "stop"}, op=OP)
    assert b.codes(run.judge(tmp_path / "a"), CHECK) == []


@pytest.mark.parametrize(("when", "past"), [("before", r.OperationStarted), ("after", r.OperationEnded)])
def test_a_counter_read_on_the_wrong_side_fails(tmp_path: Path, when: str, past: type[r.Record]) -> None:
    run = b.build()
    client = run.client()
    (read,) = [rec for rec in client if isinstance(rec, r.CountersRead) and (rec.op, rec.when) == (OP, when)]
    client.remove(read)
    (at,) = [i for i, rec in enumerate(client) if type(rec) is past and rec.op == OP]
    client.insert(at + 1 if when == "before" else at, read)
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict, finding.place.op) == ("counters_misplaced", Verdict.FAIL, OP)


def test_counters_that_were_read_after_everything_fail(tmp_path: Path) -> None:
    run = b.build()
    client = run.client()
    reads = [rec for rec in client if isinstance(rec, r.CountersRead)]
    client[:] = [rec for rec in client if not isinstance(rec, r.CountersRead)] + reads
    assert set(b.codes(run.judge(tmp_path / "a"), CHECK)) == {"counters_misplaced"}


@pytest.mark.parametrize("kind", [r.Lookup, r.BatchScheduled, r.RequestFinished])
def test_a_record_of_another_time_is_unknown(tmp_path: Path, kind: type[r.Record]) -> None:
    run = b.build()
    records = run.scheduler()
    moved = [rec for rec in records if type(rec) is kind and _request(rec) == REQUEST]
    records[:] = [rec for rec in records if rec not in moved] + moved
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict, finding.place.op) == ("outside_operation", Verdict.UNKNOWN, OP)
    assert finding.message.endswith("after its end")


def test_a_worker_on_another_clock_is_unknown(tmp_path: Path) -> None:
    run = b.build()
    worker = run.worker()
    worker[:] = [rec for rec in worker if not isinstance(rec, b.Mark)]
    findings = b.result(run.judge(tmp_path / "a"), CHECK).findings
    assert {finding.code for finding in findings} == {"outside_operation"}
    assert all(finding.message.endswith("before its start") for finding in findings)


def test_a_save_may_come_after_the_answer(tmp_path: Path) -> None:
    run = b.build()
    worker = run.worker()
    saves = [rec for rec in worker if getattr(rec, "job", None) == 15]
    assert [type(rec) for rec in saves] == [r.SaveSubmitted, r.SaveCompleted]
    worker[:] = [rec for rec in worker if rec not in saves] + saves
    assert b.codes(run.judge(tmp_path / "a"), CHECK) == []


def _request(rec: r.Record) -> str:
    return rec.rows[0].request if isinstance(rec, r.BatchScheduled) else getattr(rec, "request", "")
