"""Files in the folders outside the seal: added once, read with bounds, and no link is followed."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from itertools import count
from pathlib import Path

from samestate.evidence.stream import Defect

VERDICTS = "verdicts"
MOST_BYTES = 1 << 24
"""Of one amendment or signature, which need a few KiB."""
MOST_FILES = 10_000


def keep_verdict(root: Path, analyzer: str, data: bytes) -> None:
    """Write a verdict as ``verdicts/ANALYZER.json``; as ``ANALYZER.2.json`` and so on where that says something else.

    What is there is never changed, and nothing but a regular file is opened. OSError where nothing can be
    written, as when `verdicts` is no folder of the archive's own.
    """
    for number in count(1):
        name = f"{analyzer}.json" if number == 1 else f"{analyzer}.{number}.json"
        if add_file(root, VERDICTS, name, data) or _holds(root / VERDICTS, name, data):
            return


def add_file(root: Path, folder: str, name: str, data: bytes) -> bool:
    """Write a file that is not there yet; False when something is. OSError where nothing can be written."""
    with suppress(FileExistsError):
        (root / folder).mkdir()
    at = _open_folder(root / folder)
    try:
        return _create(at, name, data)
    finally:
        os.close(at)


def read_files(root: Path, folder: str, most_bytes: int = MOST_BYTES) -> tuple[dict[str, bytes], list[Defect]]:
    """Name -> bytes of every regular file directly in the folder, sorted, and what could not be read."""
    try:
        at = _open_folder(root / folder)
    except FileNotFoundError:
        return {}, []
    except OSError as error:
        return {}, [Defect(folder, f"cannot be read: {error.strerror}")]
    found: dict[str, bytes] = {}
    defects: list[Defect] = []
    try:
        names = sorted(os.listdir(at))
        if len(names) > MOST_FILES:
            defects.append(Defect(folder, f"holds {len(names)} files, more than the {MOST_FILES} that are read"))
        for name in names[:MOST_FILES]:
            where = ascii(f"{folder}/{name}")[1:-1]
            try:
                data = _read(at, name, most_bytes)
            except OSError as error:
                defects.append(Defect(where, f"cannot be read: {error.strerror}"))
                continue
            if data is None:
                defects.append(Defect(where, f"is no regular file of at most {most_bytes} bytes"))
            else:
                found[name] = data
    finally:
        os.close(at)
    return found, defects


def _open_folder(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _create(folder: int, name: str, data: bytes) -> bool:
    try:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=folder)
    except FileExistsError:
        return False
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.fsync(folder)
    except OSError:
        os.unlink(name, dir_fd=folder)
        raise
    return True


def _read(folder: int, name: str, most_bytes: int) -> bytes | None:
    # Not blocking: a fifo would never answer.
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        data = file.read(most_bytes + 1)
    return data if len(data) <= most_bytes else None


def _holds(folder: Path, name: str, data: bytes) -> bool:
    at = _open_folder(folder)
    try:
        found = os.stat(name, dir_fd=at, follow_symlinks=False)
        return stat.S_ISREG(found.st_mode) and found.st_size == len(data) and _read(at, name, len(data)) == data
    finally:
        os.close(at)
