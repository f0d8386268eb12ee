"""Custody's types and interfaces: the process that serves, the router before it, and what can go wrong."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from samestate.engines.base import EngineError
from samestate.evidence.custody_records import Field


class CustodyError(Exception):
    """A swap cannot begin, or a step of it failed. ``str(error)`` is one line, remedy included."""


class Unfinished(CustodyError):
    """A swap was begun and has not reached its end; its records say how far it came."""


def field(name: str, value: str) -> Field:
    """A field with its value."""
    return Field(name=name, value=value, missing=None)


def missing(name: str, why: str) -> Field:
    """A field without one."""
    return Field(name=name, value=None, missing=" ".join(why.split()))


def told(error: BaseException) -> str:
    """What went wrong, in one line; of what nobody foresaw also the kind."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    known = isinstance(error, CustodyError | EngineError | OSError)
    return " ".join((str(error) if known else f"{type(error).__name__}: {error}").split())


class Stopped(NamedTuple):
    """How a process ended."""

    process: str | None
    """``4711@12345678``; None: none was there, nor anything that it left behind."""
    killed: bool
    left: list[int]
    """Processes of its session that outlived it."""


class Supervisor(ABC):
    """Who starts and stops one serving process. Raises `CustodyError`."""

    @property
    @abstractmethod
    def lock(self) -> Path:
        """A file that two swaps of the same process have in common."""

    @abstractmethod
    def identity(self) -> str | None:
        """``4711@12345678`` of the process that leads; None: it does not run."""

    @abstractmethod
    def knows(self, who: str) -> None:
        """`who` was the process: another one under its number is nobody of ours."""

    @abstractmethod
    def start(self) -> None:
        """Start it; it need not answer yet when this returns, and it outlives this program."""

    @abstractmethod
    def stop(self) -> Stopped:
        """End it with everything that it started. Safe to call where nothing runs."""

    @abstractmethod
    def fields(self) -> list[Field]:
        """What the supervisor itself knows, beside ``/proc``."""

    def alive(self) -> bool:
        """Whether it runs."""
        return self.identity() is not None

    @property
    def pid(self) -> int:
        """Of the process that leads. Raises `CustodyError` where it does not run."""
        identity = self.identity()
        if identity is None:
            raise CustodyError("the process is not running; start it, or see its log")
        return int(identity.partition("@")[0])


class Admission(NamedTuple):
    """How a router treats one place in its backend."""

    admitting: bool
    """It sends new requests there."""
    sessions: int
    """Open or queued there."""
    failed: int | None
    """Requests that failed in the backend since the router started; None: the router does not count them."""


class Router(ABC):
    """A router before the incumbent: read, and told nothing but `drain` and `ready`. Raises `CustodyError`."""

    @abstractmethod
    def fields(self) -> list[Field]:
        """Identity, and its configuration's bytes by their hash."""

    @abstractmethod
    def admission(self) -> Admission:
        """The incumbent's place now."""

    @abstractmethod
    def drain(self) -> None:
        """Send no new request there; those that are open go on."""

    @abstractmethod
    def ready(self) -> None:
        """Send requests there again."""


Failing = Callable[[Path, str], Sequence[str]]
"""What a check, by its id, has against the records in a folder so far: one line each; the judging side's answer."""
JudgeProbe = Callable[[Path], tuple[str, dict[str, str]]]
"""The verdict on a probe's sealed archive, and that of each check."""
