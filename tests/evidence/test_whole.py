from __future__ import annotations

import errno
import os
import signal
import sys
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from samestate.evidence import whole
from samestate.evidence.whole import write_new

DATA = b"0123456789" * 20_000


def test_a_file_appears_with_all_that_is_in_it(tmp_path: Path) -> None:
    write_new(tmp_path / "a", DATA)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": DATA}


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "a", DATA)
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_bytes() == b"mine"


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_without_hard_links_it_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refused(*paths: Path) -> None:
        raise OSError(number, "no links")

    monkeypatch.setattr(os, "link", refused)
    write_new(tmp_path / "a", DATA)
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_bytes() == DATA
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "a", b"")


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(draft: Path, path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(OSError, match="No space left"):
        write_new(tmp_path / "a", DATA)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.regression
def test_whatever_kills_its_writer_it_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    """Killed before each line in turn. Half of a `verify.py` would end with exit code 0."""
    found = set()
    for last in count():
        path = tmp_path / str(last)
        child = os.fork()
        if not child:
            _write_and_die(path, last)
        _, status = os.waitpid(child, 0)
        found.add(path.read_bytes() if path.exists() else None)
        if not os.WIFSIGNALED(status):
            break
    assert os.WEXITSTATUS(status) == 0 and last >= 10
    assert found == {None, DATA}


def _write_and_die(path: Path, last: int) -> None:
    """Never returns."""
    lines = count()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename == whole.__file__ and event == "line" and next(lines) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    try:
        write_new(path, DATA)
        os._exit(0)
    finally:
        os._exit(1)
