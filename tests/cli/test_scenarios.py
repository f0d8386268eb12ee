"""The plans with rules of their own, from the command line, on the simulated engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cli.conftest import Command

PLANS = ("pressure", "conversation", "cacheability")


def run(samestate: Command, checkpoint: Path, plan: str, out: Path, *more: str) -> tuple[int, str]:
    result = samestate("run", plan, "--engine", "sim", "--model", checkpoint, "--out", out, *more)
    return result.exit_code, result.output


@pytest.mark.parametrize("plan", PLANS)
def test_a_clean_run_passes_and_the_second_verifier_leaves_it_open(
    samestate: Command, checkpoint: Path, tmp_path: Path, plan: str
) -> None:
    code, said = run(samestate, checkpoint, plan, tmp_path / "a")
    assert code == 0, said
    assert samestate("check", tmp_path / "a").exit_code == 0
    second = subprocess.run([sys.executable, tmp_path / "a" / "verify.py"], capture_output=True, text=True, check=False)
    assert second.returncode == 3
    assert f"analyzer {plan}-v1 is not covered" in second.stdout
    assert "integrity        pass" in second.stdout


@pytest.mark.parametrize(
    ("plan", "fault", "check"),
    [
        ("pressure", "preempted-stale", "page-bytes"),
        ("pressure", "early-complete", "save-completion"),
        ("conversation", "trimmed-key", "prefix-identity"),
        ("conversation", "stale-page", "page-bytes"),
        ("cacheability", "boundary-dip", "hit-length"),
        ("cacheability", "third-sighting", "hit-length"),
        ("cacheability", "stored-never-served", "hit-length"),
        ("cacheability", "full-lookup", "provenance"),
    ],
)
def test_a_fault_fails(samestate: Command, checkpoint: Path, tmp_path: Path, plan: str, fault: str, check: str) -> None:
    code, said = run(samestate, checkpoint, plan, tmp_path / "a", "--fault", fault)
    assert code == 1
    assert f"  {check}: fail" in said


def test_room_for_all_is_no_pressure(samestate: Command, checkpoint: Path, tmp_path: Path) -> None:
    more = ("--serve-args", "--num-gpu-blocks-override 96")
    code, said = run(samestate, checkpoint, "pressure", tmp_path / "a", *more)
    assert code == 3
    assert "no request of a candidate was preempted: nothing was tested" in said
    assert "no request went on after a preemption: nothing was tested" in said
