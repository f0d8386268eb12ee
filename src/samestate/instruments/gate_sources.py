"""Which code of vLLM a gate ran: functions, methods and Triton kernels, by the hash of their source."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from samestate.evidence.canonical import sha256_hex
from samestate.evidence.record_base import PatchedFunction


def sources(owned: Iterable[tuple[Any, str]]) -> list[PatchedFunction]:
    """Of (module or class, name); a kernel's source includes its decorator."""
    return [_source(owner, name) for owner, name in owned]


def _source(owner: Any, name: str) -> PatchedFunction:
    found = getattr(owner, name)
    source = inspect.getsource(getattr(found, "fn", found))
    of_class = inspect.isclass(owner)
    return PatchedFunction(
        module=owner.__module__ if of_class else owner.__name__,
        qualname=f"{owner.__qualname__}.{name}" if of_class else name,
        source_sha256=sha256_hex(source.encode()),
    )
