"""The budget recorder in vLLM's newer model runner (``v1/worker/gpu/model_runner.py``).

The runner's ``sample`` is one step. Within it ``ThinkingBudgetState.apply`` is called once, or once for each
chunk of requests that verification takes at a time. It gets all logits rows of the step or chunk with
the slot and the local position of each, so rows are known by these, whatever order they come in.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.thinking_budget import ThinkingBudgetState
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from samestate.evidence.marker_records import LogitsRow, LogitsRows, ReasoningRequest, TokensCommitted
from samestate.evidence.record_base import PatchedFunction
from samestate.instruments.budget_recorder import Remembered, open_ring, unseen
from samestate.instruments.budget_ring import BudgetRing
from samestate.instruments.budget_rows import Row, compare, resident, take, to_host
from samestate.instruments.budget_sources import BOTH, Sources, require, wrap

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

WRAPPED: Sources = {
    (GPUModelRunner, "sample"): {"78982d0f9f603fccb2deeb49466213c5c045fa30c72db0582ec528a023ba2db0": BOTH},
    (ThinkingBudgetState, "apply"): {"1afa098b35c370dd99a35a35e6f0d3c11c179606dd71db691fb61bc1282d1479": BOTH},
}
RELIED_ON: Sources = {
    (Sampler, "__call__"): {"8b2c419eca0ec79cbfd937b3de0c2c66a24cae99743d016a60980036322bd9b1": BOTH},
    (Sampler, "apply_sampling_params"): {"59d1e0620023a6912c8d3a6d83bcf49cc90b858fab083cdbc6c4234470a1e112": BOTH},
    (RejectionSampler, "__call__"): {"e0a7285807218ef3d039ae57266615e01c257829cebf76073739a7fbc6aba475": BOTH},
    (RejectionSampler, "_verify_in_chunks"): {"52ea56902342bab900831a5186fce32c024c951f57170c2d013d30f0181b4f9a": BOTH},
    (RejectionSampler, "_verify"): {
        "94c9ec2b06f73ad5e7e1da2bf369c6a6d4a3993d8e56814d7db1671c1cde49d8": "0.32.0",
        "10bb2c9b9812d2a3912b1f91ded5c67a19668df43f783505544e6a721dde7111": "0.33.0",
    },
}
"""From these is read that ``apply`` comes last before temperature, and which row a token comes from."""


class Watched(NamedTuple):
    """A request with a budget in one step."""

    place: int
    """In the step's batch."""
    request: str
    slot: int
    """In the runner's tables, for as long as the request lives."""


class Step:
    """One call of ``sample``: which requests are watched, and what the budget code did to their rows."""

    def __init__(self, watched: list[Watched]) -> None:
        self.watched = watched
        self.seen: list[tuple[Tensor, Tensor]] = []
        """Of each call of the budget code: slot and local row of each watched row ``(n, 2)``, and `compare` of them."""


class Observer:
    """Watches one runner."""

    def __init__(self, runner: Any, ring: BudgetRing) -> None:
        self._runner = runner
        self._ring = ring
        self._rank = get_tensor_model_parallel_rank()
        self._step = -1
        self._announced = Remembered()

    @property
    def ring(self) -> BudgetRing:
        """Where its records go."""
        return self._ring

    def begin(self, batch: InputBatch) -> Step | None:
        """A step starts; None where no request of it has a budget."""
        self._step += 1
        budgets = self._runner.sampler.thinking_budget_state
        if not budgets.enabled:
            return None
        watched = [
            Watched(place, request, int(slot))
            for place, (request, slot) in enumerate(zip(batch.req_ids, batch.idx_mapping_np, strict=False))
            if budgets.use_thinking_budget[slot]
        ]
        return Step(watched) if watched else None

    def end(self, step: Step, batch: InputBatch, output: SamplerOutput) -> None:
        """A step was sampled: bring what was seen to the host in one copy, and record it."""
        self._announce(step)
        inputs = torch.stack(
            [batch.expanded_idx_mapping, batch.expanded_local_pos, batch.input_ids[batch.logits_indices]], dim=1
        )
        with gpu_sync_allowed():
            slots = torch.tensor([request.slot for request in step.watched], device=inputs.device)
        lengths = self._runner.req_states.total_len.gpu[slots]
        seen = [tensor for pair in step.seen for tensor in pair]
        ids, counts, lengths_now, layout, *rows = to_host(
            [output.sampled_token_ids, output.num_sampled, lengths, inputs, *seen]
        )
        input_ids = {(int(layout[at]), int(layout[at + 1])): int(layout[at + 2]) for at in range(0, len(layout), 3)}
        found = _found(rows)
        width = output.sampled_token_ids.shape[1]
        for request, length in zip(step.watched, lengths_now, strict=True):
            count = int(counts[request.place])
            if not count:  # a prompt's unfinished chunk: its sample is no output
                continue
            position = int(length) - int(self._runner.req_states.prompt_len.np[request.slot])
            start = request.place * width
            tokens = [int(token) for token in ids[start : start + count]]
            self._put(request, position, _rows(request.slot, found, input_ids), tokens)

    def _put(self, request: Watched, position: int, rows: list[LogitsRow], tokens: list[int]) -> None:
        self._ring.put(
            LogitsRows(
                rank=self._rank,
                step=self._step,
                request=request.request,
                slot=request.slot,
                position=position,
                rows=rows,
            )
        )
        self._ring.put(
            TokensCommitted(
                rank=self._rank,
                step=self._step,
                request=request.request,
                position=position,
                tokens=tokens,
                rows=list(range(len(tokens))),
            )
        )

    def _announce(self, step: Step) -> None:
        """Requests that are seen for the first time; one that was preempted and came back is not."""
        states, budgets = self._runner.req_states, self._runner.sampler.thinking_budget_state
        for request in step.watched:
            if not self._announced.add(request.request):
                continue
            length = int(states.prompt_len.np[request.slot])
            with gpu_sync_allowed():
                prompt = states.all_token_ids.gpu[request.slot, :length].tolist()
                start_ids = budgets.reasoning_start_token_ids.tolist()
                end_ids = budgets.natural_reasoning_end_token_ids.tolist()
            self._ring.put(
                ReasoningRequest(
                    rank=self._rank,
                    request=request.request,
                    slot=request.slot,
                    budget=int(budgets.thinking_token_budget.np[request.slot]),
                    prompt_tokens=length,
                    resident=resident(prompt, start_ids, end_ids),
                )
            )


def _found(values: list[list[float]]) -> dict[tuple[int, int], Row]:
    """By (slot, local row), from the values of `Step.seen` on the host."""
    found: dict[tuple[int, int], Row] = {}
    for keys, flat in zip(values[::2], values[1::2], strict=True):
        places = [int(value) for value in keys]
        take(found, zip(places[::2], places[1::2], strict=True), flat)
    return found


def _rows(slot: int, found: dict[tuple[int, int], Row], input_ids: dict[tuple[int, int], int]) -> list[LogitsRow]:
    """The rows of one request. The draft that a row verifies is the input token of the row after it."""
    own = sorted(key for key in found if key[0] == slot)
    return [found[key].beside(key[1], input_ids.get((slot, key[1] + 1))) for key in own]


_observers: WeakKeyDictionary[Any, Observer | None] = WeakKeyDictionary()
_current: tuple[Step, BudgetRing] | None = None
"""The step that is being sampled in this process."""


def install() -> list[PatchedFunction]:
    """Wrap the runner's and the budget's functions. Raises `BudgetRecorderError`."""
    require(RELIED_ON)
    functions = require(WRAPPED)
    wrap(GPUModelRunner, "sample", lambda original: _sampled(original, functions))
    wrap(ThinkingBudgetState, "apply", _applied)
    return functions


def _observer(runner: Any, functions: list[PatchedFunction]) -> Observer | None:
    if runner not in _observers:
        ring = open_ring(runner.vllm_config, functions, get_tensor_model_parallel_rank())
        _observers[runner] = Observer(runner, ring) if ring is not None else None
    return _observers[runner]


def _sampled(original: Callable[..., Any], functions: list[PatchedFunction]) -> Callable[..., Any]:
    @wraps(original)
    def sample(runner: Any, hidden_states: Any, input_batch: InputBatch, grammar_output: Any) -> Any:
        global _current  # noqa: PLW0603 (one step at a time)
        observer = _observer(runner, functions)
        if observer is None:
            return original(runner, hidden_states, input_batch, grammar_output)
        step = None
        with unseen(observer.ring):
            step = observer.begin(input_batch)
        if step is None:
            return original(runner, hidden_states, input_batch, grammar_output)
        _current = step, observer.ring
        try:
            outputs = original(runner, hidden_states, input_batch, grammar_output)
        finally:
            _current = None
        with unseen(observer.ring):
            observer.end(step, input_batch, outputs[0])
        observer.ring.drain()
        return outputs

    return sample


def _applied(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def apply(state: Any, logits: Tensor, ctx: LogitsContext) -> Any:
        if _current is None:
            return original(state, logits, ctx)
        step, ring = _current
        places = before = None
        with unseen(ring), gpu_sync_allowed():
            places = _watched_rows(step, ctx)
            before = logits[places]
        result = original(state, logits, ctx)
        if places is not None and before is not None:
            with unseen(ring):
                keys = torch.stack([ctx.expanded_idx_mapping[places], ctx.expanded_local_pos[places]], dim=1)
                step.seen.append((keys, compare(before, logits[places])))
        return result

    return apply


def _watched_rows(step: Step, ctx: LogitsContext) -> Tensor:
    """Indices of the rows that belong to watched requests; read off the device, since only it may know the layout."""
    slots = torch.tensor([request.slot for request in step.watched], device=ctx.expanded_idx_mapping.device)
    return torch.isin(ctx.expanded_idx_mapping, slots).nonzero(as_tuple=True)[0]
