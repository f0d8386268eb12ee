"""Programs over Triton's interpreter, each in a process of its own.

Triton decides at its import whether it compiles or interprets, and what a program patches stays patched. To import
vLLM takes longer than most such programs run, so one process imports it, computes nothing, and is forked for each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

FORKING = """
import json, os, sys, traceback
answers = os.fdopen(int(sys.argv[1]), "w")
import torch, triton
try:
    import vllm.v1.kv_offload.base
except ImportError:
    pass

def run(program):
    try:
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

for asked in map(json.loads, sys.stdin):
    child = os.fork()
    if not child:
        for number in (1, 2):
            os.dup2(os.open(asked["said"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        code = run(asked["program"])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)
"""
TESTS = Path(__file__).parent


class Done(NamedTuple):
    """How a program ended."""

    returncode: int
    """Negative: the signal that ended it."""
    said: str
    """On both streams."""


class Interpreter:
    """Runs one program after the other."""

    def __init__(self, folder: Path, orders: IO[str], answers: IO[str]) -> None:
        self._said, self._orders, self._answers = folder / "said", orders, answers

    def run(self, program: str) -> Done:
        """In a process that has imported ``torch``, ``triton`` and of vLLM, where there is one, ``kv_offload.base``."""
        self._said.write_text("")
        print(json.dumps({"program": program, "said": str(self._said)}), file=self._orders, flush=True)
        code = self._answers.readline()
        assert code, "the process that imports vLLM died: its last words are on stderr"
        return Done(int(code), self._said.read_text(errors="replace"))


@contextmanager
def interpreting(folder: Path) -> Iterator[Interpreter]:
    """One that lasts for the block; `folder` is its own."""
    reading, writing = os.pipe()
    path = os.pathsep.join([*(str(Path(one).resolve()) for one in sys.path if one), str(TESTS)])
    environ = {**os.environ, "TRITON_INTERPRET": "1", "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": path}
    command = [sys.executable, "-c", FORKING, str(writing)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environ, text=True, pass_fds=[writing]) as process:
        os.close(writing)
        assert process.stdin
        with os.fdopen(reading) as answers:
            yield Interpreter(folder, process.stdin, answers)
            process.stdin.close()
