"""Child processes that lead a session of their own: who belongs to it, and the end of all of them."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

LOG_TAIL_BYTES = 4096


def session_members(leader: int) -> set[int]:
    """Processes of a session as far as they can be seen, its leader included."""
    members = {leader}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            if os.getsid(int(entry.name)) == leader:
                members.add(int(entry.name))
    return members


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the session that `process` leads, and reap it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def log_tail(path: Path) -> str:
    """The end of a log file, possibly empty."""
    try:
        with path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - LOG_TAIL_BYTES))
            return log.read().decode(errors="replace")
    except OSError:
        return ""
