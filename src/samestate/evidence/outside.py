"""What lies outside the seal: verdicts, added to an archive without following any link out of it."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from itertools import count
from pathlib import Path

VERDICTS = "verdicts"


def keep_verdict(root: Path, analyzer: str, data: bytes) -> None:
    """Write a verdict as ``verdicts/ANALYZER.json``; as ``ANALYZER.2.json`` and so on where that says something else.

    What is there is never changed, and nothing but a regular file is opened. OSError where nothing can be
    written, as when `verdicts` is no folder of the archive's own.
    """
    with suppress(FileExistsError):
        (root / VERDICTS).mkdir()
    folder = os.open(root / VERDICTS, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for number in count(1):
            name = f"{analyzer}.json" if number == 1 else f"{analyzer}.{number}.json"
            if _create(folder, name, data) or _holds(folder, name, data):
                return
    finally:
        os.close(folder)


def _create(folder: int, name: str, data: bytes) -> bool:
    """Write a file that was not there; False when something was. One that fails half-way is removed."""
    try:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=folder)
    except FileExistsError:
        return False
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
    except OSError:
        os.unlink(name, dir_fd=folder)
        raise
    return True


def _holds(folder: int, name: str, data: bytes) -> bool:
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISREG(found.st_mode) or found.st_size != len(data):
        return False
    # Not blocking: another may have taken the file's place since.
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with os.fdopen(fd, "rb") as file:
        return file.read(len(data) + 1) == data
