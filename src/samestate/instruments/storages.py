"""Digests of every named parameter and buffer of a rank's model: what was loaded, and whether it is so still."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import torch

from samestate.evidence.records import StorageRow, StoragesDigested
from samestate.instruments.digests import Digester, digester_for
from samestate.instruments.tuners import own_rank

_AT_ONCE = 64
"""Tensors in one pass of the digester."""


def digested(model: Any, moment: Literal["start", "end"], digester: Digester | None = None) -> StoragesDigested:
    """Every parameter and buffer of `model` by name, shape, dtype and digest of its values."""
    named = [("parameter", *one) for one in model.named_parameters()]
    named += [("buffer", *one) for one in model.named_buffers()]
    device = next((tensor.device for _, _, tensor in named), torch.device("cpu"))
    digester = digester or digester_for(device)
    rows = []
    for first in range(0, len(named), _AT_ONCE):
        part = named[first : first + _AT_ONCE]
        facts = digester.facts([as_bytes(tensor) for _, _, tensor in part])
        rows += [
            StorageRow(name=name, role=role, shape=list(tensor.shape), dtype=str(tensor.dtype), digest=one.digest)
            for (role, name, tensor), one in zip(part, facts, strict=True)
        ]
    rows.sort(key=lambda row: row.name)
    return StoragesDigested(rank=own_rank(), moment=moment, digest=digester.algorithm, rows=rows)


def digested_in_worker(worker: Any, moment: Literal["start", "end"]) -> bytes:
    """For vLLM's ``collective_rpc``: this rank's record as JSON."""
    return msgspec.json.encode(digested(worker.model_runner.get_model(), moment))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's values as uint8, one dimension, contiguous; a copy where they do not lie so."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
