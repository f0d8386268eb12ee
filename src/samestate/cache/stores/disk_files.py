"""Files of pages: read and written whole, published under a name, removed."""

from __future__ import annotations

import errno
import os
import stat
from typing import NoReturn

from samestate.cache.base import PageKey, StoreError, Write
from samestate.cache.envelope import HEADER_BYTES, PIECE_BYTES, Checksum, Namespace, header_fault, page_fault, pieces

SUFFIX = ".page"
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class Errors:
    """A context in which an `OSError` becomes a `StoreError` that names the place."""

    def __init__(self, shown: str) -> None:
        self._shown = shown

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        if isinstance(error, OSError):
            self.raise_for(error)

    def raise_for(self, error: OSError) -> NoReturn:
        raise StoreError(f"{self._shown}: {error.strerror or error}") from error


def file_name(key: PageKey) -> str:
    """Below the namespace's folder: two hex digits, then the key in hex."""
    name = key.hex()
    return f"{name[:2]}/{name}{SUFFIX}"


def key_of(name: str) -> PageKey | None:
    """The key that a file's name (its last part) says; None: it is no page's."""
    stem = name.removesuffix(SUFFIX)
    try:
        key = PageKey(bytes.fromhex(stem))
    except ValueError:
        return None
    return key if key and f"{key.hex()}{SUFFIX}" == name else None


def fill(file: int, buffers: list[memoryview], at: int) -> bool:
    """Read exactly; False where the file ends before."""
    missing = sum(map(len, buffers))
    while missing:
        got = os.preadv(file, buffers, at)
        if not got:
            return False
        missing, at, buffers = missing - got, at + got, _rest(buffers, got)
    return True


def read_page(file: int, namespace: Namespace, key: PageKey, page: memoryview) -> str | None:
    """Fill a flat `page` from the file of this key; why it is damaged, in a few words, or None. Raises OSError."""
    seen = os.fstat(file)
    if not stat.S_ISREG(seen.st_mode):
        return "no file"
    if seen.st_size != HEADER_BYTES + len(page):
        return f"{seen.st_size} bytes, not {HEADER_BYTES + len(page)}"
    header = bytearray(HEADER_BYTES)
    if not fill(file, [memoryview(header), page[:PIECE_BYTES]], 0):
        return "too short"
    if fault := header_fault(header, namespace, key, len(page)):
        return fault
    total, at = Checksum(), HEADER_BYTES
    for piece in pieces(page):
        # The first came with the header.
        if at > HEADER_BYTES and not fill(file, [piece], at):
            return "too short"
        total.update(piece)
        at += len(piece)
    return page_fault(header, total.digest())


def write_all(file: int, buffers: list[memoryview]) -> None:
    """Write them one behind the other."""
    while buffers:
        buffers = _rest(buffers, os.writev(file, buffers))


def publish(tmp: str, path: str) -> Write:
    """Give a whole page its name, unless the name is taken. `tmp` stays, or not."""
    try:
        os.link(tmp, path)
    except FileExistsError:
        return Write.PRESENT
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # No hard links here: of two at the same moment the last wins, and both are whole.
        if os.path.exists(path):
            return Write.PRESENT
        os.rename(tmp, path)
    return Write.WRITTEN


def unlink(path: str) -> bool:
    """Whether it was there."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def _rest(buffers: list[memoryview], done: int) -> list[memoryview]:
    """What is left of them behind so many bytes."""
    left = []
    for buffer in buffers:
        if done < len(buffer):
            left.append(buffer[done:])
        done = max(0, done - len(buffer))
    return left
