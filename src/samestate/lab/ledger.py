"""Attempts at a preregistered plan: each is numbered and spent before first contact, and none can be taken back.

The ledger is a folder beside the plan's lock, one file an attempt, there whole or not at all: two runs never get
one number, and one that is killed leaves no half entry. An attempt that ended before its first request (setup failed,
wrong model) is *excluded*: it stays in the ledger with its reason and spends nothing of what the plan allows. One that
never said how it ended counts.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import msgspec

from samestate.evidence.canonical import canonical_json
from samestate.evidence.records import Outcome
from samestate.evidence.whole import write_new
from samestate.lab.errors import RunError

T = TypeVar("T", "Spent", "Ended")


class Spent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An attempt that began."""

    attempt: int
    plan_sha256: str
    archive: str
    """Name of the archive's folder."""
    wall_time: str


class Ended(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How it ended."""

    attempt: int
    outcome: Outcome
    reason: str | None
    seal_sha256: str | None


class Ledger:
    """The attempts at one lock.

    Args:
        lock: The plan's lock file; the ledger is ``<lock>.attempts`` beside it.
        plan_sha256: Of the plan in the lock: a ledger of another plan is refused.
        allowed: Attempts that may reach a request; None: any number.

    """

    def __init__(self, lock: Path, plan_sha256: str, allowed: int | None) -> None:
        self.folder = lock.with_name(f"{lock.name}.attempts")
        self._plan_sha256 = plan_sha256
        self._allowed = allowed

    def spend(self, archive: str) -> int:
        """Number of the attempt that begins now, from 1. Raises `RunError` when the plan allows no further one."""
        try:
            self.folder.mkdir(exist_ok=True)
            # Before the count: whoever begins meanwhile takes this number, and ours is refused.
            number = self._last_number() + 1
            spent = self._spent()
            if self._allowed is not None and len(spent) >= self._allowed:
                last = spent[-1]
                raise RunError(
                    f"{self.folder.name}: the plan allows {self._allowed} attempt(s) and the last was spent on "
                    f"{last.archive} at {last.wall_time}; a further one needs a plan of its own: freeze a new lock"
                )
            now = datetime.now(UTC).isoformat(timespec="seconds")
            began = Spent(attempt=number, plan_sha256=self._plan_sha256, archive=archive, wall_time=now)
            write_new(self.folder / f"{number:04}.json", canonical_json(msgspec.to_builtins(began)))
        except FileExistsError:
            raise RunError(f"{self.folder}: another run began an attempt at this moment; try again") from None
        except OSError as error:
            raise RunError(f"{error.filename or self.folder}: {error.strerror}; the attempt cannot be logged") from None
        return number

    def conclude(self, attempt: int, outcome: Outcome, reason: str | None, seal_sha256: str | None) -> None:
        """Add how the attempt ended. Raises OSError."""
        ended = Ended(attempt=attempt, outcome=outcome, reason=reason, seal_sha256=seal_sha256)
        write_new(self.folder / f"{attempt:04}.outcome.json", canonical_json(msgspec.to_builtins(ended)))

    def _spent(self) -> list[Spent]:
        """Attempts that count, in order."""
        found = []
        for number in range(1, self._last_number() + 1):
            began = self._read(f"{number:04}.json", Spent)
            if began is None or began.attempt != number:
                raise RunError(f"{self.folder}: attempt {number} is missing or unreadable; restore the ledger")
            if began.plan_sha256 != self._plan_sha256:
                raise RunError(
                    f"{self.folder}: is the ledger of plan {began.plan_sha256[:12]}, this lock holds "
                    f"{self._plan_sha256[:12]}; keep each lock under a name of its own"
                )
            ended = self._read(f"{number:04}.outcome.json", Ended)
            if ended is None or ended.outcome is not Outcome.EXCLUDED:
                found.append(began)
        return found

    def _last_number(self) -> int:
        return max((int(path.name[:4]) for path in self.folder.glob("[0-9][0-9][0-9][0-9].json")), default=0)

    def _read(self, name: str, kind: type[T]) -> T | None:
        try:
            return msgspec.json.decode((self.folder / name).read_bytes(), type=kind)
        except (FileNotFoundError, msgspec.DecodeError):
            return None
