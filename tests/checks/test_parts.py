from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from samestate.checks.base import Verdict
from samestate.evidence import records as r

from . import builder as b

CHECK = "transfers"
OP = "N33.reload"
REQUEST = b.request_id("candidate", OP)
"""Loads [0, 32): two attention pages and one of state."""


def change_parts(run: b.Run, change: Callable[[r.TransferPart], r.TransferPart | None], request: str = REQUEST) -> None:
    """Change the parts of a request's transfers and, alike, the bytes that their completions report."""
    worker, moved = run.worker(), {}
    for index, rec in enumerate(worker):
        if isinstance(rec, r.LoadSubmitted | r.SaveSubmitted) and rec.request == request:
            parts = [part for part in map(change, rec.parts) if part is not None]
            worker[index] = msgspec.structs.replace(rec, parts=parts)
            moved[rec.job] = sum(part.bytes for part in parts)
        if isinstance(rec, r.LoadCompleted | r.SaveCompleted) and rec.job in moved:
            worker[index] = msgspec.structs.replace(rec, bytes=moved[rec.job])


def of(group: int, **change: object) -> Callable[[r.TransferPart], r.TransferPart]:
    return lambda part: msgspec.structs.replace(part, **change) if part.group == group else part


def test_silent_when_whole_saved_prefixes_are_loaded(tmp_path: Path) -> None:
    result = b.result(b.build(ranks=2).judge(tmp_path / "a"), CHECK)
    assert (result.verdict, result.findings) == (Verdict.PASS, [])


def test_a_load_without_attention_pages_is_unknown(tmp_path: Path) -> None:
    run = b.build()
    change_parts(run, lambda part: part if part.group else None)
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict, finding.place.op) == ("missing_part", Verdict.UNKNOWN, OP)
    assert (finding.place.rank, finding.place.group, finding.place.boundary) == (0, 0, 32)


@pytest.mark.parametrize("change", [{"pages": 1, "bytes": 32}, {"pages": 1, "bytes": 32, "first_block": 1}])
def test_attention_pages_short_of_the_boundary_are_unknown(tmp_path: Path, change: dict[str, object]) -> None:
    run = b.build()
    change_parts(run, of(0, **change))
    assert b.codes(run.judge(tmp_path / "a"), CHECK) == ["missing_part"]


def test_attention_pages_that_say_so_themselves_fail(tmp_path: Path) -> None:
    run = b.build()
    change_parts(run, of(0, boundary=16))
    finding = b.only(run.judge(tmp_path / "a"), "boundary")
    assert (finding.code, finding.verdict, finding.place.group) == ("part_boundary", Verdict.FAIL, 0)


def test_state_of_another_block_is_unknown(tmp_path: Path) -> None:
    run = b.build()
    change_parts(run, of(1, first_block=77))
    assert b.codes(run.judge(tmp_path / "a"), CHECK) == ["missing_part", "not_saved_here"]


@pytest.mark.parametrize("request_", [REQUEST, b.request_id("candidate", "N33.cold")])
def test_bytes_that_are_not_those_of_the_blocks_fail(tmp_path: Path, request_: str) -> None:
    run = b.build()
    change_parts(run, of(1, bytes=1), request_)
    findings = b.result(run.judge(tmp_path / "a"), CHECK).findings
    assert {(finding.code, finding.verdict, finding.place.group) for finding in findings} == {
        ("bytes_disagree", Verdict.FAIL, 1)
    }


def test_without_any_save_nothing_is_known_to_be_saved(tmp_path: Path) -> None:
    run = b.build()
    for kind in (r.SaveSubmitted, r.SaveCompleted):
        b.drop(run.worker(), kind)
    judgement = run.judge(tmp_path / "a")
    assert judgement.verdict is Verdict.UNKNOWN
    assert b.codes(judgement, CHECK) == ["not_saved_here"] * 3 + ["no_saves"]


def test_a_load_of_what_was_saved_later_is_unknown(tmp_path: Path) -> None:
    run = b.build()
    saves = [rec for rec in run.worker() if getattr(rec, "job", None) == 1]
    run.worker()[:] = [rec for rec in run.worker() if rec not in saves] + saves
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.place.op) == ("not_saved_here", "N31.reload")
