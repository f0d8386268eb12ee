"""HAProxy through its runtime socket. Custody sends it four commands: two read, ``drain`` and ``ready`` write."""

from __future__ import annotations

import csv
import os
import socket
import sys
from pathlib import Path

from typing_extensions import override

from samestate.custody.base import Admission, CustodyError, Router, field, missing
from samestate.custody.spec import RouterSpec
from samestate.engines.processes import identity
from samestate.evidence.canonical import file_sha256
from samestate.evidence.custody_records import Field

SECONDS = 10.0
_UP = ("UP", "no check")
_INT = 4


class HAProxy(Router):
    """One server of one backend."""

    def __init__(self, spec: RouterSpec) -> None:
        assert spec.socket is not None and spec.backend is not None and spec.server is not None
        self._socket, self._backend, self._server, self._config = spec.socket, spec.backend, spec.server, spec.config
        self._place = f"{spec.backend}/{spec.server}"

    @override
    def fields(self) -> list[Field]:
        return [*self._process(), *(one for path in self._config for one in config_fields(Path(path)))]

    @override
    def admission(self) -> Admission:
        rows = {(row.get("# pxname"), row.get("svname")): row for row in csv.DictReader(self._stat())}
        own, whole = rows.get((self._backend, self._server)), rows.get((self._backend, "BACKEND"))
        if own is None or whole is None:
            raise CustodyError(f"router.server: HAProxy has no {self._place}; name a server of its configuration")
        status = own.get("status") or ""
        return Admission(
            admitting=status.startswith(_UP),
            sessions=_count(own, "scur") + _count(own, "qcur"),
            failed=int(whole["hrsp_5xx"]) if whole.get("hrsp_5xx") else None,  # mode tcp sees no answers
        )

    @override
    def drain(self) -> None:
        self._set("drain")

    @override
    def ready(self) -> None:
        self._set("ready")

    def _set(self, state: str) -> None:
        if said := self._ask(f"set server {self._place} state {state}").strip():
            raise CustodyError(
                f"router.socket: HAProxy refuses to set {self._place} to {state} ({said}); the socket needs level admin"
            )

    def _process(self) -> list[Field]:
        info = dict(line.split(": ", 1) for line in self._ask("show info").splitlines() if ": " in line)
        pid = info.get("Pid", "")
        who = next((found for one in (pid, self._peer()) if (found := _haproxy(one, pid))), None)
        made = [_said("router.version", info.get("Version"))]
        made += _seen(who) if who else [missing("router.process", "its process cannot be seen from here")]
        rows = [line.split() for line in self._ask(f"show servers state {self._backend}").splitlines()]
        heading = next((row[1:] for row in rows if row[:1] == ["#"]), [])
        servers = [dict(zip(heading, row, strict=False)) for row in rows]
        own = next((one for one in servers if one.get("srv_name") == self._server), {})
        at, port = own.get("srv_addr"), own.get("srv_port")
        made.append(_said("router.weight", own.get("srv_uweight")))
        made.append(_said("router.address", f"{at}:{port}" if at and port else None))
        return made

    def _peer(self) -> str:
        """Who listens at the socket, by its number here; ``0`` where that cannot be told."""
        try:
            with socket.socket(socket.AF_UNIX) as talk:
                talk.settimeout(SECONDS)
                talk.connect(self._socket)
                credentials = talk.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 3 * _INT)
        except OSError:
            return "0"
        return str(int.from_bytes(credentials[:_INT], sys.byteorder, signed=True))

    def _stat(self) -> list[str]:
        return self._ask("show stat").strip().splitlines()

    def _ask(self, command: str) -> str:
        try:
            with socket.socket(socket.AF_UNIX) as talk:
                talk.settimeout(SECONDS)
                talk.connect(self._socket)
                talk.sendall(command.encode() + b"\n")
                answer = b""
                while chunk := talk.recv(1 << 16):
                    answer += chunk
        except OSError as error:
            words = error.strerror or str(error)
            raise CustodyError(
                f"router.socket: {self._socket} gives no answer ({words}); name HAProxy's stats socket"
            ) from None
        return answer.decode(errors="replace")


def config_fields(path: Path) -> list[Field]:
    """A configuration file's bytes, and who owns which inode."""
    name = f"router.config.{path.name}"
    try:
        state = path.stat()
        owner = f"inode {state.st_ino}, {state.st_uid}:{state.st_gid}, {state.st_mode:o}"
        return [field(name, file_sha256(path)), field(f"router.file.{path.name}", owner)]
    except OSError as error:
        return [missing(name, f"cannot be read: {error.strerror}")]


def _said(name: str, value: str | None) -> Field:
    return field(name, value) if value else missing(name, "HAProxy does not say")


def _seen(who: str) -> list[Field]:
    home = Path("/proc") / who.partition("@")[0]
    made = [field("router.process", who)]
    for name, link in (("router.executable", "exe"), ("router.mount_namespace", "ns/mnt")):
        try:
            made.append(field(name, os.readlink(home / link)))
        except OSError as error:
            made.append(missing(name, f"cannot be read: {error.strerror}"))
    return made


def _haproxy(pid: str, said: str) -> str | None:
    """Who the process `pid` is, where it is an HAProxy that calls itself `said`: it may count in a space of its own."""
    if not pid.isdecimal() or pid == "0":
        return None
    try:
        home = Path("/proc") / pid
        lines = (home / "status").read_text(errors="replace").splitlines()
        numbers = next((line.split()[1:] for line in lines if line.startswith("NSpid:")), [pid])
        named = (home / "comm").read_text(errors="replace").startswith("haproxy")
    except OSError:
        return None
    return identity(int(pid)) if named and numbers[-1:] == [said] else None


def _count(row: dict[str, str], name: str) -> int:
    return int(row.get(name) or 0)
