"""LMCache's connector on platforms whose device memory is host memory.

Load it by name, with an LMCache server beside it (``lmcache server --supported-transfer-mode lmcache_driven``)::

    --kv-transfer-config '{"kv_connector": "HostLMCacheConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "samestate.cache.lmcache",
      "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": 5555,
        "lmcache.mp.mp_transfer_mode": "lmcache_driven"}}'

On CUDA it is LMCache's own connector and nothing else. On CPU three things keep that one from carrying a hybrid model:

1. Many views (each layer, each state of a layer) share one storage of vLLM's. LMCache moves a tensor that it is
   given to shared memory by pointing *this tensor* at the new place; engine and server then work on different bytes.
   Here the storage itself is moved, under all its views.
2. LMCache's CPU copy takes tight pages only, and a recurrent layer is registered as a row shorter than its page.
   Here its whole page is handed over.
3. vLLM's search for Triton kernels to replace takes every ``vars(x)`` for a dict (vllm/triton_utils/dispatcher.py);
   numba, which LMCache imports, has objects with other answers.

Run with LMCache 0.5.5 and 0.5.6.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from typing_extensions import override
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec

try:
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector

    try:
        from lmcache.v1.platform.devices.cpu import shm  # 0.5.6
    except ImportError:
        from lmcache.v1.platform.cpu import shm  # 0.5.5
except ImportError as error:
    raise ImportError(
        f"LMCache is not importable ({error}): name a release with --lmcache-version X.Y.Z, or install one beside vLLM"
    ) from error

SHARED_MEMORY = "/dev/shm"
HEADER_BYTES = 64
"""torch keeps a counter in front of the data of a named segment (aten/src/ATen/MapAllocator.cpp)."""


class SharedMemoryError(RuntimeError):
    """The engine's cache cannot be shared with the server; one line."""


class HostLMCacheConnector(LMCacheMPConnector):
    """`LMCacheMPConnector` that also works where the device is the host.

    The segment lives as long as the engine. Once its process is gone torch's own manager process
    removes the name, within seconds; `samestate.engines.shared_memory` does so at once.

    Raises:
        SharedMemoryError: the cache is laid out in a way that LMCache's CPU copy would misread.

    """

    @override
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if current_platform.is_cpu():
            shm.migrate_to_shm_and_wrap = share
            kv_caches = whole_pages(self._kv_cache_config, kv_caches)
        super().register_kv_caches(kv_caches)


def whole_pages(config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The registered caches, recurrent layers as their whole pages: shape (blocks, 1, 1, page), the same bytes.

    Raises:
        SharedMemoryError: a recurrent layer's blocks are not one page apart.

    """
    pages = dict(kv_caches)
    for group in config.kv_cache_groups:
        if not isinstance(group.kv_cache_spec, MambaSpec):
            continue
        for layer in group.layer_names:
            row = kv_caches[layer]
            page = group.kv_cache_spec.page_size_bytes // row.element_size()
            if row.stride(0) != page:
                raise SharedMemoryError(
                    f"{layer}: its blocks are {row.stride(0)} elements apart, its page has {page}: "
                    "LMCache's CPU copy needs the pages of a layer side by side"
                )
            pages[layer] = row.as_strided((row.shape[0], 1, 1, page), (page, page, page, 1))
    return pages


def share(tensor: torch.Tensor) -> Any:
    """Move the storage under `tensor` and all its other views to a named segment, once; LMCache's handle of this view.

    Stands in for LMCache's own ``migrate_to_shm_and_wrap``.

    Raises:
        SharedMemoryError: there is no room, or the segment is not laid out as torch lays it out today.

    """
    storage = tensor.untyped_storage()
    room = os.statvfs(SHARED_MEMORY)
    if not storage.is_shared() and storage.nbytes() + HEADER_BYTES > (free := room.f_bavail * room.f_frsize):
        # Asked beforehand: a segment that outgrows its file system kills the process when it is written.
        raise SharedMemoryError(
            f"{SHARED_MEMORY}: {free} bytes are free, the engine's cache has {storage.nbytes()}: "
            f"lower num_gpu_blocks_override, or make {SHARED_MEMORY} larger"
        )
    _, name, size = storage._share_filename_cpu_()
    found = os.stat(SHARED_MEMORY + name.decode()).st_size
    if found != size + HEADER_BYTES:
        raise SharedMemoryError(
            f"{SHARED_MEMORY}{name.decode()}: {found} bytes for {size} of data, expected {HEADER_BYTES} more: "
            f"torch {torch.__version__} lays shared memory out in another way"
        )
    handle = shm.CpuShmTensorWrapper(tensor, name.decode(), segment_nbytes=size)
    handle.nbytes = found
    handle.storage_offset += HEADER_BYTES // tensor.element_size()
    return handle


def plain_vars(value: object) -> Mapping[str, Any]:
    """`vars`, or nothing where an object answers with something that is no mapping."""
    found = vars(value)
    return found if isinstance(found, Mapping) else {}


if current_platform.is_cpu():
    from vllm.triton_utils import dispatcher

    dispatcher.vars = plain_vars
