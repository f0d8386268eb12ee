from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from samestate.checks.base import Verdict
from samestate.evidence import records as r
from samestate.plans.load import load

from . import builder as b

CHECK = "coverage"
OP = "N32.reload"


def test_silent_on_a_complete_run(tmp_path: Path) -> None:
    result = b.result(b.build().judge(tmp_path / "a"), CHECK)
    assert (result.verdict, result.findings, result.examined) == (Verdict.PASS, [], 30)


def test_a_run_of_five_operations_is_rejected(tmp_path: Path) -> None:
    run = b.build(load("boundary"), 1792)
    for arm in ("control", "candidate"):
        records = run.client(arm)
        starts = [index for index, rec in enumerate(records) if isinstance(rec, r.OperationStarted)]
        del records[starts[5] - 1 :]
    judgement = run.judge(tmp_path / "a")
    assert (judgement.verdict, b.result(judgement, CHECK).verdict) == (Verdict.UNKNOWN, Verdict.UNKNOWN)
    messages = [finding.message for finding in b.result(judgement, CHECK).findings]
    assert "arm candidate: 5 of 45 planned operations done, first missing: N3584.cold" in messages
    assert b.result(judgement, CHECK).summary.startswith("control 5/45 operations, 4/36 generations, 1/9 resets")


@pytest.mark.parametrize(
    ("kind", "op", "code"),
    [
        (r.OperationStarted, OP, "missing_operations"),
        (r.OperationOutput, OP, "missing_output"),
        (r.OperationEnded, OP, "missing_end"),
        (r.CacheReset, "N32.reset", "missing_reset"),
    ],
)
def test_missing_records_are_unknown(tmp_path: Path, kind: type[r.Record], op: str, code: str) -> None:
    run = b.build()
    b.drop(run.client(), kind, op=op)
    judgement = run.judge(tmp_path / "a")
    finding = b.only(judgement, CHECK)
    assert (finding.code, finding.verdict) == (code, Verdict.UNKNOWN)
    assert (finding.place.arm, finding.place.case, finding.place.op) == ("candidate", "N32", op)


def test_a_missing_arm_is_unknown(tmp_path: Path) -> None:
    judgement = b.build(arms=("control",)).judge(tmp_path / "a")
    assert (judgement.verdict, b.only(judgement, CHECK).code) == (Verdict.UNKNOWN, "missing_arm")


def test_a_missing_engine_is_unknown_and_a_restarted_one_a_fail(tmp_path: Path) -> None:
    run = b.build()
    b.drop(run.client(), r.EngineStarted)
    assert b.only(run.judge(tmp_path / "a"), CHECK).code == "missing_engine"
    run = b.build()
    run.client().append(run.client()[0])
    assert b.only(run.judge(tmp_path / "b"), CHECK).code == "engine_restarted"


def test_a_failed_operation_is_unknown(tmp_path: Path) -> None:
    run = b.build()
    b.edit(run.client(), r.OperationEnded, {"ok": False, "error": "the engine died"}, op=OP)
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict) == ("operation_failed", Verdict.UNKNOWN)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"prompt_tokens": 31}, "wrong_prompt_length"),
        ({"prompt_sha256": "0" * 64}, "wrong_prompt"),
        ({"name": r.OperationName.COLD}, "wrong_operation"),
        ({"case": "N31"}, "wrong_operation"),
    ],
)
def test_an_operation_that_contradicts_the_plan_fails(tmp_path: Path, change: dict[str, object], code: str) -> None:
    run = b.build()
    b.edit(run.client(), r.OperationStarted, change, op=OP)
    judgement = run.judge(tmp_path / "a")
    finding = b.only(judgement, CHECK)
    assert (judgement.verdict, finding.code, finding.verdict) == (Verdict.FAIL, code, Verdict.FAIL)
    assert finding.evidence[0].startswith("arms/candidate/client.jsonl:")


def test_a_repeated_operation_fails(tmp_path: Path) -> None:
    run = b.build()
    again = [rec for rec in run.client() if getattr(rec, "op", None) == OP]
    run.client().extend(again)
    assert b.codes(run.judge(tmp_path / "a"), CHECK) == ["repeated_operation", "missing_counters"]


def test_an_unplanned_operation_fails(tmp_path: Path) -> None:
    run = b.build()
    extra = [rec for rec in run.client() if getattr(rec, "op", None) == OP]
    run.client().extend(msgspec.structs.replace(rec, op="N99.cold") for rec in extra)
    assert set(b.codes(run.judge(tmp_path / "a"), CHECK)) == {"unplanned_operation", "request_reused"}


def test_operations_out_of_order_fail(tmp_path: Path) -> None:
    run = b.build()
    moved = [rec for rec in run.client() if getattr(rec, "op", None) == "N31.cold"]
    run.client()[:] = [rec for rec in run.client() if rec not in moved] + moved
    assert set(b.codes(run.judge(tmp_path / "a"), CHECK)) == {"out_of_order", "outside_operation"}


def test_overlapping_operations_fail(tmp_path: Path) -> None:
    run = b.build()
    (ended,) = [rec for rec in run.client() if isinstance(rec, r.OperationEnded) and rec.op == "N31.cold"]
    run.client().remove(ended)
    run.client().append(ended)
    assert b.codes(run.judge(tmp_path / "a"), CHECK) == ["overlap", "counters_misplaced"]


def test_two_answers_to_one_operation_fail(tmp_path: Path) -> None:
    run = b.build()
    records = run.client()
    (index,) = [i for i, rec in enumerate(records) if isinstance(rec, r.OperationOutput) and rec.op == OP]
    records.insert(index, records[index])
    assert b.codes(run.judge(tmp_path / "a"), CHECK) == ["repeated_output"]


def test_one_request_for_two_operations_fails(tmp_path: Path) -> None:
    run = b.build()
    b.edit(run.client(), r.OperationOutput, {"request": b.request_id("candidate", "N32.cold")}, op=OP)
    assert b.codes(run.judge(tmp_path / "a"), CHECK) == ["request_reused", "outside_operation"]


def test_an_output_of_a_reset_fails(tmp_path: Path) -> None:
    run = b.build()
    (output,) = [rec for rec in run.client() if isinstance(rec, r.OperationOutput) and rec.op == OP]
    run.client().append(msgspec.structs.replace(output, op="N32.reset", request="other"))
    assert b.codes(run.judge(tmp_path / "a"), CHECK) == ["wrong_operation"]


def test_inputs_that_are_not_distinct_fail(tmp_path: Path) -> None:
    run = b.build()
    inputs = run.resolved.inputs
    inputs[1] = inputs[1].model_copy(update={"sha256": inputs[0].sha256})
    assert "inputs_not_distinct" in b.codes(run.judge(tmp_path / "a"), CHECK)


@pytest.mark.parametrize("field", ["logprobs", "margins"])
def test_as_many_log_probabilities_as_tokens(tmp_path: Path, field: str) -> None:
    run = b.build()
    b.edit(run.client(), r.OperationOutput, {field: [-0.5]}, op="N32.reload")
    finding = b.only(run.judge(tmp_path / "a"), "coverage")
    assert (finding.code, finding.verdict, finding.place.op) == ("wrong_length", Verdict.FAIL, "N32.reload")
