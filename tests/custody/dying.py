"""A swap that is killed with SIGKILL right after a record of a step is on the disk, or in the middle of writing it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from click.testing import CliRunner

from samestate.cli.commands import samestate
from samestate.evidence import custody_journal
from samestate.evidence.custody_records import CustodyRecord, StepBegan, StepEnded


def swap_and_die(spec: Path, step: str, when: str) -> int:
    """Swap in a process of its own, which reads no code anew, and die there; the signal that ended it.

    `when`: ``began`` or ``ended``, of the step; ``torn``: in the middle of the line that would say that it began.
    """
    pid = os.fork()
    if not pid:
        try:
            _arm(step, when)
            CliRunner().invoke(samestate, ["swap", str(spec)])
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _arm(step: str, when: str) -> None:
    append = custody_journal.JournalWriter.append

    def dying(self: custody_journal.JournalWriter, record: CustodyRecord) -> None:
        fatal = isinstance(record, StepEnded if when == "ended" else StepBegan) and record.step == step
        if fatal and when == "torn":
            os.write(self._fd, b'{"n":7,"prev":"00')
            os.kill(os.getpid(), signal.SIGKILL)
        append(self, record)
        if fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    custody_journal.JournalWriter.append = dying  # type: ignore[method-assign]
