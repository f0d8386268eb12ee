from __future__ import annotations

from pathlib import Path

import pytest

from samestate.checks.base import Verdict
from samestate.evidence import records as r

from . import builder as b

CHECK = "settings"


def test_silent_when_only_declared_settings_differ(tmp_path: Path) -> None:
    run = b.build()
    roles = {
        rec.settings["kv_transfer_config.kv_role"] for arm in ("control", "candidate") for rec in run.client(arm)[:1]
    }
    assert len(roles) == 2
    assert b.result(run.judge(tmp_path / "a"), CHECK).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"settings": {"cache_config.block_size": 8, "kv_transfer_config.kv_role": "x"}}, "cache_config.block_size"),
        ({"settings": {"cache_config.block_size": 16.0}}, "cache_config.block_size"),
        ({"settings": {"cache_config.block_size": 16, "kv_transfer_configured": 1}}, "kv_transfer_configured"),
        ({"settings": {"kv_transfer_config": 1}}, "cache_config.block_size"),
        ({"versions": {"sim": "2"}}, "versions.sim"),
        ({"tensor_parallel": 2}, "tensor_parallel"),
        ({"eos_token_ids": [7, 8]}, "eos_token_ids"),
    ],
)
def test_an_undeclared_difference_fails(tmp_path: Path, change: dict[str, object], name: str) -> None:
    run = b.build()
    b.edit(run.client(), r.EngineStarted, change)
    judgement = run.judge(tmp_path / "a")
    (finding,) = [one for one in b.result(judgement, CHECK).findings if one.code == "setting_differs"]
    assert (judgement.verdict, finding.place.arm) == (Verdict.FAIL, "candidate")
    assert finding.message.startswith(f"{name} is ")


@pytest.mark.parametrize(
    "change",
    [
        {"max_model_len": 99},
        {"settings": {"cache_config.block_size": 8}},
        {"settings": {"cache_config.block_size": 16, "model_config.seed": 1}},
        {"settings": {"cache_config.block_size": 16, "model_config.dtype": "torch.float32"}},
    ],
)
def test_a_setting_that_no_arm_has_in_force_fails(tmp_path: Path, change: dict[str, object]) -> None:
    run = b.build()
    for arm in ("control", "candidate"):
        b.edit(run.client(arm), r.EngineStarted, change)
    judgement = run.judge(tmp_path / "a")
    assert (judgement.verdict, b.codes(judgement, CHECK)) == (Verdict.FAIL, ["setting_not_in_force"] * 2)


@pytest.mark.parametrize("name", ["model_config.dtype", "speculative_config.draft.dtype", "cache_config.dtype_of"])
def test_settings_in_force_and_others_of_like_names_are_silent(tmp_path: Path, name: str) -> None:
    run = b.build()
    settings = {"cache_config.block_size": 16, "model_config.seed": 0, name: "torch.bfloat16"}
    for arm in ("control", "candidate"):
        b.edit(run.client(arm), r.EngineStarted, {"settings": settings})
    assert b.result(run.judge(tmp_path / "a"), CHECK).verdict is Verdict.PASS


def test_more_than_one_engine_fails(tmp_path: Path) -> None:
    run = b.build()
    for arm in ("control", "candidate"):
        b.edit(run.client(arm), r.EngineStarted, {"data_parallel": 2})
    assert b.codes(run.judge(tmp_path / "a"), CHECK) == ["not_one_engine"] * 2


@pytest.mark.parametrize(("arm", "connector"), [("control", "Sim"), ("candidate", None)])
def test_a_connector_that_was_not_planned_fails(tmp_path: Path, arm: str, connector: str | None) -> None:
    run = b.build()
    b.edit(run.client(arm), r.EngineStarted, {"connector": connector})
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.place.arm) == ("wrong_connector", arm)


def test_no_settings_at_all_are_no_pass(tmp_path: Path) -> None:
    run = b.build()
    for arm in ("control", "candidate"):
        b.edit(run.client(arm), r.EngineStarted, {"settings": {}})
    assert b.only(run.judge(tmp_path / "a"), CHECK).code == "nothing_examined"
