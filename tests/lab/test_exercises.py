"""The exercises of the zoo: without a fault every one passes, and exercises what it is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestate.checks.analyzers import judge, source_sha256
from samestate.checks.base import Verdict
from samestate.evidence import records as r
from samestate.evidence.archive import Archive
from samestate.lab.exercises import Exercise, exercises, varied
from samestate.lab.zoo import nameless_model, simulate
from samestate.plans.load import freeze


def run(exercise: Exercise, folder: Path, fault: str | None = None) -> Archive:
    plan = freeze(exercise.plan, source_sha256(exercise.plan.analyzer.id))
    return Archive.open(simulate(plan, fault, nameless_model(folder / "model"), folder / "archive"))


def scheduled(archive: Archive) -> list[r.BatchScheduled]:
    return [line.rec for line in archive.records("candidate", "scheduler") if isinstance(line.rec, r.BatchScheduled)]


@pytest.mark.parametrize("name", exercises())
def test_a_clean_run_of_every_exercise_passes(tmp_path: Path, name: str) -> None:
    assert judge(run(exercises()[name], tmp_path)).verdict is Verdict.PASS


@pytest.mark.parametrize("number", [1, 2, 3, 6])
def test_variations_differ_and_pass(tmp_path: Path, number: int) -> None:
    exercise = exercises()["shared prefixes"]
    other = varied(exercise, number)
    assert other.plan != exercise.plan
    assert varied(exercise, 0) == exercise
    assert judge(run(other, tmp_path)).verdict is Verdict.PASS


def test_preemption_preempts_and_few_blocks_make_saves_wait(tmp_path: Path) -> None:
    assert any(batch.preempted for batch in scheduled(run(exercises()["preemption"], tmp_path / "a")))
    archive = run(exercises()["few blocks"], tmp_path / "b")
    assert any(len(batch.rows) > 1 for batch in scheduled(archive))
    assert any(isinstance(line.rec, r.SaveWaited) for line in archive.records("candidate", "worker-0"))


def test_drafts_are_scheduled_and_some_rejected(tmp_path: Path) -> None:
    rows = [row for batch in scheduled(run(exercises()["boundaries, drafts"], tmp_path)) for row in batch.rows]
    assert {row.drafted for row in rows} >= {0, 3}


def test_a_second_engine_finds_the_tier_only_where_it_follows(tmp_path: Path) -> None:
    def loaded(name: str) -> bool:
        archive = run(exercises()[name], tmp_path / name.replace(" ", "-"))
        lines = archive.records("candidate-2", "scheduler")
        first = next(line.rec for line in lines if isinstance(line.rec, r.Lookup))
        return bool(first.matched_tokens)

    assert loaded("a second engine")
    assert not loaded("a second engine, nothing kept")
