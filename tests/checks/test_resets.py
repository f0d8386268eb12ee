"""After a confirmed reset nothing is local but what was computed or loaded since."""

from __future__ import annotations

from pathlib import Path

from samestate.checks.base import CheckResult, Verdict
from samestate.checks.resets import CHECK, resets
from samestate.evidence import records as r
from samestate.lab.exercises import C
from samestate.plans.model import StepPlan

from . import builder as b
from . import zoo


def checked(recorded: b.Run, folder: Path) -> CheckResult:
    return zoo.result(resets, CHECK, recorded, folder)


def test_silent_where_local_hits_were_computed_or_loaded_since(tmp_path: Path) -> None:
    recorded = zoo.run("shared prefixes", tmp_path)
    assert any(isinstance(rec, r.Lookup) and rec.local_tokens for rec in recorded.scheduler())
    result = checked(recorded, tmp_path / "a")
    assert (result.verdict, result.findings) == (Verdict.PASS, [])
    assert result.examined > 10


def test_what_a_reset_left_is_named(tmp_path: Path) -> None:
    result = checked(zoo.run("shared prefixes", tmp_path, "reset-keeps-local"), tmp_path / "a")
    finding = zoo.first(result)
    assert (finding.code, finding.verdict) == ("reset_left_local", Verdict.FAIL)
    assert (finding.place.op, finding.place.boundary) == ("trunk.2", 4 * C)


def test_a_reset_that_the_engine_did_not_confirm_is_left_to_others(tmp_path: Path) -> None:
    recorded = zoo.run("shared prefixes", tmp_path, "reset-keeps-local")
    for rec in [rec for rec in recorded.client() if isinstance(rec, r.CacheReset)]:
        b.edit(recorded.client(), r.CacheReset, {"local_reset": False}, op=rec.op)
    result = checked(recorded, tmp_path / "a")
    assert all(finding.place.arm != "candidate" for finding in result.findings)


def test_without_a_reset_the_question_does_not_come_up(tmp_path: Path) -> None:
    steps = [StepPlan(prompts=["a"]), StepPlan(prompts=["a"])]
    recorded = zoo.run(zoo.scenario({"a": "2C+5"}, steps), tmp_path)
    b.drop(recorded.client("control"), r.CacheReset)
    result = checked(recorded, tmp_path / "a")
    assert (result.verdict, zoo.first(result).code) == (Verdict.NOT_EXERCISED, "no_reset")
