"""What a store lost is asked of memory once, and not what is on its way."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from types import SimpleNamespace

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import TransferJob

from cache.test_tier import SPANS, DictStore
from samestate.cache.base import PageKey, Write
from samestate.cache.tier import StoreTier
from samestate.cache.tier_refill import PAGES_A_STEP, PREFIXES, Refill, refills


class Memory:
    """The memory tier, as vLLM shows it to a secondary tier: which keys are there, and what was asked and ordered."""

    def __init__(self, there: Iterable[OffloadKey]) -> None:
        self.there = set(there)
        self.asked: list[OffloadKey] = []
        self.ordered: list[list[OffloadKey]] = []
        self.open: set[str] = set()

    def on_new_request(self, context: ReqContext) -> None:
        assert refills(context)
        self.open.add(context.req_id)

    def lookup(self, key: OffloadKey, context: ReqContext) -> LookupResult:
        assert context.req_id in self.open
        self.asked.append(key)
        return LookupResult.HIT if key in self.there else LookupResult.MISS

    def create_store_job(self, keys: Collection[OffloadKey], context: ReqContext) -> TransferJob:
        self.ordered.append(list(keys))
        rows = np.arange(len(keys), dtype=np.int32)
        return TransferJob(1000 + len(self.ordered), list(keys), rows, False, context)

    def on_request_finished(self, context: ReqContext) -> None:
        self.open.remove(context.req_id)


def keys(*numbers: int) -> list[OffloadKey]:
    return [make_offload_key(number.to_bytes(4, "big") * 8, 0) for number in numbers]


def lacking(refill: Refill, prefix: list[OffloadKey], missing: list[OffloadKey]) -> None:
    refill.lacks(prefix, [key not in missing for key in prefix])


def test_what_is_missing_and_in_memory_is_ordered_once() -> None:
    memory, refill = Memory(keys(1, 2)), Refill()
    lacking(refill, keys(1, 2, 3), keys(2, 3))
    job = refill.order(memory)  # type: ignore[arg-type]
    assert job is not None and list(job.keys) == keys(2)
    assert memory.asked == keys(2, 3)
    assert refill.order(memory) is None  # type: ignore[arg-type]
    assert memory.ordered == [keys(2)]
    assert not memory.open, "what was asked for it is over"


def test_a_whole_store_lacks_nothing_and_memory_is_asked_nothing() -> None:
    memory, refill = Memory(keys(1)), Refill()
    lacking(refill, keys(1), [])
    assert refill.order(memory) is None  # type: ignore[arg-type]
    assert memory.asked == []


def test_what_memory_cannot_have_is_not_asked_of_it() -> None:
    memory, refill = Memory(keys(1, 2)), Refill()
    refill.in_memory = lambda key: key in keys(2)
    lacking(refill, keys(1), keys(1))
    lacking(refill, keys(1, 2), keys(1, 2))
    assert refill.order(memory) is not None  # type: ignore[arg-type]
    assert memory.asked == keys(2)


def test_so_many_a_step_and_the_rest_in_the_next() -> None:
    prefix = keys(*range(PAGES_A_STEP + 3))
    memory, refill = Memory(prefix), Refill()
    lacking(refill, prefix, prefix)
    while refill.order(memory) is not None:  # type: ignore[arg-type]
        pass
    assert [len(one) for one in memory.ordered] == [PAGES_A_STEP, 3]
    assert [key for one in memory.ordered for key in one] == prefix


def test_the_oldest_prefixes_are_dropped_and_a_reset_drops_all() -> None:
    memory, refill = Memory(keys(*range(1000))), Refill()
    for number in range(PREFIXES + 2):
        lacking(refill, keys(number), keys(number))
    refill.order(memory)  # type: ignore[arg-type]
    assert memory.asked == keys(2)
    refill.clear()
    assert refill.order(memory) is None  # type: ignore[arg-type]


@pytest.mark.regression
def test_a_page_that_is_being_saved_is_not_ordered_again() -> None:
    """A request may be over, and its prefix looked at, before its pages are in the store: its job is still open."""
    store = DictStore()
    written, saving, go_on = store.write, threading.Event(), threading.Event()

    def wait(key: PageKey, page: memoryview) -> Write:
        saving.set()
        assert go_on.wait(10)
        return written(key, page)

    store.write = wait  # type: ignore[method-assign]
    rows = np.zeros((8, 64), np.int8)
    tier = StoreTier(SimpleNamespace(), memoryview(rows), "samestate-disk", url="test:", time_limit_s=60.0)  # type: ignore[arg-type]
    tier.open(lambda: store, SPANS, "1:samestate-disk", set())
    assert tier.wait_opened(10)
    request, memory = ReqContext(req_id="r"), Memory(keys(1, 2))
    for number, one in enumerate(keys(1, 2), 1):
        request.set_offload_key_position(one, number)
    tier.submit_store(TransferJob(1, keys(1), np.zeros(1, np.int32), False, request))
    assert saving.wait(10)
    tier.on_request_finished(request)
    while not tier.refill._lost:
        go_on.wait(0.001)
    tier.serve_external_requests(memory)  # type: ignore[arg-type]
    assert memory.ordered == [keys(2)], "only what no job has"
    go_on.set()
    done: list[int] = []
    while len(done) < 2:
        done += [result.job_id for result in tier.get_finished_jobs()]
    assert store.pages.keys() == set(map(PageKey, keys(1, 2)))
    # Reported, and lost afterwards: now it is ordered.
    del store.pages[PageKey(keys(1)[0])]
    tier.on_request_finished(request)
    tier._pool.wait_idle()
    tier.serve_external_requests(memory)  # type: ignore[arg-type]
    assert memory.ordered == [keys(2), keys(1)]
    tier.shutdown()
