"""What a swap's records hold, indexed for its checks. The journal is read once, raw responses when asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from samestate.checks.base import CheckResult
from samestate.checks.verdicts import conclude, unknown
from samestate.evidence import custody_records as c
from samestate.evidence.canonical import file_sha256
from samestate.evidence.custody_journal import read_journal
from samestate.evidence.places import place
from samestate.evidence.stream import Defect

R = TypeVar("R")


class Noted(NamedTuple):
    """A record, where it stands, and when it was written."""

    rec: Any
    where: str
    """``journal.jsonl:7``."""
    t_ns: int
    wall: str
    """RFC 3339."""


@dataclass
class CustodyHistory:
    """One swap."""

    folder: Path
    defects: list[Defect] = field(default_factory=list)
    noted: list[Noted] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> CustodyHistory:
        """Never raises for what lies in the folder."""
        read = read_journal(folder)
        noted = [Noted(entry.rec, place(c.JOURNAL, entry.n), entry.t_ns, entry.wall) for entry in read.entries]
        return cls(folder, read.defects, noted)

    def all(self, kind: type[R]) -> list[Noted]:
        """All records of a kind, in order."""
        return [one for one in self.noted if isinstance(one.rec, kind)]

    def first(self, kind: type[R], when: str) -> Noted | None:
        """The first record of a kind at a time."""
        return next((one for one in self.all(kind) if one.rec.when == when), None)

    def last(self, kind: type[R], when: str) -> Noted | None:
        """The last record of a kind at a time."""
        return next((one for one in reversed(self.all(kind)) if one.rec.when == when), None)

    @property
    def started(self) -> c.SwapStarted | None:
        """What the swap is held to."""
        return next((one.rec for one in self.noted if isinstance(one.rec, c.SwapStarted)), None)

    @property
    def began(self) -> list[c.Step]:
        """Steps that began, in order."""
        return [one.rec.step for one in self.all(c.StepBegan)]

    @property
    def stopped(self) -> bool:
        """Whether the incumbent was to be stopped, or started again because it had ended by itself."""
        return c.Step.STOP in self.began or c.Step.RESTORE in self.began

    @property
    def rebooted(self) -> bool:
        """Whether the machine was started again within the swap."""
        return self.started is not None and any(one.rec.boot_id != self.started.boot_id for one in self.resumptions)

    @property
    def resumptions(self) -> list[Noted]:
        """Each time that another tool took over."""
        return self.all(c.Resumed)

    def smokes(self, name: str, when: c.When) -> list[Noted]:
        """Runs of a smoke at a time."""
        return [one for one in self.all(c.SmokeDone) if one.rec.name == name and one.rec.when == when]

    def raw_is(self, done: c.SmokeDone) -> bool:
        """Whether the smoke's raw response lies there as it was recorded."""
        if done.response is None or done.response_sha256 is None or "/" in done.response:
            return False
        try:
            return file_sha256(self.folder / c.RAW / done.response) == done.response_sha256
        except OSError:
            return False


def values(fields: list[c.Field]) -> dict[str, c.Field]:
    """Fields by name."""
    return {one.name: one for one in fields}


def nothing(check: str, code: str, message: str, unit: str) -> CheckResult:
    """The result of a check whose records are not there."""
    return conclude(check, [unknown(code, message)], unit=unit, examined=0, summary=message)


def spans(history: CustodyHistory) -> Iterator[tuple[c.Step, int, int | None]]:
    """Each step with when it began and when it ended, monotonic nanoseconds; None: it did not end."""
    step: c.Step | None = None
    began = 0
    for one in history.noted:
        if isinstance(one.rec, c.StepBegan):
            if step is not None:
                yield step, began, None
            step, began = one.rec.step, one.t_ns
        elif isinstance(one.rec, c.StepEnded) and step is not None:
            yield step, began, one.t_ns
            step = None
    if step is not None:
        yield step, began, None
