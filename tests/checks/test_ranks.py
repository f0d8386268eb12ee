"""What one rank loads, every rank loads, and whoever writes also reads."""

from __future__ import annotations

from pathlib import Path

from samestate.checks.base import CheckResult, Verdict
from samestate.checks.ranks import CHECK, ranks
from samestate.evidence import records as r

from . import builder as b
from . import zoo


def checked(recorded: b.Run, folder: Path) -> CheckResult:
    return zoo.result(ranks, CHECK, recorded, folder)


def test_silent_where_all_ranks_load(tmp_path: Path) -> None:
    result = checked(zoo.run("shared prefixes", tmp_path), tmp_path / "a")
    assert (result.verdict, result.findings) == (Verdict.PASS, [])
    assert result.examined > 5


def test_one_rank_has_nobody_to_differ_from(tmp_path: Path) -> None:
    result = checked(zoo.run("shared prefixes in chunks", tmp_path), tmp_path / "a")
    assert (result.verdict, zoo.first(result).code) == (Verdict.NOT_EXERCISED, "one_rank")


def test_a_rank_that_loads_nothing_is_named_with_the_request(tmp_path: Path) -> None:
    result = checked(zoo.run("shared prefixes", tmp_path, "silent-rank"), tmp_path / "a")
    finding = zoo.first(result)
    assert (finding.code, finding.verdict) == ("rank_silent", Verdict.FAIL)
    assert (finding.place.op, finding.place.rank) == ("trunk.2", 1)
    assert "rank_reads_nothing" in {one.code for one in result.findings}


def test_a_rank_that_writes_and_never_reads_is_named(tmp_path: Path) -> None:
    result = checked(zoo.run("shared prefixes", tmp_path, "rank-names-differ"), tmp_path / "a")
    assert [(one.code, one.place.rank) for one in result.findings] == [("rank_reads_nothing", 1)]


def test_a_rank_whose_loads_are_not_recorded_is_unknown_in_a_damaged_archive(tmp_path: Path) -> None:
    recorded = zoo.run("shared prefixes", tmp_path)
    b.drop(recorded.worker(1), r.LoadSubmitted)
    archive = recorded.write(tmp_path / "a")
    with (archive.root / "arms" / "candidate" / "worker-1.jsonl").open("ab") as stream:
        stream.write(b"{}\n")
    judged = zoo.result_of(ranks, CHECK, archive.root)
    assert {finding.verdict for finding in judged.findings} == {Verdict.UNKNOWN}
