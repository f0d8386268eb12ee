"""Query counters count every token that was asked for, once."""

from __future__ import annotations

from pathlib import Path

from samestate.checks.base import CheckResult, Verdict
from samestate.checks.queries import CHECK, queries
from samestate.evidence import records as r

from . import builder as b
from . import zoo
from .test_paths import count


def checked(recorded: b.Run, folder: Path) -> CheckResult:
    return zoo.result(queries, CHECK, recorded, folder)


def test_silent_where_all_is_counted_once_batches_and_local_hits_included(tmp_path: Path) -> None:
    result = checked(zoo.run("shared prefixes", tmp_path), tmp_path / "a")
    assert (result.verdict, result.findings) == (Verdict.PASS, [])
    assert result.examined > 10


def test_requests_that_were_preempted_ask_again_and_are_left_out(tmp_path: Path) -> None:
    result = checked(zoo.run("preemption", tmp_path), tmp_path / "a")
    assert (result.verdict, result.examined) == (Verdict.PASS, 2)


def test_queries_counted_twice_are_named(tmp_path: Path) -> None:
    finding = zoo.first(checked(zoo.run("shared prefixes", tmp_path, "queries-doubled"), tmp_path / "a"))
    assert (finding.code, finding.verdict, finding.place.op) == ("queries_disagree", Verdict.FAIL, "trunk.1")
    assert r.EXTERNAL_QUERIES in finding.message


def test_the_local_counter_is_held_too_and_one_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    recorded = zoo.run("shared prefixes", tmp_path)
    count(recorded, "two.1", r.LOCAL_QUERIES, 16)
    count(recorded, "one.1", r.EXTERNAL_QUERIES, None)
    found = {finding.place.op: finding.code for finding in checked(recorded, tmp_path / "a").findings}
    assert found == {"two.1": "queries_disagree", "one.1": "counter_unreadable"}
