"""Pages of a layer that reads a packed block in kernel blocks, as GLM-5-Next's indexer does in vLLM 0.33."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, MLAAttentionSpec

from samestate.evidence.records import EntryKind
from samestate.instruments.digests import SENTINEL
from samestate.instruments.pages import Layout, LayoutError

BLOCKS, WIDTH = 4, 132
ROWS, PARTS = 2, 3
"""Rows of a kernel block, and kernel blocks of a page."""
KERNEL = ROWS * WIDTH
PAGE = PARTS * KERNEL
STRIDE = 10 * KERNEL
"""Of the manager's blocks: two layers' pages, and what belongs to others."""
LAYERS = ["model.layers.3.self_attn.indexer.k_cache", "model.layers.7.self_attn.indexer.k_cache"]


class Cache:
    """One raw tensor of random bytes; each layer bound to a view in kernel blocks, as
    `AttentionGroup.map_kv_cache_to_kernel_blocks` makes it (vllm/v1/worker/utils.py)."""

    def __init__(self) -> None:
        self.raw = torch.randint(0, 200, (BLOCKS * STRIDE,), dtype=torch.uint8)
        self.spec = MLAAttentionSpec(block_size=ROWS * PARTS, num_kv_heads=1, head_size=WIDTH, dtype=torch.uint8)
        assert self.spec.page_size_bytes == PAGE
        self.bound = [self.view(index * PAGE) for index in range(len(LAYERS))]

    def view(
        self, start: int, *, count: int = (BLOCKS - 1) * (STRIDE // KERNEL) + PARTS, stride: int = KERNEL
    ) -> torch.Tensor:
        return self.raw.as_strided((count, ROWS, WIDTH), (stride, WIDTH, 1), start)

    def layout(self, block_stride: int = STRIDE) -> Layout:
        tensor = KVCacheTensor(BLOCKS * STRIDE, LAYERS, layer_stride=PAGE, block_stride=block_stride)
        config = KVCacheConfig(BLOCKS, [tensor], [KVCacheGroupSpec(LAYERS, self.spec)])
        manager = {
            layer: self.raw.as_strided((BLOCKS, 1, ROWS * PARTS, WIDTH), (STRIDE, PAGE, WIDTH, 1), index * PAGE)
            for index, layer in enumerate(LAYERS)
        }
        context = {layer: SimpleNamespace(kv_cache=view) for layer, view in zip(LAYERS, self.bound, strict=True)}
        return Layout(config, manager, context)


@pytest.fixture
def cache() -> Cache:
    return Cache()


def test_a_page_is_its_kernel_blocks_in_a_row(cache: Cache) -> None:
    layout = cache.layout()
    assert [one.kind for one in layout.entries] == [EntryKind.INDEXER] * 2
    for index, placed in enumerate(layout.placed):
        entry = placed.entry
        assert (entry.storage_offset, entry.block_stride) == (index * PAGE, STRIDE)
        assert (entry.page_bytes, entry.effective_bytes, entry.shape) == (PAGE, PAGE, [PARTS, ROWS, WIDTH])
        for block in range(BLOCKS):
            first = block * (STRIDE // KERNEL)
            read = cache.bound[index][first : first + PARTS]
            assert torch.equal(placed.pages[block], read.reshape(-1))
            assert torch.equal(placed.whole[block], read.reshape(-1))


def test_poison_stays_in_the_page(cache: Cache) -> None:
    layout, before = cache.layout(), cache.raw.clone()
    assert layout.fill([layout.placed[1].pages[2]]) == PAGE
    page = slice(2 * STRIDE + PAGE, 2 * STRIDE + 2 * PAGE)
    assert bool((cache.raw[page] == SENTINEL).all())
    before[page] = SENTINEL
    assert torch.equal(cache.raw, before)


def test_a_view_that_is_larger_than_its_page_is_refused(cache: Cache) -> None:
    wide = cache.raw.as_strided((BLOCKS, ROWS * PARTS + 1, WIDTH), (STRIDE, WIDTH, 1), 0)
    cache.bound[0] = wide
    with pytest.raises(LayoutError, match=rf"{PAGE + WIDTH} bytes a block, its page {PAGE}"):
        cache.layout()


@pytest.mark.parametrize("what", ["start", "early end", "late end", "gaps", "stride"])
def test_a_view_that_lies_otherwise_is_refused(cache: Cache, what: str) -> None:
    count = cache.bound[0].shape[0]
    match what:
        case "start":
            cache.bound[0] = cache.view(KERNEL)
        case "early end":
            cache.bound[0] = cache.view(0, count=count - 1)
        case "late end":
            cache.bound[0] = cache.view(0, count=count + 1)
        case "gaps":
            cache.bound[0] = cache.view(0, count=count // 2, stride=2 * KERNEL)
    with pytest.raises(LayoutError, match=r"indexer\.k_cache: its tensor has"):
        cache.layout(STRIDE - KERNEL if what == "stride" else STRIDE)
