"""New files that are there whole or not at all, whatever kills their writer."""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import suppress
from pathlib import Path

_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
"""What file systems without hard links answer."""


def write_new(path: Path, data: bytes) -> None:
    """Write a file that does not exist yet: FileExistsError where it does, OSError where it cannot be written.

    Its name appears with all of `data` behind it. Only a file system without hard links shows it growing.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        _write(draft, data)
        try:
            os.link(draft, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            _write(path, data)
    finally:
        with suppress(OSError):
            draft.unlink()


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        try:
            file.write(data)
            file.flush()
        except OSError:
            path.unlink(missing_ok=True)
            raise
