from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from samestate.checks.base import Verdict
from samestate.evidence import records as r

from . import builder as b

CHECK = "page-coverage"
COLD, RELOAD = b.request_id("candidate", "N32.cold"), b.request_id("candidate", "N32.reload")


def zero(row: r.PageRow) -> r.PageRow:
    return msgspec.structs.replace(row, nonzero=0) if row.entry == b.RECURRENT else row


def test_silent_when_every_entry_moved_something(tmp_path: Path) -> None:
    result = b.result(b.build(b.instrumented_plan(), ranks=2).judge(tmp_path / "a"), CHECK)
    assert (result.verdict, result.findings) == (Verdict.PASS, [])
    assert result.summary == "6/6 entries of 2 rank(s) loaded non-zero bytes"


@pytest.mark.parametrize(
    ("request_", "side", "moment"),
    [
        (COLD, r.PageSide.STORED, "completed"),
        (RELOAD, r.PageSide.STORED, "submitted"),
        (RELOAD, r.PageSide.DESTINATION, "completed"),
    ],
)
def test_a_page_that_arrives_as_zeros_fails(tmp_path: Path, request_: str, side: r.PageSide, moment: str) -> None:
    run = b.build(b.instrumented_plan())
    direction = "save" if request_ == COLD else "load"
    b.edit_pages(run, zero, request=request_, direction=direction, side=side, moment=moment)
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict) == ("zero_page", Verdict.FAIL)
    assert (finding.place.rank, finding.place.group, finding.place.layer) == (0, 1, "b")
    assert f"({side.value}); 20 bytes of its source were not" in finding.message


def test_an_entry_that_was_only_ever_zero_is_vacuous(tmp_path: Path) -> None:
    run = b.build(b.instrumented_plan(), ranks=2)
    b.edit_pages(run, zero, rank=1)
    judgement = run.judge(tmp_path / "a")
    finding = b.only(judgement, CHECK)
    assert (finding.code, finding.verdict, finding.place.rank) == ("vacuous", Verdict.UNKNOWN, 1)
    assert judgement.verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("kind", "pool", "missed"),
    [
        (r.EntryKind.TAIL, 8, []),  # C = 16: at a boundary no pool of 8 is open
        (r.EntryKind.TAIL, 12, ["vacuous"]),
        (r.EntryKind.INDEXER, 8, ["vacuous"]),
    ],
)
def test_a_tail_that_is_never_moved_is_missed_only_where_a_boundary_needs_it(
    tmp_path: Path, kind: r.EntryKind, pool: int, missed: list[str]
) -> None:
    run = b.build(b.instrumented_plan())
    (before,) = [rec for rec in run.worker(0) if isinstance(rec, r.RankRegistered)]
    group = msgspec.structs.replace(before.engine_groups[0], group=2, layers=["c"], tokens_per_block=pool)
    entry = msgspec.structs.replace(before.entries[0], entry=3, layer="c", engine_group=2, kind=kind)
    fields = {"engine_groups": [*before.engine_groups, group], "entries": [*before.entries, entry]}
    b.edit(run.worker(0), r.RankRegistered, fields)
    result = b.result(run.judge(tmp_path / "a"), CHECK)
    assert [one.code for one in result.findings] == missed
    assert result.summary == f"3/{3 + len(missed)} entries of 1 rank(s) loaded non-zero bytes"


@pytest.mark.parametrize("change", [{"entry": 9}, {"block": b.BLOCKS}])
def test_a_row_outside_the_layout_fails(tmp_path: Path, change: dict[str, int]) -> None:
    run = b.build(b.instrumented_plan())

    def stray(row: r.PageRow) -> r.PageRow:
        return msgspec.structs.replace(row, **change) if row.entry == b.CONV else row

    b.edit_pages(run, stray, request=RELOAD, direction="load", side=r.PageSide.DESTINATION)
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict) == ("outside_layout", Verdict.FAIL)


def test_without_page_rows_it_is_unknown(tmp_path: Path) -> None:
    run = b.build(b.instrumented_plan())
    b.drop(run.worker(), r.PagesDigested)
    assert b.result(run.judge(tmp_path / "a"), CHECK).verdict is Verdict.UNKNOWN
