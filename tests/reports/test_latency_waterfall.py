"""Pieces of a reload: bounded by records alone, in order; one that lost a record is told as missing, never filled."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from checks.latency_run import LatencyRun, build
from samestate.checks.analyzers import judge
from samestate.checks.history import History
from samestate.evidence import records as r
from samestate.evidence.latency_records import RequestTimed, StreamEvent
from samestate.reports.html import html
from samestate.reports.latency_waterfall import ASYNC, Waterfall, waterfalls
from samestate.reports.latency_waterfall_plot import waterfall_plot
from samestate.reports.model import report

PIECES = ["arrival", "lookup", "queue", "load", "schedule", "suffix compute", "first token"]
OP = "t1-N32.reload"
REQUEST = f"candidate-{OP}-0"


def serial(run: LatencyRun) -> LatencyRun:
    """Its engines say that no step overlaps another; the client has a token a while after its step."""
    for arm in run.arms:
        run.edit(arm, r.EngineStarted, lambda rec: msgspec.structs.replace(rec, settings=rec.settings | {ASYNC: False}))
        run.edit(arm, RequestTimed, _later)
    return run


def _later(rec: RequestTimed) -> RequestTimed:
    events = [StreamEvent(at_ns=event.at_ns + 10**6, tokens=event.tokens) for event in rec.events]
    return msgspec.structs.replace(rec, events=events, done_ns=rec.done_ns + 10**6)


def drawn(run: LatencyRun, root: Path) -> list[Waterfall]:
    return waterfalls(History.read(run.write(root / "archive")))


def only(run: LatencyRun) -> LatencyRun:
    """A run whose other reloads of this length were never timed, so that `OP` is the one that is drawn."""
    for number in (2, 3):
        run.edit("candidate", RequestTimed, lambda rec: None, op=f"t{number}-N32.reload")
    return run


def one(found: list[Waterfall]) -> Waterfall:
    (mine,) = [one for one in found if (one.arm, one.tokens) == ("candidate", 32)]
    assert mine.op == OP
    return mine


def test_every_length_and_engine_has_its_median_reload_in_seven_pieces(tmp_path: Path) -> None:
    found = drawn(serial(build()), tmp_path)
    assert [(one.arm, one.tokens, one.of) for one in found] == [
        (arm, tokens, 3) for arm in ("candidate", "candidate-2") for tokens in (31, 32, 48)
    ]
    for waterfall in found:
        assert [piece.name for piece in waterfall.pieces] == PIECES
        assert waterfall.missing == []
        assert waterfall.pieces[0].begins == 0
        assert waterfall.pieces[-1].ends == pytest.approx(waterfall.first_token)
        for left, right in zip(waterfall.pieces, waterfall.pieces[1:], strict=False):
            assert left.ends == right.begins, "the pieces leave nothing out of what is recorded"


def test_the_suffix_takes_what_it_took(tmp_path: Path) -> None:
    found = {piece.name: piece.ends - piece.begins for piece in one(drawn(only(serial(build())), tmp_path)).pieces}
    assert found["suffix compute"] == pytest.approx(16 * 10 + 2, abs=1.5), "16 tokens of 10 ms, and the load's 2 ms"


@pytest.mark.parametrize(
    ("kind", "field", "lost"),
    [
        (r.Lookup, "request", {"arrival", "lookup"}),
        (r.Allocated, "request", {"lookup", "queue"}),
        (r.LoadCompleted, "job", {"load", "schedule"}),
    ],
)
def test_a_lost_record_is_a_missing_piece(kind: type[r.Record], field: str, lost: set[str], tmp_path: Path) -> None:
    run = only(serial(build()))
    value = REQUEST if field == "request" else _job(run)
    run.edit("candidate", kind, lambda rec: None, **{field: value})
    if kind is r.LoadCompleted:  # bytes are then unknown, so the request counts as no reload at all
        assert not [one for one in drawn(run, tmp_path) if (one.arm, one.tokens) == ("candidate", 32)]
        return
    waterfall = one(drawn(run, tmp_path))
    assert [piece.name for piece in waterfall.pieces] == [name for name in PIECES if name not in lost]
    assert {line.partition(":")[0] for line in waterfall.missing} == lost


def _job(run: LatencyRun) -> int:
    (rec,) = [
        entry.record
        for entry in run.arms["candidate"]
        if isinstance(entry.record, r.LoadSubmitted) and entry.record.request == REQUEST
    ]
    return rec.job


def test_where_steps_may_overlap_the_next_one_marks_nothing(tmp_path: Path) -> None:
    """The engine of the plain run does not say that its steps never overlap."""
    waterfall = one(drawn(only(build()), tmp_path))
    assert [piece.name for piece in waterfall.pieces] == [*PIECES[:5], "suffix compute and first token"]
    assert waterfall.missing == [
        "end of the suffix compute: steps may overlap in this engine, so the next one does not mark it"
    ]


def test_a_token_that_came_before_the_next_step_is_not_forced_behind_it(tmp_path: Path) -> None:
    run = only(serial(build()))
    early = [StreamEvent(at_ns=5 * 10**6, tokens=8)]
    run.edit("candidate", RequestTimed, lambda rec: msgspec.structs.replace(rec, events=early), op=OP)
    waterfall = one(drawn(run, tmp_path))
    assert waterfall.pieces[-1].name == "suffix compute and first token"
    assert waterfall.missing == ["end of the suffix compute: the client had its token before the next step was made"]


def test_bars_lie_on_the_axis_in_order(tmp_path: Path) -> None:
    plot = waterfall_plot(drawn(serial(build()), tmp_path))
    assert plot.names == PIECES
    assert len(plot.rows) == 6
    for row in plot.rows:
        assert all(bar.left >= 0 and bar.left + bar.width <= 1 for bar in row.bars)
        assert row.bars[-1].left + row.bars[-1].width == pytest.approx(row.whole)
    tops = [row.y for row in plot.rows]
    assert tops == sorted(set(tops))
    assert tops[-1] < plot.height


def test_the_page_draws_them_and_says_what_is_missing(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    for name, run in (("whole", serial(build())), ("parts", build())):
        archive = run.write(tmp_path / name)
        page = html(report(judge(archive), History.read(archive)), tmp_path / name, None)
        assert page.count('<rect class="piece load"') == 6
        assert ("unavailable: end of the suffix compute" in page) is (name == "parts")


def test_without_a_reload_the_page_says_so(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    run = build()
    for arm in ("candidate", "candidate-2"):
        run.edit(arm, r.LoadCompleted, lambda rec: None)
    archive = run.write(tmp_path / "a")
    page = html(report(judge(archive), History.read(archive)), tmp_path / "a", None)
    assert "no reload was timed with its load recorded" in page
    assert 'class="piece' not in page


def test_another_plan_has_none(tmp_path: Path) -> None:
    from checks.builder import build as boundary_run

    assert waterfalls(History.read(boundary_run().write(tmp_path / "a"))) == []
