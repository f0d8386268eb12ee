"""Verdicts beside an archive: added, never changed, and never written through a link."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from samestate.evidence.outside import keep_verdict


def test_a_verdict_is_kept_once_and_another_beside_it(tmp_path: Path) -> None:
    for data in (b"one", b"one", b"two", b"two"):
        keep_verdict(tmp_path, "v1", data)
    kept = {path.name: path.read_bytes() for path in (tmp_path / "verdicts").iterdir()}
    assert kept == {"v1.json": b"one", "v1.2.json": b"two"}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["fifo", "endless", "dangling", "folder"])
def test_what_is_no_regular_file_is_neither_read_nor_followed(tmp_path: Path, kind: str) -> None:
    (tmp_path / "verdicts").mkdir()
    path, elsewhere = tmp_path / "verdicts" / "v1.json", tmp_path / "elsewhere"
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "endless":
            path.symlink_to("/dev/zero")
        case "dangling":
            path.symlink_to(elsewhere)
        case "folder":
            path.mkdir()
    keep_verdict(tmp_path, "v1", b"one")
    assert (tmp_path / "verdicts" / "v1.2.json").read_bytes() == b"one"
    assert not elsewhere.exists()


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo", "file"])
def test_nothing_is_written_where_verdicts_is_no_folder_of_the_archive(tmp_path: Path, kind: str) -> None:
    root, elsewhere = tmp_path / "archive", tmp_path / "elsewhere"
    root.mkdir()
    match kind:
        case "link":
            elsewhere.mkdir()
            (root / "verdicts").symlink_to(elsewhere)
        case "dangling":
            (root / "verdicts").symlink_to(elsewhere)
        case "fifo":
            os.mkfifo(root / "verdicts")
        case "file":
            (root / "verdicts").write_text("mine")
    with pytest.raises(OSError, match="verdicts"):
        keep_verdict(root, "v1", b"one")
    assert not elsewhere.exists() or list(elsewhere.iterdir()) == []
