"""The matched schedule: prefill steps end where states do, with and without a connector, loaded or computed.

vLLM ends steps where state can be cached, so arms mostly match by configuration alone. They do not where a kernel
keeps a state from within a step (`MambaSpec.num_prefill_checkpoint_blocks`) or where one step spans several blocks: a
cold prompt is then one step and a reload only its tail, of other shapes and other bits; and a state in bf16 is rounded
where a step ends, so that only a cold run split at B rounds as a reload does. This switch clips vLLM's own answer, at
every multiple of C or, as `COLD_SPLIT`, at B alone; it never lengthens a step. It knows the function that it wraps by
hash and refuses any other.
"""

from __future__ import annotations

import inspect
import sys
from functools import wraps
from typing import Any

from samestate.evidence.canonical import sha256_hex
from samestate.evidence.controls import COLD_SPLIT, EVERY_MULTIPLE, SCHEDULE_VARIABLE, sources_sha256

WRAPPED = "_mamba_block_aligned_split"
"""Of vLLM's scheduler (vllm/v1/core/sched/scheduler.py): how many tokens of a prefill one step takes."""
KNOWN = {
    "b2a08c774ae495bfdd509380e8d14ccdd0bd2c5b70219720a926059a0d8eb9b0": "0.32.0",
    "9af6739dbbdf081fb40351995325825352f9a96f86df21cdcc88cd357c120244": "0.33.0",
}
"""SHA-256 of its source -> releases of vLLM that have it."""


class ScheduleError(ValueError):
    """The schedule cannot be matched here; one line."""


def match_schedule(scheduler: Any, mode: str = EVERY_MULTIPLE) -> str:
    """Put the switch onto a scheduler, and return the hash of what it is made of. Raises `ScheduleError`."""
    if mode not in (EVERY_MULTIPLE, COLD_SPLIT):
        raise ScheduleError(f"{SCHEDULE_VARIABLE}: must be {EVERY_MULTIPLE}, {COLD_SPLIT} or 0, not {mode!r}")
    if not getattr(scheduler, "need_mamba_block_aligned_split", False):
        raise ScheduleError("matched schedule: this model keeps no recurrent state by block: it needs no such switch")
    original = getattr(scheduler, WRAPPED)
    source = inspect.getsource(original)
    if sha256_hex(source.encode()) not in KNOWN:
        raise ScheduleError(
            f"matched schedule: {WRAPPED} has unknown source (sha256 {sha256_hex(source.encode())[:12]}…); "
            f"it was written for vLLM {', '.join(sorted(set(KNOWN.values())))}"
        )

    @wraps(original)
    def clipped(
        request: Any, num_new_tokens: int, num_new_local_computed_tokens: int = 0, num_external_computed_tokens: int = 0
    ) -> int:
        tokens: int = original(request, num_new_tokens, num_new_local_computed_tokens, num_external_computed_tokens)
        start = request.num_computed_tokens + num_new_local_computed_tokens + num_external_computed_tokens
        if start >= max(request.num_prompt_tokens, request.num_tokens - 1):
            return tokens
        interval = scheduler.cache_config.block_size
        if mode == COLD_SPLIT:
            return to_strict_prefix(start, tokens, request.num_prompt_tokens, interval)
        return min(tokens, to_boundary(start, interval))

    setattr(scheduler, WRAPPED, clipped)
    return sources_sha256({__name__: inspect.getsource(sys.modules[__name__]), WRAPPED: source, "mode": mode})


def to_boundary(start: int, interval: int) -> int:
    """Tokens from `start` to the next multiple of the interval."""
    return interval - start % interval


def to_strict_prefix(start: int, tokens: int, prompt: int, interval: int) -> int:
    """A step's tokens, cut at B = C·⌊(N−1)/C⌋ of the prompt where the step would go across it."""
    end = interval * ((prompt - 1) // interval)
    return end - start if start < end < start + tokens else tokens
