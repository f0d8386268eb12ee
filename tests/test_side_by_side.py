"""`make test` fails where either of its two runs fails, and shows what both say."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts/run_tests.py"
SPEAKS = "import sys; print(sys.argv[1], flush=True); sys.exit(int(sys.argv[2]))"


def command(words: str, code: int) -> tuple[str, ...]:
    return (sys.executable, "-c", SPEAKS, words, str(code))


@pytest.mark.parametrize(("first", "second", "code"), [(0, 0, 0), (1, 0, 1), (0, 3, 3), (1, 3, 1), (5, 0, 5)])
def test_either_failure_is_its_own(capfd: pytest.CaptureFixture[str], first: int, second: int, code: int) -> None:
    spec = importlib.util.spec_from_file_location("run_tests", SCRIPT)
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.side_by_side(command("units", first), command("engines", second)) == code
    said = capfd.readouterr().out
    assert said.index("units") < said.index("engines\n")


INTERRUPTED = """
import sys, runpy
script = runpy.run_path(sys.argv[1])
waits = "import os, sys, time; os.mkdir(f'{sys.argv[1]}/{os.getpid()}'); time.sleep(600)"
script["side_by_side"](*[(sys.executable, "-c", waits, sys.argv[2])] * 2)
"""


def test_an_interruption_ends_both(tmp_path: Path) -> None:
    asked = [sys.executable, "-c", INTERRUPTED, str(SCRIPT), str(tmp_path)]
    with subprocess.Popen(asked, stderr=subprocess.DEVNULL, start_new_session=True) as run:
        while len(started := list(tmp_path.iterdir())) < 2:
            assert run.poll() is None
            time.sleep(0.01)
        os.killpg(run.pid, signal.SIGINT)
        assert run.wait() != 0
    for folder in started:
        with pytest.raises(ProcessLookupError):
            os.kill(int(folder.name), 0)
