"""`make test` fails where either of its two runs fails, and shows what both say."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from conftest import require_in_sight

SCRIPT = Path(__file__).parents[1] / "scripts/run_tests.py"
SPEAKS = "import sys; print(sys.argv[1], flush=True); sys.exit(int(sys.argv[2]))"


def command(words: str, code: int) -> tuple[str, ...]:
    return (sys.executable, "-c", SPEAKS, words, str(code))


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_tests", SCRIPT)
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.mark.parametrize(("first", "second", "code"), [(0, 0, 0), (1, 0, 1), (0, 3, 3), (1, 3, 1), (5, 0, 5)])
def test_either_failure_is_its_own(capfd: pytest.CaptureFixture[str], first: int, second: int, code: int) -> None:
    assert script().side_by_side(command("units", first), command("engines", second)) == code
    said = capfd.readouterr().out
    assert said.index("units") < said.index("engines\n")


ENGINE, DEEP = "@pytest.mark.vllm\n", "@pytest.mark.deep\n"


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (f"{ENGINE}def test_one(): ...", True),
        (f"pytestmark = pytest.mark.slow\n{ENGINE}class TestOne: ...", True),
        ("pytestmark = [pytest.mark.vllm, pytest.mark.slow]", True),
        ("live = [pytest.mark.vllm]", True),
        ("@pytest.mark.parametrize('a', [pytest.param(1, marks=pytest.mark.vllm)])\ndef test_one(a): ...", True),
        (f"{ENGINE}@pytest.mark.parametrize('a', [pytest.param(1, marks=pytest.mark.deep), 2])\ndef f(a): ...", True),
        (f"{ENGINE}{DEEP}def test_one(): ...\n{ENGINE}def test_two(): ...", True),
        (f"{ENGINE}{DEEP}def test_one(): ...", False),
        (f"pytestmark = pytest.mark.soak\n{ENGINE}def test_one(): ...", False),
        ("live = [pytest.mark.vllm, pytest.mark.lmcache]", False),
        (f"{DEEP}def test_one(): ...", False),
    ],
)
def test_engines_are_for_the_files_in_which_their_mark_is_read(tmp_path: Path, text: str, seen: bool) -> None:
    file = tmp_path / "test_one.py"
    file.write_text(text)
    (tmp_path / "kept.py").write_text(ENGINE)
    assert script().with_engines(tmp_path) == [file] * seen


def test_a_test_on_an_engine_that_is_not_seen_is_refused(request: pytest.FixtureRequest) -> None:
    """As by a mark that another file gives."""
    marked = pytest.Function.from_parent(request.node.parent, name="marked", callobj=lambda: None)
    require_in_sight([request.node, marked])
    marked.add_marker(pytest.mark.vllm)
    with pytest.raises(pytest.UsageError, match=r"test_side_by_side\.py: has tests with the mark vllm"):
        require_in_sight([request.node, marked])
    marked.add_marker(pytest.mark.deep)
    require_in_sight([marked])


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
