"""How the workers lay pages out: what a page's bytes are, where they lie in a row of the memory tier.

A row of the tier holds one page of one group, for all ranks::

    rank 0: [ matrix 0 | matrix 1 | … ]   rank 1: [ matrix 0 | … ]   …   padding

A group uses some of the byte matrices, and of those the first bytes of each; what lies between is left over from
whoever had the row before. Only the group's own bytes are ever given to a store: they are the same whoever wrote them,
and nothing of another request gets out with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingSpec


class LayoutError(ValueError):
    """The pages cannot be kept beyond the memory tier; one line."""


class Span(NamedTuple):
    """Bytes [start, end) of a row."""

    start: int
    end: int


@dataclass(frozen=True)
class GroupLayout:
    """A transfer group on one rank."""

    group: int
    """vLLM's group, as in its keys."""
    kind: str
    """``state``, ``pages``, or ``window``, of which a prefix needs only the last pages."""
    tokens_per_block: int
    refs: tuple[tuple[int, int], ...]
    """Byte matrix and effective bytes, entry by entry."""
    facts: tuple[tuple[str, str], ...]
    """Layer by layer, everything that vLLM's spec of it says."""


@dataclass(frozen=True)
class RankLayout(KVConnectorHandshakeMetadata):
    """What a worker registered; it travels to the scheduler once, before the first request."""

    rank: int
    row_offset: int
    """Where this rank's part of a row begins, bytes."""
    matrices: tuple[int, ...]
    """Bytes of a page in each byte matrix, padding included."""
    groups: tuple[GroupLayout, ...]


def rank_layout(spec: OffloadingSpec, config: KVCacheConfig, caches: CanonicalKVCaches) -> RankLayout:
    """What this worker's caches look like."""
    groups = []
    for offloaded, refs in zip(spec.config.groups, caches.group_data_refs, strict=True):
        cache_spec = config.kv_cache_groups[offloaded.group_id].kv_cache_spec
        layers = _layer_specs(cache_spec, offloaded.layer_names)
        groups.append(
            GroupLayout(
                group=offloaded.group_id,
                kind=group_kind(next(iter(layers.values()))),
                tokens_per_block=offloaded.tokens_per_block,
                refs=tuple((ref.tensor_idx, ref.page_size_bytes) for ref in refs),
                facts=tuple((layer, _told(layer_spec)) for layer, layer_spec in layers.items()),
            )
        )
    rank = 0 if spec.replicated_layout else spec.config.parallel.rank
    return RankLayout(
        rank=spec.config.parallel.rank,
        row_offset=rank * spec.cpu_page_size_per_worker,
        matrices=tuple(int(t.page_size_bytes) for t in caches.tensors),
        groups=tuple(groups),
    )


def row_spans(ranks: Sequence[RankLayout]) -> dict[int, tuple[Span, ...]]:
    """By group, the bytes of a row that are its own, in order; neighbours are joined."""
    spans: dict[int, tuple[Span, ...]] = {}
    for index, group in enumerate(ranks[0].groups):
        pieces = sorted({span for rank in ranks for span in _pieces(rank, rank.groups[index])})
        joined: list[Span] = []
        for piece in pieces:
            if joined and piece.start <= joined[-1].end:
                joined[-1] = Span(joined[-1].start, max(joined[-1].end, piece.end))
            else:
                joined.append(piece)
        spans[group.group] = tuple(joined)
    return spans


def _pieces(rank: RankLayout, group: GroupLayout) -> Iterator[Span]:
    for matrix, size in group.refs:
        start = rank.row_offset + sum(rank.matrices[:matrix])
        yield Span(start, start + size)


def _layer_specs(spec: Any, layers: Sequence[str]) -> dict[str, Any]:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return {layer: spec.kv_cache_specs[layer] for layer in layers}
    return dict.fromkeys(layers, spec)


def group_kind(spec: Any) -> str:
    """``state``, ``pages`` or ``window``, by vLLM's spec of a layer of the group."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    if isinstance(spec, MambaSpec):
        return "state"
    return "window" if isinstance(spec, SlidingWindowSpec) else "pages"


def _told(spec: Any) -> str:
    """Every field of a spec, by name: block size, shapes, dtypes, padding, mode."""
    assert is_dataclass(spec)
    said = ", ".join(f"{field.name}={getattr(spec, field.name)!r}" for field in fields(spec))
    return f"{type(spec).__name__}({said})"
