from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Command = Callable[..., Result]


@pytest.fixture
def judged(samestate: Command, clean: Path, tmp_path: Path) -> Path:
    """The judgement of the clean run, as `samestate check --json` prints it."""
    file = tmp_path / "judged.json"
    file.write_text(samestate("check", clean, "--json").stdout)
    return file


def test_the_same_run_again_is_the_same(samestate: Command, sim: Command, clean: Path, tmp_path: Path) -> None:
    assert sim("--out", tmp_path / "again").exit_code == 0
    result = samestate("diff", "results", clean, tmp_path / "again")
    assert result.exit_code == 0, result.output
    assert "same (" in result.stdout and "9 rows, 72 operations compared)" in result.stdout


def test_a_fault_is_different(samestate: Command, clean: Path, faulty: Path) -> None:
    result = samestate("diff", "results", clean, faulty)
    assert result.exit_code == 1
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "N3584: B 1,792 3,584" in lines
    assert any(line.startswith("candidate N3584.reload: from token 0 on") for line in lines)
    assert "run pass fail" in lines
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_as_json(samestate: Command, clean: Path, faulty: Path) -> None:
    result = samestate("diff", "results", clean, faulty, "--json")
    said = json.loads(result.stdout)
    assert (result.exit_code, said["same"]) == (1, False)
    assert {"kind": "verdict", "name": "run", "a": "pass", "b": "fail"} in said["changes"]
    assert said["compared"]["operations"] == 72


def test_a_judgement_stands_for_its_archive_and_says_what_it_lacks(
    samestate: Command, clean: Path, faulty: Path, judged: Path
) -> None:
    result = samestate("diff", "results", judged, clean)
    assert result.exit_code == 0
    assert "tokens not compared: A without records" in result.stdout
    assert samestate("diff", "results", faulty, judged).exit_code == 1


def test_a_damaged_archive_is_different_from_a_whole_one(samestate: Command, clean: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(clean, tmp_path / "damaged")
    (damaged / "seal.json").unlink()
    result = samestate("diff", "results", clean, damaged)
    assert result.exit_code == 1
    assert "B has no seal: its run did not complete" in result.stdout


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "B: {file} does not exist; name an archive"),
        ("nothing", "B: {file} is no JSON (Expecting value"),
        ("[]", "B: {file} is no judgement; name an archive"),
        ('{"error": "x"}', "B: {file} is no judgement: analyzer: Field required; name an archive"),
    ],
)
def test_bad_input_is_one_line(
    samestate: Command, clean: Path, tmp_path: Path, content: str | None, message: str
) -> None:
    file = tmp_path / "other"
    if content is not None:
        file.write_text(content)
    result = samestate("diff", "results", clean, file)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"samestate: {message.format(file=file)}")
    assert len(result.stderr.splitlines()) == 1


def test_judgements_without_a_check_are_not_the_same(samestate: Command, judged: Path) -> None:
    empty = json.loads(judged.read_bytes()) | {"results": [], "table": []}
    judged.write_text(json.dumps(empty))
    result = samestate("diff", "results", judged, judged)
    assert result.exit_code == 2
    assert "nothing to compare" in result.stderr


def test_what_is_judged_already_takes_no_analyzer(samestate: Command, clean: Path, judged: Path) -> None:
    result = samestate("diff", "results", clean, judged, "--analyzer", "boundary-v1")
    assert result.exit_code == 2
    assert result.stderr.startswith("samestate: --analyzer: B is judged already; name its archive")
