"""The self-test: two steps of one request with a budget, through vLLM's own rejection sampler, before any weights.

The request is inside reasoning with two tokens left; the model, whose logits are made up, would reason on. Step 1: the
first two of three drafts hold, the budget falls on the third row, which must give the end id, and nothing comes after
it. Step 2: reasoning is closed, all drafts hold and nothing is forced. Run greedily and sampled, alone and as the
second of two requests, the first of which must not notice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler, expand_batch_to_tokens
from vllm.v1.sample.sampler import Sampler
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from samestate.evidence.gate_report import GateGroup
from samestate.evidence.record_base import PatchedFunction
from samestate.instruments.gate_sources import sources

K = 3
BUDGET = 4
START, END, WORD, OTHER_WORD = 1, 2, 5, 6
PROMPT = [WORD, START, WORD]
COMMITTED = [WORD]
"""With the prompt's one token two of the budget are used."""
STEPS = [[WORD, WORD, END], [WORD, WORD, WORD, WORD]]
"""What the request must commit in each step."""
BESIDE = [OTHER_WORD] * (K + 1)
"""What the other request, without a budget, commits in each."""
SETTINGS = [(0.0, 1.0), (0.6, 0.95), (1.0, 0.5)]
"""Temperature and top-p; 0: greedy."""
PEAK = 40.0
"""The logit of the token that the model would sample; of all others 0."""
VOCABULARY = 64


class Taken(NamedTuple):
    """What a step committed of each request, and the logits it was given, afterwards."""

    tokens: list[list[int]]
    logits: torch.Tensor


class Ids:
    """vLLM's ReasoningConfig, as far as it is read."""

    reasoning_start_token_ids: list[int] = [START]  # noqa: RUF012
    reasoning_end_token_ids: list[int] = [END]  # noqa: RUF012


class Fixture:
    """A batch in vLLM's sampling code: the request with the budget is the last of `size`."""

    def __init__(self, device: str, temperature: float, top_p: float, size: int, budget: int | None = BUDGET) -> None:
        self._device = torch.device(device)
        self._sampler = RejectionSampler(Sampler(), device=self._device)
        self._temperature, self._top_p, self._size = temperature, top_p, size
        self._holder = ThinkingBudgetStateHolder(Ids(), size, K, self._device, False)
        self._outputs = [[OTHER_WORD], list(COMMITTED)][-size:]
        params = SamplingParams(thinking_token_budget=budget)
        added = [(size - 1, params, list(PROMPT), self._outputs[-1])]
        self._holder.sync_batch(BatchUpdate(batch_size=size, removed=[], added=added, moved=[]))

    def step(self) -> Taken:
        """Draft what the model would sample, and verify it."""
        words = [OTHER_WORD, WORD][-self._size :]
        drafts = [[word] * K for word in words]
        logits = torch.zeros(self._size * (K + 1), VOCABULARY, device=self._device)
        for request, word in enumerate(words):
            logits[request * (K + 1) : (request + 1) * (K + 1), word] = PEAK
        output = self._sampler(self._layout(drafts), None, logits, self._metadata(drafts))
        tokens, _ = RejectionSampler.parse_output(output.sampled_token_ids, VOCABULARY)
        for kept, new in zip(self._outputs, tokens, strict=True):
            kept.extend(new)
        return Taken(tokens, logits.cpu())

    def _layout(self, drafts: list[list[int]]) -> SpecDecodeMetadata:
        layout = SpecDecodeMetadata.make_dummy(drafts, self._device)
        rows = torch.arange(self._size * (K + 1), dtype=torch.int32, device=self._device).view(self._size, K + 1)
        layout.target_logits_indices = rows[:, :K].flatten()
        layout.bonus_logits_indices = rows[:, K].contiguous()
        layout.logits_indices = rows.flatten()
        return layout

    def _metadata(self, drafts: list[list[int]]) -> SamplingMetadata:
        size, device = self._size, self._device
        greedy = self._temperature == 0
        none = torch.zeros(size, device=device)
        return SamplingMetadata(
            temperature=None if greedy else torch.full((size,), self._temperature, device=device),
            all_greedy=greedy,
            all_random=not greedy,
            top_p=None if greedy else torch.full((size,), self._top_p, device=device),
            top_k=None,
            generators={} if greedy else {place: torch.Generator(device).manual_seed(place) for place in range(size)},
            max_num_logprobs=None,
            no_penalties=True,
            prompt_token_ids=None,
            frequency_penalties=none,
            presence_penalties=none,
            repetition_penalties=none,
            output_token_ids=self._outputs,
            allowed_token_ids_mask=None,
            bad_words_token_ids={},
            logitsprocs=LogitsProcessors(),
            spec_token_ids=drafts,
            thinking_budget_state_holder=self._holder,
        )


def functions() -> list[PatchedFunction]:
    """vLLM's code that the self-test runs, as it is now."""
    return sources(
        [
            (RejectionSampler, "forward"),
            (Sampler, "apply_logits_processors"),
            (ThinkingBudgetStateHolder, "apply_to_logits"),
            (ThinkingBudgetStateHolder, "update_state"),
        ]
    )


def examine(device: str) -> list[GateGroup]:
    """The two steps at every setting, with and without company.

    Forced rows: those on which the budget falls; right where the request commits up to it what it must. Ordinary rows:
    all rows of the given logits, which sampling must leave alone, the tokens of what is not forced, and the temperature
    that every drafted row gets.
    """
    # As vLLM's workers do at their start: on a CPU other code stands for the kernels.
    current_platform.register_triton_kernel_overrides()
    return [_group(device, temperature, top_p) for temperature, top_p in SETTINGS]


def _expanded(device: str, temperature: float) -> list[float]:
    """The temperature of a request, as vLLM repeats it for each of its drafts."""
    one = torch.tensor([temperature], device=device)
    # Memory that comes again must not hold the right value by accident.
    junk = [torch.full((K,), 7.0, device=device) for _ in range(16)]
    del junk
    drafts = torch.tensor([K], dtype=torch.int32, device=device)
    return expand_batch_to_tokens(one, drafts, K, replace_from=-1, replace_to=-1).double().round(decimals=6).tolist()


def _group(device: str, temperature: float, top_p: float) -> GateGroup:
    expanded = _expanded(device, temperature) if temperature else []
    right, ordinary, same = 0, len(expanded), sum(one == temperature for one in expanded)
    for size in (1, 2):
        budgeted, free = (Fixture(device, temperature, top_p, size, budget) for budget in (BUDGET, None))
        for expected in STEPS:
            taken, untouched = budgeted.step(), free.step()
            forced = END in expected
            right += forced and taken.tokens[-1] == expected
            ordinary += len(taken.logits)
            if torch.equal(taken.logits.view(torch.int32), untouched.logits.view(torch.int32)):
                same += len(taken.logits)
            beside = [(taken.tokens[:-1], [BESIDE] * (size - 1)), (untouched.tokens[-1], [WORD] * (K + 1))]
            beside += [] if forced else [(taken.tokens[-1], expected)]
            ordinary += len(beside)
            same += sum(found == wanted for found, wanted in beside)
    return GateGroup(
        temperature=temperature,
        top_p=top_p,
        forced_rows=2,
        forced_right=right,
        forced_empty=0,
        ordinary_rows=ordinary,
        ordinary_same=same,
    )
