"""Records of reasoning budgets: which rows were forced, which tokens were committed, which were delivered.

One stream per process that samples (``budget-<rank>``) and one for the scheduler (``budget-scheduler``). Workers see
logits rows and commit tokens; the scheduler trims what it delivers. Output positions are zero-based and count the
tokens of a request after its prompt; a step is one call of the sampler on a rank, numbered from 0 by that process.

A row is *stored* when the budget code wrote into it; the token of that row is *committed* only if the sampler took it.
A store is not a forced token (requirements 142, 143).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import msgspec

from samestate.evidence.record_base import NonNegative, PatchedFunction, Positive, Record

TRACE_FOLDER = "SAMESTATE_BUDGET_TRACE"
"""Environment variable of an engine's processes: folder of the recorder's streams. Unset or empty: no recorder."""
TRACE_ARM = "SAMESTATE_BUDGET_ARM"
"""Environment variable: the arm's name in the streams; required with `TRACE_FOLDER`."""
TRACE_CAPACITY = "SAMESTATE_BUDGET_CAPACITY"
"""Environment variable: records that the ring of each process holds; optional."""
SAMPLING_GUARD = "SAMESTATE_SAMPLING_GUARD"
"""Environment variable of an engine's processes: the guard to put onto sampling code. Unset or empty: none."""
SPLIT_TOP_P = "split-top-p"
"""The one guard there is: the split-row top-p kernel keeps the maximum of a row that it would mask whole."""
BUDGET_FAULT = "SAMESTATE_BUDGET_FAULT"
"""Environment variable of an engine's processes: the fault to inject into budget code or recorder, by name."""
REPAIRS = "SAMESTATE_VLLM_REPAIRS"
"""Environment variable of an engine's processes: repairs of vLLM to put on, by name, separated by commas."""
CPU_DRAFT_ROWS = "cpu-draft-rows"
"""The one repair of sampling: drafts on a CPU are sampled with their request's temperature, top-k and top-p."""

REPLACES: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        SPLIT_TOP_P: frozenset(
            {
                "vllm.v1.sample.ops.topk_topp_triton._topp_sb_mask_kernel",
                "vllm.utils.cpu_triton_utils._expand_kernel_impl",
            }
        ),
        CPU_DRAFT_ROWS: frozenset({"vllm.utils.cpu_triton_utils._expand_kernel_impl"}),
    }
)
"""All that a guard or a repair may replace, by its name, as ``module.function``: what a plan declares by naming it."""
WRAPS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "v1": frozenset(
            {
                "vllm.v1.worker.gpu_model_runner.GPUModelRunner._sample",
                "vllm.v1.sample.thinking_budget_state.ThinkingBudgetStateHolder.apply_to_logits",
            }
        ),
        "v2": frozenset(
            {
                "vllm.v1.worker.gpu.model_runner.GPUModelRunner.sample",
                "vllm.v1.worker.gpu.sample.thinking_budget.ThinkingBudgetState.apply",
            }
        ),
        "scheduler": frozenset(
            {
                "vllm.v1.core.sched.scheduler.Scheduler.add_request",
                "vllm.v1.core.sched.scheduler.Scheduler.update_from_output",
                "vllm.v1.core.sched.scheduler.Scheduler._update_request_with_output",
                "vllm.v1.engine.core.EngineCore.shutdown",
            }
        ),
    }
)
"""All that the recorder may wrap, by runner where it watches a rank, else by role."""


class RecorderStarted(Record, frozen=True, kw_only=True, tag="recorder_started"):
    """The budget recorder watches this process."""

    role: Literal["rank", "scheduler"]
    rank: NonNegative | None
    """None: the scheduler's."""
    ranks: Positive
    """Ranks of the engine: as many streams must be there."""
    runner: Literal["v1", "v2"]
    """vLLM's model runner: ``v1/worker/gpu_model_runner.py`` or ``v1/worker/gpu/model_runner.py``."""
    capacity: Positive
    """Records that the ring holds."""
    speculative_tokens: NonNegative
    """K, drafts per step at most."""
    asynchronous: bool
    """Asynchronous scheduling: a step may run ahead of a stop."""
    start_ids: list[NonNegative]
    """Of the reasoning start marker; may be several tokens."""
    end_ids: list[NonNegative]
    functions: list[PatchedFunction]
    """That the recorder wraps, with the hash of their sources."""


class ReasoningRequest(Record, frozen=True, kw_only=True, tag="reasoning_request"):
    """A request with a reasoning budget got a slot on this rank."""

    rank: NonNegative
    request: str
    slot: NonNegative
    budget: NonNegative
    prompt_tokens: Positive
    resident: NonNegative | None
    """Prompt tokens after the prompt's last start marker; None: the prompt ends outside reasoning."""


class LogitsRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True):
    """One logits row of a request: ``[local, drafted, store, stored, argmax, logprob]``."""

    local: NonNegative
    """0 for the row after the last committed token, k for the one after draft k."""
    drafted: NonNegative | None
    """The draft token that this row verifies; None: the bonus row, or no speculation."""
    store: bool
    """The budget code wrote into this row."""
    stored: NonNegative | None
    """The token id that it forced."""
    argmax: NonNegative
    """Before forcing."""
    logprob: float
    """Of `argmax`, before forcing, natural logarithm."""


class LogitsRows(Record, frozen=True, kw_only=True, tag="logits_rows"):
    """The rows of one request in one step."""

    rank: NonNegative
    step: NonNegative
    request: str
    slot: NonNegative
    position: NonNegative
    """Output position that row 0 decides."""
    rows: list[LogitsRow]


class TokensCommitted(Record, frozen=True, kw_only=True, tag="tokens_committed"):
    """A rank took these tokens: token i at output position ``position + i``, from local row ``rows[i]``."""

    rank: NonNegative
    step: NonNegative
    request: str
    position: NonNegative
    tokens: list[NonNegative]
    rows: list[NonNegative]


class TokensDelivered(Record, frozen=True, kw_only=True, tag="tokens_delivered"):
    """The scheduler took a step's tokens for a request, before and after its stop check: the witness of a trim."""

    request: str
    position: NonNegative
    before: list[NonNegative]
    after: NonNegative
    """How many of `before` were kept, from the first on."""
    finish_reason: str | None
    """Set by the step that ended the request."""
    stop_reason: int | str | None
    """The declared stop that ended it; None where it was EOS or no stop."""


class RunAheadDropped(Record, frozen=True, kw_only=True, tag="run_ahead_dropped"):
    """A step's tokens arrived for a request that was over: all were dropped (asynchronous scheduling)."""

    request: str
    tokens: list[NonNegative]


class RecorderStopped(Record, frozen=True, kw_only=True, tag="recorder_stopped"):
    """The ring's account. Without it, or with anything dropped, the trace is not whole."""

    rank: NonNegative | None
    """None: the scheduler's."""
    written: NonNegative
    dropped: NonNegative
