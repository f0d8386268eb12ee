"""Real `samestate run` processes, and what kills them: at a size of their archive, after a time, at a line of code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from samestate.engines import shared_memory

MARK = "SAMESTATE_TEST_MARK"
"""In the environment of whatever a run starts, so that nothing of it can hide in another session."""
DYING = Path(__file__).with_name("dying.py")
COMMAND = [sys.executable, "-c", "from samestate.cli.main import main; main()"]


@dataclass
class Run:
    """A run that leads a process group of its own."""

    process: subprocess.Popen[bytes]
    mark: str
    out: Path
    seen: set[int] = field(default_factory=set)
    """Processes that it had when it was killed."""

    def kill(self) -> None:
        """SIGKILL to the whole group."""
        self.seen |= {self.process.pid, *self.descendants()}
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def kill_when(self, moment: Callable[[], bool]) -> bool:
        """Kill as soon as `moment` has come; False: the run was over before it."""
        while not moment():
            if self.process.poll() is not None:
                return False
            time.sleep(0.001)
        self.kill()
        return self.process.returncode == -signal.SIGKILL

    def kill_at_size(self, size: float) -> bool:
        """Kill as soon as the archive holds so many bytes."""
        return self.kill_when(lambda: size_of(self.out) >= size)

    def descendants(self) -> list[int]:
        """Processes that carry the mark; the dead that nobody has reaped yet have no environment."""
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found


def start(out: Path, *arguments: object, command: list[str] | None = None) -> Run:
    """`samestate run ARGUMENTS --out OUT`, in a session of its own."""
    mark = uuid4().hex
    temporary = out.parent / f"{out.name}.tmp"
    temporary.mkdir()
    words = [*(command or COMMAND), "run", *map(str, arguments), "--out", str(out)]
    with (out.parent / f"{out.name}.said").open("wb") as said:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env=os.environ | {MARK: mark, "TMPDIR": str(temporary)},
            start_new_session=True,
        )
    return Run(process, mark, out)


def dying(last: int | None, file: Path) -> list[str]:
    """The command that dies before line `last` (`dying.py`); None: it lives and names its lines in `file`."""
    return [sys.executable, str(DYING), "-" if last is None else str(last), str(file)]


def size_of(folder: Path) -> int:
    """Bytes in all files below a folder; -1 where there is no such folder yet."""
    if not folder.is_dir():
        return -1
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.stat().st_size
    return total


def gone(run: Run, seconds: float = 30.0) -> bool:
    """Whether everything that the run started ends, and its shared memory with it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not run.descendants() and not shared_memory.segments(run.seen):
            return True
        time.sleep(0.05)
    return False
