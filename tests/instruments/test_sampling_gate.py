"""The sampling gate fires on vLLM's fault and on a guard that changes an ordinary row, and is silent else."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from samestate.instruments import interpreted
from samestate.instruments.interpreted import NoTriton, interpret

FEWER = """
from samestate.instruments.interpreted import interpret
interpret()
from samestate.instruments import sampling_gate as gate, top_p_guard
from samestate.instruments.top_p_guard import Guarded

gate.BATCHES, gate.ORDINARY_ROWS = 1, 12

def counts(guard):
    told = []
    found = gate.examine("cpu", guard, lambda done, of: told.append((done, of)))
    assert told == [(1, 2), (2, 2)] and found.split_calls == 2, (told, found.split_calls)
    def total(name):
        return sum(getattr(group, name) for group in found.groups)
    names = ("forced_rows", "forced_right", "forced_empty", "ordinary_rows", "ordinary_same")
    return tuple(map(total, names)), found.first_other

def careless():
    source = top_p_guard.kernel_source(gate.kernels)
    other = source.replace(top_p_guard.ANCHOR, "        keep = x > pivot_logit + 0.5\\n")
    assert other != source
    top_p_guard.replace_kernel(gate.kernels, other)

assert counts(None) == ((1, 0, 1, 12, 12), None), "vLLM's own fault"
bare = gate.kernels._topp_sb_mask_kernel
found, first = counts(careless)
assert found[:4] == (1, 0, 1, 12) and found[4] < 12 and first is not None, (found, first)
gate.kernels._topp_sb_mask_kernel = gate.kernels._topp_split_mask.kernel = bare
assert counts(top_p_guard.guard) == ((1, 1, 0, 12, 12), None), "with the guard"
assert gate.missing() == []
del gate.kernels._topp_sb_stats_kernel
assert gate.missing() == ["_topp_sb_stats_kernel"]
from pathlib import Path
from samestate.engines.children.gate_child import run
from samestate.engines.gates import GateQuestion
report = run(GateQuestion("sampling", None), Path("/dev/null"))
assert (report.verdict, report.receipt.ok, report.receipt.forced_rows) == ("unknown", False, 0), report
assert report.receipt.reason.endswith("it has no _topp_sb_stats_kernel"), report.receipt.reason
"""


@pytest.mark.deep
@pytest.mark.slow
def test_the_gate_fires_and_is_silent() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", FEWER],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "PYTHONPATH": str(Path(interpreted.__file__).parents[2]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_without_triton_nothing_is_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NoTriton, match="triton: not installed; pip install triton"):
        interpret()


def test_a_process_that_would_compile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(NoTriton, match="TRITON_INTERPRET: not 1 in this process"):
        interpret()


def test_the_self_tests_expectation_is_the_policy() -> None:
    """Its steps are written down by hand; the oracle says the same."""
    from samestate.checks.budget_oracle import Markers, decide_rows, stored_rows
    from samestate.instruments import sampling_selftest as selftest

    markers = Markers((selftest.START,), (selftest.END,))
    tokens = [*selftest.PROMPT, *selftest.COMMITTED]
    for expected in selftest.STEPS:
        drafts = [selftest.WORD] * selftest.K
        stores = stored_rows(decide_rows(tokens, drafts, markers, selftest.BUDGET, "v1"))
        taken = [stores.get(row, selftest.WORD) for row in range(selftest.K + 1)]
        assert taken[: min(stores, default=selftest.K) + 1] == expected
        tokens += expected
