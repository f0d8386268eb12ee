"""Loads on CUDA keep the order that vLLM's keep, and say no earlier that they are over. A stream that tests drive."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("triton")

from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, GPULoadStoreSpec, TransferResult
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.gpu_worker import SingleDirectionOffloadingHandler

from samestate.cache import cuda_gather, cuda_loads
from samestate.cache.cuda_gather import Gather, Gathered, JobSize
from samestate.cache.cuda_lanes import Lane
from samestate.cache.cuda_loads import CudaLoads, install, left_to_copy, require_mode
from samestate.cache.cuda_staged import Staged

ROWS, PAGE = 8, 48
MIB = 1 << 20


class FakeMark:
    def __init__(self, lane: FakeLane) -> None:
        self.lane = lane
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.lane.log.append("synchronize")
        self.lane.run()

    def elapsed_time(self, other: FakeMark) -> float:
        assert self.passed and other.passed
        return 2.0


class FakeLane(Lane):
    """Runs what was put on it when told to, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.pending: list[Callable[[], object]] = []
        self.current = "compute"
        self.returned: list[FakeMark] = []
        self.tables = 0

    def run(self) -> None:
        while self.pending:
            self.pending.pop(0)()

    def follow_current(self) -> None:
        self.log.append(f"after {self.current}")

    def follow(self, mark: Any) -> None:
        self.log.append(f"after {mark}")

    @contextmanager
    def entered(self) -> Any:
        self.current = "lane"
        try:
            yield
        finally:
            self.current = "compute"

    def mark(self) -> FakeMark:
        mark = FakeMark(self)
        self.log.append("mark")
        self.pending.append(lambda: setattr(mark, "passed", True))
        return mark

    def drain(self) -> None:
        self.log.append("drain")

    def give_back(self, *marks: Any) -> None:
        self.returned += marks

    def signal(self) -> object:
        return object()

    def table(self, numbers: int) -> torch.Tensor:
        self.tables += 1
        return torch.zeros(numbers, dtype=torch.int64)


class FakeGather(Gathered):
    """Copies when the lane runs, from the table as it then is."""

    def launch(self, table: torch.Tensor) -> None:
        if not table.shape[1]:
            return
        (lane,) = self.lanes
        assert lane.current == "lane"
        lane.log.append("launch")

        def copy() -> None:
            for source, target, length in table.T.tolist():
                ctypes.memmove(target, source, length * self.unit)

        lane.pending.append(copy)


class FakeInner:
    """vLLM's handler, towards those who stand before it."""

    def __init__(self, lane: FakeLane) -> None:
        self.lane = lane
        self.jobs: list[int] = []
        self._transfer_events: dict[int, str] = {}
        self.waited: set[int] = set()
        self.closed = False

    def transfer_async(self, job_id: int, src_spec: object, dst_spec: object) -> bool:
        self.lane.log.append(f"copy after {self.lane.current}")
        self.jobs.append(job_id)
        self._transfer_events[job_id] = f"copy {job_id}"
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self.jobs = self.jobs, []
        self._transfer_events.clear()
        return [TransferResult(job, True, 0, 0.0) for job in done]

    def wait(self, job_ids: set[int]) -> None:
        self.waited |= job_ids

    def shutdown(self) -> None:
        self.closed = True


class Bench:
    def __init__(self, by_copy: Callable[[JobSize], bool] | None = None) -> None:
        self.tier = torch.randint(-128, 128, (ROWS, PAGE), dtype=torch.int8)
        self.device = torch.full((ROWS, PAGE), 7, dtype=torch.int8)
        self.lane = FakeLane()
        self.inner = FakeInner(self.lane)
        gather = FakeGather([[CanonicalKVCacheRef(0, PAGE)]], [self.tier], [self.device], self.lane)
        self.loads = CudaLoads(self.inner, gather, by_copy)  # type: ignore[arg-type]

    def load(self, job: int, rows: list[int], blocks: list[int]) -> None:
        source, target = CPULoadStoreSpec(rows), GPULoadStoreSpec(blocks, [len(blocks)], [0])
        assert self.loads.transfer_async(job, source, target)

    def finished(self) -> list[int]:
        return [one.job_id for one in self.loads.get_finished()]


def test_a_load_begins_behind_the_compute_stream_and_is_over_behind_its_kernel() -> None:
    bench = Bench()
    bench.load(1, [2, 0], [5, 3])
    assert bench.lane.log == ["after compute", "mark", "launch", "mark"]
    assert bench.finished() == []
    assert bool((bench.device == 7).all())
    bench.lane.run()
    assert bench.loads.get_finished() == [TransferResult(1, True, 2 * PAGE, 0.002)]
    expected = torch.full_like(bench.device, 7)
    expected[[5, 3]] = bench.tier[[2, 0]]
    assert torch.equal(bench.device, expected)
    assert bench.finished() == []


def test_a_long_load_is_launched_in_two_parts_between_two_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_gather, "HEAD_CHUNKS", 2)
    bench = Bench()
    bench.load(1, [4, 5, 6, 7], [3, 2, 1, 0])
    assert bench.lane.log == ["after compute", "mark", "launch", "launch", "mark"]
    bench.lane.run()
    assert bench.finished() == [1]
    assert torch.equal(bench.device[:4], bench.tier[4:].flip(0))
    assert bool((bench.device[4:] == 7).all())


def test_kernel_and_copy_wait_for_each_other() -> None:
    bench = Bench(by_copy=lambda job: job.pieces == 1)
    bench.load(1, [0], [0])
    assert bench.lane.log == ["after compute", "copy after lane"]
    bench.load(2, [0, 1], [0, 1])
    assert bench.lane.log[2:] == ["after compute", "after copy 1", "mark", "launch", "mark"]
    bench.load(3, [1], [1])
    assert bench.lane.log[7:] == ["after compute", "copy after lane"]
    bench.lane.run()
    assert sorted(bench.finished()) == [1, 2, 3]
    bench.load(4, [0, 1], [0, 1])
    assert bench.lane.log[9:] == ["after compute", "mark", "launch", "mark"], "the copy is long over"


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, ROWS), st.booleans()), max_size=12), st.randoms(use_true_random=False))
def test_tables_of_open_jobs_are_left_alone(jobs: list[tuple[int, bool]], chance: Any) -> None:
    """However late the device gets to it, each job moves its own pages, in the order of submission."""
    bench = Bench()
    expected = torch.full_like(bench.device, 7)
    open_jobs: list[int] = []
    for number, (size, run) in enumerate(jobs):
        rows, blocks = chance.sample(range(ROWS), size), chance.sample(range(ROWS), size)
        bench.load(number, rows, blocks)
        expected[blocks] = bench.tier[rows]
        open_jobs.append(number)
        if run:
            bench.lane.run()
            assert bench.finished() == open_jobs
            open_jobs.clear()
    bench.lane.run()
    assert bench.finished() == open_jobs
    assert torch.equal(bench.device, expected)
    assert len(bench.lane.returned) == 2 * len(jobs)


def test_a_table_serves_again_and_a_larger_job_gets_a_larger_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_loads, "_TABLE_NUMBERS", 8)
    bench = Bench()
    for job, size in enumerate((2, 2, 8, 1)):
        bench.load(job, list(range(size)), list(range(size)))
        bench.lane.run()
        assert bench.finished() == [job]
    assert bench.lane.tables == 2


def test_a_load_that_fails_half_way_leaves_nothing_that_reads_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_gather, "HEAD_CHUNKS", 2)
    bench = Bench()
    launch = FakeGather.launch

    def once(self: FakeGather, table: torch.Tensor) -> None:
        launch(self, table)
        raise RuntimeError("no second launch")

    monkeypatch.setattr(FakeGather, "launch", once)
    with pytest.raises(RuntimeError, match="no second launch"):
        bench.load(1, [4, 5, 6, 7], [3, 2, 1, 0])
    assert bench.lane.log[-2:] == ["launch", "drain"]


def test_a_copy_that_vllm_refuses_is_not_the_one_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(by_copy=lambda job: job.pieces > 1)
    bench.load(1, [0, 1], [2, 3])

    def refuse(*_args: object) -> bool:
        raise RuntimeError("refused")

    with monkeypatch.context() as while_refused:
        while_refused.setattr(bench.inner, "transfer_async", refuse)
        with pytest.raises(RuntimeError, match="refused"):
            bench.load(2, [0, 1], [2, 3])
    bench.lane.log.clear()
    bench.load(3, [4], [5])
    assert bench.lane.log[:2] == ["after compute", "after copy 1"]


def test_a_job_without_pages_is_left_to_vllm() -> None:
    bench = Bench()
    bench.load(1, [], [])
    assert bench.inner.jobs == [1]
    assert bench.finished() == [1]


def test_only_what_was_asked_for_is_waited_for() -> None:
    bench = Bench()
    bench.load(1, [0], [0])
    bench.loads.wait({2})
    assert "synchronize" not in bench.lane.log
    bench.loads.wait({1})
    assert bench.lane.log.count("synchronize") == 1
    assert bench.inner.waited == {1, 2}
    assert bench.finished() == [1]


def test_shutdown_drains_and_reaches_vllm_even_when_the_device_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.load(1, [0], [0])
    bench.loads.shutdown()
    assert bench.lane.log[-1] == "synchronize"
    assert bench.inner.closed

    def fail(self: FakeMark) -> None:
        raise RuntimeError("device lost")

    bench = Bench()
    bench.load(1, [0], [0])
    monkeypatch.setattr(FakeMark, "synchronize", fail)
    with pytest.raises(RuntimeError, match="device lost"):
        bench.loads.shutdown()
    assert bench.inner.closed


@pytest.mark.parametrize(
    ("pieces", "piece", "left"),
    [(128, 2 * MIB, True), (1, MIB, True), (4096, 1023 << 10, False), (1, 64 << 10, False)],
)
def test_jobs_of_large_pieces_are_left_to_the_copy(pieces: int, piece: int, left: bool) -> None:
    assert left_to_copy(JobSize(0, pieces, pieces * piece)) is left


class Handler(SingleDirectionOffloadingHandler):
    """With tensors that nobody pinned."""

    def __init__(self, blocks_per_chunk: int = 1) -> None:
        self.src_blocks_per_chunk = blocks_per_chunk
        self.layer_refs_per_group = [[CanonicalKVCacheRef(0, PAGE)]]
        self.src_tensors = [torch.zeros((ROWS, PAGE), dtype=torch.int8)]
        self.dst_tensors = [torch.zeros((ROWS, PAGE), dtype=torch.int8)]


SOURCE = inspect.getsource(SingleDirectionOffloadingHandler)


@pytest.mark.parametrize(
    ("source", "handler", "pinned", "line"),
    [
        (SOURCE + " ", Handler(), True, "this vLLM's handler of loads is not known (sha256 "),
        (SOURCE, Handler(blocks_per_chunk=2), True, "chunks hold several blocks"),
        (SOURCE, Handler(), False, "the memory tier is not pinned"),
        (SOURCE, Handler(), True, "the kernel cannot be made: "),  # There is no GPU to compile for.
    ],
    ids=["source", "chunks", "pageable", "compiler"],
)
def test_where_the_kernel_cannot_be_vllm_loads_or_one_line_says_why(
    source: str, handler: Handler, pinned: bool, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available() and "made" in line:
        pytest.skip("a GPU is here")
    monkeypatch.setattr(inspect, "getsource", lambda _: source)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: pinned)
    warned: list[str] = []
    monkeypatch.setattr(cuda_loads.logger, "warning", lambda text, *arguments: warned.append(text % arguments))
    worker: Any = SimpleNamespace(_load_handler=handler)
    install(worker, "copy")
    assert not warned
    install(worker, "auto")
    assert worker._load_handler is handler
    assert len(warned) == 1 and warned[0].startswith(f"loads are left to vLLM's worker: {line}")
    for mode in ("gather", "staged"):
        with pytest.raises(ValueError, match="say auto or copy") as caught:
            install(worker, mode)
        assert str(caught.value).startswith(f"kv_connector_extra_config.cuda_loads={mode}: {line}")
        assert "\n" not in str(caught.value)


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, with the handler that `Handler` extends."""
    monkeypatch.setattr(inspect, "getsource", lambda _: SOURCE)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)


@pytest.mark.usefixtures("pinned")
@pytest.mark.parametrize(
    ("unit", "span", "line"),
    [
        (16, PAGE, None),
        (4, PAGE - 12, "pages are aligned to 4 bytes only"),
        (16, PAGE + 1, "pieces are large, or no spans of small ones are"),
    ],
    ids=["fit", "alignment", "small spans"],
)
def test_auto_leaves_badly_aligned_pages_and_small_spans_to_vllm(
    unit: int, span: int, line: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (Gather, Staged):
        monkeypatch.setattr(kind, "trial", lambda *_: True)
    monkeypatch.setattr(cuda_loads, "Lane", lambda device: FakeLane())
    monkeypatch.setattr(cuda_loads, "STAGED_SPAN", span)
    warned: list[str] = []
    monkeypatch.setattr(cuda_loads.logger, "warning", lambda text, *arguments: warned.append(text % arguments))
    for mode, by_copy, kind in (("auto", left_to_copy, Staged), ("gather", None, Gathered), ("staged", None, Staged)):
        handler = Handler()
        handler.layer_refs_per_group = [[CanonicalKVCacheRef(0, PAGE - 16 + unit)]]
        worker: Any = SimpleNamespace(_load_handler=handler)
        install(worker, mode)
        installed = worker._load_handler
        if mode == "auto" and line is not None:
            assert installed is handler
            continue
        assert isinstance(installed, CudaLoads)
        assert (installed._inner, installed._by_copy, type(installed._loader)) == (handler, by_copy, kind)
    assert warned == ([f"loads are left to vLLM's worker: {line}"] if line else [])


@pytest.mark.usefixtures("pinned")
def test_a_trial_that_fails_installs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Gather, Staged):
        monkeypatch.setattr(kind, "trial", lambda *_: False)
    monkeypatch.setattr(cuda_loads, "Lane", lambda device: FakeLane())
    monkeypatch.setattr(cuda_loads, "STAGED_SPAN", 1)
    handler = Handler()
    worker: Any = SimpleNamespace(_load_handler=handler)
    install(worker, "auto")
    assert worker._load_handler is handler
    for mode in ("gather", "staged"):
        with pytest.raises(ValueError, match=f"{mode}: the kernel's trial gave other bytes; say auto or copy"):
            install(worker, mode)


def test_a_worker_without_such_a_handler_is_left_alone() -> None:
    worker: Any = SimpleNamespace()
    install(worker, "auto")
    assert not vars(worker)
    with pytest.raises(ValueError, match="not known"):
        install(worker, "gather")


def test_the_handler_of_the_installed_vllm_is_known() -> None:
    import hashlib

    assert hashlib.sha256(SOURCE.encode()).hexdigest() in cuda_loads.KNOWN


def test_modes_are_four() -> None:
    assert [require_mode(mode) for mode in ("auto", "copy", "gather", "staged")] == sorted(cuda_loads.MODES)
    with pytest.raises(ValueError, match=r"cuda_loads: True is none of copy, auto, gather, staged"):
        require_mode(True)
