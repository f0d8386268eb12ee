"""What a tier's store has: asked by a thread, answered a step later, and never waited for."""

from __future__ import annotations

import time
from collections.abc import Iterable

from typing_extensions import override
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager, LookupPhase

from samestate.cache import tier_metrics as metric
from samestate.cache.base import StoreError
from samestate.cache.tier_opening import OpenedStore
from samestate.cache.tier_pages import page_key
from samestate.cache.tier_use import Use


class _Requested:
    """What a tier remembers of a request: when it asked first, key by key, and what it was told to do without."""

    def __init__(self) -> None:
        self.asked: dict[OffloadKey, float] = {}
        self.missed: set[OffloadKey] = set()


class _ByTier(dict["Lookups", _Requested]):
    """In a request's context, which all tiers share."""


class Lookups(AsyncLookupManager):
    """vLLM's own, asking a store; a thread that the store holds up does not hold up the engine's end.

    Args:
        time_limit_s: The longest that a look-up may take.

    """

    def __init__(self, tier_type: str, opened: OpenedStore, use: Use, time_limit_s: float) -> None:
        self._opened = opened
        self._use = use
        self._limit = time_limit_s
        super().__init__(tier_type=tier_type)

    def answer(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """As `SecondaryTierManager.lookup`."""
        requested = self._requested(req_context)
        if key in requested.missed:
            return LookupResult.MISS
        reason = self._use.out_of_use(req_context, self._use.reading)
        if reason is not None:
            # What was asked before is counted where it is answered.
            return self._miss(requested, key, None if key in requested.asked else reason)
        asked = requested.asked.setdefault(key, time.monotonic())
        found = self.lookup(key, req_context) if self._opened.store is not None else None
        if found:
            return LookupResult.HIT
        if found is not None:
            return LookupResult.MISS
        if time.monotonic() - asked <= self._limit:
            return LookupResult.RETRY
        self._use.failed(self._use.reading, "a look-up was not answered in time")
        return self._miss(requested, key, "slow" if self._opened.store is not None else "unopened")

    @override
    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        store = self._opened.store
        if store is None or self._use.reading.paused:
            self._use.counts.add(metric.MISSES, len(keys), "paused")
            return [False] * len(keys)
        try:
            found = store.contains([page_key(key) for key in keys])
        except StoreError as error:
            self._use.failed(self._use.reading, str(error))
            self._use.counts.add(metric.MISSES, len(keys), "failed")
            return [False] * len(keys)
        self._use.reading.succeeded()
        self._use.counts.add(metric.MISSES, found.count(False), "absent")
        return found

    def mark_present(self, keys: Iterable[OffloadKey]) -> None:
        """They were saved since: a request that was preempted may find again what it lacked when it came."""
        for key in keys:
            state = self._lookup_state.get(key)
            if state is not None and state.phase is LookupPhase.RESOLVED:
                state.result = True

    @override
    def shutdown(self) -> None:
        self._lookup_queue.put(None)
        self._thread.join(self._limit)

    def _requested(self, req_context: ReqContext) -> _Requested:
        tiers = req_context.get_state(_ByTier)
        if tiers is None:
            req_context.set_state(tiers := _ByTier())
        return tiers.setdefault(self, _Requested())

    def _miss(self, requested: _Requested, key: OffloadKey, reason: str | None) -> LookupResult:
        """A miss for this request for good, whatever the store may answer later."""
        requested.missed.add(key)
        if reason is not None:
            self._use.counts.add(metric.MISSES, 1, reason)
        return LookupResult.MISS
