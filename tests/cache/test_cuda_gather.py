"""The kernel that loads pages writes the bytes of their blocks, and no others: interpreted, and on a GPU."""

from __future__ import annotations

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("triton")

from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from interpreted import Interpreter
from samestate.cache import cuda_gather, cuda_loads
from samestate.cache.cuda_gather import CHUNK_BYTES, Gather, JobSize

KERNEL = """
import numpy as np, torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef
from samestate.cache.cuda_gather import CHUNK_BYTES, Gather

GUARD = 64

def sides(draw, rows, page, offset):
    "A tier of random bytes, and a device side of sevens that begins `offset` bytes after a multiple of 16."
    tier = torch.from_numpy(draw.integers(-128, 128, rows * page + 32, dtype=np.int8))
    whole = torch.full((rows * page + 2 * GUARD + 32,), 7, dtype=torch.int8)
    first = -tier.data_ptr() % 16 + offset, -whole.data_ptr() % 16 + GUARD + offset
    view = [side[at : at + rows * page].view(rows, page) for side, at in zip((tier, whole), first)]
    return view[0], whole, view[1]

def loaded(seed, pages, offset):
    "One group that uses all of each page, one that uses less of the first: every byte beside what was asked for."
    draw = np.random.default_rng(seed)
    rows = 12
    tier, whole, device = zip(*(sides(draw, rows, page, offset) for page in pages))
    part = max(1, pages[0] - 16)
    groups = [[CanonicalKVCacheRef(i, page) for i, page in enumerate(pages)], [CanonicalKVCacheRef(0, part)]]
    gather = Gather(groups, tier, device)
    sizes = [int(draw.integers(0, 7)), int(draw.integers(0, 6))]
    rows_of, blocks = draw.permutation(rows)[: sum(sizes)], draw.permutation(rows)[: sum(sizes)]
    expected = [one.clone() for one in device]
    for number, (row, block) in enumerate(zip(rows_of, blocks)):
        for ref in groups[number >= sizes[0]]:
            size = ref.page_size_bytes
            expected[ref.tensor_idx][block, :size] = tier[ref.tensor_idx][row, :size]
    table = torch.zeros((3, gather.size(sizes).chunks), dtype=torch.int64)
    gather.describe(rows_of, blocks, sizes, table.numpy())
    gather.launch(table)
    for one, memory, right, page in zip(device, whole, expected, pages):
        assert torch.equal(one, right), (seed, pages, offset)
        assert int((memory != 7).sum()) == int((right != 7).sum()), (seed, pages, offset, "outside the blocks")
    return gather.unit

units = set()
for seed, (pages, offset) in enumerate([
    ([16], 0), ([4096, 48], 0), ([CHUNK_BYTES], 0), ([CHUNK_BYTES + 16, 32], 0), ([3 * CHUNK_BYTES - 16], 0),
    ([1000], 0), ([24, CHUNK_BYTES + 8], 8), ([20, 4], 0), ([CHUNK_BYTES + 6], 2), ([1], 0), ([CHUNK_BYTES + 1, 7], 0),
    ([64], 1), ([64], 4),
] * 2):
    units.add(loaded(seed, pages, offset))
assert units == {1, 2, 4, 8, 16}, units
one = sides(np.random.default_rng(0), 4, 64, 0)
gather = Gather([[CanonicalKVCacheRef(0, 64)]], [one[0]], [one[2]])
assert gather.trial(torch.device("cpu"))
gather.launch(torch.zeros((3, 0), dtype=torch.int64))
assert bool((one[1] == 7).all())
"""

BROKEN = """
import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef
from samestate.cache import cuda_gather
tier, device = torch.ones((1, 64), dtype=torch.int8), torch.zeros((1, 64), dtype=torch.int8)
launch = cuda_gather.Gather.launch

def short(self, table):
    table[2] -= 1
    launch(self, table)

cuda_gather.Gather.launch = short
gather = cuda_gather.Gather([[CanonicalKVCacheRef(0, 64)]], [tier], [device])
assert not gather.trial(torch.device("cpu")), "a trial that leaves bytes out passed"
"""


@pytest.mark.parametrize("program", [KERNEL, BROKEN], ids=["kernel", "broken"])
def test_interpreted(interpreter: Interpreter, program: str) -> None:
    done = interpreter.run(program)
    assert done.returncode == 0, done.said


def test_a_program_that_fails_says_so_and_leaves_nothing_to_the_next(interpreter: Interpreter) -> None:
    failed = interpreter.run("import torch; torch.left = 1; print('said'); assert torch.left == 2, 'not two'")
    assert failed.returncode == 1
    assert "said" in failed.said and "AssertionError: not two" in failed.said
    assert interpreter.run("import os; os.kill(os.getpid(), 9)").returncode == -9
    assert interpreter.run("raise SystemExit(0)").returncode == 1, "a program that does not come to its end"
    assert interpreter.run("import torch; assert not hasattr(torch, 'left')") == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize(("wide", "load"), [(16, "ld.global.cg.v2.b64"), (8, "ld.global.cg.b64")])
def test_a_thread_reads_sixteen_bytes_at_once_where_it_can(wide: int, load: str) -> None:
    """Compiled for an H100, which need not be there."""
    from triton import compile as compiled
    from triton import language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(
        cuda_gather.copy_chunks,
        {"table": "i64", "count": "i32", "apart": "i32"}
        | dict.fromkeys(("element", "word", "wide", "chunk"), "constexpr"),
        {"element": tl.int64, "word": 8, "wide": wide, "chunk": CHUNK_BYTES},
    )
    kernel = compiled(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": cuda_gather.WARPS})
    lines = [line.split() for line in kernel.asm["ptx"].splitlines()]
    moves = [word for line in lines for word in line if word.startswith(("ld.global.cg", "st.global"))]
    each = CHUNK_BYTES // wide // (32 * cuda_gather.WARPS)
    assert moves == [load] * each + [load.replace("ld.", "st.").replace(".cg", "")] * each, (
        "all reads before the writes"
    )


def gather_of(pages: list[list[int]]) -> Gather:
    """Groups of pages of so many bytes, each entry on a tensor of its own."""
    sizes = [page for group in pages for page in group]
    number = iter(range(len(sizes)))
    groups = [[CanonicalKVCacheRef(next(number), page) for page in group] for group in pages]
    sides = [[torch.zeros((4, page), dtype=torch.int8) for page in sizes] for _ in range(2)]
    return Gather(groups, *sides)


def test_a_job_is_counted_by_chunks_pieces_and_bytes() -> None:
    gather = gather_of([[CHUNK_BYTES, CHUNK_BYTES + 16], [32]])
    assert gather.size([2, 5]) == JobSize(2 * 3 + 5, 2 * 2 + 5, 2 * (2 * CHUNK_BYTES + 16) + 5 * 32)
    assert gather.size([0, 0]) == JobSize(0, 0, 0)


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=2), st.integers(1, 60))
def test_the_head_of_a_job_is_its_fewest_first_blocks_with_enough_chunks(sizes: list[int], chunks: int) -> None:
    gather = gather_of([[3 * CHUNK_BYTES, CHUNK_BYTES], [CHUNK_BYTES]])
    head = gather.head(sizes, chunks)
    weights = [4] * sizes[0] + [1] * sizes[1]
    taken = next((n for n in range(len(weights)) if sum(weights[:n]) >= chunks), len(weights))
    assert head == [min(taken, sizes[0]), max(0, taken - sizes[0])]


def test_a_job_that_does_not_fit_its_groups_is_refused() -> None:
    gather = gather_of([[64]])
    with pytest.raises(ValueError, match="1 rows, 2 blocks"):
        gather.describe(np.arange(1), np.arange(2), [2], np.zeros((3, 2), np.int64))
    with pytest.raises(ValueError, match="a table of"):
        gather.describe(np.arange(2), np.arange(2), [2], np.zeros((3, 3), np.int64))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mode", cuda_loads.MODES)
@pytest.mark.parametrize("page", [4096, 100_016, 24, 2 << 20])
def test_a_gpu_loads_what_was_stored(mode: str, page: int) -> None:
    """vLLM's worker stores; loads come back in an order of their own, behind work that still reads the blocks."""
    from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

    rows = 40
    content = torch.randint(-128, 128, (rows, page), dtype=torch.int8, device="cuda")
    blocks = content.clone()
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(blocks, page)], [[CanonicalKVCacheRef(0, page - 16)]])
    worker = CPUOffloadingWorker(caches, 1, rows)
    cuda_loads.install(worker, mode)
    # One tensor alone: its pages are large, or their spans are small.
    assert isinstance(worker._load_handler, cuda_loads.CudaLoads) is (mode in ("gather", "staged"))
    everything = CPULoadStoreSpec(list(range(rows)))
    assert worker.submit_store(0, GPULoadStoreSpec(list(range(rows)), [rows], [0]), everything)
    worker.wait({0})
    seen = torch.empty_like(blocks)
    draw = np.random.default_rng(0)
    for job in range(1, 9):
        order = draw.permutation(rows)[:30]
        blocks.fill_(7)
        torch.cuda._sleep(20_000_000)
        seen.copy_(blocks)  # still to come when the load is submitted
        assert worker.submit_load(job, CPULoadStoreSpec(list(range(30))), GPULoadStoreSpec(order.tolist(), [30], [0]))
        worker.wait({job})
        expected = torch.full_like(blocks, 7)
        expected[order, : page - 16] = content[:30, : page - 16]
        assert torch.equal(blocks, expected)
        assert bool((seen == 7).all()), "a load wrote blocks that were still being read"
    assert {one.job_id for one in worker.get_finished()} == set(range(9))
    worker.shutdown()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_kernel_and_copy_follow_each_other() -> None:
    """Jobs that write the same blocks, submitted at once, by turns to the kernel and to vLLM: the last one stays."""
    from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

    rows, page = 64, 256 << 10
    content = torch.randint(-128, 128, (rows, page), dtype=torch.int8, device="cuda")
    blocks = content.clone()
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(blocks, page)], [[CanonicalKVCacheRef(0, page)]])
    worker = CPUOffloadingWorker(caches, 1, rows)
    cuda_loads.install(worker, "gather")
    worker._load_handler._by_copy = lambda job: job.pieces % 2 == 1
    everything = list(range(rows))
    assert worker.submit_store(0, GPULoadStoreSpec(everything, [rows], [0]), CPULoadStoreSpec(everything))
    worker.wait({0})
    draw = np.random.default_rng(1)
    expected = content.clone()
    jobs = range(1, 41)
    for job in jobs:
        size = 60 + job % 2
        source, target = draw.permutation(rows)[:size], draw.permutation(rows)[:size]
        assert worker.submit_load(
            job, CPULoadStoreSpec(source.tolist()), GPULoadStoreSpec(target.tolist(), [size], [0])
        )
        expected[target] = content[source]
    worker.wait(set(jobs))
    assert torch.equal(blocks, expected)
    assert {one.job_id for one in worker.get_finished()} == {0, *jobs}
    worker.shutdown()
