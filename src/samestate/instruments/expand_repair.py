"""The guard's second place: vLLM's CPU code gives every drafted row its request's temperature, top-p and top-k.

``expand_batch_to_tokens`` (``v1/sample/rejection_sampler.py``) repeats a value of each request for each of its drafts.
The code that stands for its kernel on a CPU (``utils/cpu_triton_utils.py``) converts the output to int64, fills the
copy and drops it: what comes back is memory that nobody wrote. With a temperature above 0 drafts are then verified
under any temperature and any top-p, and a forced row may be lost. The repair, own code, writes the output itself. Its
source is pinned by hash.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import torch

from samestate.evidence.canonical import sha256_hex
from samestate.evidence.marker_records import SPLIT_TOP_P
from samestate.evidence.record_base import PatchedFunction
from samestate.instruments.top_p_guard import Guarded, GuardError

MODULE = "vllm.utils.cpu_triton_utils"
FUNCTION = "_expand_kernel_impl"
FAULTY = {"b0d7df291932f1c3d0818bcba211d3c9b2a701de070dc888ff659948763e9559": "0.32.0 and 0.33.0"}
"""Sources of the function, by SHA-256, that the repair was written for."""

_done: Guarded | None = None
"""What was done in this process; a forked one begins with it, as with the patch itself."""


def repair() -> Guarded:
    """Put the repair in the function's place, in this process. Raises `GuardError`: unknown source."""
    global _done  # noqa: PLW0603 (one process, one patch)
    module = import_module(MODULE)
    function = getattr(module, FUNCTION, None)
    if function is expand:
        raise GuardError(f"guard {SPLIT_TOP_P}: {FUNCTION} was replaced already")
    try:
        digest = sha256_hex(inspect.getsource(function).encode()) if inspect.isfunction(function) else "none"
    except OSError:
        digest = "none"
    if digest not in FAULTY:
        raise GuardError(
            f"guard {SPLIT_TOP_P}: {MODULE}.{FUNCTION} has unknown source (sha256 {digest[:12]}…); it was "
            f"written for vLLM {', '.join(sorted(FAULTY.values()))}: leave the guard out"
        )
    setattr(module, FUNCTION, expand)
    own = sha256_hex(inspect.getsource(expand).encode())
    _done = Guarded(PatchedFunction(module=MODULE, qualname=FUNCTION, source_sha256=digest), own)
    return _done


def ensure() -> Guarded:
    """`repair`, or what it did already: the guard and the repair ``cpu-draft-rows`` may both be asked for."""
    if _done is not None and getattr(import_module(MODULE), FUNCTION, None) is expand:
        return _done
    return repair()


def expand(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: Any = None,
) -> None:
    """Request r's value, once for each of its tokens: ``output[cu[r - 1]:cu[r]]``.

    A value of `replace_from` becomes `replace_to`. `output` has as many entries as there are drafts in all.
    """
    counts = torch.diff(cu_num_tokens.to(torch.int64), prepend=torch.zeros(1, dtype=torch.int64))
    values = input_val.masked_fill(input_val == replace_from, replace_to)
    output[: int(cu_num_tokens[-1])] = values.repeat_interleave(counts)
