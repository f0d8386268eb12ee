"""The host worker moves exactly the effective bytes of exactly the pages of a job."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    TransferResult,
)

from samestate.cache.host_worker import HostWorker, PageCopies

BLOCKS, PAGE, STATE = 12, 64, 40
"""Blocks on the device; bytes of a page; bytes of it that a recurrent entry uses."""


class Tier(BlockIDsLoadStoreSpec):
    @staticmethod
    def medium() -> str:
        return "CPU"


def device(seed: int) -> CanonicalKVCaches:
    """Two entries on two tensors: group 0 uses part of its page, group 1 all of it."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randint(-128, 128, (BLOCKS, PAGE), dtype=torch.int8, generator=generator) for _ in range(2)]
    return CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(tensor=t, page_size_bytes=PAGE) for t in tensors],
        group_data_refs=[[CanonicalKVCacheRef(0, STATE)], [CanonicalKVCacheRef(1, PAGE)]],
    )


@pytest.fixture
def caches() -> Iterator[CanonicalKVCaches]:
    yield device(seed=0)


def run(worker: HostWorker, job: int, submitted: bool) -> int:
    assert submitted
    worker.wait({job})
    (result,) = worker.get_finished()
    assert result.job_id == job
    assert result.success
    assert result.transfer_size is not None
    return result.transfer_size


@pytest.mark.sanity
def test_a_page_comes_back_and_its_padding_and_neighbours_stay(caches: CanonicalKVCaches) -> None:
    worker = HostWorker(caches, blocks_per_chunk=1, num_chunks=4)
    state, rows = (t.tensor for t in caches.tensors)
    saved_state, saved_rows = state[3].clone(), rows[5:7].clone()
    source = GPULoadStoreSpec([3, 5, 6], group_sizes=[1, 2], block_indices=[1, 0])
    moved = run(worker, 0, worker.submit_store(0, source, Tier([2, 0, 3])))
    assert moved == STATE + 2 * PAGE

    before = [t.tensor.clone() for t in caches.tensors]
    target = GPULoadStoreSpec([8, 9, 10], group_sizes=[1, 2], block_indices=[1, 0])
    run(worker, 1, worker.submit_load(1, Tier([2, 0, 3]), target))
    assert torch.equal(state[8, :STATE], saved_state[:STATE])
    assert torch.equal(rows[9:11], saved_rows)
    assert torch.equal(state[8, STATE:], before[0][8, STATE:]), "padding was written"
    untouched = [b for b in range(BLOCKS) if b not in (8, 9, 10)]
    assert torch.equal(state[untouched], before[0][untouched])
    assert torch.equal(rows[untouched], before[1][untouched])
    worker.shutdown()


@settings(max_examples=40, deadline=None)
@given(data=st.data(), blocks_per_chunk=st.integers(1, 4))
def test_any_run_of_blocks_survives_the_round_trip(data: st.DataObject, blocks_per_chunk: int) -> None:
    caches = device(seed=1)
    rows = caches.tensors[1].tensor
    worker = HostWorker(caches, blocks_per_chunk, num_chunks=BLOCKS)
    first = data.draw(st.integers(0, 5))
    ids = data.draw(st.lists(st.integers(1, BLOCKS - 1), min_size=1, max_size=5, unique=True))
    chunks = -(-(len(ids) + first % blocks_per_chunk) // blocks_per_chunk)
    tier = data.draw(st.permutations(range(BLOCKS)))[:chunks]
    saved = rows[ids].clone()
    spec = GPULoadStoreSpec(ids, group_sizes=[0, len(ids)], block_indices=[0, first])
    run(worker, 0, worker.submit_store(0, spec, Tier(tier)))
    rows[ids] = 0
    run(worker, 1, worker.submit_load(1, Tier(tier), spec))
    assert torch.equal(rows[ids], saved)
    worker.shutdown()


def test_jobs_finish_in_the_order_of_their_submission(caches: CanonicalKVCaches) -> None:
    worker = HostWorker(caches, blocks_per_chunk=1, num_chunks=8)
    for job in range(8):
        spec = GPULoadStoreSpec([job + 1], group_sizes=[0, 1], block_indices=[0, 0])
        assert worker.submit_store(job, spec, Tier([job]))
    worker.wait({7})
    assert [result.job_id for result in worker.get_finished()] == list(range(8))
    worker.shutdown()


def test_another_route_changes_what_is_copied_and_not_what_is_reported(caches: CanonicalKVCaches) -> None:
    worker = HostWorker(caches, blocks_per_chunk=1, num_chunks=4)
    rows = caches.tensors[1].tensor
    spec, saved = GPULoadStoreSpec([3, 5], group_sizes=[0, 2], block_indices=[0, 0]), rows[5].clone()
    run(worker, 0, worker.submit_store(0, spec, Tier([1, 2])))
    seen: list[tuple[int, int, list[int], int, bool]] = []

    def second_page_one_block_on(copies: list[PageCopies], load: bool) -> list[PageCopies]:
        (one,) = copies
        seen.append((one.group, one.ref, one.blocks.tolist(), one.block_stride, load))
        return [one._replace(device=one.device[1:] + np.uint64(one.block_stride), tier=one.tier[1:])]

    worker.route = second_page_one_block_on
    rows[:] = 0
    assert run(worker, 1, worker.submit_load(1, Tier([1, 2]), spec)) == 2 * PAGE
    assert seen == [(1, 0, [3, 5], PAGE, True)]
    assert torch.equal(rows[6], saved)
    assert not rows[[3, 5]].any()
    worker.shutdown()


def test_another_report_decides_when_a_job_is_over(caches: CanonicalKVCaches) -> None:
    worker = HostWorker(caches, blocks_per_chunk=1, num_chunks=4)
    spec = GPULoadStoreSpec([3], group_sizes=[0, 1], block_indices=[0, 0])
    worker.report = lambda job_id, copied: None
    assert worker.submit_store(0, spec, Tier([1]))
    worker.wait({0})
    assert worker.get_finished() == []
    worker.report = lambda job_id, copied: TransferResult(job_id=job_id, success=True)
    assert [result.job_id for result in worker.get_finished()] == [0]
    assert worker.get_finished() == []
    worker.shutdown()
