"""The end of a trace where an engine ends: first thing in ``EngineCore.shutdown`` (``v1/engine/core.py``).

vLLM then waits for its workers, and kills a core that takes too long over it; the account is written by that time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm.v1.engine.core import EngineCore

from samestate.evidence.record_base import PatchedFunction
from samestate.instruments import budget_recorder
from samestate.instruments.budget_sources import BOTH, Sources, require, wrap

WRAPPED: Sources = {
    (EngineCore, "shutdown"): {"cc934aca9b62e40a5afb36083a5d9565c5967bf88ce9ab9d2d1d077fa61c65ef": BOTH},
}


def install() -> list[PatchedFunction]:
    """Wrap the function. Raises `BudgetRecorderError`."""
    functions = require(WRAPPED)
    wrap(EngineCore, "shutdown", _shut_down)
    return functions


def _shut_down(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def shutdown(core: Any) -> Any:
        budget_recorder.stop()  # and a worker's trace where it shares this process
        return original(core)

    return shutdown
