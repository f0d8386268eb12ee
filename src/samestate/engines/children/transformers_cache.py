"""The entries of a transformers cache object: found in the object itself, read as pages, and put back.

A page is the bytes of one entry in one block of C tokens. Entries of tokens (keys, values, indexer keys) have a page
a block, their rows [k*C, (k+1)*C). Entries of state (convolution, recurrence) have one page, the whole tensor as it is
after [0, B). transformers keeps the indexer's key of every token and pools them anew in each step; so where C is no
multiple of the pool, the last rows of a block are those of a pool that is unfinished at its end. They are an entry of
their own, the tail. Rows that a page has no use for are zero.

Cache classes that are not named here, and attributes that hold what nobody here knows, are refused: an entry that is
neither saved nor restored would be a wrong state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from transformers.cache_utils import Cache, DynamicIndexedLayer, DynamicLayer, LinearAttentionLayer

from samestate.evidence.records import EntryKind

_TOKENS: dict[type, dict[str, tuple[EntryKind, int]]] = {
    DynamicLayer: {"keys": (EntryKind.ATTENTION, 2), "values": (EntryKind.ATTENTION, 2)},
    DynamicIndexedLayer: {
        "keys": (EntryKind.ATTENTION, 2),
        "values": (EntryKind.ATTENTION, 2),
        "indexer_keys": (EntryKind.INDEXER, 1),
    },
    LinearAttentionLayer: {},
}
"""By class of a layer's cache: attributes with a row for every token, and which axis the tokens are on."""
_STATES: dict[type, dict[str, EntryKind]] = {
    DynamicLayer: {},
    DynamicIndexedLayer: {},
    LinearAttentionLayer: {"conv_states": EntryKind.CONV, "recurrent_states": EntryKind.RECURRENT},
}
"""Attributes with a tensor for every state of the layer."""
_PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))
"""What an attribute may hold beside entries: upstream's own update methods set it again."""
_GROUPS = (
    frozenset({EntryKind.ATTENTION}),
    frozenset({EntryKind.RECURRENT, EntryKind.CONV}),
    frozenset({EntryKind.INDEXER}),
    frozenset({EntryKind.TAIL}),
)
STATE = _GROUPS[1]
Page: TypeAlias = torch.Tensor
"""Bytes (uint8), one dimension, sharing memory with nothing."""
Pages: TypeAlias = Mapping[tuple[int, int], Page]
"""By entry and block."""


class UnknownEntry(ValueError):
    """The cache object holds something that is not known to be saved and restored rightly. One line."""


class Entry(NamedTuple):
    """One tensor of one layer."""

    number: int
    layer: int
    attribute: str
    state: int | None
    """Which of the layer's states; None for rows of tokens."""
    kind: EntryKind
    axis: int | None
    """Where the tokens are."""
    shape: tuple[int, ...]
    """Of a page, in elements; batch of one included."""
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def place(self) -> str:
        """The layer as a finding names it."""
        apart = self.kind in (EntryKind.INDEXER, EntryKind.TAIL)
        return f"layers.{self.layer}.{self.kind.value}" if apart else f"layers.{self.layer}"


class Layout:
    """The entries of a model's cache at interval C, and their pages."""

    def __init__(self, cache: Cache, interval: int, pool: int) -> None:
        """Read from a `cache` that has seen tokens; `pool`: of the indexer's keys, 1 without one.

        Raises `UnknownEntry`.
        """
        self.interval, self._pool = interval, pool
        self._classes = [type(layer).__name__ for layer in cache.layers]
        self._empty: dict[tuple[int, str], tuple[list[int], int, torch.dtype]] = {}
        _refuse_unknown("the cache", vars(cache), known={"layers", "layer_class_to_replicate"})
        self.entries = list(self._found(cache))
        kinds = {entry.kind for entry in self.entries}
        self.groups = [group for group in _GROUPS if group & kinds]

    # --- what there is ------------------------------------------------------------------------------

    def _found(self, cache: Cache) -> Iterator[Entry]:
        number = 0
        for at, layer in enumerate(cache.layers):
            name = type(layer).__name__
            if type(layer) not in _TOKENS:
                known = ", ".join(one.__name__ for one in _TOKENS)
                raise UnknownEntry(
                    f"layer {at} of the cache is a {name}, and what it keeps is not known here ({known}): such a model "
                    "cannot be saved and restored with certainty; choose another, or teach transformers_cache"
                )
            tokens, states = _TOKENS[type(layer)], _STATES[type(layer)]
            _refuse_unknown(f"layer {at} of the cache ({name})", vars(layer), known={*tokens, *states})
            for one in (*self._of_tokens(at, layer, tokens), *_of_states(at, layer, states)):
                yield one._replace(number=number)
                number += 1

    def _of_tokens(self, at: int, layer: Any, known: Mapping[str, tuple[EntryKind, int]]) -> Iterator[Entry]:
        for name, (kind, axis) in known.items():
            tensor = getattr(layer, name)
            if tensor is None:
                continue
            shape = list(tensor.shape)
            shape[axis] = self.interval
            if not prod(shape):
                # Latent attention without rotary keys keeps a tensor of width 0: nothing to save, but it must be there.
                self._empty[at, name] = shape, axis, tensor.dtype
                continue
            yield Entry(0, at, name, None, kind, axis, tuple(shape), tensor.dtype)
            if kind is EntryKind.INDEXER and self.interval % self._pool:
                shape[axis] = self._pool - 1
                yield Entry(0, at, name, None, EntryKind.TAIL, axis, tuple(shape), tensor.dtype)

    def members(self, group: int) -> list[Entry]:
        """The entries of a group."""
        return [entry for entry in self.entries if entry.kind in self.groups[group]]

    def is_state(self, group: int) -> bool:
        """Whether the group's pages are the state at one boundary."""
        return self.groups[group] == STATE

    def classes(self, group: int) -> list[str]:
        """Upstream's classes that keep the group's entries."""
        return sorted({self._classes[entry.layer] for entry in self.members(group)})

    def block_bytes(self, group: int) -> int:
        """Bytes of one block of a group."""
        return sum(entry.bytes for entry in self.members(group))

    # --- pages --------------------------------------------------------------------------------------

    def read(self, cache: Cache, entry: Entry, block: int) -> Page:
        """A copy of one page. Of a state it is what the cache holds now; the caller knows which boundary that is."""
        tensor = _tensor(cache, entry)
        if entry.axis is not None:
            start, count = self._rows(entry, block)
            tensor = tensor.narrow(entry.axis, start, count)
        page = torch.zeros(entry.bytes, dtype=torch.uint8)
        raw = tensor.contiguous().flatten().view(torch.uint8)
        page[: raw.numel()] = raw
        return page

    def _rows(self, entry: Entry, block: int) -> tuple[int, int]:
        """Where a page's rows begin in the tensor, and how many there are."""
        start, end = block * self.interval, (block + 1) * self.interval
        tail = end % self._pool if entry.kind in (EntryKind.INDEXER, EntryKind.TAIL) else 0
        return (end - tail, tail) if entry.kind is EntryKind.TAIL else (start, end - tail - start)

    def restore(self, cache: Cache, pages: Pages, boundary: int) -> None:
        """Put the state of [0, `boundary`) into a fresh `cache`, through upstream's own update methods.

        Every tensor is made anew. A page that is not among `pages` leaves zeros, as fresh memory would be.
        """
        for at, layer in enumerate(cache.layers):
            mine = [entry for entry in self.entries if entry.layer == at]
            if type(layer) is LinearAttentionLayer:
                _restore_states(layer, {entry: self._state(entry, pages, boundary) for entry in mine})
                continue
            keys, values = (self._tokens(at, name, pages, boundary) for name in ("keys", "values"))
            layer.update(keys, values)
            if any(entry.attribute == "indexer_keys" for entry in mine):
                layer.update_indexer(self._tokens(at, "indexer_keys", pages, boundary))

    def _state(self, entry: Entry, pages: Pages, boundary: int) -> torch.Tensor:
        page = pages.get((entry.number, boundary // self.interval - 1))
        return _typed(torch.zeros(entry.bytes, dtype=torch.uint8) if page is None else page, entry)

    def _tokens(self, at: int, name: str, pages: Pages, boundary: int) -> torch.Tensor:
        """All rows of a tensor, from its pages."""
        if (at, name) in self._empty:
            shape, axis, dtype = self._empty[at, name]
            return torch.empty([*shape[:axis], boundary, *shape[axis + 1 :]], dtype=dtype)
        entries = [entry for entry in self.entries if (entry.layer, entry.attribute) == (at, name)]
        parts = []
        for block in range(boundary // self.interval):
            for entry in entries:
                page = pages.get((entry.number, block))
                typed = _typed(torch.zeros(entry.bytes, dtype=torch.uint8) if page is None else page, entry)
                parts.append(self._used(typed, entry, block))
        return torch.cat(parts, dim=entries[0].axis or 0)

    def _used(self, typed: torch.Tensor, entry: Entry, block: int) -> torch.Tensor:
        """The rows of a page that are in use, the padding left out."""
        _, count = self._rows(entry, block)
        shape = [count if axis == entry.axis else size for axis, size in enumerate(entry.shape)]
        return typed.flatten()[: prod(shape)].view(shape)


def _of_states(at: int, layer: Any, known: Mapping[str, EntryKind]) -> Iterator[Entry]:
    for name, kind in known.items():
        for number, tensor in getattr(layer, name).items():
            if tensor is not None:
                yield Entry(0, at, name, number, kind, None, tuple(tensor.shape), tensor.dtype)


def _tensor(cache: Cache, entry: Entry) -> torch.Tensor:
    held = getattr(cache.layers[entry.layer], entry.attribute)
    return held if entry.state is None else held[entry.state]


def _typed(page: Page, entry: Entry) -> torch.Tensor:
    return page.clone().view(entry.dtype).view(entry.shape)


def _restore_states(layer: Any, tensors: Mapping[Entry, torch.Tensor]) -> None:
    for entry, tensor in tensors.items():
        if entry.kind is EntryKind.CONV:
            layer.update_conv_state(tensor, entry.state, conv_kernel_size=tensor.shape[-1])
        else:
            layer.update_recurrent_state(tensor, entry.state)


def _refuse_unknown(what: str, attributes: Mapping[str, Any], known: set[str]) -> None:
    """Raise `UnknownEntry` for an attribute that may hold state and is none of the known ones."""
    for name, value in attributes.items():
        plain = isinstance(value, _PLAIN) or (
            isinstance(value, dict) and all(isinstance(one, _PLAIN) for one in value.values())
        )
        if name not in known and not plain:
            raise UnknownEntry(
                f"{what} keeps {name} ({type(value).__name__}), an entry that is not known here: it would be neither "
                "saved nor restored; choose another model, or teach transformers_cache"
            )
