"""One worker's side of the dictionary: pages as bytes, and the copies between them and vLLM's cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from samestate.cache.families import Geometry, Transfer

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


class Page(NamedTuple):
    """One layer's page of one block, on both sides."""

    group: int
    layer: int
    """Position in the group."""
    position: int
    """Of the block in its part."""
    device: torch.Tensor
    """uint8, effective bytes."""
    stored: torch.Tensor


class Watcher:
    """Told of every transfer of a worker, in the thread that makes it. This one does nothing."""

    def saves_begin(self, saves: Sequence[Transfer]) -> None:
        """All saves of a step. Nothing is copied yet, but what the dictionary will hold is in place."""

    def save_ended(self, save: Transfer, moved: int) -> None:
        """All pages are copied, `moved` bytes."""

    def load_begins(self, load: Transfer) -> None:
        """Nothing is copied yet."""

    def load_ended(self, load: Transfer, moved: int) -> None:
        """All pages are copied, `moved` bytes."""


class Dictionary:
    """One worker's pages. Copies on the caller's thread, and on the current stream where there is one.

    Args:
        device: By group and layer: uint8, shape (blocks, effective bytes), views of vLLM's cache.

    """

    def __init__(self, geometry: Geometry, device: list[list[torch.Tensor]], watcher: Watcher) -> None:
        self._geometry = geometry
        self._device = device
        self._watcher = watcher
        self._families: dict[bytes, dict[int, list[torch.Tensor]]] = {}
        """Key -> group -> by layer: uint8, shape (blocks of a family, effective bytes)."""

    def save(self, saves: Sequence[Transfer]) -> None:
        """Copy pages of families out of the engine's cache; done when this returns."""
        for save in saves:
            self._make_room(save)
        self._watcher.saves_begin(saves)
        for save in saves:
            moved = sum(page.stored.copy_(page.device).numel() for page in self.pages(save))
            self._watcher.save_ended(save, moved)

    def load(self, load: Transfer) -> None:
        """Copy pages into the engine's cache. Raises KeyError for a family that is not there, before any copy."""
        pages = list(self.pages(load))
        self._watcher.load_begins(load)
        moved = sum(page.device.copy_(page.stored).numel() for page in pages)
        self._watcher.load_ended(load, moved)

    def drop(self, key: bytes) -> None:
        """Forget a family."""
        self._families.pop(key, None)

    def pages(self, transfer: Transfer) -> Iterator[Page]:
        """Every page of a transfer. Raises KeyError for a family that is not there."""
        for group, _, blocks in transfer.parts:
            size = self._geometry.blocks(group)
            keys = transfer.keys[-(len(blocks) // size) :]
            for position, block in enumerate(blocks):
                stored = self._families[keys[position // size]][group]
                for layer, device in enumerate(self._device[group]):
                    yield Page(group, layer, position, device[block], stored[layer][position % size])

    def _make_room(self, save: Transfer) -> None:
        (key,) = save.keys
        for part in save.parts:
            shapes = [(len(part.blocks), layer.shape[1]) for layer in self._device[part.group]]
            pages = [torch.empty(shape, dtype=torch.uint8, device="cpu") for shape in shapes]
            self._families.setdefault(key, {})[part.group] = pages


def device_pages(
    geometry: Geometry, config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> list[list[torch.Tensor]]:
    """By group and layer: the pages of vLLM's cache as bytes, shape (blocks, effective bytes), nothing copied."""
    places = {
        layer: (tensor.offset + at * tensor.layer_stride, tensor.block_stride)
        for tensor in config.kv_cache_tensors
        for at, layer in enumerate(tensor.layers)
    }

    def view(layer: str, size: int) -> torch.Tensor:
        cache = kv_caches[layer]
        raw = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
        start, stride = places[layer]
        return raw.as_strided((config.num_blocks, size), (stride, 1), start)

    return [[view(layer, size) for layer, size in group.layers.items()] for group in geometry.groups]
