"""Faults of reasoning budgets by name: armed from an engine's start, or while it runs.

The plugin arms the one that ``SAMESTATE_BUDGET_FAULT`` names, beside ``SAMESTATE_BUDGET_TRACE``, in every process of
the engine; it acts in those that have its side.
"""

from __future__ import annotations

from typing import Any, Literal

from samestate.instruments.budget_faults import (
    BudgetFault,
    BudgetIgnored,
    DoubleForce,
    ForcedRowMasked,
    OffByDrafts,
    RankDisagreement,
    Side,
    StoreOnWrongRow,
)
from samestate.instruments.faults import FaultError, Undo
from samestate.instruments.recorder_faults import LostStep, RingOverflow, TrimNotRecorded

BUDGET_FAULTS: dict[str, type[BudgetFault]] = {
    "budget-ignored": BudgetIgnored,
    "budget-off-by-drafts": OffByDrafts,
    "double-force": DoubleForce,
    "forced-row-masked": ForcedRowMasked,
    "store-on-wrong-row": StoreOnWrongRow,
    "rank-disagreement": RankDisagreement,
    "ring-overflow": RingOverflow,
    "lost-step": LostStep,
    "trim-not-recorded": TrimNotRecorded,
}
_armed = Undo()
_at_start: dict[str, BudgetFault] = {}
"""The fault of this process, which several modules of vLLM may let act."""


def arm(name: str | None) -> None:
    """Arm fault `name`, and only it, in this process; None disarms all. The recorder must be on.

    Raises:
        FaultError: an unknown name, or a source that the fault was not written against.

    """
    _armed.close()
    if name is not None:
        _fault(name).act(_armed)


def arm_at_start(name: str, side: Side, runner: Literal["v1", "v2"]) -> None:
    """Arm fault `name` if it acts on this side, beside what is armed. `runner`: whose module was imported.

    Raises:
        FaultError: see `arm`; and, once a newer runner is made, where the fault acts in V1's.

    """
    fault = _at_start.setdefault(name, _fault(name))
    if fault.side != side:
        return
    if runner == "v2" and fault.sources:
        _refuse_newer_runner(name)
    else:
        fault.act(_armed)


def _refuse_newer_runner(name: str) -> None:
    """An engine may import it and run V1 all the same."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    def refuse(runner: GPUModelRunner, *args: Any, **options: Any) -> None:
        raise FaultError(f"fault {name!r}: acts in vLLM's V1 model runner; set VLLM_USE_V2_MODEL_RUNNER=0")

    _armed.patch(GPUModelRunner, "__init__", refuse)


def _fault(name: str) -> BudgetFault:
    if name not in BUDGET_FAULTS:
        raise FaultError(f"fault {name!r}: no fault of reasoning budgets; use one of {', '.join(BUDGET_FAULTS)}")
    return BUDGET_FAULTS[name]()
