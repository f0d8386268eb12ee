"""The host worker moves exactly the effective bytes of exactly the pages of a job."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import chain

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
from vllm.v1.kv_offload.cpu.gpu_worker import compute_sub_block_ptrs

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


@settings(max_examples=60, deadline=None)
@given(data=st.data(), blocks_per_chunk=st.integers(1, 4))
def test_pages_lie_where_vllm_computes_that_they_do(data: st.DataObject, blocks_per_chunk: int) -> None:
    worker = HostWorker(device(seed=1), blocks_per_chunk, num_chunks=BLOCKS)
    numbers = st.lists(st.integers(0, BLOCKS - 1), max_size=5)
    blocks = [data.draw(numbers) for _ in range(2)]
    first = [data.draw(st.integers(0, 5)) for _ in range(2)]
    skip = [one % blocks_per_chunk for one in first]
    chunks = [
        -(-(len(ids) + skipped) // blocks_per_chunk) if ids else 0 for ids, skipped in zip(blocks, skip, strict=True)
    ]
    rows = [[data.draw(st.integers(0, BLOCKS - 1)) for _ in range(count)] for count in chunks]
    spec = GPULoadStoreSpec([*chain(*blocks)], group_sizes=list(map(len, blocks)), block_indices=first)
    seen = {one.group: one for one in worker._page_copies(spec, Tier([*chain(*rows)]))}
    assert seen.keys() == {group for group in range(2) if blocks[group]}
    for group, one in seen.items():
        count = len(blocks[group])
        on_device, in_tier = np.empty(count, np.uint64), np.empty(count, np.uint64)
        compute_sub_block_ptrs(np.array(blocks[group]), 1, on_device, worker._device[group])
        compute_sub_block_ptrs(np.array(rows[group]), blocks_per_chunk, in_tier, worker._tier[group], skip[group])
        assert one.device.dtype == one.tier.dtype == np.uint64
        assert (one.device.tolist(), one.tier.tolist()) == (on_device.tolist(), in_tier.tolist())
        assert (one.blocks.tolist(), one.page_bytes, one.block_stride) == (blocks[group], (STATE, PAGE)[group], PAGE)
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


# --- small loads, copied where they are submitted ------------------------------------------------


class Copying:
    """A worker whose copies say in which thread they are made, and wait where they are told to."""

    def __init__(self, caches: CanonicalKVCaches) -> None:
        self.worker = HostWorker(caches, blocks_per_chunk=1, num_chunks=8)
        self.threads: list[int] = []
        self.saves = threading.Event()
        self.saves.set()
        copy = self.worker._copy

        def watched(job_id: int, copies: list[PageCopies], to_device: bool) -> TransferResult:
            self.threads.append(threading.get_ident())
            assert to_device or self.saves.wait(10)
            return copy(job_id, copies, to_device)

        self.worker._copy = watched  # type: ignore[method-assign]

    @property
    def inline(self) -> list[bool]:
        """Job by job, whether it was copied in this thread."""
        return [one == threading.get_ident() for one in self.threads]

    def save(self, job: int, block: int, row: int) -> None:
        assert self.worker.submit_store(job, GPULoadStoreSpec([block], [0, 1], [0, 0]), Tier([row]))

    def load(self, job: int, row: int, *blocks: int) -> None:
        rows = [row] * len(blocks)
        assert self.worker.submit_load(job, Tier(rows), GPULoadStoreSpec(list(blocks), [0, len(blocks)], [0, 0]))

    def finished(self) -> list[int]:
        return [result.job_id for result in self.worker.get_finished()]


@pytest.fixture
def copying(caches: CanonicalKVCaches) -> Iterator[Copying]:
    one = Copying(caches)
    yield one
    one.saves.set()
    one.worker.shutdown()


def test_a_small_load_is_over_when_it_is_submitted(copying: Copying, caches: CanonicalKVCaches) -> None:
    rows = caches.tensors[1].tensor
    copying.save(0, block=3, row=1)
    copying.worker.wait({0})
    copying.load(1, 1, 5)
    assert torch.equal(rows[5], rows[3])
    saved, loaded = copying.worker.get_finished()
    assert (saved.job_id, loaded.job_id) == (0, 1)
    assert (loaded.success, loaded.transfer_size) == (True, PAGE)
    assert loaded.transfer_time is not None and loaded.transfer_time > 0
    assert copying.inline == [False, True], "saves never hold up the engine"


def test_a_load_that_is_not_small_is_left_to_the_thread(copying: Copying, caches: CanonicalKVCaches) -> None:
    copying.worker.inline_bytes = 2 * PAGE
    copying.load(0, 1, 5, 6)
    copying.load(1, 1, 5, 6, 7)
    copying.worker.wait({0, 1})
    assert copying.finished() == [0, 1]
    assert copying.inline == [True, False]


def test_many_small_loads_do_not_keep_a_step(copying: Copying) -> None:
    copying.worker.inline_bytes = 2 * PAGE
    for job in range(4):
        copying.load(job, 1, 5)
    copying.worker.wait({2, 3})
    assert copying.finished() == [0, 1, 2, 3]
    copying.load(4, 1, 5)
    assert copying.finished() == [4]
    assert copying.inline == [True, True, False, False, True], "in the next step there is time again"


def test_a_load_waits_for_a_save_to_its_row(copying: Copying, caches: CanonicalKVCaches) -> None:
    rows = caches.tensors[1].tensor
    before = rows.clone()
    copying.saves.clear()
    copying.save(0, block=3, row=1)
    copying.load(1, 1, 5)
    copying.load(2, 1, 6)
    assert copying.finished() == []
    assert torch.equal(rows, before), "the row was read before it was written"
    copying.saves.set()
    copying.worker.wait({1, 2})
    assert copying.finished() == [0, 1, 2]
    assert torch.equal(rows[5], before[3]) and torch.equal(rows[6], before[3])
    assert copying.inline == [False, False, False]


def test_a_load_waits_for_a_save_that_was_reported_before_its_time(copying: Copying, caches: CanonicalKVCaches) -> None:
    rows = caches.tensors[1].tensor
    before = rows.clone()
    copying.saves.clear()
    copying.save(0, block=3, row=1)
    copying.worker.report = lambda job_id, copied: TransferResult(job_id=job_id, success=True)
    assert copying.finished() == [0]
    copying.load(1, 1, 5)
    assert torch.equal(rows, before)
    copying.saves.set()
    copying.worker.wait({1})
    assert torch.equal(rows[5], before[3])


def test_a_save_comes_after_the_load_before_it(copying: Copying, caches: CanonicalKVCaches) -> None:
    rows = caches.tensors[1].tensor
    copying.save(0, block=3, row=1)
    copying.worker.wait({0})
    first = rows[3].clone()
    copying.load(1, 1, 5)
    copying.save(2, block=4, row=1)
    copying.worker.wait({2})
    assert torch.equal(rows[5], first)
    assert copying.finished() == [0, 1, 2]


@pytest.mark.parametrize("inline_bytes", [0, PAGE])
def test_what_goes_wrong_with_a_load_is_told_when_it_is_asked_for(copying: Copying, inline_bytes: int) -> None:
    def refuse(job_id: int, copies: list[PageCopies], to_device: bool) -> TransferResult:
        raise RuntimeError("no way there")

    copying.worker.inline_bytes = inline_bytes
    copying.worker._copy = refuse  # type: ignore[method-assign]
    copying.load(0, 1, 5)
    copying.worker.wait({0})
    with pytest.raises(RuntimeError, match="no way there"):
        copying.worker.get_finished()


def test_a_route_may_take_its_time(copying: Copying) -> None:
    copying.worker.route = lambda copies, load: copies
    copying.load(0, 1, 5)
    copying.worker.wait({0})
    assert copying.inline == [False]
