"""Addresses on which a serving process listens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from samestate.custody.base import field, missing
from samestate.engines.processes import session_members
from samestate.evidence.custody_records import Field

_PROC = Path("/proc")
_LISTENING = "0A"


def listening(pid: int, url: str) -> Iterator[Field]:
    """Ports that somebody chose, by name; of those that the kernel chose, which no start has again, the number.

    Where the server's own port is not among them, they were not seen, and are missing.
    """
    try:
        low, high = map(int, (_PROC / "sys/net/ipv4/ip_local_port_range").read_text().split())
        found = _ports(pid)
        parts = urlsplit(url)
        own = parts.port or {"https": 443}.get(parts.scheme, 80)
        # In a network of its own it may listen under another number.
        ours = os.readlink(_PROC / str(pid) / "ns/net") == os.readlink(_PROC / "self/ns/net")
        if not found or (ours and all(port != own for _, port in found)):
            raise LookupError("nothing of it listens at its own address")
    except (OSError, ValueError, LookupError) as error:
        yield missing("ports", f"cannot be read: {error}")
        yield missing("ports.ephemeral", f"cannot be read: {error}")
        return
    chosen = {name for name, port in found if port == own or not low <= port <= high}
    yield field("ports", ", ".join(sorted(chosen)))
    yield field("ports.ephemeral", str(len(found) - len(chosen)))


def _ports(leader: int) -> set[tuple[str, int]]:
    """Addresses on which the session listens, with their ports. Raises OSError where a process of it cannot be seen."""
    sockets = set()
    for pid in session_members(leader):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            for descriptor in (_PROC / str(pid) / "fd").iterdir():
                with suppress(FileNotFoundError, ProcessLookupError):
                    target = os.readlink(descriptor)
                    if target.startswith("socket:["):
                        sockets.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):
            for line in (_PROC / str(leader) / "net" / table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENING and words[9] in sockets:
                    host, _, port = words[1].partition(":")
                    found.add((f"{table} {host}:{int(port, 16)}", int(port, 16)))
    return found
