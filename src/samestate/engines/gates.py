"""Running a gate on the installed vLLM's sampling code, in a child process that ends afterwards. No torch here.

``selftest``: two steps of a made-up request through vLLM's rejection sampler. ``sampling``: 8 forced and 272
ordinary rows through its top-p kernels, on the GPU, or without one in Triton's interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from samestate.engines.base import EngineError
from samestate.engines.inquiry import engine_release
from samestate.engines.processes import kill_session, log_tail
from samestate.evidence.gate_report import GateRefused, GateReport
from samestate.evidence.marker_records import SAMPLING_GUARD
from samestate.evidence.probe_records import GateReceipt

Gate = Literal["selftest", "sampling"]
GATE_SECONDS = 900.0
"""The interpreter takes half a minute on an idle core, minutes on a busy one."""
_POLL_SECONDS = 0.2
_MODULE = "samestate.engines.children.gate_child"


class GateQuestion(msgspec.Struct, frozen=True):
    """What the child is asked."""

    gate: Gate
    guard: str | None
    """Name of the guard that is to be in force."""


def run_gate(gate: Gate, guard: str | None = None) -> GateReceipt:
    """The receipt that an archive keeps. Raises `EngineError` where the gate cannot run."""
    return examine(gate, guard).receipt


def examine(gate: Gate, guard: str | None = None, advance: Callable[[int, int], None] | None = None) -> GateReport:
    """Run `gate`; `advance` is told parts done and in all.

    Raises `EngineError`: no vLLM, no Triton, a guard that does not fit, no answer.
    """
    if engine_release() is None:
        raise EngineError(f"gate {gate}: vLLM is not installed; install it, or run where it is")
    with tempfile.TemporaryDirectory(prefix="samestate-gate-") as scratch:
        names = ("question.json", "reply.json", "done", "vllm.log")
        question, reply, done, log_path = (Path(scratch) / name for name in names)
        question.write_bytes(msgspec.json.encode(GateQuestion(gate, guard)))
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(os.getpid()), str(question), str(reply), str(done)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # The child puts the guard on itself, after it has seen the kernel without.
                env={name: value for name, value in os.environ.items() if name != SAMPLING_GUARD},
            )
        try:
            code = _wait(process, done, advance or (lambda now, of: None))
        except TimeoutError:
            raise EngineError(f"gate {gate}: no answer in {GATE_SECONDS:.0f} s", log_tail(log_path)) from None
        finally:
            kill_session(process)
        if code != 0 or not reply.is_file():
            raise EngineError(f"gate {gate}: its process died (exit code {code})", log_tail(log_path))
        answer = msgspec.json.decode(reply.read_bytes(), type=GateReport | GateRefused)
    if isinstance(answer, GateRefused):
        raise EngineError(answer.message)
    return answer


def _wait(process: subprocess.Popen[bytes], done: Path, advance: Callable[[int, int], None]) -> int:
    end = time.monotonic() + GATE_SECONDS
    told = ""
    while (code := process.poll()) is None:
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(_POLL_SECONDS)
        said = done.read_text(encoding="utf-8") if done.is_file() else ""
        now, _, of = said.partition("/")
        if said != told and now.isdigit() and of.isdigit():
            told = said
            advance(int(now), int(of))
    return code
