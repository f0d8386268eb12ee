"""Loads by way of a buffer: whole spans of a row, no byte beside the pages, no slab filled before it is empty."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Collection
from typing import Any

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("triton")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from cache.cuda_streams import Device, SimulatedCopy, SimulatedLane, SimulatedStaged, load
from interpreted import Interpreter
from samestate.cache import cuda_loads, cuda_staged
from samestate.cache.cuda_gather import CHUNK_BYTES, JobSize
from samestate.cache.cuda_loads import CudaLoads, left_to_copy
from samestate.cache.cuda_spans import parts, spans

ROWS = 6
KIB = 1 << 10


class Bench:
    """A tier whose rows hold the pages of several tensors, `gaps` bytes before each, and a simulated device."""

    def __init__(
        self,
        pages: list[int],
        gaps: list[int] | None = None,
        groups: list[list[tuple[int, int]]] | None = None,
        slabs: int = 2,
        slab_bytes: int = 256,
        by_copy: Callable[[JobSize], bool] | None = None,
        forgets: Collection[str] = (),
    ) -> None:
        gaps = gaps or [0] * len(pages)
        starts = [sum(gaps[: n + 1]) + sum(pages[:n]) for n in range(len(pages))]
        row = sum(gaps) + sum(pages)
        draw = np.random.default_rng(0)
        store = torch.from_numpy(draw.integers(-128, 128, (ROWS, row), dtype=np.int8))
        self.tier = [store[:, at : at + page] for at, page in zip(starts, pages, strict=True)]
        self.device = [torch.full((ROWS, page), 7, dtype=torch.int8) for page in pages]
        self.expected = [one.clone() for one in self.device]
        chosen = groups or [list(enumerate(pages))]
        self.groups = [[CanonicalKVCacheRef(index, size) for index, size in group] for group in chosen]
        self.gpu = Device()
        self.inner: Any = SimulatedCopy(self.gpu, self.groups, self.tier, self.device)
        lanes = [SimulatedLane(self.gpu, name, forgets) for name in ("feed", "scatter")]
        self.staged = SimulatedStaged(self.groups, self.tier, self.device, *lanes, slabs, slab_bytes)
        self.loads = CudaLoads(self.inner, self.staged, by_copy)

    def load(self, job: int, sizes: list[int], rows: list[int], blocks: list[int]) -> None:
        target = GPULoadStoreSpec(blocks, sizes, [0] * len(sizes))
        assert self.loads.transfer_async(job, CPULoadStoreSpec(rows), target)
        groups = [group for group, size in zip(self.groups, sizes, strict=True) for _ in range(size)]
        load(groups, list(zip(rows, blocks, strict=True)), self.tier, self.expected)

    def clear(self, value: int) -> None:
        """By the compute stream."""
        self.gpu.put("compute", lambda: [one.fill_(value) for one in self.device])
        for one in self.expected:
            one.fill_(value)

    def right(self) -> bool:
        return all(torch.equal(*both) for both in zip(self.device, self.expected, strict=True))

    def finished(self) -> list[int]:
        return sorted(one.job_id for one in self.loads.get_finished())


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Any]:
    pages = draw(st.lists(st.integers(1, 200), min_size=1, max_size=5))
    if draw(st.booleans()):
        pages = [16 * page for page in pages]
    gaps = [draw(st.sampled_from([0, 0, 1, 16, 400])) for _ in pages]
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        used = draw(st.lists(st.integers(0, len(pages) - 1), unique=True, max_size=len(pages)))
        groups.append([(index, draw(st.integers(1, pages[index]))) for index in used])
    slab_bytes = draw(st.sampled_from([16, 64, 256, 1024, 16384]))
    return {"pages": pages, "gaps": gaps, "groups": groups, "slabs": draw(st.integers(1, 4)), "slab_bytes": slab_bytes}


@pytest.fixture(autouse=True)
def tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """As small beside the slabs here as it is beside real ones."""
    monkeypatch.setattr(cuda_staged, "TAIL_BYTES", 64)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layouts(), st.randoms(use_true_random=False))
def test_any_order_that_waits_allow_gives_the_bytes_of_one_load_after_the_other(layout: Any, chance: Any) -> None:
    """Jobs of ours and of vLLM's, and work that clears blocks, submitted at once or while others run."""
    bench = Bench(**layout, by_copy=lambda job: job.pieces % 3 == 1)
    number = len(bench.groups)
    for job in range(chance.randint(1, 6)):
        if chance.random() < 0.4:
            bench.gpu.run(chance.choice)  # Engines clear no block of a load that goes on.
            bench.clear(chance.randint(-128, 127))
        sizes = [chance.randint(0, ROWS) for _ in range(number)]
        # A block belongs to one group at a time: no job writes a byte twice.
        free = chance.sample(range(ROWS), ROWS)
        sizes = [min(size, ROWS - sum(sizes[:n])) if sum(sizes[:n]) < ROWS else 0 for n, size in enumerate(sizes)]
        total = sum(sizes)
        bench.load(job, sizes, [chance.randrange(ROWS) for _ in range(total)], free[:total])
        for _ in range(chance.choice([0, 0, 10, 100])):
            if ready := bench.gpu.ready():
                bench.gpu.step(chance.choice(ready))
    bench.gpu.run(chance.choice)
    assert bench.right()
    assert bench.finished() == list(range(job + 1))
    assert bench.finished() == []


def harm(forgets: Collection[str]) -> int:
    """In how many orders of the streams' precedence other bytes arrive, where lanes forget to wait."""
    wrong = 0
    for order in itertools.permutations(("compute", "vllm", "feed", "scatter")):
        bench = Bench([64, 64], slab_bytes=128, by_copy=lambda job: job.pieces == 2, forgets=forgets)
        bench.clear(1)
        bench.load(0, [5], [0, 1, 2, 3, 4], [4, 3, 2, 1, 0])
        bench.load(1, [1], [5], [3])
        bench.load(2, [4], [1, 2, 3, 4], [0, 1, 2, 3])
        bench.gpu.run(lambda ready, order=order: min(ready, key=order.index))
        wrong += not bench.right()
    return wrong


@pytest.mark.parametrize("forgotten", ["feed", "scatter", "current", "copied"])
def test_every_wait_is_needed(forgotten: str) -> None:
    """For what the other lane signals, for the compute stream, and for vLLM's copy: without it bytes are wrong."""
    assert not harm(())
    assert harm({forgotten})


def test_the_ring_is_filled_once_slab_by_slab_before_a_kernel_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench([64], slabs=2, slab_bytes=64)
    for name in ("_describe_moves", "_describe_chunks"):
        told = getattr(bench.staged, name)

        def described(*arguments: Any, name: str = name, told: Any = told) -> None:
            bench.gpu.log.append(name[10:])
            told(*arguments)

        monkeypatch.setattr(bench.staged, name, described)
    bench.load(0, [5], list(range(5)), list(range(5)))
    assert bench.gpu.log == [
        *("moves", "move", "moves", "move"),  # A slab at once, then what else the ring has room for.
        *("chunks", "chunks", "launch", "launch"),
        *("moves", "move", "move", "chunks", "launch", "launch"),
        *("moves", "move", "chunks", "launch"),
    ]


def test_the_next_slab_is_filled_while_one_is_scattered() -> None:
    """Nothing but its own slab holds the feeding lane back: it runs two slabs ahead, and no further."""
    bench = Bench([64], slabs=2, slab_bytes=64)
    bench.load(0, [5], list(range(5)), list(range(5)))
    while "compute" in bench.gpu.ready():
        bench.gpu.step("compute")
    done = []
    while "feed" in bench.gpu.ready():
        done.append(bench.gpu.queues["feed"][0][0])
        bench.gpu.step("feed")
    assert done.count("work") == 2
    while "scatter" in bench.gpu.ready():
        bench.gpu.step("scatter")
    assert "feed" in bench.gpu.ready()


@pytest.mark.parametrize(
    ("blocks", "filled"),
    [(1, [1]), (2, [2]), (3, [2, 1]), (8, [4, 2, 2]), (9, [8, 1]), (24, [8, 8, 4, 2, 2]), (29, [8, 8, 8, 3, 2])],
)
def test_the_last_slabs_are_filled_by_halves(blocks: int, filled: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A slab holds 8 blocks; what is left alone to be scattered at the end, 2."""
    monkeypatch.setattr(cuda_staged, "TAIL_BYTES", 2 * 64)
    bench = Bench([64], slabs=4, slab_bytes=8 * 64)
    seen: list[int] = []
    monkeypatch.setattr(bench.staged, "_move", lambda source, target, size: seen.append(len(size)))
    numbers = np.zeros(blocks, np.int64)
    memory = torch.zeros(bench.staged.numbers([blocks]), dtype=torch.int64)
    bench.staged.load(numbers, numbers, [blocks], memory, lambda lane: None)
    assert seen == filled


def layout_of(*tensors: tuple[int, int, int]) -> list[list[tuple[int, int]]]:
    """Spans, as (start, length), of tensors (storage, start, page) with rows of 4096 bytes."""
    stores = [torch.zeros((4, 4096), dtype=torch.int8) for _ in range(2)]
    tier = [stores[store][:, start : start + page] for store, start, page in tensors]
    refs = [CanonicalKVCacheRef(index, page) for index, (_, _, page) in enumerate(tensors)]
    found = spans(refs, tier)
    return [
        [(span.start - store.data_ptr(), span.end - span.start) for span in found if _in(store, span.start)]
        for store in stores
    ]


def _in(store: torch.Tensor, address: int) -> bool:
    return 0 <= address - store.data_ptr() < store.numel()


@pytest.mark.parametrize(
    ("tensors", "first", "second"),
    [
        ([(0, 0, 64), (0, 64, 128), (0, 192, 64)], [(0, 256)], []),
        ([(0, 192, 64), (0, 0, 64), (0, 64, 128)], [(0, 256)], []),
        ([(0, 0, 64), (0, 80, 64)], [(0, 144)], []),
        ([(0, 0, 64), (0, 81, 64)], [(0, 64), (81, 64)], []),
        ([(0, 0, 64), (0, 76, 32), (0, 113, 32)], [(0, 64 + 12 + 32), (113, 32)], []),
        ([(0, 0, 64), (1, 0, 64)], [(0, 64)], [(0, 64)]),
        ([(0, 0, 64), (0, 32, 64)], [(0, 96)], []),
        ([], [], []),
    ],
    ids=["adjacent", "any order", "small gap", "large gap", "gaps together", "storages", "overlap", "none"],
)
def test_spans(tensors: Any, first: Any, second: Any) -> None:
    assert layout_of(*tensors) == [first, second]


def test_a_span_lies_within_a_row() -> None:
    """Tensors one after the other in one allocation, each contiguous: what follows a page is the next row's."""
    store = torch.zeros(4 * 64, dtype=torch.int8)
    tier = [store[:64].view(1, 64), store[64:128].view(1, 64)]
    refs = [CanonicalKVCacheRef(index, 64) for index in range(2)]
    assert [span.end - span.start for span in spans(refs, tier)] == [64, 64]


@pytest.mark.parametrize(
    ("pages", "sizes"), [([3000, 3000], [2000] * 3), ([64], [64]), ([1000, 1000, 1000], [1504] * 2)]
)
def test_a_block_larger_than_a_slab_goes_in_equal_parts(pages: list[int], sizes: list[int]) -> None:
    bench = Bench(pages)
    found = parts(0, bench.groups[0], bench.tier, bench.device, 2048, 1)
    assert [int(part.size.sum()) for part in found[:-1]] == sizes[:-1]
    assert sum(int(part.size.sum()) for part in found) == sum(pages)
    assert sum(int(part.length.sum()) for part in found) == sum(pages)
    assert all(part.bytes <= 2048 for part in found)


def test_a_job_is_counted_by_pieces_bytes_and_spans() -> None:
    bench = Bench([CHUNK_BYTES + 16, 32, 32], [0, 0, 3000], [[(0, CHUNK_BYTES + 16), (1, 32)], [(2, 32)]], 2, 1 << 20)
    assert bench.staged.size([2, 5]) == JobSize(2 * 3 + 5, 2 * 2 + 5, 2 * (CHUNK_BYTES + 48) + 5 * 32, 2 + 5)
    assert bench.staged.size([0, 0]) == JobSize(0, 0, 0, 0)
    assert bench.staged.numbers([2, 5]) == 3 * (2 * (1 + 3) + 5 * (1 + 1))


@pytest.mark.parametrize(
    ("piece", "span", "left"),
    [
        (64 * KIB, 2048 * KIB, False),
        (255 * KIB, 256 * KIB, False),
        (64 * KIB, 255 * KIB, True),
        (512 * KIB, 2048 * KIB, False),
        (1024 * KIB, 2048 * KIB, True),
    ],
)
def test_auto_stages_small_pieces_of_large_spans(piece: int, span: int, left: bool) -> None:
    job = JobSize(0, 1024 * span, 1024 * piece * span, 1024 * piece)
    assert left_to_copy(job) is left


def test_a_job_that_does_not_agree_is_refused() -> None:
    bench = Bench([64])
    with pytest.raises(ValueError, match="1 rows, 2 blocks"):
        bench.staged.load(np.arange(1), np.arange(2), [2], torch.zeros(24, dtype=torch.int64), lambda lane: None)


def test_a_load_is_reported_once_and_only_when_it_is_over() -> None:
    bench = Bench([64, 64])
    bench.load(1, [2], [2, 0], [5, 3])
    while "feed" in bench.gpu.ready() or "compute" in bench.gpu.ready():
        bench.gpu.step(next(name for name in ("compute", "feed") if name in bench.gpu.ready()))
    assert bench.loads.get_finished() == [], "it is in the buffer only"
    bench.loads.wait({2})
    assert "synchronize" not in bench.gpu.log
    bench.loads.wait({1})
    assert bench.right()
    assert bench.loads.get_finished() == [TransferResult(1, True, 256, 0.002)]
    assert bench.loads.get_finished() == []


def test_shutdown_drains() -> None:
    bench = Bench([64, 64])
    bench.load(1, [2], [2, 0], [5, 3])
    bench.loads.shutdown()
    assert bench.right()
    assert bench.inner.closed


def test_a_trial_on_streams_that_run_passes_and_one_that_loses_bytes_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench([64])
    assert bench.staged.trial(torch.device("cpu"))
    begun = SimulatedStaged._launch
    monkeypatch.setattr(SimulatedStaged, "_launch", lambda self, at, count, apart: begun(self, at, count - 1, apart))
    assert not bench.staged.trial(torch.device("cpu"))


KERNEL = """
import numpy as np, torch
from cache.cuda_streams import Device, SimulatedLane, SimulatedStaged
from samestate.cache.cuda_staged import Staged
from vllm.v1.kv_offload.base import CanonicalKVCacheRef

class Interpreted(SimulatedStaged):
    def _launch(self, *what):
        lane = self.lanes[1]
        lane.device.put(lane.name, lambda: Staged._launch(self, *what))

draw = np.random.default_rng(0)
for pages, slab_bytes in (([4096, 64, 20000], 16384), ([24, 40], 1024), ([1000], 2048), ([33, 7], 256)):
    store = torch.from_numpy(draw.integers(-128, 128, (9, sum(pages)), dtype=np.int8))
    starts = np.cumsum([0, *pages])
    tier = [store[:, at : at + page] for at, page in zip(starts, pages)]
    device = [torch.full((9, page), 7, dtype=torch.int8) for page in pages]
    gpu = Device()
    lanes = [SimulatedLane(gpu, name) for name in ("feed", "scatter")]
    refs = [CanonicalKVCacheRef(index, page) for index, page in enumerate(pages)]
    staged = Interpreted([refs], tier, device, *lanes, 2, slab_bytes)
    memory = torch.full((staged.numbers([8]),), -1, dtype=torch.int64)
    rows, blocks = draw.permutation(9)[:8], draw.permutation(9)[:8]
    staged.load(rows, blocks, [8], memory, lambda lane: None)
    gpu.run(lambda ready: ready[0])
    for side, one in zip(tier, device):
        expected = torch.full_like(one, 7)
        expected[blocks] = side[rows]
        assert torch.equal(one, expected), pages
    assert staged.trial(torch.device("cpu")), pages
"""


def test_interpreted(interpreter: Interpreter) -> None:
    """The kernel itself."""
    done = interpreter.run(KERNEL)
    assert done.returncode == 0, done.said


def region_worker(row: int, piece: int, rows: int, mode: str) -> tuple[Any, list[torch.Tensor]]:
    """vLLM's worker over a region of rows as engines have them, and the blocks."""
    from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

    stride = -(-row // 4096) * 4096
    region = SharedOffloadRegion(f"test-{os.getpid()}-{time.monotonic_ns()}", rows, 0, stride, stride, lambda: None)
    blocks = [torch.randint(-128, 128, (rows, piece), dtype=torch.int8, device="cuda") for _ in range(row // piece)]
    refs = [CanonicalKVCacheRef(index, piece) for index in range(len(blocks))]
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(one, piece) for one in blocks], [refs, refs[::2]])
    worker = CPUOffloadingWorker(caches, 1, rows, region)
    cuda_loads.install(worker, mode)
    everything = list(range(rows))
    assert worker.submit_store(0, GPULoadStoreSpec(everything, [rows, 0], [0, 0]), CPULoadStoreSpec(everything))
    worker.wait({0})
    return worker, blocks


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    ("row", "piece"), [(2 << 20, 16 << 10), (2 << 20, 64 << 10), (10 << 20, 512 << 10), (640_000, 1000), (99, 33)]
)
def test_a_gpu_loads_rows_of_many_tensors(row: int, piece: int) -> None:
    """More than the ring holds, behind work that still reads the blocks; by one group, and by one of gaps."""
    rows = 40
    worker, blocks = region_worker(row, piece, rows, "staged")
    assert isinstance(worker._load_handler, cuda_loads.CudaLoads)
    content = [one.clone() for one in blocks]
    seen = torch.empty_like(blocks[0])
    draw = np.random.default_rng(0)
    for job in range(1, 7):
        source, target = draw.permutation(rows)[:30], draw.permutation(rows)[:30]
        for one in blocks:
            one.fill_(7)
        torch.cuda._sleep(20_000_000)
        seen.copy_(blocks[0])  # still to come when the load is submitted
        assert worker.submit_load(
            job, CPULoadStoreSpec(source.tolist()), GPULoadStoreSpec(target.tolist(), [18, 12], [0, 0])
        )
        worker.wait({job})
        for index, (one, whole) in enumerate(zip(blocks, content, strict=True)):
            expected, used = torch.full_like(one, 7), 30 if index % 2 == 0 else 18
            expected[target[:used]] = whole[source[:used]]
            assert torch.equal(one, expected)
        assert bool((seen == 7).all()), "a load wrote blocks that were still being read"
    assert {one.job_id for one in worker.get_finished()} == set(range(7))
    worker.shutdown()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_staged_and_copied_jobs_follow_each_other() -> None:
    """Jobs that write the same blocks, submitted at once, by turns staged and by vLLM: the last one stays."""
    rows = 64
    worker, blocks = region_worker(1 << 20, 64 << 10, rows, "auto")
    assert isinstance(worker._load_handler, cuda_loads.CudaLoads)
    worker._load_handler._by_copy = lambda job: job.spans % 2 == 1
    content = [one.clone() for one in blocks]
    expected = [one.clone() for one in blocks]
    draw = np.random.default_rng(1)
    jobs = range(1, 41)
    for job in jobs:
        size = 60 + job % 2
        source, target = draw.permutation(rows)[:size], draw.permutation(rows)[:size]
        assert worker.submit_load(
            job, CPULoadStoreSpec(source.tolist()), GPULoadStoreSpec(target.tolist(), [size, 0], [0, 0])
        )
        for one, whole in zip(expected, content, strict=True):
            one[target] = whole[source]
    worker.wait(set(jobs))
    assert all(torch.equal(*both) for both in zip(blocks, expected, strict=True))
    assert {one.job_id for one in worker.get_finished()} == {0, *jobs}
    worker.shutdown()
