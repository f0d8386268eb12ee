"""How fast this worker copies plain memory to where its cache lies, measured where and when the cache is registered.

What a reload is held against: its bytes cannot come faster than a copy of one buffer onto another, whole, in the same
process and by the same means (`ctypes.memmove` in one thread on a host, as `samestate.cache.host_worker` copies; from
page-locked memory onto a device).
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from samestate.evidence.latency_records import MEASURE_COPIES, CopyMeasured

BYTES = 64 << 20
"""More than the caches of most processors: what is measured is memory."""
WARM_UPS, COPIES = 2, 7
MEASURABLE = ("cpu", "cuda")
"""Kinds of devices whose copies can be waited for here."""


def asked(rank: int, kv_caches: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> CopyMeasured | None:
    """The record, where the environment asks for one and there is memory for it; else None.

    Args:
        rank: The worker's.
        kv_caches: By layer, the registered tensors, or lists of them; they are not touched.
        environ: `MEASURE_COPIES` in it asks.

    """
    if not environ.get(MEASURE_COPIES):
        return None
    first = next(iter(kv_caches.values()))
    device = (first[0] if isinstance(first, list | tuple) else first).device
    if device.type not in MEASURABLE:
        return None
    try:
        return measured(rank, device)
    except (RuntimeError, MemoryError):  # of torch, out of memory is one of these: there is no speed to tell then
        return None
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what the buffer took is the engine's again


def measured(rank: int, device: torch.device) -> CopyMeasured:
    """Copy, and say how long it took. Two buffers of `BYTES` for as long as it lasts. Raises RuntimeError."""
    plain = device.type == "cpu"
    source = torch.ones(BYTES, dtype=torch.uint8, pin_memory=not plain)
    target = torch.zeros(BYTES, dtype=torch.uint8, device=device)
    copy = on_host(source, target) if plain else onto_device(source, target)
    for _ in range(WARM_UPS):
        copy()
    took = []
    for _ in range(COPIES):
        began = time.monotonic_ns()
        copy()
        took.append(max(1, time.monotonic_ns() - began))
    name = "cpu" if plain else torch.cuda.get_device_name(device)
    return CopyMeasured(
        rank=rank, route="host-to-host" if plain else "host-to-device", device=name, bytes=BYTES, took_ns=took
    )


def on_host(source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
    """What copies all of `source` onto `target`, both on the host, in the calling thread."""
    return lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


def onto_device(source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
    """What copies a page-locked `source` onto `target`, and waits until it is there."""

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(target.device)

    return copy
