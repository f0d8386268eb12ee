"""Amendments: appended, chained, and never without the seal that they are of."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from samestate.evidence.amendments import amend, read_amendments
from samestate.evidence.archive import Archive, ArchiveError
from samestate.evidence.canonical import sha256_hex


@pytest.fixture
def amended(archive: Path) -> Path:
    for text in ("one", "two", "three"):
        amend(Archive.open(archive), text, by="me")
    return archive


def read(archive: Path) -> list[str]:
    """What is wrong with the amendments."""
    found = read_amendments(archive, Archive.open(archive).seal_sha256)
    return [f"{defect.where}: {defect.what}" for defect in found.defects]


def test_amendments_are_numbered_chained_and_of_the_seal(amended: Path) -> None:
    found = read_amendments(amended, Archive.open(amended).seal_sha256)
    assert found.defects == []
    assert [(one.number, one.text, one.by) for one in found.items] == [
        (1, "one", "me"),
        (2, "two", "me"),
        (3, "three", "me"),
    ]
    files = [(amended / "amendments" / f"000{number}.json").read_bytes() for number in (1, 2, 3)]
    assert [one.prev for one in found.items] == ["0" * 64, sha256_hex(files[0]), sha256_hex(files[1])]
    assert Archive.open(amended).verify() == []


def test_an_archive_without_amendments(archive: Path) -> None:
    assert read(archive) == []


@pytest.mark.tamper
@pytest.mark.parametrize("number", [1, 2])
def test_one_that_is_lost_before_the_end_shows(amended: Path, number: int) -> None:
    (amended / "amendments" / f"000{number}.json").unlink()
    assert any("were lost, added or renamed" in line for line in read(amended))


@pytest.mark.tamper
def test_closing_the_gap_by_renaming_shows(amended: Path) -> None:
    folder = amended / "amendments"
    (folder / "0002.json").unlink()
    said = json.loads((folder / "0003.json").read_bytes())
    (folder / "0003.json").unlink()
    (folder / "0002.json").write_text(json.dumps(said | {"number": 2}))
    assert read(amended) == [
        "amendments/0002.json: does not follow the amendment before it: one was changed or replaced"
    ]


@pytest.mark.tamper
@pytest.mark.parametrize("field", ["text", "by", "seal_sha256", "prev", "format", "number"])
def test_an_edit_before_the_end_shows(amended: Path, field: str) -> None:
    path = amended / "amendments" / "0002.json"
    said = json.loads(path.read_bytes())
    said[field] = {"seal_sha256": "1" * 64, "prev": "1" * 64, "format": 9, "number": 7}.get(field, "changed")
    path.write_text(json.dumps(said))
    assert read(amended)


@pytest.mark.tamper
def test_an_amendment_of_another_archive_shows(amended: Path, tmp_path: Path) -> None:
    (amended / "seal.json").write_bytes((amended / "seal.json").read_bytes() + b" ")
    assert all("is of another seal" in line for line in read(amended))


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b"[" * 100_000])
def test_what_is_no_amendment_shows(amended: Path, content: bytes) -> None:
    (amended / "amendments" / "0004.json").write_bytes(content)
    assert len(read(amended)) == 1
    with pytest.raises(ArchiveError, match="restore the amendments"):
        amend(Archive.open(amended), "four")


def test_a_newer_amendment_says_so(amended: Path) -> None:
    (amended / "amendments" / "0004.json").write_text('{"format": 2, "more": 1}')
    assert "format 2 is newer" in read(amended)[0]


@pytest.mark.timeout(20)
def test_links_and_fifos_are_not_opened(amended: Path) -> None:
    (amended / "amendments" / "0004.json").symlink_to("/dev/zero")
    os.mkfifo(amended / "amendments" / "0005.json")
    assert len(read(amended)) == 2


def test_nothing_is_written_through_a_link(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (archive / "amendments").symlink_to(tmp_path / "elsewhere")
    with pytest.raises((OSError, ArchiveError)):
        amend(Archive.open(archive), "one")
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("text", ["", "  ", "x" * 10_001, "\udcff"])
def test_texts_that_do_not_serve(archive: Path, text: str) -> None:
    with pytest.raises(ArchiveError, match="--text"):
        amend(Archive.open(archive), text)
    assert not (archive / "amendments").exists()


def test_without_a_seal_there_is_nothing_to_name(archive: Path) -> None:
    (archive / "seal.json").unlink()
    with pytest.raises(ArchiveError, match=r"has no seal\.json"):
        amend(Archive.open(archive), "one")


def test_a_copy_of_an_archive_keeps_its_amendments(amended: Path, tmp_path: Path) -> None:
    assert read(shutil.copytree(amended, tmp_path / "copy")) == []
