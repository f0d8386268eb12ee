"""Supervisors: plain processes with a file that names them, and units of systemd."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from typing_extensions import override

from samestate.custody import launch
from samestate.custody.base import CustodyError, Stopped, Supervisor, field, missing
from samestate.custody.spec import ProcessSpec
from samestate.engines import shared_memory
from samestate.engines.processes import await_end, identity, session_members
from samestate.evidence.canonical import sha256_hex
from samestate.evidence.custody_records import Field
from samestate.folders import cache_root

LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})
_APPEAR_SECONDS = 20.0
_KILL_SECONDS = 10.0
_UNIT_FIELDS = ("FragmentPath", "DropInPaths", "NRestarts", "User", "Group")
_MAY_BE_EMPTY = ("DropInPaths", "User", "Group")
"""Nothing was dropped in; root."""


class PlainProcess(Supervisor):
    """A process in a session of its own, named by a file; ``4711`` or ``4711@12345678`` in it.

    `limits`: resource limits to start it with, as `limits_of` gave them; None: this program's.
    """

    def __init__(self, process: ProcessSpec) -> None:
        assert process.pid_file is not None and process.log is not None
        self._spec = process
        self._pid_file, self._log = Path(process.pid_file), Path(process.log)
        self._child: subprocess.Popen[bytes] | None = None
        self._known: str | None = None
        self.limits: dict[int, tuple[int, int]] | None = None

    @property
    @override
    def lock(self) -> Path:
        return self._pid_file.with_name(f"{self._pid_file.name}.lock")

    @override
    def identity(self) -> str | None:
        if self._child is not None:
            self._child.poll()
        said = self._said()
        if said is None or not running(int(said.partition("@")[0])):
            return None
        seen = identity(int(said.partition("@")[0]))
        if "@" not in said:
            said = self._named(said) or seen or said
            self._known = said
        return seen if seen == said else None

    @override
    def knows(self, who: str) -> None:
        self._known = who

    @property
    def by_number(self) -> bool:
        """The file holds no more than a number, which anybody may have by now."""
        return "@" not in (self._said() or "@")

    def _said(self) -> str | None:
        """What the file says: ``4711``, or ``4711@12345678``."""
        try:
            said = self._pid_file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            return None
        return said if said.partition("@")[0].isdecimal() else None

    def _named(self, number: str) -> str | None:
        """Who is known to have that number."""
        return self._known if self._known is not None and self._known.partition("@")[0] == number else None

    @override
    def start(self) -> None:
        environment = self.environment()
        limits = self.limits if self.limits is not None else limits_of(os.getpid())
        with self._log.open("ab") as log:
            try:
                self._child = subprocess.Popen(
                    [
                        *(sys.executable, "-I", launch.__file__, str(self._pid_file), json.dumps(limits)),
                        *self._spec.argv,
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self._spec.cwd,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise CustodyError(f"{self._spec.argv[0]}: cannot be started ({error.strerror}); see cwd") from None
        deadline = time.monotonic() + _APPEAR_SECONDS
        while self.identity() != identity(self._child.pid) or self._executing_launch():
            if self._child.poll() is not None or time.monotonic() > deadline:
                raise CustodyError(f"{self._spec.argv[0]}: ended at once; its log is {self._log}")
            time.sleep(0.01)

    def environment(self) -> dict[str, str]:
        """All that it is started with. Raises `CustodyError`."""
        return _environment(self._spec)

    def _executing_launch(self) -> bool:
        assert self._child is not None
        with suppress(OSError):
            words = Path(f"/proc/{self._child.pid}/cmdline").read_bytes().split(b"\0")
            return launch.__file__.encode() in words or words == [b""]
        return True  # it has none once it has ended

    @override
    def stop(self) -> Stopped:
        who = self.identity()
        if who is None:
            return self._stop_orphans()
        leader = int(who.partition("@")[0])
        # A process that leads no session shares it with others, who are none of ours.
        with suppress(ProcessLookupError):
            members = session_members(leader) if os.getsid(leader) == leader else {leader}
            _signal([leader], signal.SIGTERM)
            return self._end(who, members, [leader])
        return self._stop_orphans()  # it ended just now

    def _stop_orphans(self) -> Stopped:
        """End what runs on of a session without its leader, whose number the kernel gives to nobody meanwhile."""
        said = self._said()
        if said is None:
            return Stopped(None, killed=False, left=[])
        who = said if "@" in said else self._named(said)
        leader = int(said.partition("@")[0])
        if who is None or identity(leader) not in (None, who):
            return Stopped(None, killed=False, left=[])
        members = await_end(session_members(leader) - {leader}, 0.0)
        if not members:
            return Stopped(None, killed=False, left=[])
        _signal(members, signal.SIGTERM)
        return self._end(who, members, members)

    def _end(self, who: str, members: set[int], told: set[int] | list[int]) -> Stopped:
        """Wait for those that were told to end; what is left of the session then is killed."""
        leader = int(who.partition("@")[0])
        self._await(told, self._spec.stop_seconds)
        members |= session_members(leader) if identity(leader) in (None, who) else set()
        alive = await_end(members, 1.0)
        self._reap()
        if alive:
            _signal(alive, signal.SIGKILL)
        left = self._await(members, _KILL_SECONDS)
        shared_memory.remove(members - left)
        return Stopped(who, killed=not alive.isdisjoint(told), left=sorted(left))

    def _await(self, pids: set[int] | list[int], seconds: float) -> set[int]:
        left = await_end(pids, seconds)
        self._reap()
        return left

    def _reap(self) -> None:
        if self._child is not None:
            self._child.poll()

    @override
    def fields(self) -> list[Field]:
        return []


def running(pid: int) -> bool:
    """Whether a process runs at this moment; one that only waits to be reaped does not."""
    return bool(await_end([pid], 0.0))


def limits_of(pid: int) -> dict[int, tuple[int, int]]:
    """Soft and hard resource limits by number. OSError where they cannot be read."""
    return {number: resource.prlimit(pid, number) for number in LIMITS}


def _signal(pids: set[int] | list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def api_key(process: ProcessSpec) -> str | None:
    """What its clients must send: the value of the variable that the spec names. Raises `CustodyError`."""
    if process.api_key_env is None:
        return None
    key = _environment(process).get(process.api_key_env)
    if not key:
        raise CustodyError(
            f"api_key_env: {process.api_key_env} is not in environment or environment_file; put it there"
        )
    return key


def _environment(process: ProcessSpec) -> dict[str, str]:
    made = dict(process.environment)
    if process.environment_file is None:
        return made
    try:
        lines = Path(process.environment_file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CustodyError(f"{process.environment_file}: cannot be read ({error}); put the file back") from None
    for line in lines:
        name, equals, value = line.partition("=")
        if equals and not line.lstrip().startswith("#"):
            made[name.strip()] = value
    return made


class SystemdUnit(Supervisor):
    """A unit of systemd, through ``systemctl``. Not tried on a machine with systemd."""

    def __init__(self, process: ProcessSpec) -> None:
        assert process.unit is not None
        self._unit, self._seconds = process.unit, process.stop_seconds

    @property
    @override
    def lock(self) -> Path:
        return cache_root() / "locks" / f"{sha256_hex(self._unit.encode())[:16]}.lock"

    @override
    def identity(self) -> str | None:
        pid = self._show("MainPID")
        return identity(int(pid)) if pid.isdecimal() and int(pid) else None

    @override
    def knows(self, who: str) -> None:
        pass  # systemd does

    @override
    def start(self) -> None:
        self._call("start", self._unit)

    @override
    def stop(self) -> Stopped:
        who = self.identity()
        self._call("stop", self._unit)
        return Stopped(who, killed=self._show("Result") == "timeout", left=[])

    @override
    def fields(self) -> list[Field]:
        made = []
        for name in _UNIT_FIELDS:
            try:
                said = self._show(name)
                empty = missing(f"unit.{name}", "systemd gives no value")
                made.append(field(f"unit.{name}", said) if said or name in _MAY_BE_EMPTY else empty)
            except CustodyError as error:
                made.append(missing(f"unit.{name}", str(error)))
        try:
            made.append(field("unit.files", sha256_hex(self._call("cat", self._unit).encode())))
        except CustodyError as error:
            made.append(missing("unit.files", str(error)))
        return made

    def _show(self, name: str) -> str:
        """Raises `CustodyError` where systemd knows no such property, which is not the same as an empty one."""
        said = self._call("show", self._unit, f"--property={name}").strip()
        if not said.startswith(f"{name}="):
            raise CustodyError(f"systemctl show {self._unit}: says no {name}")
        return said.partition("=")[2]

    def _call(self, *words: str) -> str:
        try:
            done = subprocess.run(
                ["systemctl", *words], capture_output=True, text=True, timeout=self._seconds + 30, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CustodyError(f"systemctl {words[0]}: {error}; is systemd there?") from None
        if done.returncode:
            raise CustodyError(f"systemctl {words[0]} {self._unit}: {' '.join(done.stderr.split())}")
        return done.stdout
