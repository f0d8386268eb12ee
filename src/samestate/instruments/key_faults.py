"""Faults of keys, of counters and of resets: what belongs to which prompt, and what is said of it."""

from __future__ import annotations

from copy import copy
from inspect import signature
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.metrics.stats import PrefixCacheStats

from samestate.instruments.faults import Audited, FaultError, Undo
from samestate.instruments.lookup_faults import SchedulerFault

if TYPE_CHECKING:
    from vllm.v1.request import Request

# --- keys -----------------------------------------------------------------------------------------


class _Rekeyed:
    """A request as the connector sees it, with other block hashes."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def __getattr__(self, name: str) -> object:
        return getattr(self._request, name)


class _Unsalted(_Rekeyed):
    """Without its cache salt."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._twin = copy(request)
        self._twin.cache_salt = None
        self._twin.block_hashes = []

    @property
    def block_hashes(self) -> list[BlockHash]:
        self._twin.update_block_hashes()  # the twin has the same list of tokens
        return self._twin.block_hashes


class _Shortened(_Rekeyed):
    """With hashes of so few bits that none is left to tell two prompts apart: only the position is."""

    @property
    def block_hashes(self) -> list[BlockHash]:
        return [BlockHash(position.to_bytes(32, "big")) for position, _ in enumerate(self._request.block_hashes)]


class KeyFault(SchedulerFault):
    """Gives requests that come while it is armed other keys, for saves and lookups alike."""

    seen_as: ClassVar[type[_Rekeyed]]

    @override
    def act(self, on: Audited, undo: Undo) -> None:
        scheduler = on.inner.scheduler
        on_new_request = scheduler.on_new_request

        def rekeyed(request: Request) -> None:
            on_new_request(request)
            scheduler._req_status[request.request_id].req = self.seen_as(request)

        undo.patch(scheduler, "on_new_request", rekeyed)


class SaltIgnored(KeyFault):
    """Leaves the cache salt out of the key."""

    seen_as = _Unsalted


class ShortHash(KeyFault):
    """Cuts keys to a few bits (here to none), and two prompts meet."""

    seen_as = _Shortened


# --- counters and resets --------------------------------------------------------------------------


class CounterFault(SchedulerFault):
    """Counts other numbers of what the connector was asked for and found."""

    queries = hits = 1
    """How often each token is counted."""

    @override
    def act(self, on: Audited, undo: Undo) -> None:
        record = PrefixCacheStats.record
        if "hits_by_source" not in signature(record).parameters:
            raise FaultError("a fault of counters needs a vLLM that says where a connector's hits came from")

        def counted(stats: PrefixCacheStats, num_tokens: int, num_hits: int, *rest: object, **more: object) -> None:
            # Only a connector's hits come with their source; the local cache is counted by another class's object.
            own = "hits_by_source" in more
            more = more | {"hits_by_source": None} if own else more
            times = (self.queries, self.hits) if own else (1, 1)
            record(stats, num_tokens * times[0], num_hits * times[1], *rest, **more)

        undo.patch(PrefixCacheStats, "record", counted)


class HitsSilent(CounterFault):
    """The hit counter stays at 0."""

    hits = 0


class HitsOvercounted(CounterFault):
    """The hit counter counts every prefix twice."""

    hits = 2


class QueriesDoubled(CounterFault):
    """The query counter counts every request twice."""

    queries = 2


class ResetKeepsLocal(SchedulerFault):
    """A reset of the local cache is confirmed and changes nothing."""

    @override
    def act(self, on: Audited, undo: Undo) -> None:
        undo.patch(BlockPool, "reset_prefix_cache", lambda pool: True)
