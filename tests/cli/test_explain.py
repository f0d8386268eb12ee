from __future__ import annotations

import json
from pathlib import Path

from .conftest import Command


def test_a_clean_run_has_nothing_to_explain(samestate: Command, clean: Path) -> None:
    result = samestate("explain", clean)
    assert result.exit_code == 0 and result.output == "0 of 45 outputs differ from their reference\n"


def test_a_fault_is_explained_in_order(samestate: Command, faulty: Path) -> None:
    result = samestate("explain", faulty)
    assert result.exit_code == 1, result.output
    lines = result.output.splitlines()
    assert lines[0] == "candidate N3584.reload differs from control N3584.reload at token 0: state"
    assert [line.split()[0] for line in lines[1:5]] == ["schedule", "kernel", "storage", "state"]
    assert lines[-1] == "2 of 45 outputs differ from their reference"
    said = json.loads(samestate("explain", faulty, "--json").stdout)
    assert {row["cause"] for row in said["explained"]} == {"state"}


def test_what_is_no_archive(samestate: Command, tmp_path: Path) -> None:
    assert samestate("explain", tmp_path / "none").exit_code == 2
