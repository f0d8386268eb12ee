from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Command = Callable[..., Result]


def test_an_archive_as_one_file_and_back(samestate: Command, clean: Path, tmp_path: Path) -> None:
    result = samestate("archive", "export", clean, "--out", tmp_path / "a.tar")
    assert result.exit_code == 0, result.output
    again = samestate("archive", "export", clean, "--out", tmp_path / "b.tar")
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    assert result.stdout.splitlines()[1] == again.stdout.splitlines()[1]
    back = samestate("archive", "import", tmp_path / "a.tar", tmp_path / "back")
    assert back.exit_code == 0, back.output
    assert samestate("check", tmp_path / "back").exit_code == 0


def test_an_export_is_counted_and_hashed_again(samestate: Command, clean: Path, tmp_path: Path) -> None:
    assert samestate("archive", "export", clean, "--out", tmp_path / "a.tar").exit_code == 0
    result = samestate("archive", "verify", tmp_path / "a.tar")
    assert result.exit_code == 0, result.output
    files = json.loads((clean / "seal.json").read_bytes())["files"]
    assert f"{files} sealed files, as the seal counts, each with its listed SHA-256 (candidate " in result.stdout
    told = json.loads(samestate("archive", "verify", tmp_path / "a.tar", "--json").stdout)
    assert told["files"] == files and told["by_arm"].keys() == {"control", "candidate"}


def test_the_tar_is_named_after_the_archive(
    samestate: Command, clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert samestate("archive", "export", clean).stdout.splitlines()[0] == "clean.tar"
    assert (tmp_path / "clean.tar").is_file()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["export", "nosuch"], "the archive: nosuch does not exist"),
        (["import", "nosuch", "back"], "nosuch is no file"),
        (["verify", "nosuch"], "nosuch is no file"),
        (["verify", __file__], "cannot be unpacked"),
        (["import", __file__, "back"], "cannot be unpacked"),
    ],
)
def test_bad_input_is_one_line(
    samestate: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = samestate("archive", *arguments)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert word in result.stderr
    assert list(tmp_path.iterdir()) == []
