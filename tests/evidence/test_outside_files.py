from __future__ import annotations

from pathlib import Path

import pytest

from samestate.evidence.outside import add_file, read_files


def test_a_file_is_added_once(tmp_path: Path) -> None:
    assert add_file(tmp_path, "amendments", "a", b"one")
    assert not add_file(tmp_path, "amendments", "a", b"two")
    assert read_files(tmp_path, "amendments") == ({"a": b"one"}, [])


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert read_files(tmp_path, "amendments") == ({}, [])


def test_what_is_too_large_is_a_defect(tmp_path: Path) -> None:
    add_file(tmp_path, "amendments", "a", b"12345")
    found, defects = read_files(tmp_path, "amendments", most_bytes=4)
    assert found == {}
    assert [defect.where for defect in defects] == ["amendments/a"]


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_folder_that_is_none_of_the_archive_s_own(tmp_path: Path, kind: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a").touch()
    if kind == "link":
        (tmp_path / "amendments").symlink_to(tmp_path / "elsewhere")
    else:
        (tmp_path / "amendments").touch()
    found, defects = read_files(tmp_path, "amendments")
    assert found == {}
    assert len(defects) == 1
    with pytest.raises(OSError, match="amendments"):
        add_file(tmp_path, "amendments", "b", b"")
