"""The tier over a store that does what a test says: hits, misses, damage, silence. vLLM's own manager drives it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("vllm")

from typing_extensions import override
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from samestate.cache import tier_metrics as metric
from samestate.cache.base import PageInfo, PageKey, PageStore, Read, StoreError, Write
from samestate.cache.breaker import Breaker
from samestate.cache.layout import Span
from samestate.cache.tier import StoreTier

ROWS, ROW = 8, 64
SPANS = {0: (Span(0, 16), Span(32, 40)), 1: (Span(16, 32),)}
"""Group 0 has two pieces of a row, group 1 one."""
LIMIT = 0.4
"""Seconds; what waits for a store that is silent waits that long."""
STEP = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


class DictStore(PageStore):
    """Pages in a dictionary. What a test puts into `trouble` happens before every call."""

    namespace = "test"

    def __init__(self) -> None:
        self.pages: dict[PageKey, bytes] = {}
        self.damaged: set[PageKey] = set()
        self.touched: list[list[PageKey]] = []
        self.trouble: Callable[[], None] = lambda: None
        self.closed = False

    @override
    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        self.trouble()
        return [key in self.pages for key in keys]

    @override
    def read(self, key: PageKey, into: memoryview) -> Read:
        self.trouble()
        if key in self.damaged:
            into[:4] = b"\xff\xff\xff\xff"
            del self.pages[key]
            self.damaged.discard(key)
            return Read.DAMAGED
        if key not in self.pages:
            return Read.MISS
        into[:] = self.pages[key]
        return Read.HIT

    @override
    def write(self, key: PageKey, page: memoryview) -> Write:
        self.trouble()
        if key in self.pages:
            return Write.PRESENT
        self.pages[key] = bytes(page)
        return Write.WRITTEN

    @override
    def touch(self, keys: Sequence[PageKey]) -> None:
        self.touched.append(list(keys))

    @override
    def delete(self, keys: Sequence[PageKey]) -> int:
        return sum(self.pages.pop(key, None) is not None for key in keys)

    @override
    def scan(self) -> Iterator[PageInfo]:
        return (PageInfo(self.namespace, key, len(page), None) for key, page in self.pages.items())

    @override
    def close(self) -> None:
        self.closed = True


class Bench:
    """A tier, its rows, its store, and the requests' contexts."""

    def __init__(self, rows: Any, store: DictStore) -> None:
        self.rows = rows
        self.store = store
        spec = SimpleNamespace()
        self.tier = StoreTier(spec, memoryview(rows), "samestate-disk", url="file:///test", time_limit_s=LIMIT)
        self.tier.use.reading = Breaker(failures=3, first_pause_s=30.0)
        self.tier.use.writing = Breaker(failures=3, first_pause_s=30.0)
        self.adapted: set[str] = set()
        self.jobs = 0

    def open(self) -> None:
        self.tier.open(lambda: self.store, SPANS, "1:samestate-disk", self.adapted)
        assert self.tier.wait_opened(10.0)

    def lookup(self, key: OffloadKey, request: ReqContext) -> LookupResult:
        """As a scheduler does, step by step, until there is an answer."""
        while (found := self.tier.lookup(key, request)) is LookupResult.RETRY:
            self.tier.on_schedule_end(STEP)
            time.sleep(0.002)
        return found

    def move(self, keys: list[OffloadKey], rows: list[int], *, load: bool, wait: bool = True) -> JobResult | None:
        self.jobs += 1
        job = TransferJob(self.jobs, keys, np.array(rows, np.int32), load, context(f"r{self.jobs}"))
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        return self.finished() if wait else None

    def finished(self) -> JobResult:
        while not (results := list(self.tier.get_finished_jobs())):
            time.sleep(0.002)
        (result,) = results
        assert result.job_id == self.jobs
        return result

    def count(self, name: str, *labels: str) -> float:
        return self.tier.counts.totals[name, labels]


@pytest.fixture
def bench() -> Iterator[Bench]:
    one = Bench(np.arange(ROWS * ROW, dtype=np.int64).astype(np.int8).reshape(ROWS, ROW), DictStore())
    yield one
    one.tier.shutdown()


def context(name: str = "r") -> ReqContext:
    return ReqContext(req_id=name)


def key(block: int, group: int) -> OffloadKey:
    return make_offload_key(bytes([block]) * 32, group)


def raise_gone() -> None:
    raise StoreError("the store is gone")


@pytest.mark.sanity
def test_a_page_goes_out_and_comes_back_into_another_row_and_nothing_else_does(bench: Bench) -> None:
    bench.open()
    saved = bench.rows[2].copy()
    result = bench.move([key(1, 0), key(1, 1)], [2, 3], load=False)
    assert (result.success, result.transfer_bytes) == (True, 40)
    assert bench.store.pages[PageKey(key(1, 0))] == saved[0:16].tobytes() + saved[32:40].tobytes()

    before = bench.rows.copy()
    assert bench.lookup(key(1, 0), context()) is LookupResult.HIT
    result = bench.move([key(1, 0)], [6], load=True)
    assert (result.success, result.transfer_bytes) == (True, 24)
    assert (bench.rows[6, 0:16] == saved[0:16]).all()
    assert (bench.rows[6, 32:40] == saved[32:40]).all()
    untouched = np.ones((ROWS, ROW), bool)
    untouched[6, 0:16] = untouched[6, 32:40] = False
    assert (bench.rows[untouched] == before[untouched]).all()


def test_the_first_writer_wins(bench: Bench) -> None:
    bench.open()
    bench.store.pages[PageKey(key(1, 0))] = b"theirs"
    result = bench.move([key(1, 0)], [2], load=False)
    assert (result.success, result.transfer_bytes) == (True, 0)
    assert bench.store.pages[PageKey(key(1, 0))] == b"theirs"
    assert bench.count(metric.UNSTORED_PAGES, "present") == 1


def test_what_is_not_there_is_a_miss_and_counted_once(bench: Bench) -> None:
    bench.open()
    request = context()
    assert [bench.lookup(key(9, 0), request) for _ in range(3)] == [LookupResult.MISS] * 3
    assert bench.count(metric.MISSES, "absent") == 1


def test_a_request_finds_what_was_saved_since_it_first_asked(bench: Bench) -> None:
    bench.open()
    request = context()
    assert bench.lookup(key(1, 0), request) is LookupResult.MISS
    bench.move([key(1, 0)], [0], load=False)
    assert bench.lookup(key(1, 0), request) is LookupResult.HIT


def test_a_damaged_page_takes_its_family_and_no_other_with_it(bench: Bench) -> None:
    bench.open()
    pages = [key(1, 0), key(1, 1), key(2, 0), key(2, 1)]
    bench.move(pages, [0, 1, 2, 3], load=False)
    bench.store.damaged.add(PageKey(key(2, 0)))
    before, request = bench.rows.copy(), context()
    for one in pages:
        assert bench.lookup(one, request) is LookupResult.HIT
    result = bench.move(pages, [4, 5, 6, 7], load=True)
    assert not result.success
    assert result.successful_keys == (key(1, 0), key(1, 1))
    assert (bench.rows[6] == before[6]).all(), "bytes of a damaged page reached a row"
    assert bench.count(metric.DAMAGED_PAGES) == 1
    assert bench.count(metric.MISSES, "damaged") == 1
    # The request that waits for it is not sent again and again.
    assert bench.lookup(key(2, 0), request) is LookupResult.MISS
    assert bench.lookup(key(2, 1), request) is LookupResult.MISS


def test_a_page_that_vanished_since_it_was_seen_is_a_miss(bench: Bench) -> None:
    bench.open()
    result = bench.move([key(5, 0)], [1], load=True)
    assert (result.success, result.successful_keys) == (False, None)
    assert bench.count(metric.MISSES, "lost") == 1
    assert bench.count(metric.DAMAGED_PAGES) == 0


def test_a_store_that_fails_is_left_alone_after_three_failures(bench: Bench) -> None:
    bench.open()
    bench.store.trouble = raise_gone
    for block in range(3):
        assert bench.lookup(key(block, 0), context(f"a{block}")) is LookupResult.MISS
    assert bench.count(metric.MISSES, "failed") == 3
    bench.store.trouble = lambda: None
    bench.store.pages[PageKey(key(7, 0))] = bytes(24)
    assert bench.tier.lookup(key(7, 0), context("b")) is LookupResult.MISS, "at once, without asking"
    assert bench.count(metric.MISSES, "paused") == 1
    result = bench.move([key(7, 0)], [1], load=True)
    assert not result.success
    assert bench.count(metric.MISSES, "paused") == 2
    assert (bench.count(metric.PAUSES, "reads"), bench.count(metric.PAUSES, "writes")) == (1, 0)
    assert bench.move([key(8, 0)], [1], load=False).success, "writing has not failed"


def test_what_one_tier_is_not_asked_for_another_one_is(bench: Bench) -> None:
    """Both see the same request: it does without the first, and not without the second."""
    bench.open()
    other = Bench(bench.rows, DictStore())
    other.open()
    other.store.pages[PageKey(key(1, 0))] = bytes(24)
    for _ in range(3):
        bench.tier.use.reading.failed()
    request = context()
    assert bench.lookup(key(1, 0), request) is LookupResult.MISS
    assert other.lookup(key(1, 0), request) is LookupResult.HIT
    other.tier.shutdown()


def test_a_full_disk_is_read_from_all_the_same(bench: Bench) -> None:
    bench.open()
    saved = bench.rows[0].copy()
    bench.move([key(1, 0)], [0], load=False)

    def full(key: PageKey, page: memoryview) -> Write:
        raise StoreError("No space left on device")

    bench.store.write = full  # type: ignore[method-assign]
    for block in range(2, 5):
        assert not bench.move([key(block, 0)], [1], load=False).success
    assert not bench.move([key(5, 0)], [1], load=False).success
    assert bench.count(metric.UNSTORED_PAGES, "failed") == 3
    assert bench.count(metric.UNSTORED_PAGES, "paused") == 1
    assert bench.lookup(key(1, 0), context("later")) is LookupResult.HIT
    assert bench.move([key(1, 0)], [6], load=True).success
    assert (bench.rows[6, :16] == saved[:16]).all()
    stats = bench.tier.get_stats()
    assert stats is not None
    values = stats.reduce()
    paused = {what: values[f"{metric.PAUSED}:('1:samestate-disk', '{what}')"] for what in ("reads", "writes")}
    assert paused == {"reads": 0, "writes": 1}


def test_a_silent_store_is_a_miss_within_the_limit(bench: Bench) -> None:
    bench.open()
    answers = threading.Event()
    bench.store.trouble = lambda: answers.wait(20.0) and None
    assert bench.lookup(key(1, 0), context()) is LookupResult.MISS
    assert bench.count(metric.MISSES, "slow") == 1
    # The answer comes after all: it is for others.
    bench.store.pages[PageKey(key(1, 0))] = bytes(24)
    bench.store.trouble = lambda: None
    answers.set()
    bench.tier.use.reading.succeeded()
    assert bench.lookup(key(1, 0), context("later")) is LookupResult.HIT


def test_a_load_that_stands_still_is_given_up_and_what_comes_later_goes_nowhere(bench: Bench) -> None:
    bench.open()
    bench.move([key(1, 0)], [0], load=False)
    answers, reached = threading.Event(), threading.Event()

    def silent() -> None:
        reached.set()
        answers.wait(20.0)

    bench.store.trouble = silent
    before = bench.rows.copy()
    result = bench.move([key(1, 0)], [5], load=True)
    assert not result.success
    assert bench.count(metric.MISSES, "slow") == 1
    assert reached.is_set()
    answers.set()
    bench.tier._pool.wait_idle()
    assert (bench.rows == before).all()


def test_draining_waits_for_what_is_open_and_not_for_ever(bench: Bench) -> None:
    bench.open()
    answers = threading.Event()
    bench.store.trouble = lambda: answers.wait(20.0) and None
    bench.move([key(1, 0)], [0], load=False, wait=False)
    bench.tier.drain_jobs()
    assert not bench.finished().success
    answers.set()
    bench.store.trouble = lambda: None
    bench.move([key(2, 0)], [0], load=False, wait=False)
    bench.tier.drain_jobs()
    assert bench.finished().success


def test_while_it_is_being_opened_requests_wait_a_little_and_go_on(bench: Bench) -> None:
    opened = threading.Event()

    def slow() -> PageStore:
        opened.wait(20.0)
        return bench.store

    bench.tier.open(slow, SPANS, "1:x", set())
    assert bench.tier.lookup(key(1, 0), context("a")) is LookupResult.RETRY
    assert bench.lookup(key(1, 0), context("b")) is LookupResult.MISS
    assert bench.count(metric.MISSES, "unopened") == 1
    assert not bench.move([key(1, 0)], [0], load=False).success
    assert bench.count(metric.UNSTORED_PAGES, "unopened") == 1
    opened.set()


def test_a_tier_that_nobody_opens_is_a_miss_at_once(bench: Bench) -> None:
    assert bench.tier.lookup(key(1, 0), context()) is LookupResult.MISS
    assert bench.count(metric.MISSES, "unopened") == 1


def test_opening_is_tried_again(bench: Bench) -> None:
    tries: list[int] = []

    def open_store() -> PageStore:
        tries.append(1)
        if len(tries) == 1:
            raise_gone()
        return bench.store

    bench.tier.open(open_store, SPANS, "1:x", set())
    assert bench.tier.wait_opened(20.0)
    assert len(tries) == 2


def test_what_cannot_be_opened_at_all_is_a_miss_at_once(bench: Bench) -> None:
    def refuse() -> PageStore:
        raise ValueError("no such place")

    bench.tier.open(refuse, SPANS, "1:x", set())
    assert not bench.tier.wait_opened(10.0)
    assert bench.tier.lookup(key(1, 0), context()) is LookupResult.MISS


def test_requests_with_an_adapter_are_left_out(bench: Bench) -> None:
    bench.open()
    bench.move([key(1, 0)], [0], load=False)
    bench.adapted.add("adapted")
    assert bench.lookup(key(1, 0), context("adapted")) is LookupResult.MISS
    assert bench.lookup(key(1, 0), context("plain")) is LookupResult.HIT
    assert bench.count(metric.MISSES, "adapter") == 1
    bench.tier.on_request_finished(context("adapted"))
    assert not bench.adapted


def test_a_request_that_is_over_has_used_its_prefix_from_the_first_page_on(bench: Bench) -> None:
    bench.open()
    request = context()
    for block in (2, 1):
        request.set_offload_key_position(key(block, 0), block * 16)
    bench.tier.on_request_finished(request)
    bench.tier._pool.wait_idle()
    assert bench.store.touched == [[PageKey(key(1, 0)), PageKey(key(2, 0))]]


def test_forgetting_removes_every_page_and_says_when_it_could_not(bench: Bench) -> None:
    bench.open()
    bench.move([key(1, 0), key(1, 1)], [0, 1], load=False)
    assert bench.tier.forget(10.0)
    assert bench.store.pages == {}
    bench.store.scan = raise_gone  # type: ignore[method-assign]
    assert not bench.tier.forget(0.2)


@pytest.mark.regression
def test_forgetting_waits_for_a_write_that_hangs_after_its_job_was_given_up(bench: Bench) -> None:
    """Else its page, of weights that are gone perhaps, comes when everything is said to be removed."""
    bench.open()
    written, hangs, go_on = bench.store.write, threading.Event(), threading.Event()

    def hang(key: PageKey, page: memoryview) -> Write:
        hangs.set()
        assert go_on.wait(10)
        return written(key, page)

    bench.store.write = hang  # type: ignore[method-assign]
    result = bench.move([key(1, 0)], [0], load=False)
    assert result is not None and not result.success and hangs.is_set()
    assert not bench.tier.forget(0.2), "not done, while a page may still come"
    threading.Timer(0.2, go_on.set).start()
    assert bench.tier.forget(10.0)
    assert bench.store.pages == {}


@pytest.mark.regression
def test_forgetting_does_not_wait_for_a_read_that_hangs(bench: Bench) -> None:
    bench.open()
    bench.move([key(1, 0), key(2, 0)], [0, 1], load=False)
    go_on = threading.Event()

    def hang(key: PageKey, into: memoryview) -> Read:
        assert go_on.wait(10)
        return Read.MISS

    bench.store.read = hang  # type: ignore[method-assign]
    bench.move([key(1, 0)], [0], load=True)
    assert bench.tier.forget(5.0)
    assert bench.store.pages == {}
    go_on.set()


def test_the_end_lets_go_of_rows_and_store_and_finishes_what_was_begun(bench: Bench) -> None:
    bench.open()
    bench.move([key(1, 0)], [0], load=False, wait=False)
    bench.tier.shutdown()
    assert PageKey(key(1, 0)) in bench.store.pages
    assert bench.store.closed


def test_what_was_counted_reaches_prometheus_under_vllms_naming(bench: Bench) -> None:
    bench.open()
    bench.move([key(1, 0)], [0], load=False)
    stats = bench.tier.get_stats()
    assert stats is not None
    values = stats.reduce()
    assert values[f"{metric.STORED_PAGES}:('1:samestate-disk',)"] == 1
    assert values[f"{metric.STORED_BYTES}:('1:samestate-disk',)"] == 24
    assert {name.partition(":(")[0] for name in values} <= metric.definitions().keys()
    assert all(name.startswith("vllm:kv_offload_tier_") for name in metric.definitions())


# --- the breaker ----------------------------------------------------------------------------------


def test_pauses_double_until_a_call_works() -> None:
    now = [0.0]
    breaker = Breaker(failures=2, first_pause_s=1.0, longest_pause_s=3.0, clock=lambda: now[0])
    assert not breaker.failed()
    assert not breaker.paused
    lengths = []
    for _ in range(3):
        assert breaker.failed()
        began = now[0]
        while breaker.paused:
            now[0] += 0.5
        lengths.append(now[0] - began)
    assert lengths == [1.0, 2.0, 3.0]
    breaker.succeeded()
    assert not breaker.failed(), "one failure after a success is no pause"
    assert breaker.failed()
    assert breaker.paused
    assert breaker.pauses == 4
