"""What a worker registered: vLLM's cache groups, and the groups in which the cache moves them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec, MambaSpec, UniformTypeKVCacheSpecs

from samestate.evidence.records import EngineGroup, EntryKind

if TYPE_CHECKING:
    from vllm.config import CacheConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def entry_kind(spec: KVCacheSpec) -> EntryKind:
    """Recurrent state cannot be trimmed by a token; everything else here is positional.

    A group whose layers' pages are of unequal size is recurrent where all of them are.
    """
    if isinstance(spec, UniformTypeKVCacheSpecs):
        inner = {entry_kind(one) for one in spec.kv_cache_specs.values()}
        return EntryKind.RECURRENT if inner == {EntryKind.RECURRENT} else EntryKind.ATTENTION
    return EntryKind.RECURRENT if isinstance(spec, MambaSpec) else EntryKind.ATTENTION


def effective_bytes(spec: KVCacheSpec) -> int:
    """Bytes of one page that later computation reads, padding left out."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return max(effective_bytes(inner) for inner in spec.kv_cache_specs.values())
    if isinstance(spec, MambaSpec):
        return int(replace(spec, page_size_padded=None).page_size_bytes)
    if isinstance(spec, AttentionSpec):
        return int(spec.unpadded_page_size_bytes)
    return int(spec.page_size_bytes)


def page_bytes(spec: KVCacheSpec) -> int:
    """Bytes of one layer's page, padding included."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return max(page_bytes(inner) for inner in spec.kv_cache_specs.values())
    return int(spec.page_size_bytes)


def engine_groups(config: KVCacheConfig) -> list[EngineGroup]:
    """vLLM's cache groups as records, in vLLM's order."""
    return [
        EngineGroup(
            group=index,
            entry_kind=entry_kind(group.kv_cache_spec),
            spec=type(group.kv_cache_spec).__name__,
            tokens_per_block=group.kv_cache_spec.block_size,
            layers=list(group.layer_names),
            page_bytes=page_bytes(group.kv_cache_spec),
            effective_bytes=effective_bytes(group.kv_cache_spec),
        )
        for index, group in enumerate(config.kv_cache_groups)
    ]


def transfer_layers(config: KVCacheConfig, transfer_groups: list[int]) -> list[list[str]]:
    """Layer names by transfer group, given vLLM's group ids in transfer order."""
    return [list(config.kv_cache_groups[group].layer_names) for group in transfer_groups]


def recurrent_blocks(config: KVCacheConfig) -> dict[int, int]:
    """Tokens per block of every recurrent group, by vLLM's group id."""
    return {
        index: int(group.kv_cache_spec.block_size)
        for index, group in enumerate(config.kv_cache_groups)
        if entry_kind(group.kv_cache_spec) is EntryKind.RECURRENT
    }


def checkpoint_interval(config: KVCacheConfig) -> int:
    """C: the largest block of a recurrent group, or of any group when none is recurrent."""
    sizes = recurrent_blocks(config).values() or [group.kv_cache_spec.block_size for group in config.kv_cache_groups]
    return int(max(sizes))


def configured_interval(config: CacheConfig) -> int:
    """C by the configuration alone, for whoever cannot see the cache groups."""
    if config.mamba_cache_mode == "align":
        return int(config.block_size)
    return int(config.mamba_block_size or config.block_size)
