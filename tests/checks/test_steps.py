"""Steps adjoin: no token is fed to the recurrence twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestate.checks.base import CheckResult, Verdict
from samestate.checks.steps import CHECK, steps
from samestate.evidence import records as r
from samestate.lab.exercises import C

from . import builder as b
from . import zoo


def checked(recorded: b.Run, folder: Path) -> CheckResult:
    return zoo.result(steps, CHECK, recorded, folder)


@pytest.mark.parametrize("exercise", ["shared prefixes in chunks", "boundaries, drafts", "preemption"])
def test_silent_also_where_drafts_are_rejected_and_requests_preempted(tmp_path: Path, exercise: str) -> None:
    recorded = zoo.run(exercise, tmp_path)
    batches = [rec for rec in recorded.scheduler() if isinstance(rec, r.BatchScheduled)]
    if exercise == "preemption":
        assert any(batch.preempted for batch in batches)
    if exercise == "boundaries, drafts":
        assert any(row.drafted for batch in batches for row in batch.rows)
    result = checked(recorded, tmp_path / "a")
    assert (result.verdict, result.findings) == (Verdict.PASS, [])
    assert result.examined > 20


def test_a_chunk_that_takes_up_tokens_again_is_named(tmp_path: Path) -> None:
    result = checked(zoo.run("shared prefixes in chunks", tmp_path, "fed-twice"), tmp_path / "a")
    finding = zoo.first(result)
    assert (finding.code, finding.verdict) == ("tokens_fed_twice", Verdict.FAIL)
    assert (finding.place.op, finding.place.boundary) == ("trunk.1", C - 2)
    assert "2 tokens are fed twice" in finding.message


def test_without_a_step_there_is_nothing_to_say(tmp_path: Path) -> None:
    recorded = zoo.run("shared prefixes in chunks", tmp_path)
    for arm in ("control", "candidate"):
        b.drop(recorded.scheduler(arm), r.BatchScheduled)
    result = checked(recorded, tmp_path / "a")
    assert (result.verdict, zoo.first(result).code) == (Verdict.UNKNOWN, "nothing_examined")
