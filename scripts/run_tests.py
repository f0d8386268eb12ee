"""`make test`: the tests without an engine and those with one, side by side.

An engine computes on one core and the other tests start many processes, so that two cores do both in less time than one
after the other. Those without an engine speak as they go; what the engines' say comes after them. Exit code: 0 where
both runs pass, else the first that is not 0.
"""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

PYTEST = (sys.executable, "-m", "pytest")
ELSEWHERE = ("lmcache", "soak", "deep")
NOT_HERE = " and ".join(f"not {mark}" for mark in ELSEWHERE)
SPREAD = ("-n", "auto", "--maxprocesses", "4", "--dist", "loadfile", "--durations", "25")
WITHOUT_ENGINE = (*SPREAD, "-m", f"not vllm and {NOT_HERE}")
WITH_ENGINE = ("-o", "cache_dir=.pytest_cache/engines", "-m", f"vllm and {NOT_HERE}")
TESTS = Path(__file__).parents[1] / "tests"
SECONDS = 30


def with_engines(tests: Path = TESTS) -> list[Path]:
    """The files that have tests for the run with engines. To read them all would mean to import torch and vLLM.

    It goes by their text. tests/conftest.py refuses a file which has such a test and is not named here.
    """
    return sorted(path for path in tests.rglob("test_*.py") if is_for_engines(path.read_text(encoding="utf-8")))


def is_for_engines(text: str) -> bool:
    """Whether a file of tests, by its text, has one that needs an engine and is not left to another run."""
    if "mark.vllm" not in text:
        return False
    everywhere, *groups = _marks(ast.parse(text))
    return any(
        "mark.vllm" in marks and not any(f"mark.{mark}" in marks for mark in ELSEWHERE)
        for marks in (everywhere + group for group in ("", *groups))
    )


def _marks(module: ast.Module) -> Iterator[str]:
    """The source of marks: the module's own, and then those that are given together.

    What one case of several is marked with (`parametrize`) is a group of its own: it takes nothing from the others.
    """
    named = [node for node in module.body if isinstance(node, ast.Assign)]
    own = [node for node in named if ast.unparse(node.targets[0]) == "pytestmark"]
    yield "".join(ast.unparse(node.value) for node in own)
    yield from (ast.unparse(node.value) for node in named if node not in own)
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            given = [ast.unparse(one) for one in node.decorator_list]
            yield "".join(one for one in given if "parametrize" not in one)
        elif isinstance(node, ast.keyword) and node.arg == "marks":
            yield ast.unparse(node.value)


def side_by_side(spoken: Sequence[str], kept: Sequence[str]) -> int:
    """Run two commands at once and print what the second said after the first; neither outlives the caller."""
    with (
        tempfile.TemporaryFile("w+", errors="replace") as log,
        subprocess.Popen(kept, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT) as second,
    ):
        try:
            first = subprocess.run(spoken, check=False).returncode
            if second.poll() is None:
                print("\nthe tests on real engines still run", flush=True)
            second.wait()
        finally:
            if second.poll() is None:
                stop(second)
            log.seek(0)
            print(log.read(), flush=True)
    return first or second.returncode


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end, as the keyboard does, so that fixtures close their engines; kill it where it does not."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


if __name__ == "__main__":
    sys.exit(side_by_side((*PYTEST, *WITHOUT_ENGINE), (*PYTEST, *WITH_ENGINE, *map(str, with_engines()))))
