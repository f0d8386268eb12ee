from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from samestate.checks.analyzers import judge
from samestate.checks.history import History
from samestate.evidence import records as r
from samestate.evidence.archive import Archive
from samestate.reports.html import html, tick
from samestate.reports.latency import STEPS, Latency, axis_to, charts, latency

from . import made
from .pages import Reader


def times(archive: Archive) -> Latency:
    return latency(History.read(archive), judge(archive))


def live(run: Any, builder: ModuleType) -> None:
    """As an engine that is not the simulated one leaves it."""
    for arm in ("control", "candidate"):
        builder.edit(run.client(arm), r.EngineStarted, {"engine": "vllm"})


def test_each_generation_by_the_clock_of_its_own_records(clean: Archive) -> None:
    found = times(clean)
    assert [arm for arm, _ in found.arms] == ["control", "candidate"]
    clock: dict[tuple[str, str, str], int] = {}
    for arm in ("control", "candidate"):
        for line in clean.records(arm, "client"):
            if isinstance(line.rec, r.OperationStarted | r.OperationEnded):
                clock[arm, line.rec.op, type(line.rec).__name__] = line.t_ns
    for arm, timed in found.arms:
        assert [one.op for one in timed] == [f"N{n}.{kind}" for n in (31, 32, 33) for kind in ("cold", "reload")]
        for one in timed:
            took = clock[arm, one.op, "OperationEnded"] - clock[arm, one.op, "OperationStarted"]
            assert one.total == took / 1e6 and one.first_batch is not None and 0 <= one.first_batch <= one.total
    assert found.names == ["cold", "reload"]
    assert found.trials == "1 trial"


def test_it_has_credited_and_generated_beside_it(clean: Archive) -> None:
    one = next(one for one in dict(times(clean).arms)["candidate"] if one.op == "N33.reload")
    assert (one.tokens, one.credited, one.generated) == (33, 32, 8)


@pytest.mark.parametrize("lost", [r.OperationEnded, r.OperationOutput])
def test_what_did_not_end_well_has_no_time(builder: ModuleType, tmp_path: Path, lost: type) -> None:
    run = builder.build()
    builder.drop(run.client(), lost, op="N32.reload")
    found = dict(times(run.write(tmp_path / "a")).arms)
    assert "N32.reload" not in [one.op for one in found["candidate"]]
    assert "N32.reload" in [one.op for one in found["control"]]


def test_generations_that_ran_together_are_counted_and_not_shown(builder: ModuleType, tmp_path: Path) -> None:
    run = builder.build()
    builder.edit(run.client(), r.OperationStarted, {"together": "both"}, op="N32.reload")
    found = times(run.write(tmp_path / "a"))
    assert found.together == 1
    assert "N32.reload" not in [one.op for one in dict(found.arms)["candidate"]]


def test_what_says_no_measurement(
    clean: Archive, faulted: Archive, instrumented: Archive, builder: ModuleType, tmp_path: Path
) -> None:
    simulated = "the engine was the simulated one"
    assert times(clean).ineligible == [simulated]
    assert times(faulted).ineligible == [simulated, "a fault was injected"]
    assert "pages were read at level poison" in times(instrumented).ineligible
    borrower = builder.imported(builder.build(arms=("candidate",)), control=clean).write(tmp_path / "imported")
    found = times(borrower)
    assert found.ineligible == [simulated, "control was imported, and ran at another time"]
    assert [chart.imported for chart in charts(found, 9)[1]] == [True, False]


def test_a_live_run_without_audit_of_pages_is_eligible(builder: ModuleType, tmp_path: Path) -> None:
    run = builder.build()
    live(run, builder)
    archive = run.write(tmp_path / "a")
    assert times(archive).ineligible == []
    words = page(archive)
    assert "Not eligible for performance" not in words
    assert "1 trial of each arm, case and kind: no claim about speed follows" in words


@pytest.mark.parametrize("longest", [0.0, 1e-6, 0.3, 1.0, 9.99, 10.0, 20.6, 38.7, 99.9, 1234.5, 3.6e6])
def test_an_axis_holds_what_is_on_it(longest: float) -> None:
    axis = axis_to(longest)
    assert axis.end >= longest * (1 - 1e-9) and (axis.end <= 2 * longest or longest == 0)
    assert len(axis.ticks) == STEPS + 1 and axis.ticks[0] == 0 and axis.ticks[-1] == axis.end


def test_bars_do_not_overlap_and_stay_on_the_axis(clean: Archive) -> None:
    _, drawn = charts(times(clean), 2)
    for chart in drawn:
        assert [bar.case for bar in chart.bars] == ["N31", "", "N32", ""]
        tops = [bar.y for bar in chart.bars]
        assert tops == sorted(set(tops)) and tops[-1] < chart.height
        assert all(0 <= bar.waited <= bar.whole <= 1 for bar in chart.bars)


# --- on the page ----------------------------------------------------------------------------------


def page(archive: Archive) -> str:
    return html(made.report_of(archive), archive.root, None)


def test_a_chart_has_a_title_a_description_and_a_table(instrumented: Archive) -> None:
    reader = Reader(page(instrumented))
    assert reader.faults == []
    ids = {attributes["id"] for _, attributes in reader.elements if "id" in attributes}
    drawn = [svg for svg in reader.all("svg") if "aria-describedby" in svg]
    assert len(drawn) == 2
    assert {svg[name] for svg in drawn for name in ("aria-labelledby", "aria-describedby")} <= ids
    table = page(instrumented).partition('<table class="times">')[2].partition("</table>")[0]
    assert table.count('<th scope="row">') == 12
    assert "Not eligible for performance" in page(instrumented)


def test_where_nothing_ended_there_is_no_chart(builder: ModuleType, tmp_path: Path) -> None:
    run = builder.build()
    for arm in ("control", "candidate"):
        builder.drop(run.client(arm), r.OperationEnded)
    assert "no operation that ran alone ended well" in page(run.write(tmp_path / "a"))


@pytest.mark.parametrize(("value", "said"), [(0.0, "0"), (0.25, "0.25 ms"), (10.0, "10 ms"), (1500.0, "1.5 s")])
def test_ticks_are_short(value: float, said: str) -> None:
    assert tick(value) == said
