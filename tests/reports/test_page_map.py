from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from samestate.checks.history import History
from samestate.evidence import records as r
from samestate.evidence.archive import Archive
from samestate.reports.html import PAGE_MARKS
from samestate.reports.page_map import PageMap, PageState, page_maps, require_page_maps

Edit = Callable[[r.PageRow], r.PageRow | None]


def pages(archive: Archive, op: str = "N33.reload") -> PageMap:
    return next(one for one in page_maps(History.read(archive)) if one.op == op)


def states(one: PageMap, rank: int, group: int) -> list[PageState]:
    """By block."""
    row = next(row for row in one.rows if (row.rank, row.group) == (rank, group))
    return [run.state for run in row.runs for _ in range(run.first, run.last + 1)]


def spoiled(builder: ModuleType, folder: Path, edit: Edit, **where: Any) -> PageMap:
    """The map of N33.reload, its destination on rank 1 spoiled."""
    run = builder.build(builder.instrumented_plan(), ranks=2)
    where = {"request": builder.request_id("candidate", "N33.reload"), "direction": "load", "rank": 1} | where
    builder.edit_pages(run, edit, side=r.PageSide.DESTINATION, **where)
    return pages(run.write(folder / "a"))


def test_what_arrived_as_it_was_saved_is_equal(instrumented: Archive) -> None:
    one = pages(instrumented)
    assert (one.case, one.blocks, one.notes) == ("N33", 2, [])
    for rank in (0, 1):
        assert states(one, rank, 0) == [PageState.EQUAL, PageState.EQUAL]
        assert states(one, rank, 1)[-1] is PageState.EQUAL
        assert states(one, rank, 1)[0] in (PageState.SAVED, PageState.NONE)
    assert [one.op for one in page_maps(History.read(instrumented))] == ["N31.reload", "N32.reload", "N33.reload"]


def test_a_checkpoint_that_was_saved_and_not_loaded_is_shown(instrumented: Archive) -> None:
    assert states(pages(instrumented, "N32.reload"), 0, 1) == [PageState.EQUAL, PageState.SAVED]


@pytest.mark.parametrize(
    ("change", "state", "said"),
    [
        ({"sentinel": 48}, PageState.POISON, "poison left, 48 of 384 bytes still hold the poison"),
        ({"digest": "0" * 32}, PageState.DIFFERS, "differs from what was saved"),
    ],
)
def test_a_page_that_did_not_arrive_is_named(
    builder: ModuleType, tmp_path: Path, change: dict[str, Any], state: PageState, said: str
) -> None:
    def spoil(row: r.PageRow) -> r.PageRow:
        return msgspec.structs.replace(row, **change) if row.entry == builder.RECURRENT else row

    one = spoiled(builder, tmp_path, spoil)
    assert states(one, 1, 1)[-1] is state
    assert states(one, 1, 0) == [PageState.EQUAL, PageState.EQUAL]
    assert states(one, 0, 1)[-1] is PageState.EQUAL
    assert len(one.notes) == 1 and one.notes[0].startswith("rank 1: group 1, entry 2") and one.notes[0].endswith(said)
    worst = next(row for row in one.rows if (row.rank, row.group) == (1, 1)).runs[-1]
    assert (worst.entries, worst.of) == (1, 2)


def test_a_page_that_was_loaded_and_not_read_is_not_equal(builder: ModuleType, tmp_path: Path) -> None:
    run = builder.build(builder.instrumented_plan(), ranks=2)
    request = builder.request_id("candidate", "N33.reload")
    builder.drop(run.worker(1), r.PagesDigested, request=request, side=r.PageSide.DESTINATION)
    one = pages(run.write(tmp_path / "a"))
    assert set(states(one, 1, 0)) == {PageState.MISSING}
    assert set(states(one, 0, 0)) == {PageState.EQUAL}


def test_a_page_without_a_recorded_save_is_not_equal(builder: ModuleType, tmp_path: Path) -> None:
    run = builder.build(builder.instrumented_plan(), ranks=2)
    builder.drop(run.worker(1), r.PagesDigested, direction="save")
    one = pages(run.write(tmp_path / "a"))
    assert set(states(one, 1, 0)) == {PageState.UNSAVED}
    assert set(states(one, 0, 0)) == {PageState.EQUAL}


def test_a_guard_that_changed_is_noted(builder: ModuleType, tmp_path: Path) -> None:
    run = builder.build(builder.instrumented_plan(), ranks=2)
    builder.edit(run.worker(1), r.GuardsChecked, {"changed": [[2, 9]]})
    assert "rank 1: guarded block 9 of entry 2 changed, no page of the load" in pages(run.write(tmp_path / "a")).notes


def test_where_no_page_was_read_there_is_no_map(clean: Archive) -> None:
    assert page_maps(History.read(clean)) == []


def test_without_a_layout_there_is_a_reason_instead(builder: ModuleType, tmp_path: Path) -> None:
    run = builder.build(builder.instrumented_plan(), ranks=2)
    builder.drop(run.worker(1), r.RankRegistered)
    drawn, why = require_page_maps(History.read(run.write(tmp_path / "a")))
    assert (drawn, "rank 1 never registered its cache" in why) == ([], True)


def test_the_documentation_explains_every_mark() -> None:
    text = (Path(__file__).parents[2] / "docs/reports.md").read_text()
    assert set(re.findall(r"^\| `(.)` \|", text, re.M)) == set(PAGE_MARKS.values())
    assert set(PAGE_MARKS) == set(PageState)
