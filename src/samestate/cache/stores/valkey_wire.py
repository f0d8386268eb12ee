"""Connections to a Valkey or Redis server over which pages go without being copied, and in bounded time.

The client library connects, authenticates, encrypts and pools; values of pages are sent and received here, straight
from and into the caller's buffer, and hashed on the way.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from valkey.connection import Connection, SSLConnection
from valkey.exceptions import ConnectionError, ResponseError, TimeoutError

from samestate.cache.base import PageKey
from samestate.cache.envelope import HEADER_BYTES, Checksum, Namespace, header_fault, page_fault, pieces

LONGEST_LINE = 4096
JOINED_BYTES = 64 << 10
"""Up to here a page is copied, to be sent at one go."""


class Wire(Connection):
    """A connection that knows pages. Every method raises `ValkeyError`, and then the connection is closed."""

    def exchange(self, commands: Sequence[Sequence[bytes | str | int]], seconds: float) -> list[Any]:
        """Send all, then read all replies; an error that is a reply to one command is that reply.

        Each reply may take `seconds`, and none is waited for once they are over: at most twice that in all.
        """
        end = time.monotonic() + seconds
        replies: list[Any] = []
        with self._whole():
            self.send_packed_command(self.pack_commands(commands))
            for _ in commands:
                if time.monotonic() > end:
                    raise TimeoutError("no answer in time")
                replies.append(self._reply())
        return replies

    def put(self, name: bytes, header: bytes, page: memoryview, behind: Sequence[bytes | str], seconds: float) -> Any:
        """``SET name page NX``, and a small command behind it: the reply to the first; the other's may be an error."""
        end = time.monotonic() + seconds
        length = HEADER_BYTES + len(page)
        start = b"*4\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b" % (len(name), name, length, header)
        rest = b"\r\n$2\r\nNX\r\n" + b"".join(self.pack_command(*behind))
        small = len(page) <= JOINED_BYTES
        parts = [memoryview(start + page + rest)] if small else [memoryview(start), *pieces(page), memoryview(rest)]
        with self._whole():
            for part in parts:
                self._until(end)
                self._sock.sendall(part)
            replies = []
            for _ in range(2):
                self._until(end)
                replies.append(self._reply())
            if isinstance(replies[0], ResponseError):
                raise replies[0]
            return replies[0]

    def fetch(
        self, name: bytes, space: Namespace, key: PageKey, page: memoryview, seconds: float
    ) -> tuple[bool, str | None]:
        """``GET name`` into `page`: whether it is there, and why it is damaged, or None."""
        end = time.monotonic() + seconds
        with self._whole():
            self.send_packed_command(self.pack_command("GET", name))
            line = self._line(end)
            if line.startswith(b"-"):
                raise self._parser.parse_error(line[1:].decode(errors="replace"))
            if line == b"$-1":
                return False, None
            if not line.startswith(b"$") or not line[1:].isdigit():
                raise ConnectionError(f"no reply to GET: {line[:40]!r}")
            fault = self._page(int(line[1:]), space, key, page, end)
        if fault:
            # The rest of the value is not worth reading.
            self.disconnect()
        return True, fault

    def _reply(self) -> Any:
        try:
            return self.read_response()
        except ResponseError as error:
            return error

    def _page(self, length: int, space: Namespace, key: PageKey, page: memoryview, end: float) -> str | None:
        if length != HEADER_BYTES + len(page):
            return f"{length} bytes, not {HEADER_BYTES + len(page)}"
        header, total = bytearray(HEADER_BYTES), Checksum()
        self._fill(memoryview(header), end)
        if fault := header_fault(header, space, key, len(page)):
            return fault
        for piece in pieces(page):
            self._fill(piece, end)
            total.update(piece)
        self._fill(memoryview(bytearray(2)), end)
        return page_fault(header, total.digest())

    def _line(self, end: float) -> bytes:
        """The first line of a reply. Byte by byte: what follows goes elsewhere."""
        line, one = bytearray(), bytearray(1)
        while not line.endswith(b"\r\n"):
            self._fill(memoryview(one), end)
            line += one
            if len(line) > LONGEST_LINE:
                raise ConnectionError("no Valkey or Redis server: its reply has no end")
        return bytes(line[:-2])

    def _fill(self, into: memoryview, end: float) -> None:
        while into:
            self._until(end)
            got = self._sock.recv_into(into)
            if not got:
                raise ConnectionError("the connection was cut")
            into = into[got:]

    def _until(self, end: float) -> None:
        """Let the next wait end in time."""
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        self._sock.settimeout(left)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """A request and its reply, or a closed connection: no half of one is left for the next."""
        try:
            yield
        except ResponseError:
            self._back_to_default()
            raise
        except OSError as error:
            self.disconnect()
            late = isinstance(error, socket.timeout)
            raise TimeoutError("no answer in time") if late else ConnectionError(str(error)) from error
        except BaseException:
            self.disconnect()
            raise
        self._back_to_default()

    def _back_to_default(self) -> None:
        if self._sock:
            self._sock.settimeout(self.socket_timeout)


class TlsWire(Wire, SSLConnection):
    """The same, encrypted; the server's certificate and name are checked."""
