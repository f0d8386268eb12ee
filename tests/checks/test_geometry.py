from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from samestate.checks.base import Verdict
from samestate.evidence import records as r

from . import builder as b

CHECK = "geometry"


def merged(rows: list[r.BatchRow]) -> list[r.BatchRow]:
    """The first two steps as one."""
    first, second, *rest = rows
    return [msgspec.structs.replace(first, scheduled=first.scheduled + second.scheduled), *rest]


def split(rows: list[r.BatchRow]) -> list[r.BatchRow]:
    """The first step as two."""
    first, *rest = rows
    half = msgspec.structs.replace(first, scheduled=8)
    return [half, msgspec.structs.replace(first, start=first.start + 8, scheduled=first.scheduled - 8), *rest]


def test_silent_when_schedules_agree_and_reloads_start_late(tmp_path: Path) -> None:
    result = b.result(b.build().judge(tmp_path / "a"), CHECK)
    assert (result.verdict, result.findings, result.examined) == (Verdict.PASS, [], 12)


@pytest.mark.parametrize("op", ["N32.cold", "N32.interposer-1", "N31.reload"])
def test_other_steps_are_a_mismatch(tmp_path: Path, op: str) -> None:
    run = b.build()
    b.edit_rows(run, op, split)
    judgement = run.judge(tmp_path / "a")
    finding = b.only(judgement, CHECK)
    assert (judgement.verdict, finding.code, finding.verdict) == (
        Verdict.UNKNOWN,
        "geometry_mismatch",
        Verdict.UNKNOWN,
    )
    assert finding.place.op == op and "step 0: [" in finding.message
    assert finding.evidence[0].startswith("arms/control/scheduler.jsonl:")


def test_a_control_without_a_step_at_the_boundary_is_a_mismatch(tmp_path: Path) -> None:
    run = b.build()
    b.edit_rows(run, "N32.reload", merged, arm="control")
    assert "no step of the reference starts at 16" in b.only(run.judge(tmp_path / "a"), CHECK).message


def test_drafts_are_part_of_the_shape(tmp_path: Path) -> None:
    run = b.build()
    b.edit_rows(run, "N32.cold", lambda rows: [*rows[:-1], msgspec.structs.replace(rows[-1], drafted=1)])
    assert b.only(run.judge(tmp_path / "a"), CHECK).code == "geometry_mismatch"


@pytest.mark.parametrize("kept", [slice(0, -1), slice(1, None), slice(0, 0)])
def test_missing_steps_of_both_arms_are_no_agreement(tmp_path: Path, kept: slice) -> None:
    run = b.build()
    for arm in ("control", "candidate"):
        b.edit_rows(run, "N32.cold", lambda rows: rows[kept], arm=arm)
    found = set(b.codes(run.judge(tmp_path / "a"), CHECK))
    assert found and found <= {"missing_batches", "not_cold"}


def test_a_gap_is_no_schedule(tmp_path: Path) -> None:
    run = b.build()
    for arm in ("control", "candidate"):
        b.edit_rows(run, "N32.cold", lambda rows: [rows[0], *rows[2:]], arm=arm)
    assert "tokens 16 to 32" in b.only(run.judge(tmp_path / "a"), CHECK).message


def test_sources_that_disagree_fail(tmp_path: Path) -> None:
    run = b.build()
    records, request = run.scheduler(), b.request_id("candidate", "N32.cold")
    for index, rec in enumerate(records):
        if isinstance(rec, r.BatchScheduled) and rec.rows[0].request == request:
            row = msgspec.structs.replace(rec.rows[0], drafted=1)
            assert rec.source is r.BatchSource.CONNECTOR
            records[index] = msgspec.structs.replace(rec, rows=[row])
            break
    judgement = run.judge(tmp_path / "a")
    finding = b.only(judgement, CHECK)
    assert (judgement.verdict, finding.code, finding.place.case) == (Verdict.FAIL, "sources_disagree", "N32")


def test_a_cold_run_that_hit_something_is_unknown(tmp_path: Path) -> None:
    run = b.build()
    for arm in ("control", "candidate"):
        b.edit_rows(run, "N32.cold", lambda rows: rows[1:], arm=arm)
    assert b.codes(run.judge(tmp_path / "a"), CHECK) == ["not_cold"] * 2
