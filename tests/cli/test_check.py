from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

import samestate as package

Command = Callable[..., Result]

WITHOUT_ENGINES = """
import sys
for name in ("torch", "vllm", "transformers"):
    sys.modules[name] = None
from samestate.cli.main import main
main(["check", sys.argv[1]])
"""


@pytest.fixture
def archive(clean: Path, tmp_path: Path) -> Path:
    return shutil.copytree(clean, tmp_path / "archive")


def test_the_verdict_of_a_sealed_archive(samestate: Command, archive: Path) -> None:
    result = samestate("check", archive)
    assert result.exit_code == 0
    assert "verdict pass: all required checks pass" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_judging_needs_no_engine(clean: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(package.__file__).parent.parent)}
    command = [sys.executable, "-c", WITHOUT_ENGINES, str(clean)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "verdict pass" in done.stdout


@pytest.mark.parametrize("name", ["seal.json", "SHA256SUMS", "arms/candidate/scheduler.jsonl"])
def test_a_damaged_archive_is_unknown(samestate: Command, archive: Path, name: str) -> None:
    (archive / name).unlink()
    assert samestate("check", archive).exit_code == 3


def test_a_verdict_is_kept_and_never_changed(samestate: Command, archive: Path) -> None:
    first, second = (archive / "verdicts" / name for name in ("boundary-v1.json", "boundary-v1.2.json"))
    kept = first.read_bytes()
    assert samestate("check", archive).exit_code == 0
    assert not second.exists()
    (archive / "seal.json").unlink()
    for _ in range(2):
        assert samestate("check", archive).exit_code == 3
    assert first.read_bytes() == kept
    assert json.loads(second.read_bytes())["verdict"] == "unknown"
    assert len(list((archive / "verdicts").iterdir())) == 2


def test_a_verdict_that_cannot_be_kept_is_still_given(samestate: Command, archive: Path) -> None:
    shutil.rmtree(archive / "verdicts")
    (archive / "verdicts").write_text("in the way")
    result = samestate("check", archive, "--json")
    assert json.loads(result.stdout)["archive"] == str(archive)
    assert result.exit_code != 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch"], "the archive: nosuch does not exist; name the folder that `samestate run` wrote"),
        ([__file__], f"the archive: {__file__} is not a folder; name the folder that `samestate run` wrote"),
        (["nosuch", "--analyzer", "boundary"], "--analyzer: no analyzer 'boundary'; did you mean 'boundary-v1'?"),
    ],
)
def test_bad_input_is_one_line(samestate: Command, arguments: list[str], message: str) -> None:
    result = samestate("check", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"samestate: {message}")
    assert len(result.stderr.splitlines()) == 1


def test_a_folder_that_is_no_archive(samestate: Command, tmp_path: Path) -> None:
    result = samestate("check", tmp_path)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1


# --- damage that a reader must not touch -----------------------------------------------------------


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["verdicts/boundary-v1.json", "seal.json", "plan.json", "arms/candidate/client.jsonl"])
@pytest.mark.parametrize("kind", ["fifo", "endless"])
def test_what_is_no_regular_file_is_unknown_and_never_opened(
    samestate: Command, archive: Path, name: str, kind: str
) -> None:
    (archive / name).unlink()
    if kind == "fifo":
        os.mkfifo(archive / name)
    else:
        (archive / name).symlink_to("/dev/zero")
    assert samestate("check", archive).exit_code == 3


def test_no_verdict_is_written_through_a_link(samestate: Command, archive: Path, tmp_path: Path) -> None:
    shutil.rmtree(archive / "verdicts")
    (tmp_path / "elsewhere").mkdir()
    (archive / "verdicts").symlink_to(tmp_path / "elsewhere")
    assert samestate("check", archive).exit_code == 3
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("analyzer", ["boundary-v9", "boundary-instrumented-v1"])
def test_a_damaged_archive_that_names_another_analyzer(samestate: Command, archive: Path, analyzer: str) -> None:
    plan = archive / "plan.json"
    plan.write_bytes(plan.read_bytes().replace(b'"boundary-v1"', f'"{analyzer}"'.encode()))
    result = samestate("check", archive, "--json")
    judgement = json.loads(result.stdout)
    assert judgement["verdict"] != "pass"
    assert any("plan.json" in f["message"] for r in judgement["results"] for f in r["findings"])
    if analyzer == "boundary-v9":
        assert result.exit_code == 3
        assert judgement["limitations"][0].startswith(
            "Judged by boundary-v1, so the verdict is unknown at best: no analyzer 'boundary-v9' in this version"
        )


def test_an_archive_that_lost_plan_and_seal_is_incomplete(samestate: Command, archive: Path) -> None:
    for name in ("plan.json", "seal.json"):
        (archive / name).unlink()
    assert samestate("check", archive).exit_code == 3
    shutil.rmtree(archive / "arms")
    assert samestate("check", archive).exit_code == 3
    (archive / "attempts.jsonl").unlink()
    assert samestate("check", archive).exit_code == 2


@pytest.mark.parametrize("name", ["\udcff", "\x1b[2J"])
def test_names_that_are_no_text_are_unknown(samestate: Command, archive: Path, name: str) -> None:
    shutil.copytree(archive / "arms" / "candidate", archive / "arms" / name)
    shutil.copyfile(archive / "arms/candidate/client.jsonl", archive / "arms" / "candidate" / f"{name}.jsonl")
    result = samestate("check", archive)
    assert result.exit_code == 3
    assert "\x1b" not in result.output
