"""What a load shows, from records: paths, times, company; what is not recorded is unknown or left out, never filled."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from samestate.checks.history import History
from samestate.checks.latency_load import (
    NOT_CLAIMED,
    LoadCell,
    LoadStudy,
    PhaseCounters,
    live_taken,
    load_study,
    ninetieth,
)
from samestate.checks.latency_paths import ActualPath
from samestate.evidence import records as r
from samestate.evidence.latency_records import TIER_LOADED_BYTES, LoadPhase, RequestTimed

from .latency_run import Entry, LatencyRun, build, small_plan

CASES = ["t1-N31", "t1-N32", "t2-N31", "t2-N32"]


def loaded(run: LatencyRun, behind: float = 0.0, **more: object) -> LatencyRun:
    """The run's own requests, told to be two phases of a load on each engine of the first repetition."""
    for arm, attempts in (("control", ["cold"]), ("candidate", ["cold", "reload"])):
        for attempted in attempts:
            fields = {"level": "c2", "attempted": attempted, "concurrency": 2, "rate": None, "seed": 5, "due_ns": []}
            ops = [f"{case}.{attempted}" for case in CASES]
            run.arms[arm].append(Entry("client", LoadPhase(**(fields | {"ops": ops} | more))))
            for when, value in (("before", 0.0), ("after", behind)):
                values = {TIER_LOADED_BYTES: value}
                run.arms[arm].append(
                    Entry("client", r.CountersRead(op=f"c2.{attempted}", when=when, values=values, missing=[]))
                )
    return run


def studied(run: LatencyRun, root: Path) -> LoadStudy:
    return load_study(History.read(run.write(root / "archive")))


def test_every_engine_and_phase_has_its_paths_beside_its_times(tmp_path: Path) -> None:
    study = studied(loaded(build()), tmp_path)
    assert [(one.engine, one.attempted, one.paths) for one in study.cells] == [
        ("none", "cold", {"recompute": 4}),
        ("native", "cold", {"recompute": 4}),
        ("native", "reload", {"external-memory": 4}),
    ]
    cold, reload = study.cells[1:]
    assert (cold.suffix, reload.suffix) == ([31, 32], [15, 16])
    assert cold.first_token is not None
    assert reload.first_token is not None
    assert reload.first_token < cold.first_token
    assert (cold.requests, cold.answered, cold.most_open, cold.latest) == (4, 4, 1, None)
    assert cold.tokens_per_second is not None
    assert (cold.seed, cold.unlike, reload.unlike) == (5, 0, 0)
    assert study.notes == ["No 90th percentile: no phase has 10 requests that were answered.", *NOT_CLAIMED]


def test_a_request_without_its_records_is_not_counted_and_said_so(tmp_path: Path) -> None:
    run = loaded(build())
    run.edit("candidate", RequestTimed, lambda rec: None, op="t1-N31.reload")
    run.edit("candidate", r.OperationOutput, lambda rec: None, op="t2-N31.reload")
    study = studied(run, tmp_path)
    assert (study.cells[2].requests, study.cells[2].answered) == (4, 2)
    assert study.notes[0].startswith("2 requests failed or are not recorded")


def test_a_request_without_its_lookup_names_no_path(tmp_path: Path) -> None:
    run = loaded(build())
    run.edit("candidate", r.Lookup, lambda rec: None, request="candidate-t1-N31.reload-0")
    assert studied(run, tmp_path).cells[2].paths == {"unknown": 1, "external-memory": 3}


def test_another_answer_in_company_is_counted(tmp_path: Path) -> None:
    run = loaded(build())
    other = [1] * 8
    run.edit(
        "candidate",
        r.OperationOutput,
        lambda rec: msgspec.structs.replace(rec, token_ids=other),
        op="t1-N31.reload",
    )
    study = studied(run, tmp_path)
    assert [one.unlike for one in study.cells] == [0, 0, 1]
    assert "1 answers are not those of the phase before" in study.notes[0]


@pytest.mark.parametrize(("behind", "path"), [(0.0, "external-memory"), (100.0, "external")])
def test_behind_a_memory_tier_a_phase_names_the_place_only_where_nothing_came_from_it(
    behind: float, path: str, tmp_path: Path
) -> None:
    run = loaded(build(small_plan("samestate-disk")), behind)
    for arm in ("candidate",):  # one request's own counters are not there under load
        for case in CASES:
            run.edit(arm, r.CountersRead, lambda rec: None, op=f"{case}.reload")
    assert studied(run, tmp_path).cells[2].paths == {path: 4}


def test_an_open_loop_tells_how_late_it_was(tmp_path: Path) -> None:
    study = studied(loaded(build(), concurrency=None, rate=2.0, due_ns=[0, 0, 0, 0]), tmp_path)
    cell: LoadCell = study.cells[0]
    assert (cell.concurrency, cell.rate) == (None, 2.0)
    assert cell.latest is not None
    assert cell.latest > 0


def test_a_ninetieth_needs_ten() -> None:
    assert ninetieth([1.0] * 9) is None
    assert ninetieth([float(value) for value in range(1, 11)]) == 9.0


def test_an_engine_without_a_phase_has_no_cell(tmp_path: Path) -> None:
    assert studied(build(), tmp_path).cells == []


# --- a live server --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cached", "grown", "everyone", "path"),
    [
        (0, PhaseCounters(0, 0), 0, ActualPath.RECOMPUTE),
        (None, PhaseCounters(0, None), None, ActualPath.RECOMPUTE),
        (32, PhaseCounters(64, 0), 64, ActualPath.LOCAL),
        (32, PhaseCounters(64, None), 64, ActualPath.LOCAL),
        (32, PhaseCounters(0, 64), 64, ActualPath.EXTERNAL),
        (0, PhaseCounters(32, 32), 64, ActualPath.RECOMPUTE),
    ],
)
def test_counters_of_a_phase_that_leave_one_path(
    cached: int | None, grown: PhaseCounters, everyone: int | None, path: ActualPath
) -> None:
    assert live_taken(48, cached, grown, everyone).path is path


@pytest.mark.parametrize(
    ("cached", "grown", "everyone", "why"),
    [
        (32, PhaseCounters(None, None), 32, "cannot be read"),
        (None, PhaseCounters(32, 0), None, "does not say how much"),
        (32, PhaseCounters(32, 32), 64, "no counter is of one request"),
        (32, PhaseCounters(64, 0), 32, "answers say 32 cached tokens, the counters 64"),
    ],
)
def test_what_leaves_more_than_one_names_none(
    cached: int | None, grown: PhaseCounters, everyone: int | None, why: str
) -> None:
    taken = live_taken(48, cached, grown, everyone)
    assert taken.path is None
    assert why in taken.why
