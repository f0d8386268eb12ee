"""Gates of a marker plan: what must have passed on the sampling code before a probe is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from samestate.engines.base import EngineError
from samestate.evidence.probe_records import GateReceipt
from samestate.plans.model import Gate

RunGate = Callable[[Gate, str | None], GateReceipt]
"""A gate's name and the guard in force to its receipt. Raises `EngineError` where it cannot run."""


def no_gates(gate: Gate, guard: str | None) -> GateReceipt:
    """For engines without sampling code of vLLM's."""
    raise EngineError(f"gate {gate}: this engine runs none of vLLM's sampling code; use --engine vllm")


def receipts(gates: Sequence[Gate], guard: str | None, run: RunGate) -> Iterator[GateReceipt]:
    """One receipt a gate, in order, the last of them the first that did not pass."""
    for gate in gates:
        receipt = run(gate, guard)
        yield receipt
        if not receipt.ok:
            return
