"""What failed is not used."""

from __future__ import annotations

from pathlib import Path

from samestate.checks.base import CheckResult, Verdict
from samestate.checks.failures import CHECK, failures
from samestate.evidence import records as r
from samestate.lab.exercises import C

from . import builder as b
from . import zoo


def checked(recorded: b.Run, folder: Path) -> CheckResult:
    return zoo.result(failures, CHECK, recorded, folder)


def test_silent_where_nothing_failed(tmp_path: Path) -> None:
    result = checked(zoo.run("shared prefixes", tmp_path), tmp_path / "a")
    assert (result.verdict, result.findings) == (Verdict.PASS, [])
    assert result.summary.startswith(f"none of {result.examined} transfers failed")


def test_silent_where_what_failed_is_computed_again(tmp_path: Path) -> None:
    result = checked(zoo.run("shared prefixes", tmp_path, "silent-recompute"), tmp_path / "a")
    assert result.verdict is Verdict.PASS
    assert not result.summary.startswith("none of")


def test_a_failed_load_that_is_credited_is_named(tmp_path: Path) -> None:
    finding = zoo.first(checked(zoo.run("shared prefixes", tmp_path, "swallowed-load-failure"), tmp_path / "a"))
    assert (finding.code, finding.verdict) == ("failed_load_credited", Verdict.FAIL)
    assert (finding.place.op, finding.place.rank, finding.place.boundary) == ("trunk.2", 0, 4 * C)


def test_a_page_whose_save_failed_is_named_when_it_is_loaded(tmp_path: Path) -> None:
    finding = zoo.first(checked(zoo.run("shared prefixes", tmp_path, "failed-put-visible"), tmp_path / "a"))
    assert (finding.code, finding.verdict) == ("failed_save_served", Verdict.FAIL)
    assert (finding.place.op, finding.place.rank, finding.place.boundary) == ("trunk.2", 0, 4 * C)


def test_without_a_transfer_there_is_nothing_to_say(tmp_path: Path) -> None:
    recorded = zoo.run("shared prefixes in chunks", tmp_path)
    for kind in (r.SaveSubmitted, r.SaveCompleted, r.LoadSubmitted, r.LoadCompleted):
        b.drop(recorded.worker(), kind)
    assert checked(recorded, tmp_path / "a").verdict is Verdict.UNKNOWN
