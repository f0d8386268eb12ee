"""The dictionary connector without an engine: what is looked up, saved, loaded and dropped, on two workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)

from samestate.cache.dictionary import DictionaryConnector, Orders
from samestate.cache.families import Geometry, Group, Index, geometry

C, ROWS = 4, 2
"""Tokens of a state's block; tokens of an attention block, half of it."""
BLOCKS, PAGE, STATE = 12, 64, 24
FAMILY_BYTES = 2 * PAGE + STATE
WORKERS = 2


def cache_config() -> KVCacheConfig:
    """One attention layer, whose pages are full, and one state, whose page is padded; side by side in one tensor."""
    attention = FullAttentionSpec(block_size=ROWS, num_kv_heads=1, head_size=4, head_size_v=4, dtype=torch.float32)
    state = MambaSpec(
        block_size=C, shapes=((STATE // 4,),), dtypes=(torch.float32,), page_size_padded=PAGE, mamba_cache_mode="align"
    )
    assert (attention.page_size_bytes, state.page_size_bytes) == (PAGE, PAGE)
    return KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[
            KVCacheTensor(2 * BLOCKS * PAGE, ["rows"], layer_stride=BLOCKS * PAGE, block_stride=PAGE),
            KVCacheTensor(2 * BLOCKS * PAGE, ["state"], BLOCKS * PAGE, PAGE, offset=BLOCKS * PAGE),
        ],
        kv_cache_groups=[KVCacheGroupSpec(["rows"], attention), KVCacheGroupSpec(["state"], state)],
    )


def connector(role: KVConnectorRole, **options: object) -> DictionaryConnector:
    given = {"cpu_bytes_to_use": 100 * FAMILY_BYTES} | options
    parallel = SimpleNamespace(world_size=WORKERS, pipeline_parallel_size=1, decode_context_parallel_size=1)
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=given),
        parallel_config=parallel,
        cache_config=SimpleNamespace(prefix_match_unit=None, enable_prefix_caching=True),
    )
    return DictionaryConnector(config, role, cache_config())


class Engine:
    """A scheduler's side and its workers, each with a cache of its own."""

    def __init__(self, **options: object) -> None:
        self.scheduler = connector(KVConnectorRole.SCHEDULER, **options)
        self.workers = [connector(KVConnectorRole.WORKER, **options) for _ in range(WORKERS)]
        self.caches = []
        for rank, worker in enumerate(self.workers):
            generator = torch.Generator().manual_seed(rank)
            raw = torch.randint(0, 256, (2, BLOCKS, PAGE), dtype=torch.uint8, generator=generator)
            self.caches.append(raw)
            worker.register_kv_caches({"rows": raw[0], "state": raw[1]})

    def step(self, scheduled: dict[str, tuple[int, int]], tables: dict[str, Any]) -> Orders:
        """The scheduler orders what a step of (start, tokens) by request needs."""
        output = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=r, num_computed_tokens=s) for r, (s, _) in scheduled.items()],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
            num_scheduled_tokens={request: tokens for request, (_, tokens) in scheduled.items()},
            kv_connector_block_state=SimpleNamespace(get_block_ids=tables.get),
        )
        return self.scheduler.build_connector_meta(output)

    def work(self, orders: Orders, workers: int = WORKERS) -> set[str]:
        """These workers carry the orders out and report; the requests that some worker failed to load."""
        reports, failed = [], set()
        for worker in self.workers[:workers]:
            worker.bind_connector_metadata(orders)
            worker.start_load_kv(None)
            worker.wait_for_save()
            failed |= worker.get_transfer_results(set()).failed_recving
            reports.append(worker.build_connector_worker_meta())
        merged = reports[0]
        for report in reports[1:]:
            merged = merged.aggregate(report) if merged else report
        self.scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=merged))
        return failed

    def cold(self, request: SimpleNamespace, *ends: int, blocks: int = 1) -> None:
        """Compute a request in steps that end there, on blocks from `blocks` on."""
        self.scheduler.on_new_request(request)
        start = 0
        for end in ends:
            self.work(self.step({request.request_id: (start, end - start)}, {request.request_id: table(blocks)}))
            start = end
        self.scheduler.request_finished_all_groups(request, ([], []))

    def load(self, request: SimpleNamespace, blocks: int, local: int = 0) -> tuple[int, Orders]:
        """Look up, allocate and order the load of a request; the tokens credited."""
        external, _ = self.scheduler.get_num_new_matched_tokens(request, local)
        assert external is not None
        self.scheduler.on_new_request(request)
        given = SimpleNamespace(get_block_ids=lambda: table(blocks))
        self.scheduler.update_state_after_alloc(request, given, external)
        return external, self.step({}, {})


def request(tokens: int, prompt: str = "p", name: str = "r") -> SimpleNamespace:
    """A prompt of that many tokens; prompts of one name share every prefix."""
    hashes = [f"{prompt}{end}".encode() for end in range(ROWS, tokens + 1, ROWS)]
    return SimpleNamespace(request_id=name, num_tokens=tokens, num_prompt_tokens=tokens, block_hashes=hashes)


def table(first: int) -> tuple[list[int], list[int]]:
    """Blocks of attention and of the state, from `first` on."""
    return list(range(first, first + 6)), list(range(first, first + 3))


def credited(engine: Engine, tokens: int, prompt: str = "p", local: int = 0) -> int:
    external, _ = engine.scheduler.get_num_new_matched_tokens(request(tokens, prompt), local)
    assert external is not None
    return external


@pytest.mark.sanity
@pytest.mark.parametrize(("tokens", "restored"), [(7, 4), (8, 4), (9, 8), (11, 8), (12, 8), (13, 12)])
def test_the_last_token_is_left_out_before_the_lookup(tokens: int, restored: int) -> None:
    engine = Engine()
    engine.cold(request(13), 4, 8, 12, 13)
    assert credited(engine, tokens) == restored


def test_the_fault_looks_up_every_token_and_credits_one_less() -> None:
    engine = Engine(lookup="full")
    engine.cold(request(8), 4, 8)
    assert [credited(engine, tokens) for tokens in (7, 8, 9)] == [4, 7, 8]
    external, orders = engine.load(request(8), blocks=3)
    assert external == 7
    assert orders.loads[0].parts[1].first == 1, "the state of all 8 tokens"


def test_a_state_is_kept_only_where_a_step_ended() -> None:
    engine = Engine()
    engine.cold(request(9), 3, 8, 9)
    assert credited(engine, 9) == 8
    assert credited(engine, 8) == 0, "no step ended at 4"
    engine.cold(request(6, name="later"), 4, 6)
    assert credited(engine, 8) == 4


def test_other_prompts_and_what_decode_computed_are_not_found() -> None:
    engine = Engine()
    short = request(6)
    short.num_prompt_tokens = 3
    engine.cold(short, 4)
    assert credited(engine, 9) == 0
    engine.cold(request(9), 8, 9)
    assert credited(engine, 9) == 8
    assert credited(engine, 9, prompt="q") == 0


def test_a_page_counts_as_stored_once_every_worker_has_it() -> None:
    engine = Engine()
    wanted = request(9)
    engine.scheduler.on_new_request(wanted)
    orders = engine.step({"r": (0, 8)}, {"r": table(1)})
    engine.work(orders, workers=1)
    assert credited(engine, 9) == 0
    assert engine.scheduler.has_pending_push_work()
    engine.workers[0], engine.workers[1] = engine.workers[1], engine.workers[0]
    engine.work(orders, workers=1)
    assert credited(engine, 9) == 8
    assert not engine.scheduler.has_pending_push_work()


@pytest.mark.parametrize("local", [0, 4])
def test_a_load_brings_the_effective_bytes_of_what_is_missing_and_nothing_else(local: int) -> None:
    engine = Engine()
    engine.cold(request(9), 8, 9)
    saved = [cache.clone() for cache in engine.caches]
    for cache in engine.caches:
        cache.zero_()
    external, orders = engine.load(request(9, name="reload"), blocks=6, local=local)
    assert external == 8 - local
    assert engine.work(orders) == set()
    missing = range(local // ROWS, 8 // ROWS)
    for cache, before in zip(engine.caches, saved, strict=True):
        expected = torch.zeros_like(cache)
        for block in missing:
            expected[0, 6 + block] = before[0, 1 + block]
        expected[1, 7, :STATE] = before[1, 2, :STATE]
        assert torch.equal(cache, expected)
    assert not torch.equal(engine.caches[0], engine.caches[1])


def test_nothing_is_loaded_where_the_local_cache_has_as_much() -> None:
    engine = Engine()
    engine.cold(request(9), 8, 9)
    assert engine.scheduler.get_num_new_matched_tokens(request(9), 8) == (0, False)


@pytest.mark.parametrize(("load", "is_async"), [("async", True), ("sync", False)])
def test_a_load_is_answered_as_asked(load: str, is_async: bool) -> None:
    engine = Engine(load=load)
    engine.cold(request(9), 8, 9)
    assert engine.scheduler.get_num_new_matched_tokens(request(9), 0) == (8, is_async)
    _, orders = engine.load(request(9, name="reload"), blocks=6)
    for worker in engine.workers:
        worker.bind_connector_metadata(orders)
        worker.start_load_kv(None)
        assert worker.get_transfer_results(set()).finished_recving == ({"reload"} if is_async else set())


def test_a_worker_without_the_page_says_so_and_copies_nothing() -> None:
    engine = Engine()
    engine.cold(request(9), 8, 9)
    _, orders = engine.load(request(9, name="reload"), blocks=6)
    engine.workers[1].dictionary.drop(orders.loads[0].keys[0])
    before = engine.caches[1].clone()
    assert engine.work(orders) == {"reload"}
    assert torch.equal(engine.caches[1], before)
    synchronous = Engine(load="sync")
    with pytest.raises(KeyError):  # a step that already uses the pages must not go on
        synchronous.work(orders)


def test_the_least_recently_used_families_make_room_whole() -> None:
    engine = Engine(cpu_bytes_to_use=WORKERS * 3 * FAMILY_BYTES)
    engine.cold(request(9, "a"), 4, 8, 9)
    engine.cold(request(5, "b"), 4, 5)
    engine.load(request(9, "a", name="again"), blocks=6)
    engine.cold(request(5, "c"), 4, 5)
    assert [credited(engine, 9, prompt) for prompt in "abc"] == [8, 0, 4]
    engine.cold(request(5, "d"), 4, 5)
    assert [credited(engine, 9, prompt) for prompt in "abcd"] == [4, 0, 4, 4], "the beginning of a prefix goes last"
    held = engine.workers[0].dictionary._families
    assert set(held) == {b"a4", b"c4", b"d4"}


def test_a_prefix_that_has_no_room_is_saved_as_far_as_it_has() -> None:
    engine = Engine(cpu_bytes_to_use=WORKERS * FAMILY_BYTES)
    engine.cold(request(9), 4, 8, 9)
    assert credited(engine, 9) == 4


def test_a_reset_drops_everything_on_every_worker() -> None:
    engine = Engine()
    engine.cold(request(9), 8, 9)
    assert engine.scheduler.reset_cache()
    assert credited(engine, 9) == 0
    engine.work(engine.step({}, {}))
    assert not any(worker.dictionary._families for worker in engine.workers)
    engine.cold(request(9), 8, 9)
    assert credited(engine, 9) == 8


def test_an_open_save_is_not_dropped_and_one_that_was_reset_confirms_nothing() -> None:
    index = Index(Geometry(C, [Group(0, C, False, {"rows": PAGE}), Group(1, C, True, {"state": STATE})]), 100, 1)
    assert index.claim(1, b"a", {0, 1}, beside=()) == [0, 1]
    assert index.claim(2, b"b", {0}, beside=()) is None
    index.clear()
    assert index.claim(3, b"a", {0}, beside=()) == [0]
    index.confirm({1: 1})
    assert index.restorable([b"a"]) == 0
    index.confirm({3: 1})
    assert not index.saving
    assert index.dropped == [b"a"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cpu_bytes_to_use": 10}, f"cpu_bytes_to_use: 10; one family takes {WORKERS * FAMILY_BYTES} bytes"),
        ({"cpu_bytes_to_use": "1GB"}, "cpu_bytes_to_use: '1GB'"),
        ({"lookup": "all"}, "lookup: 'all' is unknown; use strict or full"),
        ({"load": "later"}, "load: 'later' is unknown; use async or sync"),
        ({"lookups": "full"}, "no option lookups; use cpu_bytes_to_use, load, lookup"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        connector(KVConnectorRole.SCHEDULER, **options)


def test_a_cache_of_another_kind_is_refused() -> None:
    config = cache_config()
    window = SlidingWindowSpec(block_size=ROWS, num_kv_heads=1, head_size=4, dtype=torch.float32, sliding_window=8)
    config.kv_cache_groups[0] = KVCacheGroupSpec(["rows"], window)
    with pytest.raises(ValueError, match="rows: SlidingWindowSpec is not moved"):
        geometry(config)
