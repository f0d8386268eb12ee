"""Logits rows as a budget leaves them, read off the tensors: arg-max before, and what was stored.

Everything here reads. Rows are copied before the budget code runs and compared, bit for bit, after it:
a store is what changed, whatever the code that made it says of itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from samestate.evidence.marker_records import LogitsRow

if TYPE_CHECKING:
    from torch import Tensor

COLUMNS = 4
"""Of `compare`."""


class Row(NamedTuple):
    """One row of `compare`, on the host."""

    argmax: int
    logprob: float
    store: bool
    stored: int

    def beside(self, local: int, drafted: int | None) -> LogitsRow:
        """The record of it. vLLM marks a draft that is to be rejected by a negative id: no token."""
        return LogitsRow(
            local=local,
            drafted=None if drafted is None or drafted < 0 else drafted,
            store=self.store,
            stored=self.stored if self.store else None,
            argmax=self.argmax,
            logprob=self.logprob,
        )

    def after(self, first: Row) -> Row:
        """Two calls of the budget code on one row, `first` before this one: one row, stored where either stored."""
        stored = self if self.store else first
        return first._replace(store=stored.store, stored=stored.stored)


def compare(before: Tensor, after: Tensor) -> Tensor:
    """What the budget code did to some rows, each ``(n, vocabulary)`` float32, as ``(n, 4)`` float64.

    Columns: arg-max of `before` and its log-probability, 1 where any bit of the row changed else 0, arg-max of `after`.
    """
    best = before.argmax(dim=-1, keepdim=True)
    logprob = before.gather(-1, best) - before.logsumexp(dim=-1, keepdim=True)
    changed = (before.view(torch.int32) != after.view(torch.int32)).any(dim=-1, keepdim=True)
    stored = after.argmax(dim=-1, keepdim=True)
    return torch.cat([column.to(torch.float64) for column in (best, logprob, changed, stored)], dim=1)


def row(values: Sequence[float]) -> Row:
    """A row of `compare` after its way to the host."""
    argmax, logprob, changed, stored = values
    return Row(int(argmax), logprob, bool(changed), int(stored))


def take(found: dict[tuple[int, int], Row], keys: Iterable[tuple[int, int]], flat: Sequence[float]) -> None:
    """Add the rows of `flat`, one to a key; a row that was seen before goes on from what it was."""
    for at, key in enumerate(keys):
        new = row(flat[at * COLUMNS : (at + 1) * COLUMNS])
        found[key] = new.after(found[key]) if key in found else new


def to_host(tensors: Sequence[Tensor]) -> list[list[float]]:
    """The values of each tensor, flat, in one copy from the device: float64 holds token ids and float32 exactly."""
    with gpu_sync_allowed():
        flat = torch.cat([tensor.reshape(-1).to(torch.float64) for tensor in tensors]).tolist()
    values, start = [], 0
    for tensor in tensors:
        values.append(flat[start : start + tensor.numel()])
        start += tensor.numel()
    return values


def resident(prompt: Sequence[int], start_ids: Sequence[int], end_ids: Sequence[int]) -> int | None:
    """Prompt tokens after the last start marker; None where an end marker begins after it, or there is no start."""
    start, end = _last(prompt, start_ids), _last(prompt, end_ids)
    return len(prompt) - start - len(start_ids) if start > end else None


def _last(tokens: Sequence[int], marker: Sequence[int]) -> int:
    marker = list(marker)
    if not marker:
        return -1
    places = range(len(tokens) - len(marker), -1, -1)
    return next((place for place in places if list(tokens[place : place + len(marker)]) == marker), -1)
