"""Memory tier, families and a store behind them under vLLM's own tiering manager: what is loaded is what was stored."""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("vllm")

from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from cache.kept import SPACE
from cache.test_tier import DictStore
from samestate.cache import tier_metrics as metric
from samestate.cache.base import Groups, PageKey, PageStore
from samestate.cache.envelope import HEADER_BYTES
from samestate.cache.family_policy import FamilyPolicy
from samestate.cache.layout import Span
from samestate.cache.stores.disk import DiskPlace
from samestate.cache.tier import StoreTier

STATES, PAGES = (0, 1), (2,)
ROW = 4096
SPANS = {0: (Span(0, 100),), 1: (Span(100, 300), Span(400, 500)), 2: (Span(0, 700),)}
STEP = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


def content(key: OffloadKey) -> bytes:
    """The bytes of a key's page, spread over its spans."""
    size = sum(span.end - span.start for span in SPANS[int.from_bytes(key[-4:], "big")])
    return hashlib.shake_128(bytes(key)).digest(size)


def keys_at(prompt: str, boundary: int, groups: tuple[int, ...]) -> list[OffloadKey]:
    return [make_offload_key(prompt[:boundary].encode().ljust(32, b"\0"), group) for group in groups]


class Engine:
    """vLLM's scheduler towards its offloading manager, one request at a time; rows are written and read here."""

    def __init__(self, rows: int, store: PageStore, policy: str = "FamilyPolicy") -> None:
        self.region = SharedOffloadRegion(f"test-{os.getpid()}-{random.getrandbits(32)}", rows, None, ROW, ROW)
        primary = CPUPrimaryTierOffloadingManager(rows, self.region, policy, "samestate.cache.family_policy")
        self.policy: FamilyPolicy = primary._policy
        self.policy.configure(PAGES, STATES, ROW)
        self.tier = StoreTier(
            SimpleNamespace(), primary.get_kv_memoryview(), "samestate-disk", url="test:", read_threads=2
        )
        self.manager = TieringOffloadingManager(primary, [self.tier])
        self.tier.refill.in_memory = self.policy.has
        self.tier.open(lambda: store, SPANS, "1:samestate-disk", set())
        assert self.tier.wait_opened(10)
        self.requests = 0

    @property
    def rows(self) -> np.ndarray:
        return np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)

    def serve(self, prompt: str, *, over: bool = True) -> int:
        """Chunks that were reused; everything loaded is compared with what belongs there. `over`: the tiers hear so."""
        self.requests += 1
        context = ReqContext(req_id=f"r{self.requests}")
        for boundary in range(1, len(prompt) + 1):
            for key in keys_at(prompt, boundary, (*STATES, *PAGES)):
                context.set_offload_key_position(key, boundary)
        self.manager.on_new_request(context)
        while (hit := self._hit(prompt, context)) is None:
            self.step()
        if hit:
            self._load(prompt, hit, context)
        self._store(prompt, hit, context)
        if over:
            self.manager.on_request_finished(context)
        self.step()
        return hit

    def step(self) -> None:
        self.manager.on_schedule_end(STEP)
        time.sleep(0.0002)

    def settle(self) -> None:
        while self.manager.has_pending_work():
            self.step()

    def close(self) -> None:
        self.settle()
        self.manager.shutdown()

    def _hit(self, prompt: str, context: ReqContext) -> int | None:
        """As `OffloadingConnectorScheduler._lookup_complete_chunks`: pages from the first on, then the last state."""
        pending = False

        def there(boundary: int, groups: tuple[int, ...]) -> bool:
            nonlocal pending
            found = [self.manager.lookup(key, context) for key in keys_at(prompt, boundary, groups)]
            pending |= any(one in (LookupResult.RETRY, LookupResult.HIT_PENDING) for one in found)
            return all(one is not LookupResult.MISS for one in found)

        pages = 0
        while pages < len(prompt) and there(pages + 1, PAGES):
            pages += 1
        hit = next((boundary for boundary in range(pages, 0, -1) if there(boundary, STATES)), 0)
        return None if pending else hit

    def _load(self, prompt: str, hit: int, context: ReqContext) -> None:
        keys = [key for boundary in range(1, hit + 1) for key in keys_at(prompt, boundary, PAGES)]
        keys += keys_at(prompt, hit, STATES)
        spec = self.manager.prepare_load(keys, context)
        for key, row in zip(keys, spec.chunk_ids, strict=True):
            spans = SPANS[int.from_bytes(key[-4:], "big")]
            loaded = b"".join(self.rows[row][span.start : span.end].tobytes() for span in spans)
            assert loaded == content(key), "another page, or a damaged one, was served"
        self.manager.complete_load(keys, context)

    def _store(self, prompt: str, hit: int, context: ReqContext) -> None:
        pages = [key for boundary in range(hit + 1, len(prompt) + 1) for key in keys_at(prompt, boundary, PAGES)]
        for keys in [*[[key] for key in keys_at(prompt, len(prompt), STATES)], pages]:
            output = self.manager.prepare_store(keys, context) if keys else None
            if output is None or not output.keys_to_store:
                continue
            for key, row in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
                at, page = 0, content(key)
                self.rows[row][:] = 0xEE  # left over from others
                for span in SPANS[int.from_bytes(key[-4:], "big")]:
                    size = span.end - span.start
                    self.rows[row][span.start : span.end] = np.frombuffer(page[at : at + size], np.uint8)
                    at += size
            self.manager.complete_store(output.keys_to_store, context)


@pytest.fixture
def store() -> Iterator[DictStore]:
    yield DictStore()


@pytest.mark.sanity
def test_what_one_engine_stored_the_next_one_loads(store: DictStore) -> None:
    first = Engine(16, store)
    assert [first.serve("abc"), first.serve("abc")] == [0, 3]
    first.close()
    assert all(page == content(OffloadKey(key)) for key, page in store.pages.items()), "only the group's own bytes"
    second = Engine(16, store)
    assert [second.serve("abcd"), second.serve("ab"), second.serve("abc")] == [3, 0, 3]
    assert second.policy.index.orphan_bytes == 0
    second.close()


def test_a_memory_tier_smaller_than_the_work_lives_off_the_store(store: DictStore) -> None:
    engine = Engine(6, store)
    for prompt in ("abc", "xyz", "uv", "w"):
        assert engine.serve(prompt) == 0
        engine.settle()
    assert [engine.serve(prompt) for prompt in ("abc", "xyz", "uv", "w")] == [3, 3, 2, 1]
    assert engine.policy.index.evicted > 0
    engine.settle()
    engine.close()


def test_a_folder_goes_by_families_though_its_last_request_is_never_over(tmp_path: Path) -> None:
    """A real layout: a page at each boundary, two states of other sizes at the last. Room for two prompts of four.

    vLLM says that a request is over in the step after it, and of the last one never.
    """
    prompt_bytes = 3 * (HEADER_BYTES + 700) + (HEADER_BYTES + 100) + (HEADER_BYTES + 300)
    hits: list[list[int]] = []
    for prompts in (["abc", "def"], ["ghi", "jkl"], ["ghi", "jkl"]):
        store = DiskPlace(tmp_path / "pages", 2 * prompt_bytes).store(SPACE)
        store.describe(Groups(frozenset(PAGES), frozenset(STATES)))
        engine = Engine(16, store)
        hits.append([engine.serve(prompts[0]), engine.serve(prompts[1], over=False)])
        engine.settle()
        assert (store.orphan_bytes, store.measure_orphans()) == (0, 0)
        assert sum(info.stored_bytes for info in store.scan()) == 2 * prompt_bytes
        engine.close()
    assert hits == [[0, 0], [0, 0], [3, 3]]


def test_what_the_store_lost_is_written_again_while_memory_has_it(store: DictStore) -> None:
    engine = Engine(16, store)
    engine.serve("abc")
    engine.serve("abc")
    engine.settle()
    whole = dict(store.pages)
    assert whole
    everything = [OffloadKey(key) for key in whole]
    for known, lost in [
        (True, keys_at("abc", 1, PAGES)),
        (True, everything),
        (False, keys_at("abc", 3, STATES)),  # as under a policy of vLLM's
    ]:
        engine.tier.refill.in_memory = engine.policy.has if known else lambda key: True
        for one in lost:
            del store.pages[PageKey(one)]
        assert engine.serve("abc") == 3, "it comes from memory"
        until = time.monotonic() + 10
        while store.pages != whole and time.monotonic() < until:
            engine.step()
        assert store.pages == whole
    assert engine.tier.counts.totals[metric.STORED_PAGES, ()] == len(whole) + 1 + len(STATES) + len(whole)
    engine.settle()
    assert all(chunk.ref_cnt == 0 for chunk in engine.policy._chunks.values())
    engine.close()
    again = Engine(16, store)
    assert again.serve("abc") == 3
    again.close()


def test_what_neither_has_is_not_written_and_a_store_that_is_dear_to_ask_is_not_asked(store: DictStore) -> None:
    engine = Engine(16, store)
    engine.serve("ab")
    engine.settle()
    engine.manager.reset_cache()
    store.pages.clear()
    engine.serve("ab")  # computed, and saved, anew
    engine.settle()
    stored = engine.tier.counts.totals[metric.STORED_PAGES, ()]
    engine.manager.reset_cache()
    store.pages.clear()
    context = ReqContext(req_id="gone")
    for key in keys_at("ab", 2, PAGES):
        context.set_offload_key_position(key, 2)
    engine.manager.on_new_request(context)
    engine.manager.on_request_finished(context)
    engine.tier._pool.wait_idle()
    for _ in range(5):
        engine.step()
    assert engine.tier.counts.totals[metric.STORED_PAGES, ()] == stored
    engine.serve("ab")
    engine.settle()
    store.cheap_to_ask = False
    store.pages.clear()
    engine.serve("ab")
    engine.tier._pool.wait_idle()
    for _ in range(5):
        engine.step()
    assert store.pages == {}
    engine.close()


def test_a_damaged_page_costs_its_boundary_and_heals(store: DictStore) -> None:
    first = Engine(16, store)
    first.serve("ab")
    first.close()
    (page,) = keys_at("ab", 2, PAGES)
    store.damaged.add(PageKey(page))
    second = Engine(16, store)
    assert second.serve("ab") == 0, "the only state lies behind the damage"
    assert second.tier.counts.totals[metric.DAMAGED_PAGES, ()] == 1
    second.close()
    third = Engine(16, store)
    assert third.serve("ab") == 2
    third.close()


@settings(max_examples=25, deadline=None)
@given(
    prompts=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=25),
    rows=st.integers(6, 14),
    policy=st.sampled_from(["FamilyPolicy", "FamilyValuePolicy"]),
    seed=st.integers(0, 2**16),
)
def test_nothing_wrong_is_loaded_whatever_is_damaged(prompts: list[str], rows: int, policy: str, seed: int) -> None:
    rng, store = random.Random(seed), DictStore()
    for _ in range(2):  # the second engine starts with what the first one left
        engine = Engine(rows, store, policy)
        for prompt in prompts:
            engine.serve(prompt)
            if store.pages and rng.random() < 0.2:
                store.damaged.add(rng.choice(sorted(store.pages)))
        engine.settle()
        chunks = engine.policy._chunks
        assert engine.policy.index.bytes == ROW * len(chunks) <= ROW * rows
        assert all(chunk.ref_cnt == 0 for chunk in chunks.values()), "a page is pinned for ever"
        engine.close()
        store.closed = False
