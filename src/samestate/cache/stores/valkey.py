"""Pages in a Valkey or Redis server, shared by any number of engines.

::

    samestate:1:names                               hash: a namespace's digest -> its name
    samestate:1:<namespace's digest>:<key in hex>   string: header and page

A page is set with ``SET … NX``: the server lets the first writer win, and shows all of a page or none. Room is the
server's (`maxmemory`, `maxmemory-policy`): what it evicted is a miss; where it may evict nothing, there is no room.

Nothing is tried twice. Every wait ends: for a connection to be free, for an answer, for a page to be moved whole, after
`timeout` seconds; for an address of the host to be connected, after `connect_timeout`. So a silent server costs a call
``connect_timeout + 2 * timeout`` at most, one that answers everything only just in time some more. After a failure the
server is left alone for `pause` seconds, in which calls fail at once. A request that was given up may still be carried
out by the server, whole. Cluster mode is not supported.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import override
from valkey.backoff import NoBackoff
from valkey.connection import BlockingConnectionPool
from valkey.exceptions import OutOfMemoryError, ResponseError, ValkeyError
from valkey.retry import Retry

from samestate.cache.base import PageInfo, PageKey, Read, StoreError, Write
from samestate.cache.envelope import FORMAT, HEADER_BYTES, Namespace, flat, make_header, require_key
from samestate.cache.stores.place import Address, Manners, Place, PlacedStore, is_digest, named_or_lost
from samestate.cache.stores.valkey_wire import TlsWire, Wire

SCHEMES = {"valkey": False, "redis": False, "valkeys": True, "rediss": True}
"""Whether it is encrypted."""
OPTIONS = "timeout, connect_timeout, pause, connections, password_file, ca, cert, key"
LARGEST_VALUE = 512 << 20
"""Bytes of a string; the server's `proto-max-bulk-len` at its default."""
ASK_FIRST_BYTES = 256 << 10
BATCH = 1000
PREFIX = f"samestate:{FORMAT}:"
NAMES = f"{PREFIX}names"


class Patience(NamedTuple):
    """Seconds."""

    timeout: float = 2.0
    """For a page to be moved, whole; for anything else to be answered."""
    connect_timeout: float = 1.0
    pause: float = 1.0
    """How long a server that failed is left alone."""


class ValkeyPlace(Place):
    """A database of a server.

    Args:
        shown: How to call it in errors: no secrets.
        connection: Arguments of the client library's connection: host, port, db, username, password, ssl_….

    """

    def __init__(
        self,
        shown: str,
        connection: dict[str, Any],
        encrypted: bool = False,
        connections: int = 8,
        patience: Patience | None = None,
        manners: Manners | None = None,
    ) -> None:
        self.shown = shown
        self.manners = manners or Manners()
        self.patience = patience or Patience()
        self._pool = BlockingConnectionPool(
            max_connections=connections,
            timeout=self.patience.timeout,
            connection_class=TlsWire if encrypted else Wire,
            socket_timeout=self.patience.timeout,
            socket_connect_timeout=self.patience.connect_timeout,
            retry=Retry(NoBackoff(), 0),
            lib_name=None,
            lib_version=None,
            valkey_connect_func=_connect_to_look if self.manners.only_looking else None,
            **connection,
        )
        self._failed: tuple[float, str] = (0.0, "")
        """Until when the server is left alone, and why."""

    @classmethod
    def at(cls, address: Address, manners: Manners) -> ValkeyPlace:
        """``valkey[s]://[user[:password]@]host[:port][/database][?…]``. Raises ValueError."""
        shown, encrypted = address.shown, SCHEMES[address.scheme]
        database = address.path.strip("/") or "0"
        if not address.host or not database.isdecimal():
            raise ValueError(f"{shown}: say {address.scheme}://host:port/0; the database is a number")
        password = address.password
        if file := address.text("password_file"):
            try:
                password = Path(file).read_text(encoding="utf-8").rstrip("\r\n")
            except (OSError, ValueError) as error:
                raise ValueError(f"{shown}: password_file={file} cannot be read: {error}") from None
        connection = {
            "host": address.host,
            "port": address.port or 6379,
            "db": int(database),
            "username": address.user,
            "password": password,
        }
        tls = {f"ssl_{name}": address.text(said) for said, name in _TLS_OPTIONS.items()}
        if encrypted:
            connection |= {**tls, "ssl_cert_reqs": "required", "ssl_check_hostname": True}
        elif given := [said for said, name in _TLS_OPTIONS.items() if tls[f"ssl_{name}"]]:
            raise ValueError(f"{shown}: {', '.join(given)}: {address.scheme} is not encrypted; use valkeys://")
        default = Patience()
        patience = Patience(*(address.seconds(name, getattr(default, name)) for name in Patience._fields))
        connections = address.count("connections", 8)
        address.nothing_left(OPTIONS)
        return cls(shown, connection, encrypted, connections, patience, manners)

    @override
    def namespaces(self) -> list[Namespace]:
        digests: set[str] = set()
        for names in self.scan_names(f"{PREFIX}*"):
            parts = [name.decode(errors="replace").removeprefix(PREFIX).partition(":")[0] for name in names]
            digests.update(part for part in parts if is_digest(part))
        known = self.exchange([("HGETALL", NAMES)])[0]
        named = dict(zip(known[::2], known[1::2], strict=True)) if isinstance(known, list) else {}
        return sorted(named_or_lost(digest, named.get(digest.encode())) for digest in digests)

    @override
    def store(self, namespace: Namespace, alone: bool = False) -> ValkeyStore:
        return ValkeyStore(self, namespace, alone)

    @override
    def close(self) -> None:
        with suppress(ValkeyError, OSError):
            self._pool.disconnect()

    def exchange(self, commands: Sequence[Sequence[bytes | str | int]]) -> list[Any]:
        """Their replies, in order; errors among them. Raises `StoreError`."""
        with self.wire() as wire:
            return wire.exchange(commands, self.patience.timeout)

    def scan_names(self, pattern: str) -> Iterator[list[bytes]]:
        """Names of the server's keys, some at a time; one may come twice."""
        cursor: bytes | int = 0
        while True:
            (reply,) = self.exchange([("SCAN", cursor, "MATCH", pattern, "COUNT", BATCH)])
            cursor, names = self.answered(reply)
            yield names
            if int(cursor) == 0:
                return

    def answered(self, reply: Any) -> Any:
        """A reply that must not be an error."""
        if isinstance(reply, ResponseError):
            raise StoreError(f"{self.shown}: {reply}")
        return reply

    @contextmanager
    def wire(self) -> Iterator[Wire]:
        """A connection for one request. Errors become `StoreError`, but for a refusal for lack of memory."""
        until, why = self._failed
        if time.monotonic() < until:
            raise StoreError(f"{self.shown}: left alone for a moment after: {why}")
        try:
            wire = self._pool.get_connection("")
            try:
                yield wire
            finally:
                self._pool.release(wire)
        except OutOfMemoryError:
            raise
        except ResponseError as error:
            raise StoreError(f"{self.shown}: {error}") from error
        except (ValkeyError, OSError) as error:
            why = " ".join(str(error).split()) or type(error).__name__
            self._failed = time.monotonic() + self.patience.pause, why
            raise StoreError(f"{self.shown}: {why}") from error


_TLS_OPTIONS = {"ca": "ca_certs", "cert": "certfile", "key": "keyfile"}


class ValkeyStore(PlacedStore):
    """The pages of one namespace in a server."""

    def __init__(self, place: ValkeyPlace, namespace: Namespace, alone: bool) -> None:
        super().__init__(place, namespace, alone)
        self._place = place
        self._prefix = f"{PREFIX}{namespace.digest.hex()}:".encode()

    @override
    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        found: list[bool] = []
        for batch in _batches([self._name(key) for key in keys]):
            replies = self._place.exchange([("EXISTS", name) for name in batch])
            found += [bool(self._place.answered(reply)) for reply in replies]
        return found

    @override
    def read(self, key: PageKey, into: memoryview) -> Read:
        page, name = flat(into), self._name(key)
        there, fault = self._fetch(name, key, page)
        if fault is None:
            return Read.HIT if there else Read.MISS
        self._place.manners.on_damage(self._place.shown, key, fault)
        if not self._place.manners.keep_damaged:
            with suppress(StoreError):
                self._place.exchange([("UNLINK", name)])
        return Read.DAMAGED

    @override
    def write(self, key: PageKey, page: memoryview) -> Write:
        page = flat(page)
        require_key(key)
        if HEADER_BYTES + len(page) > LARGEST_VALUE:
            return Write.NO_ROOM
        name = self._name(key)
        # What is there need not be sent, unless that costs less than asking.
        if len(page) > ASK_FIRST_BYTES and self._place.answered(self._place.exchange([("EXISTS", name)])[0]):
            return Write.PRESENT
        named = ("HSETNX", NAMES, self._space.digest.hex(), self._space.name)
        try:
            with self._place.wire() as wire:
                done = wire.put(name, make_header(self._space, key, page), page, named, self._place.patience.timeout)
        except OutOfMemoryError:
            return Write.NO_ROOM
        return Write.PRESENT if done is None else Write.WRITTEN

    @override
    def touch(self, keys: Sequence[PageKey]) -> None:
        for batch in _batches([self._name(key) for key in reversed(keys)]):
            self._place.answered(self._place.exchange([("TOUCH", *batch)])[0])

    @override
    def delete(self, keys: Sequence[PageKey]) -> int:
        removed = 0
        for batch in _batches([self._name(key) for key in keys]):
            removed += int(self._place.answered(self._place.exchange([("UNLINK", *batch)])[0]))
        return removed

    @override
    def scan(self) -> Iterator[PageInfo]:
        """Every page. Before Redis 7.2 it counts as a use, though told as it was before."""
        seen: set[bytes] = set()
        for names in self._place.scan_names(f"{self._prefix.decode()}*"):
            new = [name for name in dict.fromkeys(names) if name not in seen]
            seen.update(new)
            asked = [request for name in new for request in (("OBJECT", "IDLETIME", name), ("STRLEN", name))]
            after = _NO_TOUCH_ON if self._place.manners.only_looking else _NO_TOUCH_OFF
            replies = self._place.exchange([_NO_TOUCH_ON, *asked, after])[1:-1]
            now = time.time()
            for name, idle, length in zip(new, replies[::2], replies[1::2], strict=True):
                key = _key_of(name.removeprefix(self._prefix))
                if idle is None or key is None:
                    continue  # gone meanwhile, or somebody else's
                # The server does not know under a policy that counts uses.
                last_used = None if isinstance(idle, ResponseError) else now - idle
                yield PageInfo(self.namespace, key, length if isinstance(length, int) else 0, last_used)

    def _name(self, key: PageKey) -> bytes:
        return self._prefix + key.hex().encode()

    def _fetch(self, name: bytes, key: PageKey, page: memoryview) -> tuple[bool, str | None]:
        """Whether it is there, and why it is damaged, or None."""
        with self._place.wire() as wire:
            try:
                return wire.fetch(name, self._space, key, page, self._place.patience.timeout)
            except ResponseError as error:
                if not str(error).startswith("WRONGTYPE"):
                    raise
        return True, "no string"


_NO_TOUCH_ON = ("CLIENT", "NO-TOUCH", "ON")
_NO_TOUCH_OFF = ("CLIENT", "NO-TOUCH", "OFF")


def _connect_to_look(wire: Wire) -> None:
    wire.on_connect()
    # Servers before Redis 7.2 do not know it, and take looking for use.
    wire.exchange([_NO_TOUCH_ON], Patience().timeout)


def _batches(names: list[bytes]) -> Iterator[list[bytes]]:
    for start in range(0, len(names), BATCH):
        yield names[start : start + BATCH]


def _key_of(name: bytes) -> PageKey | None:
    try:
        return PageKey(bytes.fromhex(name.decode())) or None
    except ValueError:
        return None
