"""``samestate``, killed with SIGKILL at a line of the code that writes archives: between any two lines, on demand.

``python dying.py N FILE run … --out OUT`` kills its process group before the N-th such line, from 0. With N of ``-`` it
lives, and FILE then names the function of each line, in order, and `SEALED` where OUT is.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from samestate.cli.commands import samestate
from samestate.evidence import archive, stream
from samestate.lab import ledger, run

WATCHED = {module.__file__ for module in (archive, ledger, run)}
SEALED = "sealed"
OPENING = (stream.__file__, "__init__")
"""Of a stream only its making: its records are many, and alike."""


class Lines:
    """Counts the watched lines, and kills at one of them."""

    def __init__(self, last: int | None, out: Path) -> None:
        self.seen: list[str] = []
        self._last = last
        self._out = out

    def call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        wanted = code.co_filename in WATCHED or (code.co_filename, code.co_name) == OPENING
        return self.line if wanted else None

    def line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            if len(self.seen) == self._last:
                os.killpg(0, signal.SIGKILL)
            name = frame.f_code.co_qualname
            over = name == archive.ArchiveWriter.seal.__qualname__ and (self._out / archive.SEAL_NAME).exists()
            self.seen.append(SEALED if over else name)
        return self.line


def main(last: str, file: str, *arguments: str) -> None:
    lines = Lines(None if last == "-" else int(last), Path(arguments[-1]))
    sys.settrace(lines.call)
    try:
        samestate.main(list(arguments), prog_name="samestate", standalone_mode=False)
    finally:
        sys.settrace(None)
        Path(file).write_text("\n".join(lines.seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
