"""Gates in their child process: the self-test on the installed vLLM, and all the ways in which a gate does not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestate.engines import gates
from samestate.engines.base import EngineError
from samestate.engines.gates import examine, run_gate
from samestate.engines.vllm import available
from samestate.evidence.marker_records import SAMPLING_GUARD, SPLIT_TOP_P

REAL = pytest.mark.skipif(not available(), reason="vLLM is not installed")


@REAL
def test_the_self_test_finds_that_cpus_get_no_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    """As shipped, vLLM's code for CPUs fills a copy; what an environment asks of engines is not asked of the gate."""
    monkeypatch.setenv(SAMPLING_GUARD, SPLIT_TOP_P)
    report = examine("selftest")
    greedy, *sampled = report.groups
    assert (greedy.temperature, greedy.forced_right, greedy.ordinary_same) == (0, 2, greedy.ordinary_rows)
    assert all(group.ordinary_same < group.ordinary_rows for group in sampled)
    assert (report.verdict, report.receipt.ok, report.receipt.guard) == ("fail", False, None)
    assert report.receipt.reason is not None
    assert report.receipt.reason.endswith("of drafted rows unwritten; run with --guard")


@REAL
@pytest.mark.deep
def test_the_self_test_passes_with_the_guard() -> None:
    """`test_markers_vllm` has the same receipt in its archive, and is not deep."""
    receipt = run_gate("selftest", SPLIT_TOP_P)
    assert (receipt.ok, receipt.reason, receipt.guard) == (True, None, SPLIT_TOP_P)
    assert (receipt.forced_rows, receipt.forced_right, receipt.ordinary_same) == (6, 6, receipt.ordinary_rows)
    assert receipt.ordinary_rows > 100
    assert {"RejectionSampler.forward", "ThinkingBudgetStateHolder.apply_to_logits"} <= {
        function.qualname for function in receipt.functions
    }


@REAL
def test_an_unknown_guard_is_refused() -> None:
    with pytest.raises(EngineError, match="guard 'other': unknown; use split-top-p"):
        run_gate("selftest", "other")


def test_without_vllm_there_is_no_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "engine_release", lambda: None)
    with pytest.raises(EngineError, match="gate sampling: vLLM is not installed"):
        run_gate("sampling")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("print('last words'); raise SystemExit(3)", r"gate selftest: its process died \(exit code 3\)"),
        ("pass", r"gate selftest: its process died \(exit code 0\)"),
        ("import time; time.sleep(60)", "gate selftest: no answer in 1 s"),
    ],
)
def test_a_child_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, message: str
) -> None:
    (tmp_path / "silent_gate.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gates, "_MODULE", "silent_gate")
    monkeypatch.setattr(gates, "GATE_SECONDS", 1.0 if "sleep" in program else 30.0)
    monkeypatch.setattr(gates, "engine_release", lambda: ("vllm", "0.33.0"))
    with pytest.raises(EngineError, match=message) as caught:
        run_gate("selftest")
    assert ("last words" in caught.value.log_tail) is ("print" in program)


def test_progress_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = "import sys, time; open(sys.argv[4], 'w').write('3/16'); time.sleep(1)"
    (tmp_path / "telling_gate.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gates, "_MODULE", "telling_gate")
    monkeypatch.setattr(gates, "engine_release", lambda: ("vllm", "0.33.0"))
    told: list[tuple[int, int]] = []
    with pytest.raises(EngineError, match="died"):
        examine("sampling", None, lambda now, of: told.append((now, of)))
    assert told == [(3, 16)]
