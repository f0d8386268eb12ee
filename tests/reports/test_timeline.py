from __future__ import annotations

from pathlib import Path
from types import ModuleType

from samestate.checks.history import History
from samestate.evidence import records as r
from samestate.evidence.archive import Archive
from samestate.reports.timeline import Batch, RequestTimeline, require_timelines, timelines


def request(archive: Archive, op: str) -> RequestTimeline:
    cases = timelines(History.read(archive))
    return next(one for case in cases for one in case.requests if one.op == op)


def test_every_generation_of_every_case_is_there_and_those_that_reuse_come_first(clean: Archive) -> None:
    cases = timelines(History.read(clean))
    assert [(case.case, case.tokens) for case in cases] == [("N31", 31), ("N32", 32), ("N33", 33)]
    assert [one.op for one in cases[1].requests] == ["N32.reload", "N32.cold", "N32.interposer-1", "N32.interposer-2"]
    assert [one.reuses for one in cases[1].requests] == [True, False, False, False]


def test_a_reload_from_lookup_to_answer(clean: Archive) -> None:
    one = request(clean, "N33.reload")
    names = [event.name for event in one.events]
    order = ["lookup", "allocation", "load, rank 0", "first batch", "finished", "answered"]
    assert [name for name in names if name in order] == order
    details = {event.name: event.detail for event in one.events}
    assert details["lookup"] == "32 tokens found of 33, asynchronous"
    assert details["load, rank 0"].startswith("B = 32, ")
    assert details["first batch"] == "p = 32, 1 scheduled"
    assert len(one.steps) == 8
    assert all(event.begins >= 0 for event in one.events)
    assert one.steps == sorted(one.steps)


def test_the_boundary_on_the_token_axis(clean: Archive, faulted: Archive) -> None:
    right, wrong = request(clean, "N32.reload").tokens, request(faulted, "N32.reload").tokens
    assert (right.restored, right.credited, right.strict) == (16, 16, 16)
    assert (wrong.restored, wrong.credited, wrong.strict) == (32, 31, 16)
    assert right.batches == [Batch(16, 32, True)]
    assert wrong.batches == [Batch(31, 32, True)]


def test_what_loaded_nothing_has_no_boundary(clean: Archive) -> None:
    cold = request(clean, "N32.cold").tokens
    assert (cold.restored, cold.strict, cold.credited) == (None, None, 0)


def test_a_load_that_never_completed_has_no_end(builder: ModuleType, tmp_path: Path) -> None:
    run = builder.build()
    builder.drop(run.worker(), r.LoadCompleted)
    load = next(event for event in request(run.write(tmp_path / "a"), "N33.reload").events if "load" in event.name)
    assert (load.ends, load.detail) == (None, "B = 32, never completed")


def test_a_boundary_that_no_rank_reports_is_said_to_be_unreported(builder: ModuleType, tmp_path: Path) -> None:
    run = builder.build()
    builder.edit(run.worker(), r.LoadSubmitted, {"boundary": None})
    one = request(run.write(tmp_path / "a"), "N33.reload")
    assert one.tokens.restored is None
    assert any(event.detail.startswith("B not reported") for event in one.events)


def test_without_c_there_is_a_reason_instead(clean: Archive, tmp_path: Path) -> None:
    history = History.read(clean)
    history._resolved = None
    assert require_timelines(history) == ([], "resolved.json is missing or cannot be read")
