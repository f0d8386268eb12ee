from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from samestate.checks.analyzers import judge
from samestate.checks.base import CheckResult, Verdict
from samestate.checks.history import History
from samestate.evidence import records as r
from samestate.evidence.archive import Archive
from samestate.reports.difference import KINDS, Change, Side, difference, side

from . import made


def of(archive: Archive) -> Side:
    return side(judge(archive), History.read(archive))


def test_two_runs_that_came_to_the_same_are_the_same(builder: ModuleType, clean: Archive, tmp_path: Path) -> None:
    again = builder.build().write(tmp_path / "again")
    found = difference(of(clean), of(again))
    assert found.changes == []
    assert found.compared == {"checks": len(judge(clean).results), "rows": 3, "operations": 24}


def test_two_runs_that_fail_alike_are_the_same(builder: ModuleType, faulted: Archive, tmp_path: Path) -> None:
    again = builder.build(fault="full-lookup").write(tmp_path / "again")
    assert difference(of(faulted), of(again)).changes == []


def test_a_fault_shows_in_verdict_checks_findings_row_and_tokens(clean: Archive, faulted: Archive) -> None:
    found = difference(of(clean), of(faulted))
    assert {change.kind for change in found.changes} == set(KINDS)
    assert Change("verdict", "run", "pass", "fail") in found.changes
    boundary = next(change for change in found.changes if change.kind == "check" and change.name == "boundary")
    assert boundary.a.startswith("pass: 3/3") and boundary.b.startswith("fail: 2/3")
    rows = {change.name: (change.a, change.b) for change in found.changes if change.kind == "row"}
    assert rows["N32: B"] == ("16", "32") and rows["N32: p"] == ("16", "31")
    assert rows["N32: first difference"] == ("–", "0")
    assert not any(name.startswith(("N31", "N33")) for name in rows)
    tokens = [change.name for change in found.changes if change.kind == "tokens"]
    assert tokens == ["candidate N32.reload: from token 0 on"]
    assert "other injected faults: A none, B full-lookup" in found.notes


def test_one_token_is_found_where_it_is(builder: ModuleType, clean: Archive, tmp_path: Path) -> None:
    run = builder.build()
    output = next(rec for rec in run.client("control") if isinstance(rec, r.OperationOutput) and rec.op == "N31.cold")
    changed = [*output.token_ids[:5], 9999, *output.token_ids[6:]]
    builder.edit(run.client("control"), r.OperationOutput, {"token_ids": changed}, op="N31.cold")
    found = difference(of(clean), of(run.write(tmp_path / "a")))
    tokens = [change for change in found.changes if change.kind == "tokens"]
    assert tokens == [
        Change("tokens", "control N31.cold: from token 5 on", str(output.token_ids[5]), "9999"),
    ]


def test_an_output_that_is_there_on_one_side_only_is_a_change(
    builder: ModuleType, clean: Archive, tmp_path: Path
) -> None:
    run = builder.build()
    builder.drop(run.client(), r.OperationOutput, op="N31.reload")
    found = difference(of(clean), of(run.write(tmp_path / "a")))
    assert Change("tokens", "candidate N31.reload", "8 tokens", "no output") in found.changes


@pytest.mark.parametrize("swap", [False, True])
def test_checks_and_rows_that_are_there_on_one_side_only_are_changes(swap: bool) -> None:
    extra = CheckResult(check="new", verdict=Verdict.PASS, summary="s", unit="u", examined=1)
    more = made.judgement(results=[*made.judgement().results, extra], table=[*made.judgement().table, made.row(3585)])
    sides = side(made.judgement(), None), side(more, None)
    found = difference(*reversed(sides)) if swap else difference(*sides)
    values = ("pass", "none") if swap else ("none", "pass")
    assert found.changes == [Change("check", "new", *values), Change("row", "N3585", *values)]


def test_what_was_not_compared_is_said(clean: Archive) -> None:
    found = difference(of(clean), side(judge(clean), None))
    assert found.changes == []
    assert "operations" not in found.compared
    assert found.notes == ["tokens not compared: B without records"]


def test_a_run_that_did_not_complete_is_noted(clean: Archive) -> None:
    unsealed = side(made.judgement(seal_sha256=None), None)
    assert "A has no seal: its run did not complete" in difference(unsealed, of(clean)).notes
