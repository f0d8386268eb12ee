"""Which pages LMCache's server reads for a store and writes for a retrieve.

Read in ``lmcache_driven_transfer.py``, ``object_group_transfer.py`` and ``kv_layer_groups.py`` of 0.5.5 and 0.5.6:

- A chunk is stored as one object per *object group*. By default there is one object group, of all layers. With
  ``--separate-object-groups`` layers that need the same stretch of the past share one: recurrent layers have their own.
- A chunk is left out of a store when all its blocks in the object group are the null block. In the one group of the
  default attention's blocks are real, so the recurrent layers' null block is read and stored as if it were a state.
- Of layers that need only a window of the past (recurrent: one block) each chunk moves its last blocks.
- With separate groups a retrieve writes only the chunks in the window; by default all of them, also into the null block
  where the request's table has one. That is no page of the load, it is a guarded one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from samestate.instruments.page_audit import Run
from samestate.instruments.pages import NULL_BLOCK

WHOLE_PAST = -1


class Operation(Protocol):
    """LMCache's ``LoadStoreOp``."""

    start: int
    end: int
    block_ids: list[list[int]]
    """Of [start, end), per engine group."""
    skip_first_n_tokens: int


class Group(NamedTuple):
    """One transfer group: the layers of an engine group."""

    engine_group: int
    tokens_per_block: int
    window: int
    """Tokens of the past that its layers need, or `WHOLE_PAST`."""
    recurrent: bool


class Slot(NamedTuple):
    """One block of an operation."""

    chunk: int
    from_end: int
    """Blocks after it in its chunk."""
    place: int
    """In the request's block table."""
    block: int


class PagePlan(NamedTuple):
    """The pages of an operation, given what was registered.

    Runs name blocks of a transfer group that lie side by side in the request's table.
    """

    groups: list[Group]
    chunk_tokens: int
    separate: bool | None
    """Separate object groups; None: unknown, only what moves in either mode is named."""

    @classmethod
    def of(cls, worker: Any, separate: bool | None) -> PagePlan:
        """For LMCache's worker side, once it has registered."""
        by_engine_group = {info.engine_group_id: info for info in worker.engine_group_infos}
        groups = [
            Group(
                engine_group,
                info.tokens_per_block,
                info.sw_size_tokens,
                bool(getattr(info, "recurrent_state", False)),
            )
            for engine_group, info in sorted(by_engine_group.items())
        ]
        return cls(groups, worker.lmcache_tokens_per_chunk, separate)

    def saved(self, op: Operation) -> list[Run]:
        """Blocks that a store reads, as far as it stores what it reads; the null block where it is stored."""
        kept: dict[object, set[int]] = defaultdict(set)
        tables = [self._slots(group, op) for group in self.groups]
        for group, slots in zip(self.groups, tables, strict=True):
            kept[self._object_group(group)] |= {slot.chunk for slot in slots if slot.block != NULL_BLOCK}
        found = []
        for number, (group, slots) in enumerate(zip(self.groups, tables, strict=True)):
            stored = kept[self._object_group(group)]
            moved = [
                slot
                for slot in self._in_window(group, slots)
                if slot.chunk in stored and (slot.block != NULL_BLOCK or self.separate is not None)
            ]
            found += _runs(number, moved)
        return found

    def loaded(self, op: Operation) -> list[Run]:
        """Blocks that a retrieve fills; never the null block, which holds nothing of a request."""
        chunks = (op.end - op.start) // self.chunk_tokens
        found = []
        for number, group in enumerate(self.groups):
            first = 0
            if self.separate is not False and group.window != WHOLE_PAST:
                first = max(0, chunks - -(-group.window // self.chunk_tokens))
            moved = [
                slot
                for slot in self._in_window(group, self._slots(group, op))
                if slot.chunk >= first
                and slot.block != NULL_BLOCK
                and slot.place >= (op.start + op.skip_first_n_tokens) // group.tokens_per_block
            ]
            found += _runs(number, moved)
        return found

    def _object_group(self, group: Group) -> object:
        if self.separate is False:
            return None
        chunks = WHOLE_PAST if group.window == WHOLE_PAST else -(-group.window // self.chunk_tokens)
        return group.recurrent, chunks

    def _slots(self, group: Group, op: Operation) -> list[Slot]:
        per_chunk = self.chunk_tokens // group.tokens_per_block
        first = op.start // group.tokens_per_block
        return [
            Slot(n // per_chunk, per_chunk - 1 - n % per_chunk, first + n, block)
            for n, block in enumerate(_tables(op.block_ids)[group.engine_group])
        ]

    def _in_window(self, group: Group, slots: Iterable[Slot]) -> list[Slot]:
        """The last blocks of each chunk, as many as the window has."""
        if group.window == WHOLE_PAST:
            return list(slots)
        return [slot for slot in slots if slot.from_end < group.window // group.tokens_per_block]


def _tables(block_ids: Sequence[Any]) -> Sequence[Sequence[int]]:
    """Per engine group; a single group may come flat."""
    return [block_ids] if block_ids and isinstance(block_ids[0], int) else block_ids


def _runs(group: int, slots: Iterable[Slot]) -> list[Run]:
    runs: list[Run] = []
    for slot in slots:
        if runs and slot.place == runs[-1].first + len(runs[-1].blocks):
            runs[-1].blocks.append(slot.block)
        else:
            runs.append(Run(group, slot.place, [slot.block]))
    return runs
