"""One tar of one archive: the same archive gives the same bytes, and nothing that is unpacked leaves its folder."""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple, cast

from samestate.evidence.archive import Archive, ArchiveError
from samestate.evidence.canonical import file_sha256, sha256_hex
from samestate.evidence.seal import OUTSIDE, SEAL_NAME, SUMS_NAME, read_pair, read_sums, sealable

MODE = 0o644
MOST_FILES = 100_000
_CHUNK = 1 << 20
_TOP = re.compile(r"samestate-[0-9a-f]{12}")


class Exported(NamedTuple):
    """A tar that was written and read back, or one that was unpacked."""

    files: int
    bytes: int
    """Of the files."""
    seal_sha256: str


class Verified(NamedTuple):
    """An exported archive whose every file was hashed again."""

    files: int
    """Sealed ones: as many as the seal counts, each with the hash that the list gives."""
    by_arm: dict[str, int]
    """Of these, below each arm."""
    beside: int
    """Files outside the seal: nothing here covers them."""
    bytes: int
    seal_sha256: str


def export_archive(archive: Archive, out: Path) -> Exported:
    """Write a sealed, undamaged archive and what lies beside its seal as one uncompressed tar, and read it back.

    Names are sorted below one folder named after the seal; mode, owner and time are the same everywhere.
    ArchiveError for an archive that is unsealed or damaged or changes meanwhile, and where `out` cannot be.
    Whatever fails, no file is left at `out`.
    """
    if os.path.lexists(out):
        raise ArchiveError(f"--out: {out} exists; name another file")
    if out.resolve().is_relative_to(archive.root.resolve()):
        raise ArchiveError(f"--out: {out} lies in the archive, which no file may join; name another place")
    if not out.resolve().parent.is_dir():
        raise ArchiveError(f"--out: {out.parent} is no folder; make it, or name another place")
    if defects := archive.verify():
        where, what = defects[0]
        raise ArchiveError(f"{archive.root} is not exported: {where}: {what}; export a sealed, undamaged archive")
    expected = _expected(archive)
    seal = expected[SEAL_NAME]
    draft, draft_name = tempfile.mkstemp(prefix=f".{out.name}.", dir=out.resolve().parent)
    try:
        with os.fdopen(draft, "w+b") as file:
            _write(file, archive.root, sorted(expected), _top(seal))
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), MODE)
        total, found = 0, {}
        with _telling(out):
            for name, size, source in _members(Path(draft_name), _top(seal)):
                total += size
                found[name] = hashlib.file_digest(source, "sha256").hexdigest()
        changed = sorted(name for name in expected if found.get(name) != expected[name])
        if changed:
            raise ArchiveError(f"{archive.root}: {changed[0]} changed while it was read; export it again")
        os.rename(draft_name, out)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(draft_name)
    return Exported(len(expected), total, seal)


def import_archive(tar: Path, folder: Path) -> Exported:
    """Unpack an exported archive into a folder that does not exist or is empty.

    ArchiveError for a tar that holds anything but plain files at plain names below one folder, or an archive that
    is not whole. Whatever fails, nothing is left in `folder`.
    """
    if not tar.is_file():
        raise ArchiveError(f"the tar: {tar} is no file; name what `samestate archive export` wrote")
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise ArchiveError(f"{folder} is not an empty folder; name another place")
    if not folder.resolve().parent.is_dir():
        raise ArchiveError(f"{folder.parent} is no folder; make it, or name another place")
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.resolve().parent))
    try:
        total = files = 0
        with _telling(tar):
            for name, size, source in _members(tar):
                total, files = total + size, files + 1
                target = draft / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("xb") as file:
                    shutil.copyfileobj(source, file, _CHUNK)
        seal = _require_whole(draft, tar)
        draft.chmod(0o755)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Exported(files, total, seal)


def verify_export(tar: Path) -> Verified:
    """Hash every file of an exported archive again, without unpacking it, and hold hashes and counts against its seal.

    ArchiveError for a tar that no export writes, and for one whose seal, list or files are not those that were sealed.
    """
    if not tar.is_file():
        raise ArchiveError(f"the tar: {tar} is no file; name what `samestate archive export` wrote")
    found: dict[str, str] = {}
    kept: dict[str, bytes] = {}
    total, top = 0, ""
    with _telling(tar):
        for name, size, source in _members(tar):
            if name in found:
                raise FileExistsError(name)
            data = source.read(size) if name in (SEAL_NAME, SUMS_NAME) and size <= _CHUNK else None
            if data is not None:
                kept[name] = data
            found[name] = sha256_hex(data) if data is not None else hashlib.file_digest(source, "sha256").hexdigest()
            total += size
        top = _first_folder(tar)
    if lost := [name for name in (SEAL_NAME, SUMS_NAME) if name not in kept]:
        raise ArchiveError(f"{tar}: {lost[0]} is missing or too large; name what `samestate archive export` wrote")
    seal, sums, defects = read_pair(kept[SEAL_NAME], kept[SUMS_NAME], "")
    if defects or seal is None:
        raise ArchiveError(f"{tar}: {defects[0].where}: {defects[0].what}; fetch or export it again")
    if top != _top(found[SEAL_NAME]):
        raise ArchiveError(f"{tar}: its folder {top} is not named after the seal in it; fetch or export it again")
    sealed = {name: digest for name, digest in found.items() if sealable(name)}
    for name in sorted(sums.keys() | sealed.keys()):
        if sums.get(name) != sealed.get(name):
            what = (
                "is missing" if name not in sealed else "is not listed" if name not in sums else "has another SHA-256"
            )
            raise ArchiveError(f"{tar}: {name} {what}; the archive changed on the way, fetch or export it again")
    _require_own_bytes(tar)
    arms = Counter(name.split("/")[1] for name in sums if name.startswith("arms/"))
    return Verified(len(sums), dict(arms), len(found) - len(sums) - len(kept), total, found[SEAL_NAME])


def _require_own_bytes(path: Path) -> None:
    """ArchiveError unless the tar has every byte that `_write` gives such members, and none besides."""
    before, end = "", 0
    with _telling(path), path.open("rb") as file, tarfile.open(path, mode="r:") as tar:
        for member in tar:
            if member.name <= before:
                raise ArchiveError(f"{path}: {member.name!a} is out of order; fetch or export it again")
            header = _member(member.name, member.size).tobuf(tarfile.PAX_FORMAT)
            padding = bytes(-member.size % tarfile.BLOCKSIZE)
            file.seek(end)
            if file.read(len(header)) != header:
                raise ArchiveError(f"{path}: {member.name!a} has another header; fetch or export it again")
            file.seek(member.size, os.SEEK_CUR)
            if file.read(len(padding)) != padding:
                raise ArchiveError(f"{path}: holds bytes after {member.name!a}; fetch or export it again")
            before, end = member.name, file.tell()
        # Two empty blocks, and zeros until the record is full.
        rest = bytes(2 * tarfile.BLOCKSIZE + -(end + 2 * tarfile.BLOCKSIZE) % tarfile.RECORDSIZE)
        if file.read(len(rest) + 1) != rest:
            raise ArchiveError(f"{path}: does not end where an export does; fetch or export it again")


def _first_folder(path: Path) -> str:
    with tarfile.open(path, mode="r:") as tar:
        first = tar.next()
    return first.name.partition("/")[0] if first else ""


def _expected(archive: Archive) -> dict[str, str]:
    """What the seal lists, the list and the seal themselves, and the files outside: name -> SHA-256."""
    root = archive.root
    sums, _ = read_sums((root / SUMS_NAME).read_bytes(), SUMS_NAME)
    more = [SUMS_NAME, SEAL_NAME]
    for folder in OUTSIDE:
        for path in (root / folder).rglob("*"):
            name = path.relative_to(root).as_posix()
            if path.is_dir():
                continue
            if not _allowed(name):
                raise ArchiveError(f"{root} is not exported: {name!a} has a name that no tar may hold; remove it")
            more.append(name)
    return sums | {name: file_sha256(root / name) for name in more}


def _allowed(name: str) -> bool:
    """A plain relative name: of a sealed file, of the seal, or in a folder outside it."""
    first, _, rest = name.partition("/")
    return name in (SUMS_NAME, SEAL_NAME) or sealable(name) or (first in OUTSIDE and sealable(rest))


def _top(seal_sha256: str) -> str:
    return f"samestate-{seal_sha256[:12]}"


def _write(file: IO[bytes], root: Path, names: list[str], top: str) -> None:
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in names:
            with (root / name).open("rb") as source:
                tar.addfile(_member(f"{top}/{name}", os.fstat(source.fileno()).st_size), source)


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = size, MODE, 0
    return member


def _members(path: Path, top: str | None = None) -> Iterator[tuple[str, int, io.BufferedReader]]:
    """Name inside the archive, size and content of every file. ArchiveError for everything that no export writes."""
    total = files = 0
    most = path.stat().st_size
    with path.open("rb", buffering=0) as raw, tarfile.open(fileobj=_Bounded(raw), mode="r:") as tar:
        for member in tar:
            first, _, name = member.name.partition("/")
            top = first if top is None else top
            if not member.isreg() or member.issparse():
                raise ArchiveError(f"{path}: {member.name!a} is no plain file; such a tar is no export")
            if first != top or _TOP.fullmatch(top) is None or not _allowed(name):
                raise ArchiveError(f"{path}: {member.name!a} is no name that an export has; nothing was unpacked")
            total, files = total + member.size, files + 1
            if files > MOST_FILES or total > most:
                raise ArchiveError(f"{path}: declares more than it can hold; nothing was unpacked")
            source = tar.extractfile(member)
            if source is None:
                raise ArchiveError(f"{path}: {member.name!a} has no content; such a tar is no export")
            yield name, member.size, cast(io.BufferedReader, source)


@contextmanager
def _telling(path: Path) -> Iterator[None]:
    """Whatever is wrong with a tar, while it is read, is an ArchiveError."""
    try:
        yield
    except (FileExistsError, NotADirectoryError):
        raise ArchiveError(f"{path}: names a file twice; nothing was unpacked") from None
    except (tarfile.TarError, ValueError, EOFError) as error:
        raise ArchiveError(f"{path}: cannot be unpacked ({error}); fetch it again") from None


class _Bounded(io.BufferedReader):
    """Refuses to read much at once: `tarfile` reads an extended header whole, however long it says it is."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0 or size > _CHUNK:
            raise ValueError(f"a header of {size} bytes")
        return super().read(size)


def _require_whole(folder: Path, source: Path) -> str:
    """The seal's hash of an unpacked archive that is sealed and undamaged; else ArchiveError."""
    try:
        archive = Archive.open(folder)
    except ArchiveError:
        raise ArchiveError(f"{source}: holds no archive; name what `samestate archive export` wrote") from None
    if defects := archive.verify():
        where, what = defects[0]
        raise ArchiveError(f"{source}: {where}: {what}; the archive changed on the way, fetch or export it again")
    return archive.seal_sha256 or ""
