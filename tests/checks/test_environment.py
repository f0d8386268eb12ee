"""What processes stand on: observed in time, on every rank, alike in both arms; and what differs between two runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from samestate.checks.base import Verdict
from samestate.checks.history import History
from samestate.evidence import records as r
from samestate.reports.environments import compare_environments

from . import builder as b

CHECK = "environment"
PATCHED = r.PatchedFile(distribution="vllm", path="vllm/envs.py", sha256="a" * 64)


def seen(rank: int = 0, **change: Any) -> r.EnvironmentObserved:
    one = r.EnvironmentObserved(
        rank=rank,
        observed_at="2026-11-30T10:00:00Z",
        device="NVIDIA H200",
        device_uuid=f"GPU-{rank}",
        driver="580.1",
        variables={"OMP_NUM_THREADS": "2"},
        backends={"Attention.attn_backend": "FlashAttentionBackend"},
        patched=[],
    )
    return msgspec.structs.replace(one, **change)


def observed(*, ranks: int = 1, plan: Any = None, **change: Any) -> b.Run:
    """A run whose ranks were observed when their engines started; `change` is the candidate's."""
    run = b.build(plan, ranks=ranks)
    for arm in ("control", "candidate"):
        for rank in range(ranks):
            run.scheduler(arm).insert(0, seen(rank, **(change if arm == "candidate" else {})))
    return run


def test_an_archive_without_inventories_is_judged_without_them(tmp_path: Path) -> None:
    judgement = b.build().judge(tmp_path / "a")
    assert b.result(judgement, CHECK).verdict is Verdict.NOT_EXERCISED
    assert CHECK not in judgement.required


@pytest.mark.parametrize("ranks", [1, 2])
def test_silent_where_all_ranks_stand_on_the_same(tmp_path: Path, ranks: int) -> None:
    judgement = observed(ranks=ranks, device_uuid="GPU-9").judge(tmp_path / "a")
    assert (judgement.verdict, b.codes(judgement, CHECK)) == (Verdict.PASS, [])
    assert b.result(judgement, CHECK).summary == f"{2 * ranks} ranks on NVIDIA H200; no files not as released"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"device": "NVIDIA H100"}, "device"),
        ({"driver": None}, "driver"),
        ({"variables": {"OMP_NUM_THREADS": "4"}}, "variables.OMP_NUM_THREADS"),
        ({"variables": {}}, "variables.OMP_NUM_THREADS"),
        ({"backends": {"Attention.attn_backend": "TritonAttentionBackend"}}, "backends.Attention.attn_backend"),
        ({"patched": [PATCHED]}, "patched.vllm/vllm/envs.py"),
    ],
)
def test_a_difference_is_named(tmp_path: Path, change: dict[str, Any], name: str) -> None:
    judgement = observed(**change).judge(tmp_path / "a")
    finding = b.only(judgement, CHECK)
    assert (finding.code, judgement.verdict, finding.place.rank) == ("environment_differs", Verdict.FAIL, 0)
    assert finding.message.startswith(f"rank 0: {name} is ")
    plan = b.small_plan()
    declared = [*plan.differing_settings, f"environment.{name}"]
    again = observed(plan=plan.model_copy(update={"differing_settings": declared}), **change)
    assert b.codes(again.judge(tmp_path / "b"), CHECK) == []


def test_a_rank_that_was_not_observed_is_unknown(tmp_path: Path) -> None:
    run = observed(ranks=2)
    b.drop(run.scheduler(), r.EnvironmentObserved, rank=1)
    judgement = run.judge(tmp_path / "a")
    assert (b.only(judgement, CHECK).code, judgement.verdict) == ("missing_environment", Verdict.UNKNOWN)


def test_an_inventory_speaks_for_nothing_that_ran_before_it(tmp_path: Path) -> None:
    run = observed()
    run.scheduler().append(run.scheduler().pop(0))
    judgement = run.judge(tmp_path / "a")
    assert (b.only(judgement, CHECK).code, judgement.verdict) == ("late_environment", Verdict.UNKNOWN)


def test_two_inventories_of_a_rank_are_unknown(tmp_path: Path) -> None:
    run = observed()
    run.scheduler().insert(0, seen())
    assert b.only(run.judge(tmp_path / "a"), CHECK).code == "repeated_environment"


# --- files that a plan expects not to be as released --------------------------------------------------

ELEVEN = [
    f"{package}/{package}/part_{number}.py"
    for package, files in (("vllm", 8), ("lmcache", 3))
    for number in range(files)
]


def patched(names: list[str]) -> list[r.PatchedFile]:
    split = [name.partition("/") for name in names]
    return [r.PatchedFile(distribution=package, path=path, sha256="a" * 64) for package, _, path in split]


def cumulative(listed: list[str] | None, found: list[str], *, ranks: int = 1, **change: Any) -> b.Run:
    """All ranks of both arms stand on `found`; the plan lists `listed`."""
    plan = b.small_plan().model_copy(update={"expected_patched": listed, **change})
    run = b.build(plan, ranks=ranks)
    for arm in ("control", "candidate"):
        for rank in range(ranks):
            run.scheduler(arm).insert(0, seen(rank, patched=patched(found)))
    return run


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("names", [ELEVEN, []])
def test_silent_where_the_listed_files_are_patched_and_no_others(tmp_path: Path, names: list[str], ranks: int) -> None:
    judgement = cumulative(names, names[::-1], ranks=ranks).judge(tmp_path / "a")
    assert (judgement.verdict, b.codes(judgement, CHECK)) == (Verdict.PASS, [])
    assert b.result(judgement, CHECK).summary.endswith(f"{len(names) or 'no'} files not as released")


@pytest.mark.parametrize(
    ("listed", "found", "code", "said"),
    [
        (ELEVEN[1:], ELEVEN, "unexpected_patch", f"{ELEVEN[0]} is not as released, expected_patched does not list it"),
        (ELEVEN, ELEVEN[:-1], "patch_absent", f"{ELEVEN[-1]} is not among the files"),
        ([], ELEVEN[:1], "unexpected_patch", f"{ELEVEN[0]} is not as released"),
    ],
)
def test_a_file_that_is_not_as_listed_is_named(
    tmp_path: Path, listed: list[str], found: list[str], code: str, said: str
) -> None:
    judgement = cumulative(listed, found).judge(tmp_path / "a")
    told = [one for one in b.result(judgement, CHECK).findings if one.code == code]
    assert judgement.verdict is Verdict.FAIL
    assert {one.code for one in b.result(judgement, CHECK).findings} == {code}
    assert [(one.place.arm, one.place.rank) for one in told] == [("control", 0), ("candidate", 0)]
    assert all(f"rank 0: {said}" in one.message and one.evidence for one in told)
    assert b.codes(cumulative(None, found).judge(tmp_path / "b"), CHECK) == []


def test_of_many_unlisted_files_the_first_are_named_and_the_others_counted(tmp_path: Path) -> None:
    judgement = cumulative([], ELEVEN).judge(tmp_path / "a")
    told = [one.message for one in b.result(judgement, CHECK).findings if one.place.arm == "candidate"]
    assert len(told) == 6
    assert "6 more files are not as released and not listed" in told[-1]


def test_a_list_that_no_inventory_answers_is_unknown(tmp_path: Path) -> None:
    judgement = b.build(b.small_plan().model_copy(update={"expected_patched": ELEVEN})).judge(tmp_path / "a")
    assert b.codes(judgement, CHECK) == ["missing_environment", "missing_environment"]
    assert judgement.verdict is Verdict.UNKNOWN


def test_a_file_in_which_arms_may_differ_is_not_held_to_the_list(tmp_path: Path) -> None:
    one = ELEVEN[0]
    differing = [*b.small_plan().differing_settings, f"environment.patched.{one}"]
    run = cumulative(ELEVEN[1:], ELEVEN[1:], differing_settings=differing)
    b.edit(run.scheduler(), r.EnvironmentObserved, {"patched": patched(ELEVEN)})
    assert b.codes(run.judge(tmp_path / "a"), CHECK) == []
    blanket = cumulative(ELEVEN[1:], ELEVEN, differing_settings=[*b.small_plan().differing_settings, "environment"])
    assert b.codes(blanket.judge(tmp_path / "b"), CHECK) == ["unexpected_patch", "unexpected_patch"]


# --- two runs side by side --------------------------------------------------------------------------


def arms(run: b.Run, root: Path) -> History:
    return History.read(run.write(root))


def test_every_name_that_differs_is_listed(tmp_path: Path) -> None:
    history = arms(observed(patched=[PATCHED], device_uuid="GPU-9"), tmp_path / "a")
    found = compare_environments(history.arm("control"), history.arm("candidate"))
    differing = {one.name: (one.a, one.b) for one in found.differing}
    assert differing["rank 0: patched.vllm/vllm/envs.py"] == ("absent", "a" * 64)
    assert differing["rank 0: device_uuid"] == ("GPU-0", "GPU-9")
    assert differing["kv_transfer_config.kv_role"] == ("'control'", "'candidate'")
    assert set(differing) == {
        "rank 0: patched.vllm/vllm/envs.py",
        "rank 0: device_uuid",
        "kv_transfer_config.kv_role",
    }
    assert any("speaks for arm candidate of that run alone" in note for note in found.notes)


def test_an_arm_against_itself_does_not_differ(tmp_path: Path) -> None:
    history = arms(b.build(), tmp_path / "a")
    found = compare_environments(history.arm("control"), history.arm("control"))
    assert found.differing == [] and found.compared > 5
    assert found.unseen[0] == "A: no rank was observed; devices, variables, backends and files are not compared"
