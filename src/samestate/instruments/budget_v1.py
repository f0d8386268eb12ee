"""The budget recorder in vLLM's V1 model runner (``v1/worker/gpu_model_runner.py``, ``v1/worker/cpu_model_runner.py``).

The runner's ``_sample`` is one step. Within it the budget's ``apply_to_logits`` is called for the only rows
of a step without drafts, or for the bonus rows and then for the target rows (``v1/sample/rejection_sampler.py``).
The rows are laid out from the drafts of the step, not from what the budget code takes the layout to be.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from samestate.evidence.marker_records import LogitsRows, ReasoningRequest, TokensCommitted
from samestate.evidence.record_base import PatchedFunction
from samestate.instruments.budget_recorder import Remembered, open_ring, unseen
from samestate.instruments.budget_ring import BudgetRing
from samestate.instruments.budget_rows import Row, compare, resident, take, to_host
from samestate.instruments.budget_sources import BOTH, Sources, require, wrap

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

WRAPPED: Sources = {
    (GPUModelRunner, "_sample"): {"5cb5c1da02cfdc689acb7bab51ca7eb56e2ef3b19bea4b92fc6ca4370be2cf5a": BOTH},
    (ThinkingBudgetStateHolder, "apply_to_logits"): {
        "755deae051df42ed2528239e445e1d57733a072b28c85e8ff5f87ec203f71dd9": BOTH
    },
}
RELIED_ON: Sources = {
    (Sampler, "apply_logits_processors"): {"4b31813d0881e38aa1e2730e931bd4b19ee87593dec2b6c6636bc31850f8ab29": BOTH},
    (RejectionSampler, "apply_logits_processors"): {
        "1dd9c879c443dd4b067ee3b66c1440b9d7bbf123d06544b953399e1145516236": BOTH
    },
    (RejectionSampler, "forward"): {
        "c82e51bdd5a8dc3ce974766f6ce920280c348f94e3e58de45b2fce5cb32d92d7": "0.32.0",
        "5f03339ca632e5180f0b8eb958dac0291e4fc74c0d040e9f661146faba75efe3": "0.33.0",
    },
    (RejectionSampler, "parse_output"): {"6090d9b983277064f4a03971da5d9311747506b482e6357787f28fbe9c2cb81c": BOTH},
}
"""Row layout and order of calls are read from these; which tokens of the sampler's output count, from the last."""


class Watched(NamedTuple):
    """A request with a budget in one step."""

    place: int
    """In the runner's batch."""
    request: str
    first: int
    """Its first row among the target rows of the step."""
    drafts: int


class Copied(NamedTuple):
    """Rows of a call of the budget code, as they were before it."""

    keys: list[tuple[int, int]]
    """(place in the batch, local row) of each."""
    places: Tensor
    """In the call's logits."""
    rows: Tensor


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

    def begin(self, metadata: SpecDecodeMetadata | None) -> Step | None:
        """A step starts; None where no request of it has a budget."""
        self._step += 1
        batch = self._runner.input_batch
        counts = metadata.num_draft_tokens if metadata is not None else [0] * batch.num_reqs
        watched, first = [], 0
        for place, (request, drafts) in enumerate(zip(batch.req_ids, counts, strict=True)):
            params = self._runner.requests[request].sampling_params
            # The sample of a prompt's unfinished chunk is no output: vLLM discards it.
            discarded = self._runner.discard_request_mask.np[place]
            if params is not None and params.thinking_token_budget is not None and not discarded:
                watched.append(Watched(place, request, first, drafts))
            first += drafts
        return Step(watched, metadata) if watched else None

    def end(self, step: Step, output: SamplerOutput) -> None:
        """A step was sampled: bring what was seen to the host in one copy, and record it."""
        self._announce(step)
        sampled = output.sampled_token_ids
        lengths = self._runner.seq_lens[: sampled.shape[0]]
        drafted = step.metadata.draft_token_ids if step.metadata is not None else lengths[:0]
        seen = [values for _, values in step.seen]
        ids, lengths_now, drafts, *rows = to_host([sampled, lengths, drafted, *seen])
        found = step.rows(rows)
        width = sampled.shape[1]
        for request in step.watched:
            prompt = self._runner.requests[request.request].num_prompt_tokens
            position = int(lengths_now[request.place]) - request.drafts - prompt
            tokens = [int(token) for token in ids[request.place * width : (request.place + 1) * width]]
            self._put_rows(request, position, found, [int(token) for token in drafts])
            self._put_committed(request, position, tokens)

    def _put_rows(self, request: Watched, position: int, found: dict[tuple[int, int], Row], drafts: list[int]) -> None:
        own = drafts[request.first : request.first + request.drafts]
        rows = [
            found[request.place, local].beside(local, own[local] if local < request.drafts else None)
            for local in range(request.drafts + 1)
            if (request.place, local) in found
        ]
        self._ring.put(
            LogitsRows(
                rank=self._rank,
                step=self._step,
                request=request.request,
                slot=request.place,
                position=position,
                rows=rows,
            )
        )

    def _put_committed(self, request: Watched, position: int, tokens: list[int]) -> None:
        if len(tokens) > 1:  # as RejectionSampler.parse_output
            size = self._runner.input_batch.vocab_size
            tokens = [token for token in tokens if token != PLACEHOLDER_TOKEN_ID and token < size]
        if tokens:
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
        """Requests that are seen for the first time."""
        reasoning = self._runner.vllm_config.reasoning_config
        for request in step.watched:
            if not self._announced.add(request.request):
                continue
            state = self._runner.requests[request.request]
            self._ring.put(
                ReasoningRequest(
                    rank=self._rank,
                    request=request.request,
                    slot=request.place,
                    budget=state.sampling_params.thinking_token_budget,
                    prompt_tokens=state.num_prompt_tokens,
                    resident=resident(
                        state.prompt_token_ids or [],
                        reasoning.reasoning_start_token_ids or [],
                        reasoning.reasoning_end_token_ids or [],
                    ),
                )
            )


class Step:
    """One call of ``_sample``: which rows are watched, and what the budget code did to them."""

    def __init__(self, watched: list[Watched], metadata: SpecDecodeMetadata | None) -> None:
        self.watched = watched
        self.metadata = metadata
        self.seen: list[tuple[list[tuple[int, int]], Tensor]] = []
        """(place in the batch, local row) of each row, and `compare` of them."""

    def copied(self, logits: Tensor, bonus: bool) -> Copied | None:
        """The watched rows of a call, before it acts: bonus rows, target rows, or all in a step without drafts."""
        if bonus or self.metadata is None:
            keys = [(request.place, request.drafts) for request in self.watched]
            places = [request.place for request in self.watched]
        else:
            spans = [(request, local) for request in self.watched for local in range(request.drafts)]
            keys = [(request.place, local) for request, local in spans]
            places = [request.first + local for request, local in spans]
        if not keys:
            return None
        chosen = torch.tensor(places, device=logits.device)
        return Copied(keys, chosen, logits[chosen])

    def rows(self, values: list[list[float]]) -> dict[tuple[int, int], Row]:
        """By (place in the batch, local row), from the values of `seen` on the host."""
        found: dict[tuple[int, int], Row] = {}
        for (keys, _), flat in zip(self.seen, values, strict=True):
            take(found, keys, flat)
        return found


_observers: WeakKeyDictionary[Any, Observer | None] = WeakKeyDictionary()
_current: tuple[Step, BudgetRing] | None = None
"""The step that is being sampled in this process."""


def install() -> list[PatchedFunction]:
    """Wrap the runner's and the budget's functions. Raises `BudgetRecorderError`."""
    require(RELIED_ON)
    functions = require(WRAPPED)
    wrap(GPUModelRunner, "_sample", lambda original: _sampled(original, functions))
    wrap(ThinkingBudgetStateHolder, "apply_to_logits", _applied)
    return functions


def _observer(runner: Any, functions: list[PatchedFunction]) -> Observer | None:
    if runner not in _observers:
        ring = open_ring(runner.vllm_config, functions, get_tensor_model_parallel_rank())
        _observers[runner] = Observer(runner, ring) if ring is not None else None
    return _observers[runner]


def _sampled(original: Callable[..., Any], functions: list[PatchedFunction]) -> Callable[..., Any]:
    @wraps(original)
    def sample(runner: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        global _current  # noqa: PLW0603 (one step at a time)
        observer = _observer(runner, functions)
        if observer is None:
            return original(runner, logits, spec_decode_metadata)
        step = None
        with unseen(observer.ring):
            step = observer.begin(spec_decode_metadata)
        if step is None:
            return original(runner, logits, spec_decode_metadata)
        _current = step, observer.ring
        try:
            output = original(runner, logits, spec_decode_metadata)
        finally:
            _current = None
        with unseen(observer.ring):
            observer.end(step, output)
        observer.ring.drain()
        return output

    return sample


def _applied(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def apply_to_logits(holder: Any, logits: Tensor, predict_bonus_token: bool, spec_token_ids: Any) -> Any:
        if _current is None:
            return original(holder, logits, predict_bonus_token, spec_token_ids)
        step, ring = _current
        copied: Copied | None = None
        with unseen(ring), gpu_sync_allowed():
            copied = step.copied(logits, predict_bonus_token)
        result = original(holder, logits, predict_bonus_token, spec_token_ids)
        with unseen(ring):
            if copied is not None:
                step.seen.append((copied.keys, compare(copied.rows, result[copied.places])))
        return result

    return apply_to_logits
