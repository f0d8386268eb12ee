"""A fault acts on the source it was written for, or not at all; what it patched comes back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, GPULoadStoreSpec
from vllm.v1.metrics.stats import PrefixCacheStats

from samestate.cache.host_worker import PageCopies
from samestate.faults.catalogue import faults_on
from samestate.instruments import faults
from samestate.instruments.key_faults import SaltIgnored, ShortHash
from samestate.instruments.live_faults import LIVE_FAULTS, Armoury
from samestate.instruments.page_faults import GroupOrder, orders, specs
from samestate.plans.drills import DRILLS, RANK_DRILLS


class Tier(BlockIDsLoadStoreSpec):
    @staticmethod
    def medium() -> str:
        return "CPU"


def test_the_catalogue_says_which_faults_can_be_armed_on_vllm() -> None:
    assert set(faults_on("vllm")) == set(LIVE_FAULTS) == set(DRILLS | RANK_DRILLS)


def test_an_unknown_fault_is_refused_by_name() -> None:
    for arm in (Armoury().arm, Armoury().arm_at_start):
        with pytest.raises(faults.FaultError, match=r"'no-such': not available on vLLM; use one of .*zero-page$"):
            arm("no-such")


def test_a_connector_that_it_does_not_fit_is_refused() -> None:
    armoury = Armoury()
    armoury.offer(object(), KVConnectorRole.SCHEDULER, None)
    armoury.arm_at_start("full-lookup")
    with pytest.raises(faults.FaultError, match="needs an OffloadingConnector inside, not object"):
        armoury.offer(object(), KVConnectorRole.SCHEDULER, None)


def test_a_fault_whose_connector_is_in_another_process_is_refused() -> None:
    armoury = Armoury()
    armoury.offer(object.__new__(OffloadingConnector), KVConnectorRole.SCHEDULER, None)
    with pytest.raises(faults.FaultError, match="'zero-page': no audited worker connector in this process"):
        armoury.arm("zero-page")


def test_unknown_source_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "source_sha256", lambda function: "0" * 64)
    armoury = Armoury()
    armoury.offer(object.__new__(OffloadingConnector), KVConnectorRole.SCHEDULER, None)
    with pytest.raises(faults.FaultError, match=r"unknown source of _lookup_complete_chunks, sha256 0{64}"):
        armoury.arm("full-lookup")


def test_patches_end_together_and_leave_no_trace() -> None:
    class Owner:
        def inherited(self) -> str:
            return "class"

    owner = Owner()
    owner.own = "object"  # type: ignore[attr-defined]
    undo = faults.Undo()
    for name in ("inherited", "own", "own"):
        undo.patch(owner, name, SimpleNamespace())
    undo.close()
    assert owner.inherited() == "class"
    assert vars(owner) == {"own": "object"}


@pytest.mark.parametrize("blocks_per_row", [1, 4])
def test_orders_and_specs_are_inverse(blocks_per_row: int) -> None:
    """Rows hold one block or four."""
    rows = {1: [5, 6, 7, 8, 9], 4: [5, 6]}[blocks_per_row]
    device = GPULoadStoreSpec([3, 1, 2, 4, 8], group_sizes=[1, 0, 4], block_indices=[0, 0, 4])
    given = orders(device, Tier(rows), blocks_per_row)
    assert given[1] == GroupOrder(0, [], [])
    assert given[2] == GroupOrder(4, [1, 2, 4, 8], rows[1:])
    again, tier = specs(given, Tier)
    assert again.block_ids.tolist() == [3, 1, 2, 4, 8]
    assert (again.group_sizes, again.block_indices) == ([1, 0, 4], [0, 0, 4])
    assert tier.block_ids.tolist() == rows


def test_a_fault_that_acts_in_several_processes_is_armed_in_each() -> None:
    armoury = Armoury()
    armoury.offer(object.__new__(OffloadingConnector), KVConnectorRole.SCHEDULER, None)
    armoury.arm("zero-page", elsewhere=(KVConnectorRole.WORKER,))
    armoury.arm(None)


@pytest.mark.parametrize("fault", ["rank-zero-shard", "silent-rank"])
def test_a_fault_of_ranks_needs_several(fault: str) -> None:
    connector = object.__new__(OffloadingConnector)
    connector._vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1, rank=0))
    armoury = Armoury()
    armoury.offer(connector, KVConnectorRole.WORKER, None)
    with pytest.raises(faults.FaultError, match="needs several: use --tensor-parallel-size 2"):
        armoury.arm(fault)


@pytest.mark.parametrize(
    ("fault", "queries", "hits"), [("hits-silent", 10, 0), ("hits-overcounted", 10, 8), ("queries-doubled", 20, 4)]
)
def test_a_fault_of_counters_counts_a_connectors_tokens_otherwise_and_no_others(
    fault: str, queries: int, hits: int
) -> None:
    undo = faults.Undo()
    LIVE_FAULTS[fault]().act(None, undo)  # type: ignore[arg-type]
    external, local = PrefixCacheStats(), PrefixCacheStats()
    external.record(num_tokens=10, num_hits=4, preempted=False, hits_by_source=None)
    local.record(num_tokens=10, num_hits=4, preempted=False)
    undo.close()
    assert (external.queries, external.hits) == (queries, hits)
    assert (local.queries, local.hits) == (10, 4)
    after = PrefixCacheStats()
    after.record(num_tokens=10, num_hits=4, preempted=False, hits_by_source=None)
    assert (after.queries, after.hits) == (10, 4)


def pages(group: int, device: int, tier: int, page_bytes: int = 8) -> PageCopies:
    """One page of one entry, at these addresses."""
    addresses = (np.array([at], np.uint64) for at in (device, tier))
    return PageCopies(group, 0, np.array([1]), *addresses, page_bytes, 64)


def test_halves_of_attention_pages_change_places() -> None:
    attention, state = pages(0, 100, 200), pages(1, 300, 400)
    first, second, same = LIVE_FAULTS["halves-swapped"]().route([attention, state], [1], 32)  # type: ignore[attr-defined]
    assert [(int(one.device[0]), int(one.tier[0]), one.page_bytes) for one in (first, second)] == [
        (100, 204, 4),
        (104, 200, 4),
    ]
    assert same is state


def test_another_state_moves_into_a_slot_once_it_was_read() -> None:
    fault = LIVE_FAULTS["second-reload"]()
    for tier in (400, 500):
        fault.saved([pages(1, 300, tier)], [1])  # type: ignore[attr-defined]
    load, moved_in = fault.route([pages(1, 300, 400)], [1], 32)  # type: ignore[attr-defined]
    assert (int(load.device[0]), int(load.tier[0])) == (300, 400)
    assert (int(moved_in.device[0]), int(moved_in.tier[0])) == (400, 500)


def test_without_another_state_there_is_nothing_to_bring() -> None:
    fault = LIVE_FAULTS["read-during-eviction"]()
    fault.saved([pages(1, 300, 400)], [1])  # type: ignore[attr-defined]
    with pytest.raises(faults.FaultError, match="run another prompt first"):
        fault.route([pages(1, 300, 400)], [1], 32)  # type: ignore[attr-defined]


def test_in_a_batch_states_are_taken_from_the_first_request_alone() -> None:
    offered = {"one": [(1, 7, 512), (2, 8, 512)], "other": [(1, 9, 512), (2, 10, 256)]}
    state = SimpleNamespace(boundary_state_offloads=offered)
    made = LIVE_FAULTS["wrong-grid"]().offers(None, state)  # type: ignore[attr-defined]
    assert made == {"one": offered["one"], "other": [(1, 7, 512), (2, 10, 256)]}


def test_a_key_without_salt_is_that_of_the_same_tokens_unsalted() -> None:
    class Request:
        cache_salt: str | None = "one"
        block_hashes = (b"salted",)

        def update_block_hashes(self) -> None:
            self.block_hashes = [b"unsalted" if self.cache_salt is None else b"salted"]

    request = Request()
    unsalted, shortened = SaltIgnored.seen_as(request), ShortHash.seen_as(request)
    assert unsalted.block_hashes == [b"unsalted"]
    assert shortened.block_hashes == [bytes(32)]
    assert (request.cache_salt, request.block_hashes) == ("one", (b"salted",))
    assert unsalted.cache_salt == "one"
