"""The tables of a latency study: what is missing says so, and ranges are called what they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from checks.latency_run import build, copies, small_plan
from samestate.checks.analyzers import Judgement, judge
from samestate.checks.history import History
from samestate.reports.html import html
from samestate.reports.latency_plot import path_plot
from samestate.reports.latency_tables import WordTable, notes, summary, tables
from samestate.reports.markdown import markdown
from samestate.reports.model import report
from samestate.reports.terminal import print_judgement


@pytest.fixture
def judgement(tmp_path: Path) -> Judgement:
    return build().judge(tmp_path / "a")


@pytest.fixture
def by_title(judgement: Judgement) -> dict[str, WordTable]:
    assert judgement.latency is not None
    return {one.title: one for one in tables(judgement.latency)}


def test_attempted_against_actual_is_study_a_s_table(by_title: dict[str, WordTable]) -> None:
    table = by_title["attempted against actual path, measured requests"]
    assert table.headings[:4] == ["attempted", "requests", "recompute", "local"]
    assert ["OFF repeat", "18", "12", "6", "0", "0", "0"] in table.rows
    assert ["ON repeat", "18", "0", "0", "18", "0", "0"] in table.rows


def test_what_nothing_stands_behind_is_unavailable(by_title: dict[str, WordTable]) -> None:
    rows = by_title["TTFT by actual path"].rows
    assert ["31", "local", "0", "–", "–", "unavailable"] in rows
    assert all(row[-1] == "unavailable" for row in by_title["over all groups"].rows)


def test_unequal_suffixes_show_both_and_no_ratio(by_title: dict[str, WordTable]) -> None:
    rows = by_title["ratios: medians of each input's own ratio"].rows
    assert [
        "1",
        "48",
        "OFF repeat / ON repeat",
        "32 / 16",
        "3",
        "not comparable: 32 tokens computed against 16",
        "",
    ] in rows


def test_every_row_fills_its_table(by_title: dict[str, WordTable]) -> None:
    assert len(by_title) == 6, "no worker measured its copies, so these have no table"
    for table in by_title.values():
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.headings)}


def test_the_terminal_prints_them_under_their_names(judgement: Judgement) -> None:
    console = Console(width=100, record=True, file=None, quiet=False)
    with console.capture() as captured:
        print_judgement(judgement, console)
    text = " ".join(captured.get().split())
    assert "2 paired repetition(s), 1 task, 12 inputs (9 measured), 120 requests (90 measured, 90 count)" in text
    assert text.count("range over 6 groups") == 6
    assert "break-even: reuse paid from 16 reused tokens on (measured: 16, 32)" in text


def test_only_a_few_reasons_are_printed(tmp_path: Path) -> None:
    from samestate.evidence.latency_records import RequestTimed

    run = build(small_plan())
    for number in (1, 2, 3):
        for op in ("cold", "repeat-1"):
            run.edit("control", RequestTimed, lambda rec: None, op=f"t{number}-N32.{op}")
    study = run.judge(tmp_path / "a").latency
    assert study is not None
    lines = notes(study)
    assert "not counted: 3 more" in lines
    assert summary(study).count("84 count") == 1


# --- on a page ------------------------------------------------------------------------------------


def test_bars_by_path_on_one_axis(judgement: Judgement) -> None:
    assert judgement.latency is not None
    plot = path_plot(judgement.latency)
    assert len(plot.bars) == 15
    assert [bar.length for bar in plot.bars if bar.length] == ["N 31", "N 32", "N 48"]
    assert all(0 <= bar.whole <= 1 for bar in plot.bars)
    drawn = {(bar.path, bool(bar.whole), bar.text == "unavailable") for bar in plot.bars}
    assert ("external-disk", False, True) in drawn
    assert ("recompute", True, False) in drawn
    tops = [bar.y for bar in plot.bars]
    assert tops == sorted(set(tops))
    assert tops[-1] < plot.height


def test_the_page_and_the_summary_hold_the_study(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    archive = build().write(tmp_path / "a")
    made = report(judge(archive), History.read(archive))
    page = html(made, tmp_path / "a", None)
    assert '<h2 id="latency">Latency study</h2>' in page
    assert "range over 6 groups (not CI)" in page
    assert "suffix 15" in page
    text = markdown(made)
    assert "attempted against actual path" in text
    assert "unavailable" in text


def test_other_plans_have_no_such_section(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    from checks.builder import build as boundary_run

    archive = boundary_run().write(tmp_path / "a")
    made = report(judge(archive), History.read(archive))
    assert 'id="latency"' not in html(made, tmp_path / "a", None)
    assert "attempted against actual path" not in markdown(made)


# --- a reload against copy and local hit ----------------------------------------------------------


def test_a_reload_s_cost_stands_beside_its_goal_or_says_what_is_missing(tmp_path: Path) -> None:
    run = build()
    copies(run, "candidate", 2e9)
    study = run.judge(tmp_path / "a").latency
    assert study is not None
    by_title = {one.title: one for one in tables(study)}
    (costs,) = [one for title, one in by_title.items() if title.startswith("reload against its bytes")]
    assert costs.rows[0][:4] == ["candidate", "31", "16", "544"]
    assert costs.rows[0][-2:] == ["unavailable: no local hit of the same input and p", "unavailable"]
    assert costs.rows[-1][4] == "unavailable", "the other engine measured no copy"
    (speed,) = by_title["copy speed, measured by the workers of this run"].rows
    assert speed == ["candidate", "0", "host-to-host", "cpu", "1,000,000", "3", "2.00", "0.50–2.00"]
    met = study.reloads[0].model_copy(update={"ratio": 1.19, "note": ""})
    missed = met.model_copy(update={"ratio": 1.21})
    rows = next(
        one
        for one in tables(study.model_copy(update={"reloads": [met, missed]}))
        if one.title.startswith("reload against its bytes")
    ).rows
    assert [row[-2:] for row in rows] == [["1.190", "met"], ["1.210", "not met"]]
