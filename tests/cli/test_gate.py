"""``samestate gate``: exit codes, words and the report that an archive keeps; and the real kernels' code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from click.testing import Result

from samestate.cli import gate
from samestate.engines.base import EngineError
from samestate.engines.vllm import available
from samestate.evidence.gate_report import GateGroup, GateReport
from samestate.evidence.marker_records import SPLIT_TOP_P
from samestate.evidence.probe_records import GateReceipt
from samestate.evidence.record_base import PatchedFunction

Command = Callable[..., Result]
SHA = "0" * 64
KERNEL = PatchedFunction(module="vllm.kernels", qualname="_mask_kernel", source_sha256=SHA)
GROUP = GateGroup(
    temperature=0.6,
    top_p=0.95,
    forced_rows=8,
    forced_right=8,
    forced_empty=0,
    ordinary_rows=272,
    ordinary_same=272,
)


def report(verdict: str, reason: str | None = None, guard: str | None = None, **group: int) -> GateReport:
    only = msgspec.structs.replace(GROUP, **group)
    receipt = GateReceipt(
        gate="sampling",
        ok=verdict == "pass",
        reason=reason,
        source_sha256=SHA,
        functions=[KERNEL],
        kernel="cuda",
        forced_rows=only.forced_rows,
        forced_right=only.forced_right,
        ordinary_rows=only.ordinary_rows,
        ordinary_same=only.ordinary_same,
        guard=guard,
    )
    return GateReport(
        receipt=receipt,
        verdict=verdict,  # type: ignore[arg-type]
        device="NVIDIA H200",
        versions={"vllm": "0.33.0"},
        compared="the guard",
        vocabulary=1024,
        groups=[only],
        patched=[KERNEL] if guard else [],
    )


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[GateReport | EngineError], list[tuple[str, str | None]]]:
    """Let the gate answer so; the list holds what was asked."""

    def set_answer(found: GateReport | EngineError) -> list[tuple[str, str | None]]:
        asked: list[tuple[str, str | None]] = []

        def examine(name: str, guard: str | None, advance: Callable[[int, int], None]) -> GateReport:
            asked.append((name, guard))
            advance(1, 2)
            if isinstance(found, EngineError):
                raise found
            return found

        monkeypatch.setattr(gate, "examine", examine)
        return asked

    return set_answer


@pytest.mark.parametrize(("verdict", "code"), [("pass", 0), ("fail", 1), ("unknown", 3)])
def test_verdicts_and_exit_codes(samestate: Command, answer: Callable[..., object], verdict: str, code: int) -> None:
    answer(report(verdict, None if code == 0 else "because", forced_right=8 if code == 0 else 7))
    result = samestate("gate", "sampling")
    assert result.exit_code == code
    assert f"{verdict}: {8 if code == 0 else 7}/8 forced rows, 272/272 others" in result.stdout
    assert ("because" in result.stdout) is (code != 0)
    assert "cuda on NVIDIA H200; vllm 0.33.0" in result.stdout


def test_the_guard_is_asked_for_by_name_and_shown(samestate: Command, answer: Callable[..., list[object]]) -> None:
    asked = answer(report("pass", guard=SPLIT_TOP_P))
    assert "guard split-top-p: patched _mask_kernel" in samestate("gate", "sampling", "--guard").stdout
    samestate("gate", "selftest")
    assert asked == [("sampling", SPLIT_TOP_P), ("selftest", None)]


def test_the_report_is_kept_and_printed(samestate: Command, answer: Callable[..., object], tmp_path: Path) -> None:
    answer(report("fail", "because", forced_right=0, forced_empty=8))
    out = tmp_path / "gate.json"
    result = samestate("gate", "sampling", "--json", "--out", out)
    assert (result.exit_code, json.loads(result.stdout)) == (1, json.loads(out.read_text()))
    kept = msgspec.json.decode(out.read_bytes(), type=GateReport)
    assert kept == report("fail", "because", forced_right=0, forced_empty=8)
    again = samestate("gate", "sampling", "--out", out)
    assert (again.exit_code, again.stderr) == (2, f"samestate: --out: {out} exists; name a file that does not\n")
    nowhere = samestate("gate", "sampling", "--out", tmp_path / "no" / "gate.json")
    line = f"samestate: --out: {tmp_path / 'no'} is no folder that can be written to; make it, or name another\n"
    assert (nowhere.exit_code, nowhere.stderr) == (2, line)


def test_a_gate_that_cannot_run_is_no_pass(samestate: Command, answer: Callable[..., object]) -> None:
    answer(EngineError("triton: not installed; pip install triton", "last words"))
    result = samestate("gate", "sampling", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout) == {"error": "triton: not installed; pip install triton"}
    assert "last words" in result.stderr


REAL = pytest.mark.skipif(not available(), reason="vLLM is not installed")


@REAL
@pytest.mark.slow
@pytest.mark.deep
def test_the_split_row_kernel_fails_the_gate(samestate: Command) -> None:
    """vLLM 0.32's own code: in Triton's interpreter, or on the GPU that is there."""
    pytest.importorskip("triton")
    result = samestate("gate", "sampling", "--json")
    found = msgspec.json.decode(result.stdout, type=GateReport)
    assert (result.exit_code, found.verdict) == (1, "fail")
    assert (found.receipt.forced_rows, found.receipt.forced_right) == (8, 0)
    assert (found.receipt.ordinary_rows, found.receipt.ordinary_same) == (272, 272)
    assert found.receipt.reason is not None
    assert "log(pivot)+log(Z)+max rounds to the maximum beside a logit of 1e9" in found.receipt.reason
    assert [(group.forced_empty, group.forced_rows) for group in found.groups] == [(n, n) for n in (2, 2, 1, 1, 1, 1)]


@REAL
@pytest.mark.slow
@pytest.mark.deep
def test_with_the_guard_it_passes(samestate: Command, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    out = tmp_path / "gate.json"
    result = samestate("gate", "sampling", "--guard", "--out", out)
    assert result.exit_code == 0, result.output
    found = msgspec.json.decode(out.read_bytes(), type=GateReport)
    assert (found.verdict, found.receipt.ok, found.receipt.guard) == ("pass", True, SPLIT_TOP_P)
    assert (found.receipt.forced_right, found.receipt.ordinary_same) == (8, 272)
    assert {(group.temperature, group.top_p) for group in found.groups} == {
        (temperature, top_p) for temperature in (0.6, 1.0) for top_p in (0.5, 0.95, 0.999)
    }
    assert [one.qualname for one in found.patched] == ["_topp_sb_mask_kernel"]
    assert found.patched[0].source_sha256 not in {one.source_sha256 for one in found.receipt.functions}
