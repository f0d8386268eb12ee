"""Which process an engine says that it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from samestate.engines import processes
from samestate.engines.children.identity import own_process

SAY = "from samestate.engines.children.identity import own_process; print(own_process()); print(own_process())"


def test_a_process_says_the_same_of_itself_and_another_something_else() -> None:
    said = [subprocess.run([sys.executable, "-c", SAY], capture_output=True, text=True, check=True) for _ in range(2)]
    (first, again), (second, _) = (one.stdout.split() for one in said)
    assert first == again
    assert len({first, second, own_process()}) == 3
    assert own_process().startswith(f"{os.getpid()}@")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here")
def test_a_start_of_the_kernel_s_tells_an_id_that_came_again() -> None:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    assert own_process() == f"{os.getpid()}@{fields[19]}"


def test_without_proc_the_moment_of_import_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for text in (None, "1 (odd) R 1"):
        stat = tmp_path / str(os.getpid()) / "stat"
        if text is not None:
            stat.parent.mkdir()
            stat.write_text(text)
        monkeypatch.setattr(processes, "_PROC", tmp_path)
        assert re.fullmatch(rf"{os.getpid()}@\d+ns", own_process())
        assert own_process() == own_process()
