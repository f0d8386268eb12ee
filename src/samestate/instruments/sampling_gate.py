"""The sampling gate: forced rows choose the end id, and ordinary rows do not notice.

280 rows in batches of 35, one of them forced, as small as the split-row top-p path takes. vLLM's own budget kernel
makes the store, its own mask kernels filter, its own sampler draws with a generator per row. On a GPU they are the
real kernels; elsewhere the same code in Triton's interpreter (`samestate.instruments.interpreted`).

Every row runs twice: with the guard and without it, or, without a guard, with the store in its batch and without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from vllm.v1.sample.ops import topk_topp_triton as kernels
from vllm.v1.sample.ops.topk_topp_sampler import random_sample
from vllm.v1.worker.gpu.sample import thinking_budget

from samestate.evidence.gate_report import GateGroup
from samestate.evidence.record_base import PatchedFunction
from samestate.instruments.gate_sources import sources
from samestate.instruments.gate_verdicts import BATCHES, ORDINARY_ROWS
from samestate.instruments.top_p_guard import Guarded

SETTINGS = [(temperature, top_p) for temperature in (0.6, 1.0) for top_p in (0.5, 0.95, 0.999)]
"""Row n of a kind takes entry n, and so on in turn."""
VOCABULARY = {"cuda": 154_880, "cpu": 1_024}
START, WORD = 1, 5
SPLIT = "_apply_topp_split"
_USED = [
    (kernels, SPLIT),
    (kernels, "apply_top_k_top_p_triton"),
    (kernels, "_topp_sb_stats_kernel"),
    (kernels, "_topp_sb_step_kernel"),
    (kernels, "_topp_sb_mask_kernel"),
    (thinking_budget, "_thinking_budget_kernel"),
]
"""What a vLLM must have to be examined."""


class Row(NamedTuple):
    """A row of logits before its store, and how it is sampled."""

    number: int
    forced: bool
    temperature: float
    top_p: float


class Result(NamedTuple):
    """What sampling made of a row."""

    masked: torch.Tensor
    """Its logits after top-p, on the CPU."""
    token: int


class Gate(NamedTuple):
    """What was seen of all rows."""

    groups: list[GateGroup]
    first_other: int | None
    """Number of the first ordinary row that differs."""
    split_calls: int
    guarded: Guarded | None


def missing() -> list[str]:
    """Names that this vLLM has not."""
    return [name for owner, name in _USED if not hasattr(owner, name)]


def functions() -> list[PatchedFunction]:
    """vLLM's code that the gate runs, as it is now."""
    return sources(_USED)


def examine(device: str, guard: Callable[[], Guarded] | None, advance: Callable[[int, int], None]) -> Gate:
    """Run every row twice on `device` ("cuda" or "cpu", interpreted); `advance` is told batches done and in all.

    The guard, if any, is put on between the two runs and stays on.
    """
    batches = _batches()
    before, calls = _run(batches, device, guard is not None, lambda done: advance(done, 2 * BATCHES))
    guarded = guard() if guard is not None else None
    after, more = _run(batches, device, True, lambda done: advance(BATCHES + done, 2 * BATCHES))
    rows = [row for batch in batches for row in batch]
    return _compare(rows, before, after, calls + more, guarded, device)


def _run(
    batches: list[list[Row]], device: str, store: bool, advance: Callable[[int], None]
) -> tuple[dict[int, Result], int]:
    """Every row's result, by its number, and how often the split-row path was taken."""
    found: dict[int, Result] = {}
    calls = 0
    for place, rows in enumerate(batches):
        results, launched = _sampled(rows, device, store=store, halves=place == 0)
        found |= results
        calls += launched
        advance(place + 1)
    return found, calls


def _compare(
    rows: list[Row],
    before: dict[int, Result],
    after: dict[int, Result],
    calls: int,
    guarded: Guarded | None,
    device: str,
) -> Gate:
    groups, other = [], []
    for temperature, top_p in SETTINGS:
        own = [row for row in rows if (row.temperature, row.top_p) == (temperature, top_p)]
        forced = [after[row.number] for row in own if row.forced]
        ordinary = [row.number for row in own if not row.forced]
        same = [number for number in ordinary if _same(before[number], after[number])]
        other += sorted(set(ordinary) - set(same))
        groups.append(
            GateGroup(
                temperature=temperature,
                top_p=top_p,
                forced_rows=len(forced),
                forced_right=sum(result.token == _end(device) for result in forced),
                forced_empty=sum(not bool(result.masked.isfinite().any()) for result in forced),
                ordinary_rows=len(ordinary),
                ordinary_same=len(same),
            )
        )
    return Gate(groups, min(other, default=None), calls, guarded)


def _same(one: Result, other: Result) -> bool:
    bits = [result.masked.view(torch.int32) for result in (one, other)]
    return one.token == other.token and torch.equal(*bits)


def _end(device: str) -> int:
    return VOCABULARY[device] - 2


def _batches() -> list[list[Row]]:
    """Batch b has forced row b at place b, and 34 ordinary rows."""
    each = ORDINARY_ROWS // BATCHES
    batches = []
    for batch in range(BATCHES):
        ordinary = [_row(batch * each + place, forced=False) for place in range(each)]
        ordinary.insert(batch, _row(batch, forced=True))
        batches.append(ordinary)
    return batches


def _row(of_kind: int, *, forced: bool) -> Row:
    number = ORDINARY_ROWS + of_kind if forced else of_kind
    return Row(number, forced, *SETTINGS[of_kind % len(SETTINGS)])


def logits_of(number: int, size: int) -> torch.Tensor:
    """Row `number`'s logits, float32: even, flat, peaked, with ties, half of it masked before, and all but uniform."""
    generator = torch.Generator().manual_seed(number)
    logits = torch.randn(size, generator=generator)
    match number // len(SETTINGS) % 6:
        case 0:
            return logits * 3
        case 1:
            return logits * 0.5
        case 2:
            return logits * 8
        case 3:
            return (logits * 3).bfloat16().float()
        case 4:
            return (logits * 3).masked_fill(torch.arange(size) % 2 == 0, float("-inf"))
        case _:
            return torch.zeros(size).index_fill(0, torch.tensor([number % size]), 1.0)


def _sampled(rows: list[Row], device: str, *, store: bool, halves: bool) -> tuple[dict[int, Result], int]:
    """The rows, sampled in one batch, and how often the split-row path was taken."""
    size = VOCABULARY[device]
    logits = torch.stack([logits_of(row.number, size) for row in rows]).to(device)
    if store:
        _store(logits, [row.forced for row in rows], _end(device))
    logits.div_(torch.tensor([row.temperature for row in rows], device=device).unsqueeze(1))
    top_p = torch.tensor([row.top_p for row in rows], device=device)
    masked, calls = _filtered(logits, top_p, halves)
    generators = {place: torch.Generator(device).manual_seed(row.number) for place, row in enumerate(rows)}
    tokens = random_sample(masked.softmax(dim=-1, dtype=torch.float32), generators).tolist()
    on_host = masked.cpu()
    return {row.number: Result(on_host[place], tokens[place]) for place, row in enumerate(rows)}, calls


def _filtered(logits: torch.Tensor, top_p: torch.Tensor, halves: bool) -> tuple[torch.Tensor, int]:
    """vLLM's top-p over small batches. The interpreter has no GPU whose size would say how rows are split."""
    if logits.device.type == "cpu":
        kernels._apply_topp_split(logits, None, top_p, float("-inf"), len(logits) * (2 if halves else 1))
        return logits, 1
    with _counted() as calls:
        return kernels.apply_top_k_top_p_triton(logits, None, top_p), calls()


class _counted:
    """Counts calls of the split-row path."""

    def __enter__(self) -> Callable[[], int]:
        self._original, self._calls = getattr(kernels, SPLIT), 0

        def counted(*args: Any, **options: Any) -> None:
            self._calls += 1
            self._original(*args, **options)

        setattr(kernels, SPLIT, counted)
        return lambda: self._calls

    def __exit__(self, *error: object) -> None:
        setattr(kernels, SPLIT, self._original)


def _store(logits: torch.Tensor, forced: list[bool], end: int) -> None:
    """vLLM's own store: every row is a request that just entered reasoning; the forced ones have budget 0."""
    device, count = logits.device, len(forced)

    def numbers(values: Iterator[int] | range | list[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    requests = numbers(range(count))
    thinking_budget.apply_thinking_budget(
        logits,
        requests,
        requests,
        numbers([0 if one else 1 for one in forced]),
        torch.full((count, 2), START, dtype=torch.int32, device=device),
        numbers([1] * count),
        numbers([START] * count),
        numbers([0] * count),
        numbers([-1] * count),
        numbers([-1] * count),
        numbers([0] * count),
        numbers([START]),
        numbers([end]),
        numbers([end]),
    )
