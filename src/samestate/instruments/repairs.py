"""Repairs that are put onto a connector's release while it runs.

A repair knows the source of every function that it replaces, by hash, and refuses any other: it
changes exactly what it was written for. Own code; nothing on disk is touched.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from samestate.evidence.canonical import sha256_hex
from samestate.evidence.records import InterventionApplied, PatchedFunction
from samestate.instruments.adapters import innermost
from samestate.instruments.lmcache_transfers import is_lmcache

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

STRICT_PREFIX: dict[str, dict[str, str]] = {
    "get_num_new_matched_tokens": {
        "9ad96d7867030c9f387b13241a0df6ceff754211b4b5c039ebd9ec3dcffb38fb": "0.5.5",
    },
    "on_new_request": {
        "6bb95a09f68c68a3db943499c50c46c9c3292ec2bea24740ac5b0aa38a651642": "0.5.5",
    },
}
"""The two methods of LMCache's connector that look up, by SHA-256 of their source: releases that look up all tokens.
The second one does so when a request arrives, where ``lmcache.mp.eager_prefetch`` is on."""
RESERVES = "reserve_last_token"
"""In the sources of releases that leave the last token out themselves (0.5.6, LMCache pull 5249)."""


class RepairError(ValueError):
    """The repair does not exist or does not fit; one line."""


def apply(name: str, inner: KVConnectorBase_V1) -> InterventionApplied:
    """Put repair `name` onto `inner`, on the scheduler side; wholly or not at all. Raises `RepairError`."""
    if name not in REPAIRS:
        raise RepairError(f"repair {name!r}: unknown; use one of {', '.join(sorted(REPAIRS))}")
    return InterventionApplied(name=name, functions=REPAIRS[name](innermost(inner)))


class StrictLookup:
    """LMCache's scheduler-side client; what it looks up is without the last known token."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def maybe_submit_lookup_request(self, request_id: str, token_ids: list[int], *args: Any, **options: Any) -> None:
        self._client.maybe_submit_lookup_request(request_id, token_ids[:-1], *args, **options)


def strict_prefix(connector: Any) -> list[PatchedFunction]:
    """Leave the last known token out before LMCache looks up, at both places where it does. Raises `RepairError`."""
    if not is_lmcache(connector):
        raise RepairError(f"repair 'strict-prefix': is for LMCache's connector, not {type(connector).__name__}")
    found = [_pinned(connector, method, known) for method, known in STRICT_PREFIX.items()]
    for method in STRICT_PREFIX:
        setattr(connector, method, _strictly(connector, getattr(connector, method)))
    return found


def _pinned(connector: Any, method: str, known: dict[str, str]) -> PatchedFunction:
    if method in vars(connector):
        raise RepairError(f"repair 'strict-prefix': {method} was replaced already")
    function = getattr(type(connector), method, None)
    if not callable(function):
        raise RepairError(f"repair 'strict-prefix': this release of LMCache has no {method}")
    source = inspect.getsource(function)
    if RESERVES in source:
        raise RepairError("repair 'strict-prefix': this release of LMCache leaves the last token out itself; drop it")
    digest = sha256_hex(source.encode())
    if digest not in known:
        releases = ", ".join(sorted(set(known.values())))
        raise RepairError(
            f"repair 'strict-prefix': {function.__qualname__} has unknown source (sha256 {digest[:12]}…); "
            f"it was written for LMCache {releases}"
        )
    return PatchedFunction(module=function.__module__, qualname=function.__qualname__, source_sha256=digest)


def _strictly(connector: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def looked_up(*args: Any, **options: Any) -> Any:
        client = connector.scheduler_adapter
        connector.scheduler_adapter = StrictLookup(client)
        try:
            return original(*args, **options)
        finally:
            connector.scheduler_adapter = client

    return looked_up


REPAIRS: dict[str, Callable[[Any], list[PatchedFunction]]] = {"strict-prefix": strict_prefix}
