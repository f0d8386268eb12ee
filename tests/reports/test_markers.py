"""A marker plan's verdict, as people and programs see it: terminal, HTML, Markdown, JUnit, Prometheus, JSON, diff."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from checks import builder as b
from checks import marker_run as k
from samestate.checks.analyzers import MARKER_FROZEN_V1, Judgement, judge
from samestate.checks.history import History
from samestate.evidence import marker_records as m
from samestate.evidence.archive import Archive
from samestate.reports.difference import difference, side
from samestate.reports.html import html
from samestate.reports.junit import junit
from samestate.reports.markdown import markdown
from samestate.reports.prometheus import prometheus
from samestate.reports.terminal import WIDTH, print_judgement
from samestate.reports.words import grid

from .made import report_of

NATURAL = k.Shape(
    "natural", [k.Step([], [5]), k.Step([6, 7, k.END], [6, 7, k.END, 9]), k.Step([k.STOP], [k.STOP])], budget=64
)
ROW = ["exact-answer", "64 forced", "stop", "2 agree", "64", "48", "56/57", "76 ×2", "75", "1"]


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return k.build([k.study_b_shape()]).write(tmp_path / "a")


def printed(judgement: Judgement) -> str:
    file = StringIO()
    print_judgement(judgement, Console(file=file, width=WIDTH, highlight=False))
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert max(map(len, lines)) <= WIDTH
    return "\n".join(lines)


def test_the_row_of_a_probe(archive: Archive) -> None:
    cases = grid(judge(archive))
    assert cases.headings == ["probe", "close", "stop", "ranks", "budget", "N", "drafts", "trace", "API", "tail"]
    assert [line.cells for line in cases.rows] == [ROW]


def test_the_row_under_the_frozen_rule(archive: Archive) -> None:
    (line,) = grid(judge(archive, MARKER_FROZEN_V1)).rows
    assert line.cells[1] == "64 unknown (seen forced)"
    assert line.cells[-1] == "1 (?)"
    assert {"trace-reconciled", "budget-close", "marker-class"} <= set(line.against)


@pytest.mark.parametrize("analyzer", [None, MARKER_FROZEN_V1])
def test_terminal(archive: Archive, analyzer: str | None) -> None:
    text = printed(judge(archive, analyzer))
    assert "compared: what each rank committed against what the API delivered, arm by arm" in text
    assert "not eligible for performance" in text
    assert "(second-close)     not exercised" in text
    if analyzer is None:
        assert "exact-answer   64 forced   stop   2 agree       64   48    56/57   76 ×2    75      1   pass" in text
        assert "verdict pass: all required checks pass" in text


def test_several_rows_and_ranks_that_differ(tmp_path: Path) -> None:
    run = k.build([k.study_b_shape(), NATURAL])
    k.edit_row(k.trace(run, 1), 70, logprob=-9.0)
    judgement = run.judge(tmp_path / "a")
    first, second = (line.cells for line in grid(judgement).rows)
    assert (first[1], first[3]) == ("64 unknown (seen forced)", "2 differ")
    assert (second[0], second[1], second[3]) == ("natural", "3 sampled", "2 agree")


def test_a_probe_without_answer_and_trace(tmp_path: Path) -> None:
    run = k.build()
    run.streams[k.ARM, "client"] = [one for one in k.client(run) if type(one).__name__ != "ProbeAnswered"]
    judgement = run.judge(tmp_path / "a")
    assert grid(judgement).rows[0].cells == ["exact-answer", "–", "?", "0", "64", "0", "–", "?", "?", "?"]
    assert judgement.table[0].verdict.value == "unknown"


def test_every_writer_shows_it(archive: Archive, tmp_path: Path) -> None:
    made = report_of(archive)
    page = html(made, archive.root, tmp_path / "page.html")
    for text in (page, markdown(made)):
        assert "64 forced" in text and "trace-reconciled" in text
    assert "samestate_" in prometheus(made)
    suites = ElementTree.fromstring(junit(made))
    assert any("exact-answer" in (case.get("name") or "") for case in suites.iter("testcase"))
    tree = json.loads(judge(archive).model_dump_json())
    assert tree["table"][0]["marker"]["marker_class"] == "forced"
    assert tree["table"][0]["marker"]["classes"] == "74 sampled, 1 forced, 1 post_stop"


def test_a_difference_names_what_changed_in_a_row(archive: Archive, tmp_path: Path) -> None:
    run = k.build()
    for rank in range(2):
        k.edit_row(k.trace(run, rank), 64, argmax=k.END)
    other = run.write(tmp_path / "b")
    found = difference(*(side(judge(one), History.read(one)) for one in (archive, other)))
    told = {(change.name, change.a, change.b) for change in found.changes if change.kind == "row"}
    assert ("served exact-answer: marker class", "forced", "natural coincident") in told


def test_text_from_an_archive_stays_text(tmp_path: Path) -> None:
    run = k.build()
    b.edit(k.scheduler(run), m.TokensDelivered, {"stop_reason": "\x1b[2J"}, finish_reason="stop")
    text = printed(run.judge(tmp_path / "a"))
    assert "\x1b" not in text
