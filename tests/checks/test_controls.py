"""Controls and topology: recorded apart, as planned, alike, and one engine an arm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from samestate.checks.base import Verdict
from samestate.evidence import records as r
from samestate.evidence.controls import CONTROLS, MATCHED_SCHEDULE, REPAIR, TUNER_PROFILE
from samestate.plans.model import Plan

from . import builder as b

CHECK, TOPOLOGY = "controls", "topology"
PROFILE, OTHER = "a" * 64, "c" * 64
AUTOTUNE, ROLE = "kernel_config.enable_flashinfer_autotune", "kv_transfer_config.kv_role"
ARMS = ("control", "candidate")


def controls(on: dict[str, str | None]) -> list[r.Control]:
    return [r.Control(name=name, on=name in on, sha256=on.get(name)) for name in CONTROLS]


def told(
    on: dict[str, str | None] | None = None, *, ranks: int = 1, plan: Plan | None = None, **settings: r.Scalar
) -> b.Run:
    """A run whose engines record their controls, those named on, and the roles of their connectors."""
    run = b.build(plan, ranks=ranks)
    for arm in ARMS:
        role = "kv_both" if arm == "candidate" else None
        change: dict[str, Any] = {"controls": controls(on or {})}
        change["settings"] = {"cache_config.block_size": b.C, ROLE: role, **settings}
        b.edit(run.client(arm), r.EngineStarted, change)
    return run


def profiled(*, ranks: int = 1, autotune: r.Scalar = False, recorded: bool = True) -> b.Run:
    """The same under a tuner profile that every rank read back."""
    run = told({TUNER_PROFILE: PROFILE}, ranks=ranks, **({AUTOTUNE: autotune} if recorded else {}))
    for arm in ARMS:
        for rank in range(ranks):
            run.scheduler(arm).append(selected(rank))
    return run


def selected(rank: int = 0, **change: Any) -> r.KernelsSelected:
    choice = r.KernelSelection(kernel="fla.ops.kda.chunk", key=["64"], config={"BK": 64, "num_warps": 4})
    said = r.KernelsSelected(
        rank=rank, mode="pin", profile_sha256=PROFILE, benchmarks=0, selections=[choice], violations=[]
    )
    return msgspec.structs.replace(said, **change)


def test_an_archive_from_before_they_were_recorded_is_judged_without_them(tmp_path: Path) -> None:
    judgement = b.build().judge(tmp_path / "a")
    assert judgement.verdict is Verdict.PASS
    for check in (CHECK, TOPOLOGY):
        assert b.result(judgement, check).verdict is Verdict.NOT_EXERCISED
        assert check not in judgement.required


def test_silent_when_all_are_off(tmp_path: Path) -> None:
    judgement = told().judge(tmp_path / "a")
    assert judgement.verdict is Verdict.PASS
    assert {CHECK, TOPOLOGY} <= set(judgement.required)
    assert b.result(judgement, CHECK).summary == "2 arms, in force: none"
    assert b.result(judgement, CHECK).examined == 2 * len(CONTROLS)


@pytest.mark.parametrize("ranks", [1, 2])
def test_silent_when_every_rank_ran_the_profile(tmp_path: Path, ranks: int) -> None:
    judgement = profiled(ranks=ranks).judge(tmp_path / "a")
    assert (judgement.verdict, b.codes(judgement, CHECK)) == (Verdict.PASS, [])
    assert b.result(judgement, CHECK).summary == f"2 arms, in force: {TUNER_PROFILE} {PROFILE[:12]}"
    assert f"{TUNER_PROFILE} {PROFILE[:12]}" in judgement.scope


@pytest.mark.parametrize(
    ("autotune", "recorded", "code", "verdict"),
    [
        (True, True, "autotune_in_force", Verdict.FAIL),
        (None, True, "autotune_not_recorded", Verdict.UNKNOWN),
        ("False", True, "autotune_not_recorded", Verdict.UNKNOWN),
        (False, False, "autotune_not_recorded", Verdict.UNKNOWN),
    ],
)
def test_nothing_else_may_tune_under_a_profile(
    tmp_path: Path, autotune: r.Scalar, recorded: bool, code: str, verdict: Verdict
) -> None:
    judgement = profiled(autotune=autotune, recorded=recorded).judge(tmp_path / "a")
    assert (judgement.verdict, b.codes(judgement, CHECK)) == (verdict, [code, code])


def test_without_a_profile_it_may_tune(tmp_path: Path) -> None:
    assert told(**{AUTOTUNE: True}).judge(tmp_path / "a").verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("change", "code", "verdict"),
    [
        ({"mode": "release"}, "other_profile", Verdict.FAIL),
        ({"profile_sha256": OTHER}, "other_profile", Verdict.FAIL),
        ({"benchmarks": 3}, "tuned_anew", Verdict.FAIL),
        ({"violations": ["kernel ran with BK=32, recorded BK=64"]}, "profile_violation", Verdict.FAIL),
        ({"selections": []}, "vacuous_profile", Verdict.UNKNOWN),
        ({"rank": 5}, "selection_not_recorded", Verdict.UNKNOWN),
    ],
)
def test_what_ran_is_held_to_the_profile(tmp_path: Path, change: dict[str, Any], code: str, verdict: Verdict) -> None:
    run = profiled()
    b.edit(run.scheduler(), r.KernelsSelected, change)
    judgement = run.judge(tmp_path / "a")
    assert (judgement.verdict, b.only(judgement, CHECK).code) == (verdict, code)


def edited(run: b.Run, arm: str, change: dict[str, Any]) -> b.Run:
    b.edit(run.client(arm), r.EngineStarted, change)
    return run


@pytest.mark.parametrize(
    ("mine", "code", "verdict"),
    [
        (None, "controls_not_recorded", Verdict.UNKNOWN),
        (controls({})[1:], "missing_control", Verdict.UNKNOWN),
        ([*controls({}), *controls({})[:1]], "repeated_control", Verdict.FAIL),
        (controls({MATCHED_SCHEDULE: OTHER}), "control_differs", Verdict.FAIL),
        (controls({REPAIR: OTHER}), "wrong_control", Verdict.FAIL),
    ],
)
def test_each_is_recorded_once_and_alike(
    tmp_path: Path, mine: list[r.Control] | None, code: str, verdict: Verdict
) -> None:
    judgement = edited(told(), "candidate", {"controls": mine}).judge(tmp_path / "a")
    assert (judgement.verdict, b.only(judgement, CHECK).code) == (verdict, code)


def test_one_that_is_on_says_what_it_is_made_of(tmp_path: Path) -> None:
    judgement = told({MATCHED_SCHEDULE: None}).judge(tmp_path / "a")
    assert (judgement.verdict, b.codes(judgement, CHECK)) == (Verdict.UNKNOWN, ["control_without_hash"] * 2)


def test_a_declared_difference_is_none(tmp_path: Path) -> None:
    plan = b.small_plan()
    declared = [*plan.differing_settings, f"controls.{MATCHED_SCHEDULE}"]
    run = told(plan=plan.model_copy(update={"differing_settings": declared}))
    judgement = edited(run, "control", {"controls": controls({MATCHED_SCHEDULE: OTHER})}).judge(tmp_path / "a")
    assert (judgement.verdict, b.codes(judgement, CHECK)) == (Verdict.PASS, [])


# --- one engine -------------------------------------------------------------------------------------


def test_silent_where_four_ranks_are_one_engine(tmp_path: Path) -> None:
    judgement = told(ranks=4).judge(tmp_path / "a")
    assert (judgement.verdict, b.codes(judgement, TOPOLOGY)) == (Verdict.PASS, [])
    assert b.result(judgement, TOPOLOGY).summary == "2 arms of one engine each: tensor 4 x pipeline 1"


@pytest.mark.parametrize(
    ("arm", "change", "code", "verdict"),
    [
        ("candidate", {"data_parallel": 2}, "replicas", Verdict.FAIL),
        ("candidate", {"process": "simulated-control"}, "same_process", Verdict.FAIL),
        ("candidate", {"process": ""}, "unnamed_process", Verdict.UNKNOWN),
        ("candidate", {"settings": {"cache_config.block_size": b.C}}, "role_not_recorded", Verdict.UNKNOWN),
        ("candidate", {"settings": {ROLE: "kv_producer"}}, "disaggregated", Verdict.FAIL),
        ("candidate", {"settings": {ROLE: "kv_consumer"}}, "disaggregated", Verdict.FAIL),
        ("control", {"settings": {ROLE: "kv_both"}}, "disaggregated", Verdict.FAIL),
        ("candidate", {"tensor_parallel": 2}, "missing_rank", Verdict.UNKNOWN),
    ],
)
def test_an_arm_is_one_engine(tmp_path: Path, arm: str, change: dict[str, Any], code: str, verdict: Verdict) -> None:
    judgement = edited(told(), arm, change).judge(tmp_path / "a")
    found = {one.code: one.verdict for one in b.result(judgement, TOPOLOGY).findings}
    assert found[code] is verdict


def test_a_rank_of_another_world_fails(tmp_path: Path) -> None:
    run = told(ranks=2)
    b.edit(run.worker(1), r.RankRegistered, {"world_size": 3})
    judgement = run.judge(tmp_path / "a")
    assert (b.only(judgement, TOPOLOGY).code, b.only(judgement, TOPOLOGY).place.rank) == ("wrong_world", 1)


def test_a_second_start_in_an_arm_fails(tmp_path: Path) -> None:
    run = told()
    run.scheduler().append(run.client()[0])
    assert "not_one_engine" in b.codes(run.judge(tmp_path / "a"), TOPOLOGY)
