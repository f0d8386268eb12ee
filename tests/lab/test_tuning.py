"""Pinning and ablation, as the parent sees them: what counts as held, and when a row shows nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from samestate.evidence.records import KernelSelection
from samestate.evidence.tuner_profile import make, write
from samestate.lab.errors import RunError
from samestate.lab.tuning import Ablation, ablate, broken, pinned, run_watched

CHILD = [sys.executable, str(Path(__file__).with_name("tuned_process.py"))]
KERNELS = ["k.hidden", "k.shown"]
MADE = make("cpu", {}, {0: [KernelSelection(kernel=one, key=["64"], config={"BLOCK": 16}) for one in KERNELS]})


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    write(path, MADE)
    return path


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Any:
    def say(**what: Any) -> None:
        monkeypatch.setenv("SAYS", json.dumps(what))

    say()
    return say


def held(profile: Path) -> list[str]:
    return broken(run_watched(CHILD, pinned(profile)), MADE, write(profile, MADE))


def test_a_run_under_the_profile_is_held(says: Any, profile: Path) -> None:
    assert held(profile) == []


@pytest.mark.parametrize(
    ("report", "line"),
    [
        ({"mode": "record", "profile_sha256": None}, "rank 0 ran under no profile, in mode record"),
        ({"profile_sha256": "f" * 64}, f"rank 0 ran under profile {'f' * 12}, in mode pin"),
        ({"mode": "release"}, "in mode release"),
        ({"benchmarks": 2}, "rank 0 measured configurations 2 times"),
        ({"rank": 3}, "rank 3 is not in the profile, which has 0"),
        (
            {"violations": ["k.shown was selected beside the profile"]},
            "rank 0: k.shown was selected beside the profile",
        ),
    ],
)
def test_what_is_not_held_is_named(says: Any, profile: Path, report: dict[str, Any], line: str) -> None:
    says(report=report)
    assert any(line in found for found in held(profile))


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ({"choices": {"k.shown": 32}}, "k.shown (64) ran with BLOCK=32, recorded is BLOCK=16"),
        ({"key": ["128"]}, "k.shown (128) ran with BLOCK=16, recorded is nothing"),
    ],
)
def test_a_process_that_says_it_was_held_is_not_believed(
    says: Any, profile: Path, what: dict[str, Any], line: str
) -> None:
    says(**what)
    assert any(line in found for found in held(profile))


def ablated(profile: Path, **more: Any) -> Ablation:
    return ablate(CHILD, profile, KERNELS, **more)


def bits(found: Ablation) -> dict[str, bool | None]:
    return {row.kernel: row.bits_changed for row in found.rows}


def test_the_kernel_whose_choice_changes_bits(says: Any, profile: Path) -> None:
    says(freed={"k.shown": 32, "k.hidden": 32})
    found = ablated(profile)
    assert (found.complete, bits(found)) == (True, {"k.hidden": False, "k.shown": True})


def test_a_kernel_that_chose_nothing_else_shows_nothing(says: Any, profile: Path) -> None:
    """Released, and found its recorded choice in a cache; or it did not run at all."""
    says(freed={"k.shown": 32})
    found = ablated(profile)
    assert (found.repeats, found.complete) == (True, False)
    assert bits(found) == {"k.hidden": None, "k.shown": True}
    says(choices={"k.shown": 16}, freed={"k.shown": 32})
    assert bits(ablated(profile))["k.hidden"] is None


def test_a_change_without_another_choice_is_laid_to_no_kernel(says: Any, profile: Path, tmp_path: Path) -> None:
    says(count=str(tmp_path / "count"), drifts=2)
    found = ablated(profile)
    assert (found.repeats, found.complete) == (False, False)
    assert bits(found) == {"k.hidden": None, "k.shown": None}


def test_a_drift_after_the_first_runs_is_seen_at_the_last(says: Any, profile: Path, tmp_path: Path) -> None:
    says(count=str(tmp_path / "count"), drifts=4, freed={"k.shown": 32, "k.hidden": 32})
    assert not ablated(profile).repeats


def test_a_run_that_breaks_the_rest_of_the_profile_attributes_nothing(says: Any, profile: Path) -> None:
    says(choices={"k.shown": 16, "k.hidden": 32})
    with pytest.raises(RunError, match=r"held to the profile .*, but rank 0: k\.hidden \(64\) ran with BLOCK=32"):
        ablated(profile)


def test_a_command_that_prints_nothing_has_nothing_to_compare(says: Any, profile: Path) -> None:
    says(print="")
    with pytest.raises(RunError, match="printed nothing; name what it writes with --output"):
        ablated(profile)


def test_a_file_of_an_earlier_run_is_not_compared(says: Any, profile: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    says(into=str(out), freed={"k.shown": 32, "k.hidden": 32})
    assert bits(ablated(profile, output=out)) == {"k.hidden": False, "k.shown": True}
    says(into=str(out), lazy=True, freed={"k.shown": 32, "k.hidden": 32})
    with pytest.raises(RunError, match="the command left it as it was"):
        ablated(profile, output=out)
