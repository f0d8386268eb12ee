from __future__ import annotations

import json
from pathlib import Path

from .conftest import Command


def test_a_clean_run_has_nothing_to_explain(samestate: Command, clean: Path) -> None:
    result = samestate("explain", clean)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[:2] == [
        "control: 36 generations (9 cold, 18 interposer, 9 reload), 2,304 tokens put out, 9 resets, no saves, no loads",
        "candidate: 36 generations (9 cold, 18 interposer, 9 reload), 2,304 tokens put out, 9 resets, "
        "39 of 39 saves completed, 9 of 9 loads completed",
    ]
    passed, others = (line.removeprefix("checks ").partition(": ") for line in lines[2:4])
    assert passed[0] == "pass" and {"paired-equality", "boundary", "transfers"} <= set(passed[2].split(", "))
    assert others[0] == "not exercised" and "(environment)" in others[2]
    assert lines[4] == "verdict pass, by boundary-v1"
    assert lines[5].startswith("reference: the control's output of the same prompt")
    assert lines[6:] == ["0 of 45 outputs differ from their reference"]


def test_json_tells_the_same(samestate: Command, clean: Path) -> None:
    told = json.loads(samestate("explain", clean, "--json").stdout)
    assert (told["compared"], told["explained"], told["verdict"]) == (45, [], "pass")
    assert told["checks"]["boundary"] == "pass" and told["checks"]["environment"] == "not_exercised"
    by_arm = {arm["arm"]: arm for arm in told["arms"]}
    assert by_arm["candidate"]["generations"] == {"cold": 9, "interposer": 18, "reload": 9}
    assert (by_arm["candidate"]["saves"], by_arm["candidate"]["loads"], by_arm["control"]["saves"]) == (39, 9, 0)


def test_a_fault_is_explained_in_order(samestate: Command, faulty: Path) -> None:
    result = samestate("explain", faulty)
    assert result.exit_code == 1, result.output
    lines = result.output.splitlines()
    assert lines[0] == "candidate N3584.reload differs from control N3584.reload at token 0: state"
    assert [line.split()[0] for line in lines[1:5]] == ["schedule", "kernel", "storage", "state"]
    assert lines[-1] == "2 of 45 outputs differ from their reference"
    assert "checks fail: paired-equality, reload-equality, boundary, transfers" in lines
    assert "verdict fail, by boundary-v1" in lines
    said = json.loads(samestate("explain", faulty, "--json").stdout)
    assert {row["cause"] for row in said["explained"]} == {"state"}


def test_what_is_no_archive(samestate: Command, tmp_path: Path) -> None:
    assert samestate("explain", tmp_path / "none").exit_code == 2
