"""A load's table: a path beside every time, what is missing in words, columns only for what there is."""

from __future__ import annotations

from rich.console import Console

from samestate.checks.latency_load import LoadCell, LoadStudy
from samestate.reports.latency_load import load_table, print_load

CELL = LoadCell(
    engine="native",
    level="c2",
    concurrency=2,
    rate=None,
    attempted="reload",
    seed=5,
    requests=8,
    answered=7,
    paths={"external-memory": 6, "unknown": 1},
    suffix=[1, 1791],
    first_token=0.25,
    first_token_90=None,
    total=1.5,
    most_open=2,
    tokens_per_second=63.8,
    latest=None,
    unlike=0,
)


def test_a_row_has_paths_and_times() -> None:
    table = load_table(LoadStudy(cells=[CELL], notes=[]))
    assert dict(zip(table.headings, table.rows[0], strict=True)) == {
        "engine": "native",
        "level": "2 open",
        "attempted": "reload",
        "path": "external-memory 6, unknown 1",
        "suffix": "1, 1,791",
        "done": "7/8",
        "open": "2",
        "TTFT s": "0.250",
        "total s": "1.500",
        "tokens/s": "63.80",
    }


def test_columns_that_only_some_phases_have() -> None:
    late = CELL.model_copy(update={"concurrency": None, "rate": 0.5, "latest": 0.002, "first_token_90": 0.4})
    table = load_table(LoadStudy(cells=[CELL, late], notes=[]))
    assert table.headings[-2:] == ["TTFT 90 %", "late s"]
    assert [row[-2:] for row in table.rows] == [["unavailable", "–"], ["0.400", "0.002"]]
    assert table.rows[1][1] == "0.5/s"


def test_a_phase_that_nothing_answered_has_no_times() -> None:
    update = {"answered": 0, "paths": {}, "suffix": [], "first_token": None, "total": None, "tokens_per_second": None}
    (row,) = load_table(LoadStudy(cells=[CELL.model_copy(update=update)], notes=[])).rows
    assert row[3:6] == ["unavailable", "–", "0/8"]
    assert row[7:] == ["unavailable"] * 3


def test_it_fits_a_terminal_and_says_its_notes() -> None:
    console = Console(width=100)
    with console.capture() as captured:
        print_load(LoadStudy(cells=[CELL], notes=["No verdict: none."]), console)
    text = captured.get()
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text
    assert "No verdict: none." in text
