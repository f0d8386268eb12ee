"""The repair ``stable-topk``: GLM-5-Next's sparse indexer hands its pools to attention in one order; opt-in, own code.

The indexer's top-k (vLLM 0.33.0 on CUDA) returns the same set of pools in an order that changes from run to run, and
sparse attention sums in that order: two cold runs of one prompt differ. ``expand_pools_and_append_tail``, through
which prefill and decode alike turn pools into tokens, is given the pools in falling order here; the unused places (-1)
then stand last, and which pools were selected does not change.

The function's source is pinned by hash. Unknown source, another model, a second application, and a module that holds
the function under a name of its own (the repair would not reach it) are refused. Nothing on disk is touched.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

from samestate.evidence.canonical import sha256_hex
from samestate.evidence.controls import STABLE_TOPK
from samestate.evidence.record_base import PatchedFunction
from samestate.evidence.records import InterventionApplied
from samestate.instruments.budget_plugin import POOLS_MODULE

if TYPE_CHECKING:
    import torch

FUNCTION = "expand_pools_and_append_tail"
INDEXER = "SparseAttnIndexerKpool"
"""Class of the layers that call the function (``vllm/models/glm5next/nvidia/sparse_indexer.py``)."""
KNOWN = {"7fbc5a33d2f868982bf6168f869a710cdeab1040d5f13077056c93abfcdfbede": "0.33.0"}
"""Sources of the function, by SHA-256, that the repair was written for; 0.32.0 has the same one."""

Expand = Callable[..., Any]

_done: PatchedFunction | None = None
"""What was replaced in this process; a forked one begins with it, as with the patch itself."""


class TopkRepairError(ValueError):
    """The repair does not fit; one line."""


def repair() -> PatchedFunction:
    """Put the repair in the function's place, in this process. Raises `TopkRepairError`."""
    global _done  # noqa: PLW0603 (one process, one patch)
    try:
        module = import_module(POOLS_MODULE)
    except ImportError:
        raise _refusal(f"this vLLM has no {POOLS_MODULE}; leave it out") from None
    function = getattr(module, FUNCTION, None)
    if not inspect.isfunction(function):
        raise _refusal(f"{POOLS_MODULE} has no function {FUNCTION}; leave it out")
    if hasattr(function, "__wrapped__"):
        raise _refusal(f"{FUNCTION} was replaced already")
    try:
        digest = sha256_hex(inspect.getsource(function).encode())
    except OSError:
        raise _refusal(f"{FUNCTION} has no source that can be read; leave it out") from None
    if digest not in KNOWN:
        raise _refusal(
            f"{POOLS_MODULE}.{FUNCTION} has unknown source (sha256 {digest[:12]}…); it was written for vLLM "
            f"{', '.join(sorted(KNOWN.values()))}: use it, or leave the repair out"
        )
    setattr(module, FUNCTION, in_falling_order(function))
    _done = PatchedFunction(module=POOLS_MODULE, qualname=FUNCTION, source_sha256=digest)
    return _done


def in_falling_order(expand: Expand) -> Expand:
    """`expand`, given its pool ids ([rows, pools], integers, -1: unused) in falling order, row by row."""

    @wraps(expand)
    def expanded(pool_ids: torch.Tensor, *args: Any, **options: Any) -> Any:
        return expand(pool_ids.sort(dim=-1, descending=True).values, *args, **options)

    return expanded


def in_force(model: Any, rank: int) -> InterventionApplied:
    """The repair as it is in force in this process, for `model`. Raises `TopkRepairError` where it is not."""
    kinds = {type(module).__name__ for module in model.modules()}
    if INDEXER not in kinds:
        raise _refusal(
            f"rank {rank}: {type(model).__name__} has no {INDEXER}, so nothing is to be put in order; leave it out"
        )
    function = getattr(sys.modules.get(POOLS_MODULE), FUNCTION, None)
    original = getattr(function, "__wrapped__", None)
    if _done is None or original is None:
        raise _refusal(f"rank {rank}: was not put on (VLLM_PLUGINS, if set, must name samestate_budget)")
    holders = sorted(name for name, module in list(sys.modules.items()) if _holds(module, original))
    if holders:
        raise _refusal(f"rank {rank}: {holders[0]} holds {FUNCTION} by a name of its own, which it does not reach")
    return InterventionApplied(name=STABLE_TOPK, functions=[_done], rank=rank)


def in_force_in_worker(worker: Any) -> bytes:
    """For vLLM's ``collective_rpc``: `in_force` on this rank, as JSON. Raises `TopkRepairError`."""
    from samestate.instruments.tuners import own_rank

    return msgspec.json.encode(in_force(worker.model_runner.get_model(), own_rank()))


def _holds(module: Any, function: Any) -> bool:
    try:
        return any(value is function for value in list(vars(module).values()))
    except TypeError:  # something else than a module stands there
        return False


def _refusal(why: str) -> TopkRepairError:
    return TopkRepairError(f"repair {STABLE_TOPK!r}: {why}")
