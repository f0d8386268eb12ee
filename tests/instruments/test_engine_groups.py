"""What kind a worker's group is, where vLLM wraps the specs of layers whose pages are of unequal size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec, UniformTypeKVCacheSpecs

from samestate.evidence.records import EntryKind
from samestate.instruments.layout import entry_kind


def state() -> KVCacheSpec:
    options: Mapping[str, Any] = {"shapes": ((2, 4),), "dtypes": (torch.float32,)}
    return MambaSpec(block_size=64, **options)


def pages() -> KVCacheSpec:
    return FullAttentionSpec(block_size=64, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("layers", "kind"),
    [
        ([state(), state()], EntryKind.RECURRENT),
        ([pages(), pages()], EntryKind.ATTENTION),
        ([state(), pages()], EntryKind.ATTENTION),
    ],
)
def test_a_wrapped_group_is_recurrent_where_all_of_it_is(layers: list[KVCacheSpec], kind: EntryKind) -> None:
    inner = {f"layers.{index}": spec for index, spec in enumerate(layers)}
    assert entry_kind(UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs=inner)) is kind
