"""Families: how a hybrid's cache is cut for a dictionary, and which families the workers' dictionaries hold.

A family belongs to a boundary k·C: the pages of [(k-1)·C, k·C) and, where a prefill step ended at k·C, the state there.
Its key is vLLM's own hash of [0, k·C). The scheduler's side (`Index`) decides alone what is saved and what is dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, UniformTypeKVCacheSpecs

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


class Group(NamedTuple):
    """One of vLLM's cache groups, as it is moved."""

    engine_group: int
    tokens_per_block: int
    is_state: bool
    layers: dict[str, int]
    """Effective bytes of a page, by layer."""

    @property
    def bytes_per_block(self) -> int:
        return sum(self.layers.values())


class Part(NamedTuple):
    """Blocks of one group, side by side in a request's block table."""

    group: int
    """Position in `Geometry.groups`."""
    first: int
    """Index of the first in the table."""
    blocks: list[int]


class Transfer(NamedTuple):
    """A save of one family, or a load of the families that a request lacks."""

    job: int
    request: str
    keys: list[bytes]
    """Of the families, in order. The state belongs to the last."""
    parts: list[Part]


class Geometry(NamedTuple):
    """How the engine's cache divides into families."""

    interval: int
    """C."""
    groups: list[Group]

    def blocks(self, group: int) -> int:
        """Blocks of a group in one family."""
        return self.interval // self.groups[group].tokens_per_block

    def family_bytes(self, groups: Iterable[int]) -> int:
        """Bytes of these groups in one family of one worker."""
        return sum(self.blocks(group) * self.groups[group].bytes_per_block for group in groups)


def geometry(config: KVCacheConfig) -> Geometry:
    """The engine's groups that can be found by hash. Raises ValueError for a kind of cache that is not moved here."""
    groups = []
    for index in config.prefix_cacheable_group_ids:
        group = config.kv_cache_groups[index]
        specs = {layer: _layer_spec(group.kv_cache_spec, layer) for layer in group.layer_names}
        for layer, spec in specs.items():
            if isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "align":
                raise ValueError(
                    f"{layer}: its state is kept in mode {spec.mamba_cache_mode!r}; use --mamba-cache-mode align"
                )
            if not isinstance(spec, MambaSpec | FullAttentionSpec):
                raise ValueError(
                    f"{layer}: {type(spec).__name__} is not moved by the dictionary; use OffloadingConnector"
                )
        is_state = isinstance(next(iter(specs.values())), MambaSpec)
        sizes = {layer: _effective_bytes(spec) for layer, spec in specs.items()}
        groups.append(Group(index, group.kv_cache_spec.block_size, is_state, sizes))
    states = {group.tokens_per_block for group in groups if group.is_state}
    interval = max(states or {group.tokens_per_block for group in groups}, default=0)
    if len(states) > 1 or not interval or any(interval % group.tokens_per_block for group in groups):
        sizes_said = ", ".join(str(group.tokens_per_block) for group in groups) or "none"
        raise ValueError(
            f"block sizes of the cache groups: {sizes_said}; the state's must be one, and a multiple of the others"
        )
    return Geometry(interval, groups)


def _layer_spec(spec: KVCacheSpec, layer: str) -> KVCacheSpec:
    """A worker may see each layer's own, the scheduler one for all."""
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _effective_bytes(spec: KVCacheSpec) -> int:
    if isinstance(spec, MambaSpec):
        return int(replace(spec, page_size_padded=None).page_size_bytes)
    return int(spec.unpadded_page_size_bytes)


@dataclass(slots=True, eq=False)
class Family:
    """Groups of a family whose save was ordered, and those that every worker has saved."""

    ordered: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)


class Index:
    """What the workers' dictionaries hold, and which family goes when room is needed: the least recently used.

    Args:
        capacity: Bytes of one worker.
        workers: How many must confirm a save.

    """

    def __init__(self, geometry: Geometry, capacity: int, workers: int) -> None:
        self._geometry = geometry
        self._free = capacity
        self._workers = workers
        self.states = {i for i, group in enumerate(geometry.groups) if group.is_state}
        self.pages = set(range(len(geometry.groups))) - self.states
        self._families: OrderedDict[bytes, Family] = OrderedDict()
        self._open: dict[int, tuple[Family, set[int], int]] = {}
        """Job -> its family, the groups it saves, and how many workers have yet to confirm it."""
        self.dropped: list[bytes] = []
        """Families to be dropped by the workers."""

    @property
    def saving(self) -> bool:
        """Whether a save is not yet confirmed."""
        return bool(self._open)

    def restorable(self, keys: Iterable[bytes]) -> int:
        """How many of these families, from the first on, can be restored."""
        found = 0
        for count, key in enumerate(keys, 1):
            family = self._families.get(key)
            if family is None or not self.pages <= family.kept:
                break
            if self.states <= family.kept:
                found = count
        return found

    def touch(self, keys: list[bytes]) -> None:
        """They were used. The first is kept longest: without it the others are of no use."""
        for key in reversed(keys):
            if key in self._families:
                self._families.move_to_end(key)

    def claim(self, job: int, key: bytes, groups: set[int], beside: Collection[bytes]) -> list[int] | None:
        """Make room for those groups of a family that are not there yet; `job` must save them. None: there is no room.

        Families of `beside`, and those whose save is still open, are not dropped for it.
        """
        family = self._families.get(key) or Family()
        new = groups - family.ordered
        need = self._geometry.family_bytes(new)
        while need > self._free:
            oldest = (k for k, f in self._families.items() if k not in beside and f.ordered == f.kept)
            if (victim := next(oldest, None)) is None:
                return None
            self._drop(victim)
        if new:
            self._free -= need
            self._families[key] = family
            family.ordered |= new
            self._open[job] = family, new, self._workers
        return sorted(new)

    def confirm(self, workers: Mapping[int, int]) -> None:
        """So many workers carried out these jobs."""
        for job, count in workers.items():
            family, groups, missing = self._open.pop(job)
            if count < missing:
                self._open[job] = family, groups, missing - count
            else:
                family.kept |= groups

    def clear(self) -> None:
        """Drop every family; a save that is still open then confirms nothing."""
        for key in list(self._families):
            self._drop(key)

    def _drop(self, key: bytes) -> None:
        self._free += self._geometry.family_bytes(self._families.pop(key).ordered)
        self.dropped.append(key)
