"""Families in the memory tier, driven by vLLM's own manager."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, PrepareStoreOutput, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from samestate.cache.family_index import Family
from samestate.cache.family_policy import FamilyPolicy

STATES, PAGES = (0, 1), (2,)
C = 16


def block_hash(prompt: str, boundary: int) -> bytes:
    """Of a prompt's first `boundary` chunks."""
    return prompt[:boundary].encode().ljust(32, b"\0")


class Engine:
    """What vLLM's scheduler does to its offloading manager, for prompts whose letters are chunks."""

    def __init__(self, rows: int, policy: str = "FamilyPolicy") -> None:
        self.manager = CPUOffloadingManager(rows, policy, "samestate.cache.family_policy")
        self.policy: FamilyPolicy = self.manager._policy
        self.policy.configure(PAGES, STATES, row_bytes=100)
        self.requests = 0

    def request(self, prompt: str) -> ReqContext:
        self.requests += 1
        context = ReqContext(req_id=f"r{self.requests}")
        for boundary in range(1, len(prompt) + 1):
            for group in (*STATES, *PAGES):
                context.set_offload_key_position(make_offload_key(block_hash(prompt, boundary), group), boundary * C)
        self.manager.on_new_request(context)
        return context

    def store(self, prompt: str, context: ReqContext, *, state: bool = True) -> PrepareStoreOutput | None:
        """The pages of all chunks, and the state at the end, as after one prefill step."""
        last = None
        states = [make_offload_key(block_hash(prompt, len(prompt)), group) for group in STATES] if state else []
        pages = [make_offload_key(block_hash(prompt, i), 2) for i in range(1, len(prompt) + 1)]
        for keys in [*[[one] for one in states], pages]:
            last = self.manager.prepare_store(keys, context)
            if last is None:
                return None
            self.manager.complete_store(last.keys_to_store, context)
        return last

    def serve(self, prompt: str) -> bool:
        context = self.request(prompt)
        stored = self.store(prompt, context) is not None
        self.manager.on_request_finished(context)
        return stored

    def hit(self, prompt: str) -> int:
        """Chunks that a request would reuse, as vLLM's scheduler looks them up: pages, then the state at their end."""
        context = ReqContext(req_id="look")

        def there(boundary: int, group: int) -> bool:
            key = make_offload_key(block_hash(prompt, boundary), group)
            return self.manager.lookup(key, context) is LookupResult.HIT

        pages = 0
        while pages < len(prompt) and there(pages + 1, 2):
            pages += 1
        return next((i for i in range(pages, 0, -1) if all(there(i, group) for group in STATES)), 0)


@pytest.mark.sanity
def test_pages_and_state_of_a_boundary_go_together_and_no_orphan_is_left() -> None:
    engine = Engine(rows=8)
    assert engine.serve("abc")  # 3 pages, 2 states
    assert engine.serve("x")  # 3 rows: full
    assert engine.serve("y")
    assert (engine.hit("abc"), engine.hit("x"), engine.hit("y")) == (0, 1, 1)
    assert engine.policy.index.orphan_bytes == 0
    assert engine.policy.index.bytes == 600, "all five rows of the oldest prefix went"


def test_a_shared_beginning_outlives_its_branches() -> None:
    engine = Engine(rows=9)
    for prompt in ("ab", "abc", "abd"):  # 4 + 3 + 2 rows
        engine.serve(prompt)
    assert engine.serve("abe")
    assert engine.hit("ab") == 2
    assert (engine.hit("abc"), engine.hit("abe")) == (2, 3)
    assert engine.policy.index.orphan_bytes == 0


def test_what_a_request_continues_is_not_evicted_to_store_its_end() -> None:
    engine = Engine(rows=5)
    engine.serve("ab")  # 4 rows of 5
    context = engine.request("abc")
    assert engine.store("abc", context) is None, "there is no room for two states and a page"
    assert engine.hit("abc") == 2


def test_a_family_in_transfer_stays() -> None:
    engine = Engine(rows=6)
    engine.serve("a")
    context = engine.request("a")
    loading = [make_offload_key(block_hash("a", 1), group) for group in (*STATES, *PAGES)]
    engine.manager.prepare_load(loading, context)
    assert engine.serve("x")
    assert not engine.serve("yz"), "four rows are needed, and three are free to go"
    assert engine.hit("a") == 1
    engine.manager.complete_load(loading, context)
    assert engine.serve("yz")


def test_what_is_promoted_page_by_page_for_a_request_stays_while_it_waits() -> None:
    engine = Engine(rows=6)
    waiting = engine.request("ab")
    engine.store("ab", waiting, state=False)  # its states are still on their way: orphans
    assert engine.serve("x")
    assert engine.serve("y"), "x goes for it"
    assert engine.policy.index.holds(Family(block_hash("a", 1)), 2)
    engine.manager.on_request_finished(waiting)
    assert engine.serve("z")
    assert engine.hit("y") == 1
    assert not engine.policy.index.holds(Family(block_hash("a", 1)), 2), "nobody waits for them any more"


def test_a_failed_save_leaves_nothing_behind() -> None:
    engine = Engine(rows=6)
    context = engine.request("a")
    key = make_offload_key(block_hash("a", 1), 2)
    assert engine.manager.prepare_store([key], context) is not None
    engine.manager.complete_store([key], context, success=False)
    engine.manager.on_request_finished(context)
    assert len(engine.policy.index) == 0
    assert engine.policy.index.bytes == 0
    assert not engine.policy._parents
    assert not engine.policy._readers


def test_links_of_finished_requests_are_forgotten() -> None:
    engine = Engine(rows=8)
    one, other = engine.request("abc"), engine.request("abd")
    engine.store("abc", one)
    engine.store("abd", other)
    engine.manager.on_request_finished(one)
    assert Family(block_hash("ab", 2)) in engine.policy._parents
    engine.manager.on_request_finished(other)
    assert not engine.policy._parents


def test_a_reset_forgets_all() -> None:
    engine = Engine(rows=8)
    engine.serve("abc")
    engine.manager.reset_cache()
    assert engine.hit("abc") == 0
    assert engine.serve("abcdef")
    assert engine.hit("abcdef") == 6


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=40),
    rows=st.integers(3, 14),
    policy=st.sampled_from(["FamilyPolicy", "FamilyValuePolicy"]),
)
def test_the_index_and_the_manager_agree_whatever_comes(prompts: list[str], rows: int, policy: str) -> None:
    engine = Engine(rows, policy)
    for prompt in prompts:
        stored = engine.serve(prompt)
        chain = [Family(block_hash(prompt, i)) for i in range(1, len(prompt) + 1)]
        assert engine.policy.index.restorable(chain) == engine.hit(prompt)
        if stored:
            assert engine.hit(prompt) == len(prompt)
        held = {(member.family, member.group) for family in all_families(engine) for member in family}
        assert held == {(key[:-4], int.from_bytes(key[-4:], "big")) for key in engine.policy._chunks}
        assert engine.policy.index.bytes == 100 * len(engine.policy._chunks) <= 100 * rows


def all_families(engine: Engine) -> list[list[object]]:
    return [engine.policy.index.members(Family(name)) for name in {bytes(key[:-4]) for key in engine.policy._chunks}]


def test_keys_are_vllms() -> None:
    key: OffloadKey = make_offload_key(b"h" * 32, 7)
    assert (key[:-4], int.from_bytes(key[-4:], "big")) == (b"h" * 32, 7)
