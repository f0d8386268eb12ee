"""Pages as bytes: where each entry of a rank lies, what its pages hold, what a load left behind.

Addresses come from the model's live tensors (offset, shape and stride of the views that later
computation reads). vLLM's cache configuration gives them a second time, by other arithmetic
(`KVCacheTensor`, vllm/v1/kv_cache_interface.py); where the two disagree nothing is digested.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec, UniformTypeKVCacheSpecs

from samestate.evidence.records import Entry, EntryKind
from samestate.instruments.digests import Digester, PageFacts, digester_for
from samestate.instruments.layout import effective_bytes

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

NULL_BLOCK = 0


class LayoutError(ValueError):
    """Live tensors and cache configuration do not describe the same bytes; one line."""


class Placed(NamedTuple):
    """One entry with its bytes."""

    entry: Entry
    pages: torch.Tensor
    """uint8, shape (blocks, effective bytes), a view of the engine's cache."""
    whole: torch.Tensor
    """uint8, shape (blocks, page bytes): padding and the layer's other entries included."""
    page_offset: int
    """Where the entry begins inside its layer's page, bytes."""


def live_views(layer: str, registered: torch.Tensor, context: Mapping[str, object]) -> list[torch.Tensor]:
    """The tensors that the layer itself reads, blocks first; the registered one where the layer has none."""
    own = getattr(context.get(layer), "kv_cache", None)
    views = list(own) if isinstance(own, list | tuple) else [own]
    found = [view for view in views if isinstance(view, torch.Tensor) and view.numel()]
    return found or [registered]


def kinds(layer: str, spec: KVCacheSpec, views: int) -> list[EntryKind]:
    """What each of a layer's tensors is. vLLM puts convolution states before the recurrent one (MambaSpec.shapes)."""
    if not isinstance(spec, MambaSpec):
        name = layer.rsplit(".", 2)
        kind = EntryKind.INDEXER if any("indexer" in part for part in name) else EntryKind.ATTENTION
        return [EntryKind.TAIL if any("tail" in part for part in name) else kind] * views
    if spec.mamba_type is MambaAttentionBackendEnum.SHORT_CONV:
        return [EntryKind.CONV] * views
    return [EntryKind.CONV] * (views - 1) + [EntryKind.RECURRENT]


class Layout:
    """All entries of a rank, placed in memory.

    Raises:
        LayoutError: a page that is not one dense run of bytes, or two descriptions that disagree.

    """

    def __init__(
        self, config: KVCacheConfig, registered: Mapping[str, torch.Tensor], context: Mapping[str, object]
    ) -> None:
        self.blocks = config.num_blocks
        self.placed: list[Placed] = []
        self._by_layer: dict[str, list[Placed]] = {}
        for group, spec_of_group in enumerate(config.kv_cache_groups):
            for layer in spec_of_group.layer_names:
                spec = spec_of_group.kv_cache_spec
                if isinstance(spec, UniformTypeKVCacheSpecs):
                    spec = spec.kv_cache_specs[layer]
                self._place(group, layer, spec, _start_and_stride(config, layer), registered[layer], context)
        self._digester: Digester = digester_for(self.placed[0].pages.device)
        self.digest = self._digester.algorithm

    @property
    def entries(self) -> list[Entry]:
        return [placed.entry for placed in self.placed]

    def of_layer(self, layer: str) -> list[Placed]:
        """The layer's entries, in the order in which they lie in its page."""
        return self._by_layer[layer]

    def facts(self, pages: Iterable[torch.Tensor]) -> list[PageFacts]:
        """Digest, non-zero bytes and sentinel bytes of each page (uint8, one dimension)."""
        return self._digester.facts(list(pages))

    def fill(self, pages: Iterable[torch.Tensor]) -> int:
        """Fill pages with the sentinel; bytes written."""
        return self._digester.fill(list(pages))

    def _place(
        self,
        group: int,
        layer: str,
        spec: KVCacheSpec,
        expected: tuple[int, int],
        registered: torch.Tensor,
        context: Mapping[str, object],
    ) -> None:
        views = live_views(layer, registered, context)
        start, block_stride = expected
        page_offset = 0
        for view, kind in zip(views, kinds(layer, spec, len(views)), strict=True):
            span = _span(layer, view)
            found = _in_pages(span, block_stride, effective_bytes(spec))
            offset, stride, size = found.span
            if (offset, stride, view.shape[0]) != (start + page_offset, block_stride, found.count(self.blocks)):
                raise LayoutError(
                    f"{layer}: its tensor has {view.shape[0]} blocks at {span.offset} + b*{span.stride}, "
                    f"the cache configuration {self.blocks} at {start + page_offset} + b*{block_stride}"
                )
            if page_offset + size > spec.page_size_bytes:
                raise LayoutError(
                    f"{layer}: its tensors have {page_offset + size} bytes a block, its page {spec.page_size_bytes}"
                )
            entry = Entry(
                entry=len(self.placed),
                layer=layer,
                engine_group=group,
                kind=kind,
                logical_dtype=str(view.dtype).removeprefix("torch."),
                transfer_dtype="int8",
                is_byte_view=True,
                shape=[found.parts, *view.shape[1:]] if found.parts > 1 else list(view.shape[1:]),
                storage_offset=offset,
                block_stride=stride,
                page_bytes=spec.page_size_bytes,
                effective_bytes=size,
            )
            raw = torch.empty(0, dtype=torch.uint8, device=view.device).set_(view.untyped_storage())
            placed = Placed(
                entry,
                raw.as_strided((self.blocks, size), (stride, 1), offset),
                raw.as_strided((self.blocks, spec.page_size_bytes), (stride, 1), start),
                page_offset,
            )
            self.placed.append(placed)
            self._by_layer.setdefault(layer, []).append(placed)
            page_offset += size


class _Span(NamedTuple):
    """Where a view's blocks lie, bytes."""

    offset: int
    stride: int
    size: int


class _Pages(NamedTuple):
    """The manager's pages of a view, which may hold each of them as several kernel blocks."""

    span: _Span
    parts: int
    """Kernel blocks in a page."""
    step: int
    """Kernel blocks from one page's first to the next page's first."""

    def count(self, blocks: int) -> int:
        """Blocks of a view that ends with the last page."""
        return (blocks - 1) * self.step + self.parts


def _in_pages(span: _Span, block_stride: int, page: int) -> _Pages:
    """The view in the manager's pages of `page` bytes; unchanged where its blocks are not kernel blocks.

    A kernel that wants smaller blocks gets a view of back-to-back kernel blocks over everything from
    its first page to its last, other layers' bytes included; it reads kernel blocks
    ``b * step .. b * step + parts - 1`` of block ``b``
    (AttentionGroup.map_kv_cache_to_kernel_blocks, vllm/v1/worker/utils.py).
    """
    offset, stride, size = span
    if stride != size or block_stride % stride or page % size or not size < page <= block_stride:
        return _Pages(span, 1, 1)
    return _Pages(_Span(offset, block_stride, page), page // size, block_stride // stride)


def _span(layer: str, view: torch.Tensor) -> _Span:
    """Offset of block 0, stride between blocks and size of a page, all in bytes.

    Raises `LayoutError` when a block's elements are not one dense run (in any order).
    """
    item = view.element_size()
    inner = list(zip(view.shape[1:], view.stride()[1:], strict=True))
    elements = prod(view.shape[1:])
    if 1 + sum((size - 1) * stride for size, stride in inner) != elements:
        raise LayoutError(f"{layer}: a block of shape {tuple(view.shape[1:])} is not one dense run of bytes")
    return _Span(view.storage_offset() * item, view.stride(0) * item, elements * item)


def _start_and_stride(config: KVCacheConfig, layer: str) -> tuple[int, int]:
    """The same from the cache configuration: where the layer's block 0 lies, and how far apart blocks are."""
    for tensor in config.kv_cache_tensors:
        if layer in tensor.layers:
            return tensor.offset + tensor.layers.index(layer) * tensor.layer_stride, tensor.block_stride
    raise LayoutError(f"{layer}: no cache tensor holds it")


def neighbours(blocks: Sequence[int], num_blocks: int) -> list[int]:
    """Blocks next to those of a load, and the null block: what a wrong address would hit first."""
    taken = set(blocks)
    beside = {block + step for block in blocks for step in (-1, 1)} | {NULL_BLOCK}
    return sorted(block for block in beside - taken if 0 <= block < num_blocks)
