"""Why outputs differ: each cause is found where it is, before any later one, and unknown where none is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from checks import builder as b
from checks.test_environment import seen
from checks.test_storages import taken
from samestate.checks.analyzers import judge
from samestate.checks.history import History
from samestate.evidence import records as r
from samestate.reports.explanation import Cause, Explained, Explanation, explain

ARMS = ("control", "candidate")


def recorded(**change: Any) -> b.Run:
    """A run that records all that a cause is looked for in; `change` is the candidate's environment."""
    run = b.build()
    for arm in ARMS:
        records = run.scheduler(arm)
        records.insert(0, seen(**(change if arm == "candidate" else {})))
        records.insert(0, taken(0, "start"))
        records += [taken(0, "end"), selected()]
    return run


def selected(block: int = 64) -> r.KernelsSelected:
    choice = r.KernelSelection(kernel="fla.kda", key=["64"], config={"BK": block})
    return r.KernelsSelected(
        rank=0, mode="record", profile_sha256=None, benchmarks=3, selections=[choice], violations=[]
    )


def parted(run: b.Run, *ops: str) -> b.Run:
    """The candidate's answers to these operations part from the control's at token 2."""
    for op in ops:
        (output,) = [one for one in run.client() if isinstance(one, r.OperationOutput) and one.op == op]
        ids = [*output.token_ids[:2], output.token_ids[2] + 500, *output.token_ids[3:]]
        b.edit(run.client(), r.OperationOutput, {"token_ids": ids}, op=op)
    return run


def explained(run: b.Run, root: Path) -> Explanation:
    archive = run.write(root)
    return explain(History.read(archive), judge(archive).results)


def only(run: b.Run, root: Path) -> Explained:
    (found,) = explained(run, root).explained
    return found


def asked(one: Explained) -> dict[Cause, bool | None]:
    return {step.cause: step.differs for step in one.steps}


def test_equal_outputs_need_no_cause(tmp_path: Path) -> None:
    found = explained(recorded(), tmp_path / "a")
    assert (found.compared > 10, found.explained) == (True, [])


def test_a_reload_on_a_wrong_boundary_is_state(tmp_path: Path) -> None:
    found = only(b.build(fault="full-lookup"), tmp_path / "a")
    assert (found.op, found.cause, found.against) == ("N32.reload", Cause.STATE, "control N32.reload")
    assert asked(found) == {
        Cause.SCHEDULE: False,
        Cause.KERNEL: None,
        Cause.STORAGE: None,
        Cause.STATE: True,
    }
    assert "the last token is applied twice" in found.steps[-1].said
    assert "not recorded: which autotuned configurations ran" in found.steps[1].said
    assert found.steps[-1].evidence


def test_a_reload_that_differs_while_all_else_is_the_same_is_state(tmp_path: Path) -> None:
    found = only(parted(recorded(), "N32.reload"), tmp_path / "a")
    assert (found.cause, found.first_difference) == (Cause.STATE, 2)
    assert asked(found) == {
        Cause.SCHEDULE: False,
        Cause.KERNEL: False,
        Cause.STORAGE: False,
        Cause.STATE: True,
    }


def test_a_cold_run_that_differs_while_all_else_is_the_same_is_unknown(tmp_path: Path) -> None:
    found = {one.op: one for one in explained(parted(recorded(), "N32.cold", "N32.reload"), tmp_path / "a").explained}
    assert {op: one.cause for op, one in found.items()} == {
        "N32.cold": Cause.UNKNOWN,
        "N32.reload": Cause.UNKNOWN,
    }
    assert "reused nothing" in found["N32.cold"].steps[-1].said
    assert "the difference is there without reuse" in found["N32.reload"].steps[-1].said


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"variables": {"OMP_NUM_THREADS": "4"}}, "variables.OMP_NUM_THREADS is 2 and 4"),
        ({"backends": {}}, "backends.Attention.attn_backend is FlashAttentionBackend and absent"),
    ],
)
def test_a_changed_environment_value_is_kernel(tmp_path: Path, change: dict[str, Any], name: str) -> None:
    found = only(parted(recorded(**change), "N32.reload"), tmp_path / "a")
    assert (found.cause, found.steps[-1].said) == (Cause.KERNEL, f"rank 0: {name}")


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("cache_config.mamba_ssm_cache_dtype", Cause.KERNEL),
        ("model_config.enforce_eager", Cause.KERNEL),
        ("cache_config.num_gpu_blocks", Cause.STATE),
    ],
)
def test_a_setting_that_decides_what_is_computed_is_kernel(tmp_path: Path, name: str, cause: Cause) -> None:
    run = parted(recorded(), "N32.reload")
    stream = next(one for (arm, _), one in run.streams.items() if arm == "candidate" if any(map(started, one)))
    (engine,) = filter(started, stream)
    assert isinstance(engine, r.EngineStarted)
    b.edit(stream, r.EngineStarted, {"settings": {**engine.settings, name: "other"}})
    found = only(run, tmp_path / "a")
    assert found.cause is cause
    assert (f"{name} is absent and other" in found.steps[1].said) == (cause is Cause.KERNEL)


def started(record: r.Record) -> bool:
    return isinstance(record, r.EngineStarted)


def test_another_configuration_of_a_kernel_is_kernel(tmp_path: Path) -> None:
    run = parted(recorded(), "N32.reload")
    b.edit(run.scheduler(), r.KernelsSelected, {"selections": selected(32).selections})
    found = only(run, tmp_path / "a")
    assert found.cause is Cause.KERNEL
    assert found.steps[-1].said == "rank 0: fla.kda ran with another configuration for key (64)"


@pytest.mark.parametrize("row", [0, 1])
def test_a_changed_weight_or_buffer_is_storage(tmp_path: Path, row: int) -> None:
    run = parted(recorded(), "N32.reload")
    rows = [msgspec.structs.replace(one, digest="9" * 32) if at == row else one for at, one in
            enumerate(taken(0, "start").rows)]  # fmt: skip
    b.edit(run.scheduler(), r.StoragesDigested, {"rows": rows}, moment="start")
    found = only(run, tmp_path / "a")
    assert found.cause is Cause.STORAGE
    assert f"the first is {rows[row].name}" in found.steps[-1].said


def test_another_prefill_split_is_schedule_whatever_else_differs(tmp_path: Path) -> None:
    run = parted(recorded(device="NVIDIA H100"), "N32.cold")
    records = run.scheduler()
    at = next(
        i
        for i, one in enumerate(records)
        if isinstance(one, r.BatchScheduled)
        and one.source is r.BatchSource.SCHEDULER
        and one.rows[0].request == b.request_id("candidate", "N32.cold")
    )
    whole = records[at]
    assert isinstance(whole, r.BatchScheduled)
    row = whole.rows[0]
    parts = [(row.start, 10), (row.start + 10, row.scheduled - 10)]
    records[at : at + 1] = [
        msgspec.structs.replace(whole, rows=[msgspec.structs.replace(row, start=start, scheduled=scheduled)])
        for start, scheduled in parts
    ]
    found = only(run, tmp_path / "a")
    assert (found.cause, len(found.steps)) == (Cause.SCHEDULE, 1)
    assert found.steps[0].said == "step 0: [0, 16) against [0, 10) (control against candidate)"


def test_steps_that_are_not_recorded_are_said(tmp_path: Path) -> None:
    run = parted(recorded(), "N32.reload")
    b.drop(run.scheduler(), r.BatchScheduled)
    found = only(run, tmp_path / "a")
    assert asked(found)[Cause.SCHEDULE] is None
    assert found.cause is Cause.UNKNOWN


def test_an_arm_that_is_not_there_is_no_equal_output(tmp_path: Path) -> None:
    for arm in ARMS:
        run = recorded()
        for place in [place for place in run.streams if place[0] == arm]:
            del run.streams[place]
        found = explained(run, tmp_path / arm)
        assert not found.complete
        assert found.unseen[0] == f"arm {arm} is planned and not in the archive"


def test_an_output_that_is_missing_or_empty_is_listed(tmp_path: Path) -> None:
    run = recorded()
    b.drop(run.client(), r.OperationOutput, op="N32.reload")
    b.edit(run.client(), r.OperationOutput, {"token_ids": []}, op="N33.reload")
    b.drop(run.client("control"), r.OperationOutput, op="N31.reload")
    found = explained(run, tmp_path / "a")
    assert (found.explained, found.complete) == ([], False)
    assert found.unseen == [
        "control N31.reload: it has no output",
        "candidate N31.reload: arm control has no output of N31.reload",
        "candidate N32.reload: it has no output",
        "candidate N33.reload: it has no output",
    ]


def test_an_output_that_is_cut_short_differs(tmp_path: Path) -> None:
    run = recorded()
    (output,) = [one for one in run.client() if isinstance(one, r.OperationOutput) and one.op == "N32.reload"]
    b.edit(run.client(), r.OperationOutput, {"token_ids": output.token_ids[:3]}, op="N32.reload")
    (found,) = explained(run, tmp_path / "a").explained
    assert (found.op, found.first_difference) == ("N32.reload", 3)


def test_a_prompt_that_the_control_never_ran_is_listed(tmp_path: Path) -> None:
    run = recorded()
    b.edit(run.client(), r.OperationStarted, {"prompt_sha256": "9" * 64}, op="N32.reload")
    found = explained(run, tmp_path / "a")
    assert found.unseen == ["candidate N32.reload: arm control has no run of this prompt"]
    assert not found.complete


def test_an_archive_without_a_seal_or_with_damage_is_never_complete(tmp_path: Path) -> None:
    run = recorded()
    assert explained(run, tmp_path / "whole").complete
    run.sealed = False
    found = explained(run, tmp_path / "unsealed")
    assert not found.complete and found.damage is not None and "no readable seal" in found.damage


@pytest.mark.parametrize(
    ("drop", "cause", "word"),
    [
        (r.EnvironmentObserved, Cause.KERNEL, "backends, variables and patched files of rank 1 of arm candidate"),
        (r.KernelsSelected, Cause.KERNEL, "which autotuned configurations ran on rank 1 of arm candidate"),
        (r.StoragesDigested, Cause.STORAGE, "of rank 1 of arm candidate were not digested at its start"),
    ],
)
def test_what_one_rank_did_not_record_is_not_the_same(
    tmp_path: Path, drop: type[r.Record], cause: Cause, word: str
) -> None:
    run = two_ranks()
    assert asked(only(parted(two_ranks(), "N32.reload"), tmp_path / "whole"))[cause] is False
    b.drop(run.scheduler(), drop, rank=1)
    found = only(parted(run, "N32.reload"), tmp_path / "a")
    (step,) = [one for one in found.steps if one.cause is cause]
    assert (step.differs, word in step.said) == (None, True), step


def two_ranks() -> b.Run:
    run = b.build(ranks=2)
    for arm in ARMS:
        records = run.scheduler(arm)
        for rank in range(2):
            records[:0] = [taken(rank, "start"), seen(rank)]
            records += [taken(rank, "end"), msgspec.structs.replace(selected(), rank=rank)]
    return run


def test_storages_that_name_nothing_or_cannot_be_compared_are_not_the_same(tmp_path: Path) -> None:
    empty = parted(recorded(), "N32.reload")
    for arm in ARMS:
        b.edit(empty.scheduler(arm), r.StoragesDigested, {"rows": []})
    other = parted(recorded(), "N32.reload")
    b.edit(other.scheduler(), r.StoragesDigested, {"digest": "mix128"})
    assert asked(only(empty, tmp_path / "empty"))[Cause.STORAGE] is None
    found = only(other, tmp_path / "other")
    assert asked(found)[Cause.STORAGE] is None
    assert "xxh3-128 and mix128 cannot be compared" in found.steps[2].said


def test_a_weight_that_changed_alike_in_both_arms_is_storage(tmp_path: Path) -> None:
    run = parted(recorded(), "N32.reload")
    rows = [msgspec.structs.replace(one, digest="9" * 32) for one in taken(0, "end").rows]
    for arm in ARMS:
        b.edit(run.scheduler(arm), r.StoragesDigested, {"rows": rows}, moment="end")
    found = only(run, tmp_path / "a")
    assert found.cause is Cause.STORAGE and "between start and end of arm control" in found.steps[-1].said


def test_no_kernel_and_key_that_ran_in_both_is_not_the_same(tmp_path: Path) -> None:
    run = parted(recorded(), "N32.reload")
    other = msgspec.structs.replace(selected().selections[0], key=["128"])
    b.edit(run.scheduler(), r.KernelsSelected, {"selections": [other]})
    found = only(run, tmp_path / "a")
    assert asked(found)[Cause.KERNEL] is None
    assert "which autotuned configurations ran for the same key in both arms" in found.steps[1].said


def test_a_tuner_that_broke_its_profile_is_not_the_same(tmp_path: Path) -> None:
    run = parted(recorded(), "N32.reload")
    b.edit(run.scheduler(), r.KernelsSelected, {"violations": ["fla.kda ran with BK=32 too"]})
    assert asked(only(run, tmp_path / "a"))[Cause.KERNEL] is None


def test_a_control_that_does_not_repeat_itself_blames_no_state(tmp_path: Path) -> None:
    """Its cold run agrees with the candidate's; its own second run of the prompt does not."""
    run = recorded()
    (output,) = [one for one in run.client("control") if isinstance(one, r.OperationOutput) and one.op == "N32.reload"]
    ids = [*output.token_ids[:2], output.token_ids[2] + 500, *output.token_ids[3:]]
    b.edit(run.client("control"), r.OperationOutput, {"token_ids": ids}, op="N32.reload")
    found = explained(run, tmp_path / "a").explained
    assert [(one.arm, one.cause) for one in found] == [(arm, Cause.UNKNOWN) for arm in ARMS]
    assert "the cold runs of this prompt do not repeat themselves" in found[1].steps[-1].said


@pytest.mark.parametrize(("run", "cause"), [(b.build, Cause.UNKNOWN), (recorded, Cause.STATE)])
def test_without_a_cold_run_state_is_to_blame_only_where_all_else_is_recorded(
    tmp_path: Path, run: Any, cause: Cause
) -> None:
    made = parted(run(), "N32.reload")
    b.edit(made.client(), r.OperationStarted, {"prompt_sha256": "9" * 64}, op="N32.cold")
    found = {one.op: one for one in explained(made, tmp_path / "a").explained}["N32.reload"]
    assert found.cause is cause
    assert "one side has no cold run of this prompt" in found.steps[-1].said


def test_steps_that_end_early_on_both_sides_are_not_the_same(tmp_path: Path) -> None:
    run = parted(recorded(), "N32.reload")
    for arm in ARMS:
        request = b.request_id(arm, "N32.reload")
        mine = [
            one for one in run.scheduler(arm) if isinstance(one, r.BatchScheduled) and one.rows[0].request == request
        ]
        for one in mine[-3:]:
            run.scheduler(arm).remove(one)
    found = only(run, tmp_path / "a")
    assert asked(found)[Cause.SCHEDULE] is None
    assert "no step is recorded beyond token" in found.steps[0].said
