from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Command = Callable[..., Result]


def test_an_archive_becomes_tables(samestate: Command, clean: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    result = samestate("archive", "convert", clean, tmp_path / "columns")
    assert result.exit_code == 0, result.output
    first, counts, last = result.stdout.splitlines()
    assert first == str(tmp_path / "columns") and "batch_scheduled" in counts
    assert last.endswith("for questions, not for verdicts")
    assert (tmp_path / "columns" / "lookup.parquet").is_file()
    again = samestate("archive", "convert", clean, tmp_path / "columns")
    assert (again.exit_code, len(again.stderr.splitlines())) == (2, 1)
    assert "is not empty" in again.stderr


def test_what_is_no_archive_and_a_missing_package_are_one_line(
    samestate: Command, clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for folder, word in ((tmp_path / "no", "does not exist"), (clean, "pip install 'samestate[columns]'")):
        result = samestate("archive", "convert", folder, tmp_path / "columns")
        assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
        assert word in result.stderr
    assert not (tmp_path / "columns").exists()
