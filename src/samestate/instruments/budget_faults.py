"""Faults of reasoning budgets in vLLM's own budget and sampling code.

They act in its V1 runner (``v1/sample/thinking_budget_state.py``, ``v1/sample/rejection_sampler.py``), within
what the recorder wraps, so that it sees what they do. Their sources are known by hash and any other is refused: a
faulty run is never one in which the fault silently did nothing. `budget_armoury` arms them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from typing_extensions import override
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

from samestate.instruments.faults import FaultError, Undo, source_sha256

if TYPE_CHECKING:
    from torch import Tensor

Side = Literal["sampling", "scheduler"]
"""The part of an engine, and of the recorder, in which a fault acts."""
FORCED = 1e8
"""A logit above it was stored by the budget code, which stores 1e9."""
Forcing = Callable[[Any, "Tensor", bool, list[list[int]]], "Tensor"]
"""``_apply_forcing_to_logits``: holder, logits, whether these are bonus rows, drafts by request."""


class BudgetFault(ABC):
    """A fault; one object for as long as it is armed."""

    side: ClassVar[Side] = "sampling"
    sources: ClassVar[Mapping[str, str]] = {}
    """Function of vLLM's V1 runner that it was written against -> SHA-256 of its source in 0.32.0; {}: none."""

    @abstractmethod
    def act(self, undo: Undo) -> None:
        """Act in this process until `undo`. Raises `FaultError` for unknown source."""


class _Forcing(BudgetFault):
    """Acts where V1 stores into logits."""

    sources: ClassVar[Mapping[str, str]] = {
        "_apply_forcing_to_logits": "245f433d5ad6ee6c8c1c37b3b0f8f858eacfb0e0d482037481d4a9f3e68dc423",
    }

    @override
    def act(self, undo: Undo) -> None:
        from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

        original: Forcing = _known(ThinkingBudgetStateHolder, "_apply_forcing_to_logits", self.sources)

        def forcing(holder: Any, logits: Tensor, bonus: bool, drafts: list[list[int]]) -> Tensor:
            return self.force(original, holder, logits, bonus, drafts)

        undo.patch(ThinkingBudgetStateHolder, "_apply_forcing_to_logits", forcing)

    @abstractmethod
    def force(self, original: Forcing, holder: Any, logits: Tensor, bonus: bool, drafts: list[list[int]]) -> Tensor:
        """What stands in the place of vLLM's own."""


class BudgetIgnored(_Forcing):
    """The budget holds without drafts and is not looked at with them."""

    @override
    def force(self, original: Forcing, holder: Any, logits: Tensor, bonus: bool, drafts: list[list[int]]) -> Tensor:
        return logits if holder.in_spec_mode else original(holder, logits, bonus, drafts)


class StoreOnWrongRow(_Forcing):
    """A store among draft rows lands on the row after its own, or before where its own is the request's last."""

    @override
    def force(self, original: Forcing, holder: Any, logits: Tensor, bonus: bool, drafts: list[list[int]]) -> Tensor:
        if bonus or not any(drafts):
            return original(holder, logits, bonus, drafts)
        before = logits.clone()
        logits = original(holder, logits, bonus, drafts)
        first = 0
        for own in drafts:
            rows = range(first, first + len(own))
            for row in [row for row in rows if _is_forced(logits[row])]:
                other = row + 1 if row + 1 in rows else row - 1
                if other in rows:
                    logits[other, logits[row].argmax()] = logits[row].max()
                    logits[row] = before[row]
                    break
            first += len(own)
        return logits


class DoubleForce(_Forcing):
    """The close is forced once more right after it was committed."""

    def __init__(self) -> None:
        self._done: list[Any] = []

    @override
    def force(self, original: Forcing, holder: Any, logits: Tensor, bonus: bool, drafts: list[list[int]]) -> Tensor:
        logits = original(holder, logits, bonus, drafts)
        end = holder.think_end_token_ids
        for index, state in holder._state.items():
            own = drafts[index] if index < len(drafts) else []
            # Of a step with drafts the first row is among the target rows.
            if bonus and own:
                continue
            just_closed = list(state["output_tok_ids"][-len(end) :]) == list(end)
            if just_closed and not any(state is done for done in self._done):
                logits[holder.cu_num_tokens[index], end[-1]] = 1e9
                self._done.append(state)
        return logits


class RankDisagreement(_Forcing):
    """Ranks but the first store where the first does not: the row's own token, so that serving goes on."""

    @override
    def act(self, undo: Undo) -> None:
        from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

        made = vars(ThinkingBudgetStateHolder)["__init__"]

        def make(holder: Any, *args: Any, **options: Any) -> None:
            if get_tensor_model_parallel_world_size() < 2:
                raise FaultError(
                    "fault 'rank-disagreement': one rank cannot; use --serve-args '--tensor-parallel-size 2'"
                )
            made(holder, *args, **options)

        undo.patch(ThinkingBudgetStateHolder, "__init__", make)
        super().act(undo)

    @override
    def force(self, original: Forcing, holder: Any, logits: Tensor, bonus: bool, drafts: list[list[int]]) -> Tensor:
        logits = original(holder, logits, bonus, drafts)
        if get_tensor_model_parallel_rank() > 0:
            for row in range(logits.shape[0]):
                if not _is_forced(logits[row]):
                    logits[row, logits[row].argmax()] = 1e9
        return logits


class OffByDrafts(BudgetFault):
    """The budget is met as many tokens late as a step has drafts."""

    sources: ClassVar[Mapping[str, str]] = {
        "_init_state_entry": "4ef86a11b49cdeff5867fc40c1d527508b23ea672b4d742f69cede0b8c263dca",
    }

    @override
    def act(self, undo: Undo) -> None:
        from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

        original = _known(ThinkingBudgetStateHolder, "_init_state_entry", self.sources)

        def begin(holder: Any, prompt_tok_ids: list[int] | None, thinking_token_budget: int) -> dict[str, Any]:
            state: dict[str, Any] = original(holder, prompt_tok_ids, thinking_token_budget + holder.num_spec_tokens)
            return state

        undo.patch(ThinkingBudgetStateHolder, "_init_state_entry", begin)


class ForcedRowMasked(BudgetFault):
    """Top-p and top-k leave a forced draft row without the token that was stored."""

    sources: ClassVar[Mapping[str, str]] = {
        "apply_sampling_constraints": "795f8ae5d3f2ab57d648b41b9e2f833ceaf62bfe6b8c5c439480020a7e818b3f",
    }

    @override
    def act(self, undo: Undo) -> None:
        from vllm.v1.sample import rejection_sampler

        original = _known(rejection_sampler, "apply_sampling_constraints", self.sources)

        def constrain(logits: Tensor, *args: Any, **options: Any) -> Tensor:
            forced: Tensor = original(logits, *args, **options)
            return forced.masked_fill(forced > FORCED, float("-inf"))

        undo.patch(rejection_sampler, "apply_sampling_constraints", constrain)


def _known(owner: object, name: str, sources: Mapping[str, str]) -> Callable[..., Any]:
    """The function as it is. Raises `FaultError` where its source is another one."""
    function: Callable[..., Any] = vars(owner)[name]
    if source_sha256(function) != sources[name]:
        raise FaultError(f"a fault of reasoning budgets: unknown source of {name}; it was written for vLLM 0.32.0")
    return function


def _is_forced(row: Tensor) -> bool:
    return bool(row.max() > FORCED)
