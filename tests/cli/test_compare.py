"""`samestate diff schedule` and `diff env`: the first diverging step, and what two arms stand on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from checks import builder as b
from checks.test_environment import observed
from samestate.evidence import records as r

from .conftest import Command


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """The candidate's second case is prefilled in two steps where the control takes one."""
    run = b.build()
    records = run.scheduler()
    at = next(
        i for i, one in enumerate(records) if _prefills(one, "N32.cold") and one.source is r.BatchSource.SCHEDULER
    )
    whole = records[at]
    assert isinstance(whole, r.BatchScheduled)
    (row,) = whole.rows
    parts = [(row.start, 10), (row.start + 10, row.scheduled - 10)]
    records[at : at + 1] = [
        r.BatchScheduled(
            step=whole.step,
            source=whole.source,
            rows=[r.BatchRow(request=row.request, start=start, scheduled=scheduled, drafted=0)],
            preempted=[],
        )
        for start, scheduled in parts
    ]
    return run.write(tmp_path / "split").root


def _prefills(record: r.Record, op: str) -> bool:
    return isinstance(record, r.BatchScheduled) and record.rows[0].request == b.request_id("candidate", op)


def test_an_arm_against_itself_is_alike(samestate: Command, clean: Path) -> None:
    result = samestate("diff", "schedule", clean, f"{clean}:candidate")
    assert (result.exit_code, result.output) == (0, "36/36 operations scheduled alike\n")


def test_a_reload_is_compared_over_what_is_left_to_compute(samestate: Command, clean: Path) -> None:
    for sides in ((f"{clean}:control", f"{clean}:candidate"), (f"{clean}:candidate", f"{clean}:control")):
        assert samestate("diff", "schedule", *sides).exit_code == 0


def test_the_first_diverging_step_is_named(samestate: Command, split: Path) -> None:
    result = samestate("diff", "schedule", f"{split}:control", f"{split}:candidate")
    assert result.exit_code == 1
    first = result.output.splitlines()[0]
    assert first == "first diverging step: N32.cold: step 0: [0, 16) against [0, 10) (A against B)", result.output
    assert "unknown: geometry" in result.output
    turned = samestate("diff", "schedule", f"{split}:candidate", f"{split}:control", "--json")
    (parted,) = json.loads(turned.stdout)["parted"]
    assert parted["message"] == "step 0: [0, 10) against [0, 16)"
    assert parted["evidence"][0].startswith("arms/candidate/scheduler.jsonl:")


def test_other_company_is_another_step(samestate: Command, tmp_path: Path) -> None:
    run = b.build()
    at = next(i for i, one in enumerate(run.scheduler()) if _prefills(one, "N32.cold"))
    together = run.scheduler()[at]
    assert isinstance(together, r.BatchScheduled)
    stranger = r.BatchRow(request=b.request_id("candidate", "N31.cold"), start=99, scheduled=1, drafted=0)
    for i, one in enumerate(run.scheduler()):
        if isinstance(one, r.BatchScheduled) and one.rows == together.rows:
            run.scheduler()[i] = r.BatchScheduled(
                step=one.step, source=one.source, rows=[*one.rows, stranger], preempted=[]
            )
    archive = run.write(tmp_path / "a").root
    result = samestate("diff", "schedule", f"{archive}:control", f"{archive}:candidate", "--json")
    found = {one["op"]: one["message"] for one in json.loads(result.stdout)["parted"]}
    assert found["N32.cold"] == "step 0: with nobody against with N31.cold [99, 100)"


def test_without_steps_nothing_is_compared(samestate: Command, tmp_path: Path) -> None:
    run = b.build()
    b.drop(run.scheduler(), r.BatchScheduled)
    archive = run.write(tmp_path / "a").root
    result = samestate("diff", "schedule", f"{archive}:control", archive)
    assert result.exit_code == 3
    assert "not compared: N31.cold" in result.output


def test_what_is_no_archive_or_no_arm(samestate: Command, clean: Path, tmp_path: Path) -> None:
    result = samestate("diff", "schedule", clean, f"{clean}:none")
    assert result.exit_code == 2 and "has no arm 'none'; it has: candidate, control" in result.output
    assert samestate("diff", "schedule", tmp_path, clean).exit_code == 2


def test_what_two_arms_stand_on(samestate: Command, clean: Path, tmp_path: Path) -> None:
    result = samestate("diff", "env", f"{clean}:control", f"{clean}:candidate", "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["differing"][0]["name"]) == (1, "kv_transfer_config")
    assert any("no rank was observed" in note for note in found["unseen"])
    run = b.build()
    b.drop(run.client(), r.EngineStarted)
    archive = run.write(tmp_path / "a").root
    assert samestate("diff", "env", archive, clean).exit_code == 2


def test_what_was_not_observed_is_not_alike(samestate: Command, clean: Path, tmp_path: Path) -> None:
    result = samestate("diff", "env", clean, clean)
    assert result.exit_code == 3 and " 0 of " in f" {result.output.splitlines()[-1]}"
    run = observed(ranks=2)
    for record in [run.client(), run.scheduler()]:
        for kind in (r.EngineStarted,):
            if any(isinstance(one, kind) for one in record):
                b.edit(record, kind, {"controls": []})
    whole = run.write(tmp_path / "whole").root
    assert samestate("diff", "env", whole, whole).exit_code == 0
    b.drop(run.scheduler(), r.EnvironmentObserved, rank=1)
    lacking = run.write(tmp_path / "lacking").root
    result = samestate("diff", "env", lacking, lacking)
    assert result.exit_code == 3 and "A: rank 1 was not observed" in result.output


def test_a_damaged_archive_shows_nothing(samestate: Command, clean: Path, tmp_path: Path) -> None:
    """Both sides lose the same records, and would be alike."""
    cut = tmp_path / "cut"
    shutil.copytree(clean, cut)
    for arm in ("control", "candidate"):
        stream = cut / "arms" / arm / "scheduler.jsonl"
        stream.write_bytes(stream.read_bytes()[: stream.stat().st_size // 2])
    unsealed = tmp_path / "unsealed"
    shutil.copytree(clean, unsealed)
    (unsealed / "seal.json").unlink()
    for archive, word in ((cut, "damaged: arms/"), (unsealed, "no readable seal")):
        sides = (f"{archive}:control", f"{archive}:candidate")
        for command in (["diff", "schedule", *sides], ["diff", "env", *sides], ["explain", archive]):
            result = samestate(*command)
            assert (result.exit_code, word in result.output) == (3, True), result.output
        calls = samestate("diff", "call", archive, "m", "control:N3584.cold", "candidate:N3584.cold")
        assert (calls.exit_code, word in calls.output) == (3, True), calls.output


def test_steps_that_end_early_on_both_sides_are_not_alike(samestate: Command, tmp_path: Path) -> None:
    run = b.build()
    for arm in ("control", "candidate"):
        request = b.request_id(arm, "N32.cold")
        mine = [
            one for one in run.scheduler(arm) if isinstance(one, r.BatchScheduled) and one.rows[0].request == request
        ]
        for one in mine[2:]:
            run.scheduler(arm).remove(one)
    archive = run.write(tmp_path / "a").root
    result = samestate("diff", "schedule", f"{archive}:control", archive)
    assert result.exit_code == 3, result.output
    assert "not compared: N32.cold: arm control: no step is recorded beyond token" in result.output


def test_an_operation_of_one_side_alone_is_not_alike(samestate: Command, tmp_path: Path) -> None:
    run = b.build()
    for kind in (r.OperationStarted, r.OperationOutput, r.OperationEnded):
        b.drop(run.client(), kind, op="N33.reload")
    archive = run.write(tmp_path / "a").root
    result = samestate("diff", "schedule", f"{archive}:control", archive)
    assert (result.exit_code, "N33.reload: arm candidate does not have it" in result.output) == (3, True)


def test_other_prompts_of_one_name_are_said(samestate: Command, tmp_path: Path) -> None:
    run = b.build()
    b.edit(run.client(), r.OperationStarted, {"prompt_sha256": "9" * 64}, op="N32.cold")
    archive = run.write(tmp_path / "a").root
    result = samestate("diff", "schedule", f"{archive}:control", archive)
    assert "1 operations have other prompts on the two sides, e.g. N32.cold" in result.output


def test_a_start_where_no_checkpoint_ends_is_no_matter_of_steps(samestate: Command, faulty: Path) -> None:
    result = samestate("diff", "schedule", f"{faulty}:control", faulty)
    assert result.exit_code == 1
    assert "N3584.reload and 1 more: one side starts where no checkpoint ends" in result.output
    assert "cannot be laid to reuse" not in result.output
