"""One tar of one archive: the same bytes each time, and nothing of a hostile one is unpacked."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from samestate.evidence.amendments import amend
from samestate.evidence.archive import Archive, ArchiveError
from samestate.evidence.export import export_archive, import_archive, verify_export
from samestate.evidence.outside import keep_verdict


def tree(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def tar(archive: Path, tmp_path: Path) -> Path:
    keep_verdict(archive, "v1", b"{}")
    amend(Archive.open(archive), "a remark")
    export_archive(Archive.open(archive), tmp_path / "a.tar")
    return tmp_path / "a.tar"


def test_there_and_back(tar: Path, archive: Path, tmp_path: Path) -> None:
    done = import_archive(tar, tmp_path / "back")
    assert tree(tmp_path / "back") == tree(archive)
    assert done.files == len(tree(archive))
    assert done.seal_sha256 == Archive.open(archive).seal_sha256
    assert Archive.open(tmp_path / "back").verify() == []


def test_the_same_archive_gives_the_same_bytes(tar: Path, archive: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    for name in sorted(tree(archive), reverse=True):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(archive / name, copy / name)
        os.utime(copy / name, (1, 1))
        (copy / name).chmod(0o600)
    export_archive(Archive.open(copy), tmp_path / "b.tar")
    assert (tmp_path / "b.tar").read_bytes() == tar.read_bytes()
    import_archive(tar, tmp_path / "back")
    export_archive(Archive.open(tmp_path / "back"), tmp_path / "c.tar")
    assert (tmp_path / "c.tar").read_bytes() == tar.read_bytes()


def test_the_tar_says_nothing_of_who_made_it(tar: Path) -> None:
    with tarfile.open(tar) as opened:
        members = opened.getmembers()
    assert {(m.mode, m.uid, m.gid, m.uname, m.gname, m.mtime) for m in members} == {(0o644, 0, 0, "", "", 0)}
    assert [m.name for m in members] == sorted(m.name for m in members)


@pytest.mark.parametrize("damage", ["unsealed", "changed", "stray"])
def test_only_a_whole_archive_is_exported(archive: Path, tmp_path: Path, damage: str) -> None:
    match damage:
        case "unsealed":
            (archive / "seal.json").unlink()
        case "changed":
            (archive / "arms" / "control" / "engine.log").write_text("changed")
        case "stray":
            (archive / "stray").touch()
    with pytest.raises(ArchiveError, match="is not exported"):
        export_archive(Archive.open(archive), tmp_path / "a.tar")
    assert [path.name for path in tmp_path.iterdir()] == ["archive"]


def test_places_where_no_tar_can_go(tar: Path, archive: Path, tmp_path: Path) -> None:
    for out, word in (
        (tar, "exists"),
        (archive / "a.tar", "lies in the archive"),
        (tmp_path / "no" / "a.tar", "no folder"),
    ):
        with pytest.raises(ArchiveError, match=word):
            export_archive(Archive.open(archive), out)


def test_a_file_that_changes_while_it_is_read(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verify = Archive.verify

    def and_then_change(self: Archive) -> object:
        found = verify(self)
        (archive / "arms" / "control" / "engine.log").write_text("changed")
        return found

    monkeypatch.setattr(Archive, "verify", and_then_change)
    with pytest.raises(ArchiveError, match=r"engine\.log changed while it was read"):
        export_archive(Archive.open(archive), tmp_path / "a.tar")
    assert [path.name for path in tmp_path.iterdir()] == ["archive"]


# --- hostile tars -----------------------------------------------------------------------------------

Spoil = Callable[[list[tuple[tarfile.TarInfo, bytes]], str], None]


def member(name: str, data: bytes = b"x", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    made = tarfile.TarInfo(name)
    made.size = len(data)
    for field, value in fields.items():
        setattr(made, field, value)
    return made, data


SPOILED: dict[str, Spoil] = {
    "outside": lambda members, top: members.append(member(f"{top}/../../escaped")),
    "absolute": lambda members, top: members.append(member("/tmp/escaped")),
    "other top": lambda members, top: members.append(member("other/plan.json")),
    "no top": lambda members, top: members.append(member("escaped")),
    "hidden": lambda members, top: members.append(member(f"{top}/.hidden")),
    "dot": lambda members, top: members.append(member(f"{top}/./plan.json")),
    "twice": lambda members, top: members.append(member(f"{top}/plan.json")),
    "below a file": lambda members, top: members.append(member(f"{top}/plan.json/x")),
    "stray": lambda members, top: members.append(member(f"{top}/stray")),
    "symlink": lambda members, top: members.insert(
        0, member(f"{top}/verdicts/x", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd")
    ),
    "hard link": lambda members, top: members.append(
        member(f"{top}/verdicts/x", b"", type=tarfile.LNKTYPE, linkname=f"{top}/plan.json")
    ),
    "fifo": lambda members, top: members.append(member(f"{top}/verdicts/x", b"", type=tarfile.FIFOTYPE)),
    "device": lambda members, top: members.append(member(f"{top}/verdicts/x", b"", type=tarfile.CHRTYPE)),
    "folder": lambda members, top: members.append(member(f"{top}/verdicts", b"", type=tarfile.DIRTYPE)),
    "sparse": lambda members, top: members.append(
        member(f"{top}/verdicts/x", pax_headers={"GNU.sparse.map": "0,0", "GNU.sparse.size": str(1 << 40)})
    ),
    "long header": lambda members, top: members.insert(
        0, member(f"{top}/verdicts/x", pax_headers={"comment": "x" * (1 << 21)})
    ),
    "lost": lambda members, top: members.pop(0) and None,
    "empty": lambda members, top: members.clear(),
}


def spoiled(tar: Path, tmp_path: Path, how: Spoil) -> Path:
    """A tar with other members."""
    with tarfile.open(tar) as opened:
        members = [(one, opened.extractfile(one).read()) for one in opened]  # type: ignore[union-attr]
    how(members, members[0][0].name.partition("/")[0])
    with tarfile.open(tmp_path / "b.tar", "w", format=tarfile.PAX_FORMAT) as made:
        for one, data in members:
            made.addfile(one, io.BytesIO(data))
    return tmp_path / "b.tar"


@pytest.mark.tamper
@pytest.mark.parametrize("how", SPOILED)
def test_nothing_of_a_spoiled_tar_is_unpacked(tar: Path, tmp_path: Path, how: str) -> None:
    spoiled(tar, tmp_path, SPOILED[how])
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ArchiveError):
        import_archive(tmp_path / "b.tar", tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert not Path("/tmp/escaped").exists()


@pytest.mark.tamper
def test_every_changed_byte_of_content_and_every_cut_is_refused(tar: Path, tmp_path: Path) -> None:
    data = tar.read_bytes()
    with tarfile.open(tar) as opened:
        places = [one.offset_data + one.size // 2 for one in opened if "/verdicts/" not in one.name]
        end = max(one.offset_data + one.size for one in opened)
    changed = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in places]
    cut = [data[:length] for length in range(0, end, 509)]
    for spoiled in [*changed, *cut, b"no tar", b"\x1f\x8b" + data]:
        (tmp_path / "b.tar").write_bytes(spoiled)
        if spoiled in changed and b"a remark" in spoiled and _only_beside(spoiled, data, tar):
            continue
        with pytest.raises(ArchiveError):
            import_archive(tmp_path / "b.tar", tmp_path / "back")
        assert not (tmp_path / "back").exists()


def _only_beside(spoiled: bytes, data: bytes, tar: Path) -> bool:
    """Whether the change lies in a file outside the seal, which a chain or a signature guards."""
    at = next(index for index, (a, b) in enumerate(zip(spoiled, data, strict=True)) if a != b)
    with tarfile.open(tar) as opened:
        return any(one.offset_data <= at < one.offset_data + one.size and "/amendments/" in one.name for one in opened)


def test_a_folder_that_is_not_empty_stays_as_it_is(tar: Path, tmp_path: Path) -> None:
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "mine").touch()
    with pytest.raises(ArchiveError, match="is not an empty folder"):
        import_archive(tar, tmp_path / "back")
    assert [path.name for path in (tmp_path / "back").iterdir()] == ["mine"]


# --- hashed again without unpacking -----------------------------------------------------------------


def test_every_file_of_an_export_is_counted_and_hashed_again(tar: Path, archive: Path) -> None:
    done = verify_export(tar)
    sums = (archive / "SHA256SUMS").read_text().splitlines()
    assert done.files == len(sums) == json.loads((archive / "seal.json").read_bytes())["files"]
    assert done.by_arm == {"control": sum("  arms/control/" in line for line in sums)}
    assert done.beside == 2, "a verdict and the amendments"
    assert done.bytes == sum(len(data) for data in tree(archive).values())
    assert done.seal_sha256 == Archive.open(archive).seal_sha256


def test_what_is_exported_checks_without_samestate(tar: Path, tmp_path: Path) -> None:
    """As whoever receives it does: tar, sha256sum, and the verifier that travels with it."""
    subprocess.run(["tar", "-xf", tar, "-C", tmp_path], check=True)
    (folder,) = [path for path in tmp_path.iterdir() if path.name.startswith("samestate-")]
    told = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=folder, check=True, capture_output=True, text=True)
    assert len(told.stdout.splitlines()) == verify_export(tar).files
    assert all(line.endswith(": OK") for line in told.stdout.splitlines())


@pytest.mark.tamper
@pytest.mark.parametrize("how", SPOILED)
def test_a_spoiled_tar_is_not_verified(tar: Path, tmp_path: Path, how: str) -> None:
    with pytest.raises(ArchiveError):
        verify_export(spoiled(tar, tmp_path, SPOILED[how]))


@pytest.mark.tamper
def test_each_file_that_is_lost_changed_or_swapped_is_named(tar: Path, archive: Path, tmp_path: Path) -> None:
    for name in sorted(tree(archive)):
        if name.startswith(("verdicts/", "amendments/")):
            continue

        def lose(members: list[tuple[tarfile.TarInfo, bytes]], top: str, name: str = name) -> None:
            members[:] = [one for one in members if one[0].name != f"{top}/{name}"]

        def change(members: list[tuple[tarfile.TarInfo, bytes]], top: str, name: str = name) -> None:
            for index, (one, data) in enumerate(members):
                if one.name == f"{top}/{name}":
                    members[index] = member(one.name, data + b" ")

        for how in (lose, change):
            with pytest.raises(ArchiveError, match=rf"{name}|SHA256SUMS|seal"):
                verify_export(spoiled(tar, tmp_path, how))


@pytest.mark.tamper
def test_another_archives_seal_names_another_folder(tar: Path, tmp_path: Path) -> None:
    def rename(members: list[tuple[tarfile.TarInfo, bytes]], top: str) -> None:
        for index, (one, data) in enumerate(members):
            members[index] = member(one.name.replace(top, "samestate-" + "0" * 12), data)

    with pytest.raises(ArchiveError, match="is not named after the seal"):
        verify_export(spoiled(tar, tmp_path, rename))


@pytest.mark.tamper
@pytest.mark.parametrize("what", ["after the end", "in the end", "cut end", "in padding"])
def test_bytes_that_no_export_writes_are_not_verified(tar: Path, tmp_path: Path, what: str) -> None:
    data = bytearray(tar.read_bytes())
    with tarfile.open(tar) as opened:
        members = opened.getmembers()
    padded = next(one for one in members if one.size % 512)
    match what:
        case "after the end":
            data += b"hidden"
        case "in the end":
            data[-6:] = b"hidden"
        case "cut end":
            del data[-512:]
        case "in padding":
            data[padded.offset_data + padded.size] = 1
    (tmp_path / "b.tar").write_bytes(data)
    with pytest.raises(ArchiveError, match=r"holds bytes after|does not end where"):
        verify_export(tmp_path / "b.tar")


@pytest.mark.tamper
def test_members_out_of_order_or_of_somebody_are_not_verified(tar: Path, tmp_path: Path) -> None:
    def swap(members: list[tuple[tarfile.TarInfo, bytes]], top: str) -> None:
        members[0], members[1] = members[1], members[0]

    def own(members: list[tuple[tarfile.TarInfo, bytes]], top: str) -> None:
        members[0][0].uname = "somebody"

    for how, said in ((swap, "is out of order"), (own, "has another header")):
        with pytest.raises(ArchiveError, match=said):
            verify_export(spoiled(tar, tmp_path, how))
