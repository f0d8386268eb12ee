"""Child of test_budget_oracle: vLLM's two budget implementations, a step at a time; JSON lines in and out.

``start``: a request with its markers, budget, K and prompt. ``step``: its drafts; answers which rows held a store, and
of which id. ``commit``: the tokens that were taken. A batch of requests that do not matter stands around it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from samestate.instruments.interpreted import interpret

interpret()

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder
from vllm.v1.worker.gpu.sample.thinking_budget import apply_thinking_budget

VOCABULARY = 16
STORE = 1e9
LONGEST = 128


class Ids:
    """vLLM's ReasoningConfig, as far as it is read."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.reasoning_start_token_ids = asked["start"]
        self.reasoning_end_token_ids = asked["end"]
        self.natural_reasoning_end_token_ids = asked["natural_end"] or asked["end"]


def stores(logits: torch.Tensor) -> dict[int, int]:
    """Row -> id; a row holds one store at most."""
    found = (logits == STORE).nonzero().tolist()
    assert len(found) == len({row for row, _ in found})
    return dict(found)


class HostCode:
    """Runner v1: the holder, called as the sampler and the rejection sampler do, in slot `slot` of `slots`."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.slot, self.slots, self.k = asked["slot"], asked["slots"], asked["k"]
        self.holder = ThinkingBudgetStateHolder(Ids(asked), 4, self.k, torch.device("cpu"), False)
        self.output: list[int] = []
        params = SamplingParams(thinking_token_budget=asked["budget"])
        added = [(self.slot, params, asked["prompt"], self.output)]
        self.holder.sync_batch(BatchUpdate(batch_size=self.slots, removed=[], added=added, moved=[]))

    def step(self, drafts: list[int], drafted_beside: int) -> dict[int, int]:
        beside = [0] * drafted_beside
        spec = [drafts if slot == self.slot else beside for slot in range(self.slots)]
        self.holder.update_state([self.output if slot == self.slot else [] for slot in range(self.slots)], spec)
        if not any(spec):  # the plain sampler
            found = stores(self.holder.apply_to_logits(torch.zeros(self.slots, VOCABULARY), False, spec))
            return {row - self.slot: token for row, token in found.items()}
        bonus = stores(self.holder.apply_to_logits(torch.zeros(self.slots, VOCABULARY), True, spec))
        targets = torch.zeros(sum(map(len, spec)), VOCABULARY)
        target = stores(self.holder.apply_to_logits(targets, False, spec))
        first = sum(map(len, spec[: self.slot]))
        found = {row - first: token for row, token in target.items()}
        return found | {len(drafts) + row - self.slot: token for row, token in bonus.items()}

    def commit(self, tokens: list[int]) -> None:
        self.output += tokens


class Kernel:
    """The newer runner: its kernels, interpreted; the caches stay from step to step."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.slot, self.slots = asked["slot"], asked["slots"]
        self.ids = [torch.tensor(asked[name], dtype=torch.int32) for name in ("start", "natural_end", "end")]
        if not asked["natural_end"]:
            self.ids[1] = self.ids[2]
        self.budget = torch.full((self.slots,), -1, dtype=torch.int32)
        self.budget[self.slot] = asked["budget"]
        self.tokens = torch.zeros(self.slots, LONGEST, dtype=torch.int32)
        self.length = torch.ones(self.slots, dtype=torch.int32)
        self.length[self.slot] = 0
        self.caches = [torch.full((self.slots,), value, dtype=torch.int32) for value in (-1, -1, 0)]
        self.commit(asked["prompt"])

    def step(self, drafts: list[int], drafted_beside: int) -> dict[int, int]:
        beside = [0] * drafted_beside
        rows = [[self._last(slot), *(drafts if slot == self.slot else beside)] for slot in range(self.slots)]
        flat = [token for row in rows for token in row]
        mapping = [slot for slot, row in enumerate(rows) for _ in row]
        local = [place for row in rows for place in range(len(row))]
        logits = torch.zeros(len(flat), VOCABULARY)
        apply_thinking_budget(
            logits,
            torch.arange(self.slots, dtype=torch.int32),
            torch.tensor(mapping, dtype=torch.int32),
            self.budget,
            self.tokens,
            self.length,
            torch.tensor(flat, dtype=torch.int32),
            torch.tensor(local, dtype=torch.int32),
            *self.caches,
            *self.ids,
        )
        first = mapping.index(self.slot)
        return {row - first: token for row, token in stores(logits).items()}

    def commit(self, tokens: list[int]) -> None:
        end = int(self.length[self.slot])
        self.tokens[self.slot, end : end + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.length[self.slot] = end + len(tokens)

    def _last(self, slot: int) -> int:
        return int(self.tokens[slot, int(self.length[slot]) - 1])


def serve() -> None:
    request: HostCode | Kernel | None = None
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "start":
            request = HostCode(asked) if asked["runner"] == "v1" else Kernel(asked)
            continue
        assert request is not None
        if asked["do"] == "commit":
            request.commit(asked["tokens"])
        else:
            print(json.dumps(request.step(asked["drafts"], asked["beside"])), flush=True)


if __name__ == "__main__":
    serve()
