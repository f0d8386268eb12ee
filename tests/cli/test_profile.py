"""`samestate profile` around a command that tunes: what it records, holds, rejects and lets go."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from msgspec import structs

from samestate.evidence.tuner_profile import read, write

from .conftest import Command

TUNED = [sys.executable, Path(__file__).with_name("tuned.py")]
SHOWN, HIDDEN = "__main__.shown", "__main__.hidden"


@pytest.fixture(scope="module")
def profile(samestate: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recorded where blocks of 16 are the fastest."""
    path = tmp_path_factory.mktemp("profiles") / "h200.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTEST", "16")
        result = samestate("profile", "record", path, "--", *TUNED)
    assert result.exit_code == 0, result.output
    assert "2 choices of 2 kernels on 1 ranks" in result.output
    return path


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another launch, in which blocks of 32 are the fastest."""
    monkeypatch.setenv("FASTEST", "32")
    monkeypatch.delenv("SKEWED", raising=False)


def as_json(result: Any) -> Any:
    return json.loads(result.stdout)


def test_record_then_pin_runs_the_same_without_a_measurement(samestate: Command, profile: Path) -> None:
    result = samestate("profile", "pin", profile, "--json", "--", *TUNED)
    assert result.exit_code == 0, result.output
    (selected,) = as_json(result)["selected"]
    assert (selected["mode"], selected["benchmarks"], selected["violations"]) == ("pin", 0, [])
    assert {one["config"]["BLOCK"] for one in selected["selections"]} == {16}


def test_an_unrecorded_key_is_rejected(samestate: Command, profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKEWED", "1")
    result = samestate("profile", "pin", profile, "--", *TUNED)
    assert result.exit_code == 1
    assert f"{HIDDEN} for key (48, torch.float32) is not in the profile: rejected" in result.output


def test_a_command_that_tunes_nothing_is_unknown(samestate: Command, profile: Path, tmp_path: Path) -> None:
    idle = [sys.executable, "-c", "pass"]
    assert samestate("profile", "pin", profile, "--", *idle).exit_code == 3
    result = samestate("profile", "record", tmp_path / "none.json", "--", *idle)
    assert result.exit_code == 2 and "no process ran an autotuned kernel" in result.output


def test_a_command_that_fails_by_itself_is_no_broken_profile(samestate: Command, profile: Path) -> None:
    result = samestate("profile", "pin", profile, "--", sys.executable, "-c", "raise SystemExit(7)")
    assert result.exit_code == 2 and "exit code 7" in result.output
    result = samestate("profile", "pin", profile, "--", "no-such-program")
    assert result.exit_code == 2 and "no-such-program" in result.output


def test_an_empty_profile_is_not_held(samestate: Command, tmp_path: Path) -> None:
    path = tmp_path / "empty.json"
    path.write_text('{"device":"cpu","format":1,"ranks":{},"versions":{}}\n')
    result = samestate("profile", "pin", path, "--", sys.executable, "-c", "pass")
    assert result.exit_code == 2 and "it holds no choice; record it again" in result.output


def test_a_profile_of_other_versions_is_named_where_the_command_fails(
    samestate: Command, profile: Path, tmp_path: Path
) -> None:
    path = tmp_path / "older.json"
    made = read(profile)[0]
    write(path, structs.replace(made, versions=made.versions | {"triton": "3.0.0"}))
    result = samestate("profile", "pin", path, "--", *TUNED)
    assert result.exit_code == 2, result.output
    assert "the profile was made elsewhere (triton 3.0.0 recorded" in result.output


def test_a_command_that_leaves_the_profile_is_broken(samestate: Command, profile: Path) -> None:
    """It takes the variable away, so that its kernels are recorded, and not held."""
    left = ["env", "-u", "SAMESTATE_TUNER_PROFILE", *TUNED]
    result = samestate("profile", "pin", profile, "--", *left)
    assert result.exit_code == 1, result.output
    assert "rank 0 ran under no profile, in mode record" in result.output


def test_a_place_that_cannot_be_written_is_named_before_anything_runs(samestate: Command, tmp_path: Path) -> None:
    result = samestate("profile", "record", tmp_path / "none" / "a.json", "--", "no-such-program")
    assert result.exit_code == 2 and "its folder does not exist" in result.output


@pytest.mark.deep
@pytest.mark.slow
def test_ablation_names_the_kernel_whose_choice_changes_bits(samestate: Command, profile: Path) -> None:
    result = samestate("profile", "ablate", profile, "--json", "--", *TUNED)
    assert result.exit_code == 0, result.output
    rows = {row["kernel"]: row for row in as_json(result)["rows"]}
    assert (rows[SHOWN]["chose_otherwise"], rows[SHOWN]["bits_changed"]) == (True, True)
    assert (rows[HIDDEN]["chose_otherwise"], rows[HIDDEN]["bits_changed"]) == (True, False)


@pytest.mark.slow
def test_a_command_that_does_not_repeat_itself_attributes_nothing(samestate: Command, profile: Path) -> None:
    script = f"import runpy, time; runpy.run_path({str(TUNED[1])!r}, run_name='__main__'); print(time.time_ns())"
    result = samestate("profile", "ablate", profile, "--kernel", SHOWN, "--other", "--", sys.executable, "-c", script)
    assert result.exit_code == 3
    assert "gave two outputs" in result.output


def test_an_unknown_kernel_is_named(samestate: Command, profile: Path) -> None:
    result = samestate("profile", "ablate", profile, "--kernel", "fla.none", "--", *TUNED)
    assert result.exit_code == 2 and f"it has: {HIDDEN}, {SHOWN}" in result.output


def test_show_and_verify(samestate: Command, profile: Path, tmp_path: Path) -> None:
    shown = samestate("profile", "show", profile)
    assert shown.exit_code == 0 and "BLOCK=16" in shown.output and "made on cpu" in shown.output
    assert samestate("profile", "verify", profile).exit_code == 0
    moved = tmp_path / "moved.json"
    moved.write_bytes(profile.read_bytes().replace(b'"device":"cpu"', b'"device":"NVIDIA H200"'))
    result = samestate("profile", "verify", moved, "--json")
    assert result.exit_code == 1
    assert as_json(result)["misfits"] == ["device NVIDIA H200 recorded, cpu here"]


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        (b'"format":1', b'"format":2', "not a tuner profile"),
        (b'"format":1', b'"format": 1', "not canonical"),
        (b"{", b"[", "not a tuner profile"),
    ],
)
def test_what_is_no_profile_is_refused(
    samestate: Command, profile: Path, tmp_path: Path, old: bytes, new: bytes, word: str
) -> None:
    path = tmp_path / "edited.json"
    path.write_bytes(profile.read_bytes().replace(old, new, 1))
    for command in (["show"], ["verify"], ["pin"]):
        rest = ["--", *TUNED] if command == ["pin"] else []
        result = samestate("profile", *command, path, *rest)
        assert (result.exit_code, word in result.output) == (2, True), result.output
    assert samestate("profile", "record", path, "--", *TUNED).exit_code == 2
    assert read(profile)[0].device == "cpu"
