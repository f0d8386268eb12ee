"""Whether a tier's store is used just now: to read, and to write."""

from __future__ import annotations

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import ReqContext

from samestate.cache import tier_metrics as metric
from samestate.cache.breaker import Breaker
from samestate.cache.tier_metrics import Counts
from samestate.cache.tier_opening import OpenedStore

logger = init_logger(__name__)


class Use:
    """See the module. Reading and writing are paused apart.

    Attributes:
        adapted: Requests with an adapter.

    """

    def __init__(self, url: str, opened: OpenedStore, counts: Counts) -> None:
        self.reading = Breaker()
        self.writing = Breaker()
        self.adapted: set[str] = set()
        self.counts = counts
        self._url = url
        self._opened = opened

    def out_of_use(self, req_context: ReqContext, breaker: Breaker) -> str | None:
        """Why the store is not used for this request at all, be it to read or to write."""
        if req_context.req_id in self.adapted:
            return "adapter"
        if self._opened.refused or not self._opened.begun:
            return "unopened"
        return "paused" if breaker.paused else None

    def failed(self, breaker: Breaker, why: str) -> None:
        """A call failed, or took too long."""
        if breaker.failed():
            what = metric.READS if breaker is self.reading else metric.WRITES
            self.counts.add(metric.PAUSES, 1, what)
            logger.warning("%s: no %s for a while: %s", self._url, what, why)
