"""Loads on CUDA, part of `reload.py`: one job from pinned memory to the device, by vLLM's worker and by ours.

In every round each takes one turn, the order rotating, beside a plain copy of as many bytes from pinned memory: vLLM's
worker as it is (``vllm``), ours with every load by the kernel (``gather``), and ours as it chooses (``auto``). They
share one tier and one device side; rows and blocks are in random order. A load is timed from its submission until
`get_finished` has it, asked without a pause: an engine asks in every step. ``vllm, waited``: until `wait` returns,
which the engine calls for preempted requests only.

Before it is timed, each loads once into blocks that were emptied, and every byte is compared. One that fails is said
to, and left out; the others go on. Sizes for which there is a goal come first.

*Sweep*, where asked for: the kernel with other constants, 64 MiB in pieces of 16 KiB and of 2 MiB.

*Beside compute*: what 1 GiB of loads in pieces of 64 KiB costs kernels that run at the same time on the same device.
"""

from __future__ import annotations

import copy
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from rich.console import Console
from rich.table import Table
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

from samestate.cache import cuda_gather, cuda_loads

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PIECES = (16 * KIB, 64 * KIB, 512 * KIB, 2 * MIB)
TOTALS = (64 * MIB, 256 * MIB, GIB, 16 * MIB, 2 * MIB)
DEVICE = "cuda"
GOAL_FROM, GOAL = 64 * MIB, 0.90
WARM_UP = 3
WAITED = "vllm, waited"
VARIANTS = ("vllm", WAITED, "gather", "auto")
GIVE_UP = 10.0
"""Seconds for one load."""
Interval: TypeAlias = Callable[[list[float]], tuple[float, float]]
Word: TypeAlias = Callable[[float, float], str]


class Turn(NamedTuple):
    """Seconds."""

    total: float
    submit: float
    """For which the engine's step waits."""
    said: float
    """By the worker's word: between the device's events."""


class Share(NamedTuple):
    """One variant of a row; medians over the rounds."""

    rate: float
    """GB/s (10⁹)."""
    ratio: float
    """Of the plain copy's rate in the same round, with its 95 % bootstrap interval."""
    low: float
    high: float
    submit_us: float
    said: float
    """GB/s by the worker's word."""


class Row(NamedTuple):
    """One size."""

    total_bytes: int
    piece_bytes: int
    plain: float
    shares: dict[str, Share]
    failed: dict[str, str]
    """Variants that were left out, and why."""


class Bench:
    """One tier and its device side, `total` bytes in pieces of `piece`, and the workers over them."""

    def __init__(self, total: int, piece: int, seed: int = 1) -> None:
        pages = total // piece
        self.total = total
        self._content = torch.randint(-128, 128, (pages, piece), dtype=torch.int8, device=DEVICE)
        self._blocks = self._content.clone()
        caches = CanonicalKVCaches([CanonicalKVCacheTensor(self._blocks, piece)], [[CanonicalKVCacheRef(0, piece)]])
        worker = CPUOffloadingWorker(caches, 1, pages)
        self._source = torch.ones(total, dtype=torch.int8).pin_memory()
        self._target = torch.zeros(total, dtype=torch.int8, device=DEVICE)
        self._jobs = itertools.count()
        self._worker = worker
        self.workers: dict[str, OffloadingWorker] = {"vllm": worker, WAITED: worker}
        self.failed: dict[str, str] = {}
        chance = random.Random(seed)
        self._rows, self._places = chance.sample(range(pages), pages), chance.sample(range(pages), pages)
        rows, blocks = self._specs()
        job = next(self._jobs)
        assert worker.submit_store(job, blocks, rows)
        worker.wait({job})
        assert [one.job_id for one in worker.get_finished()] == [job]
        for mode in ("gather", "auto"):
            ours = copy.copy(worker)  # Same tier, same handlers; `install` puts ours before the loads of this one.
            try:
                cuda_loads.install(ours, mode)
                if ours._load_handler is worker._load_handler:
                    raise RuntimeError("left to vLLM's worker, the log says why")
            except Exception as error:
                self.failed[mode] = _line(error)
            else:
                self.workers[mode] = ours

    def plain(self) -> float:
        """Seconds."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        self._target.copy_(self._source, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def load(self, variant: str) -> Turn:
        worker, job = self.workers[variant], next(self._jobs)
        rows, blocks = self._specs()
        torch.cuda.synchronize()
        began = time.perf_counter()
        assert worker.submit_load(job, rows, blocks)
        submitted = time.perf_counter()
        if variant == WAITED:
            worker.wait({job})
            ended = time.perf_counter()
            results = worker.get_finished()
        else:
            while not (results := worker.get_finished()):
                if time.perf_counter() - began > GIVE_UP:
                    raise TimeoutError(f"not over after {GIVE_UP:.0f} s")
            ended = time.perf_counter()
        (result,) = results
        assert result.success and result.job_id == job and result.transfer_size == self.total, result
        return Turn(ended - began, submitted - began, result.transfer_time or float("nan"))

    def check(self, variant: str) -> None:
        """Raises ValueError: after a load some byte is not what was stored."""
        self._blocks.zero_()
        self.load(variant)
        if not torch.equal(self._blocks, self._content):
            raise ValueError("loaded other bytes than were stored")

    def submit(self, variant: str) -> Callable[[], None]:
        """Start a load; what is returned waits for its end."""
        worker = self.workers[variant]
        job = next(self._jobs)
        assert worker.submit_load(job, *self._specs())

        def end() -> None:
            torch.cuda.synchronize()
            worker.get_finished()

        return end

    def close(self) -> None:
        torch.cuda.synchronize()
        self._worker.shutdown()

    def _specs(self) -> tuple[CPULoadStoreSpec, GPULoadStoreSpec]:
        return CPULoadStoreSpec(self._rows), GPULoadStoreSpec(self._places, [len(self._places)], [0])


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"


def one_row(total: int, piece: int, rounds: int, interval: Interval) -> tuple[Row, list[dict[str, Any]]]:
    """A row, and the rounds that it was found in."""
    bench = Bench(total, piece)
    for variant in [one for one in VARIANTS if one in bench.workers]:
        _attempt(bench, variant, bench.check)
    seen: list[dict[str, Any]] = []
    for number in range(-WARM_UP, rounds):
        turns: dict[str, Any] = {}
        names = ["plain", *(one for one in VARIANTS if one in bench.workers)]
        for step in range(len(names)):
            name = names[(number + step) % len(names)]
            turns[name] = bench.plain() if name == "plain" else _attempt(bench, name, bench.load)
        if number >= 0:
            seen.append(turns)
    bench.close()
    shares = {}
    for variant in bench.workers:
        mine = [(one["plain"], one[variant]) for one in seen]
        ratios = [plain / turn.total for plain, turn in mine]
        shares[variant] = Share(
            statistics.median(total / turn.total for _, turn in mine) / 1e9,
            statistics.median(ratios),
            *interval(ratios),
            statistics.median(turn.submit for _, turn in mine) * 1e6,
            statistics.median(total / turn.said for _, turn in mine) / 1e9,
        )
    row = Row(total, piece, statistics.median(total / one["plain"] for one in seen) / 1e9, shares, bench.failed)
    return row, [
        {name: turn if name == "plain" else turn._asdict() for name, turn in one.items() if turn is not None}
        for one in seen
    ]


def _attempt(bench: Bench, variant: str, do: Callable[[str], Any]) -> Any:
    try:
        return do(variant)
    except Exception as error:
        bench.failed[variant] = _line(error)
        del bench.workers[variant]
        torch.cuda.synchronize()  # Raises once more where the device itself is lost: nothing can be measured then.
        return None


def loads(
    largest: int, rounds: int, limit: float, interval: Interval, console: Console
) -> Iterator[tuple[Row, list[dict[str, Any]]]]:
    """Every size, as far as `limit` seconds reach. A row that fails is said to; the next is tried."""
    until = time.monotonic() + limit
    for total, piece in itertools.product(TOTALS, PIECES):
        if piece > total or total > largest:
            continue
        where = f"{total // MIB} MiB in pieces of {piece // KIB} KiB"
        if time.monotonic() > until:
            console.print(f"{where}: left out, {limit:.0f} s are over")
            continue
        try:
            row, seen = one_row(total, piece, rounds, interval)
        except Exception as error:
            console.print(f"{where}: failed: {_line(error)}")
            continue
        for variant, why in row.failed.items():
            console.print(f"{where}: {variant} left out: {why}")
        yield row, seen


def show(rows: list[Row], word: Word, console: Console) -> None:
    table = Table(title="Loads on CUDA: share of the plain copy's rate, submitted to reported")
    for column in (
        "MiB",
        "piece, KiB",
        "plain GB/s",
        *VARIANTS,
        "auto 95 %",
        "submit µs: vllm",
        "gather",
        "auto: goal",
    ):
        table.add_column(column, justify="right")
    for row in sorted(rows):
        share = row.shares
        auto = share.get("auto")
        goal = auto is not None and row.total_bytes >= GOAL_FROM
        table.add_row(
            f"{row.total_bytes // MIB:,}",
            f"{row.piece_bytes // KIB:,}",
            f"{row.plain:.1f}",
            *(f"{share[one].ratio:.3f}" if one in share else "" for one in VARIANTS),
            f"{auto.low:.3f} to {auto.high:.3f}" if auto else "",
            *(f"{share[one].submit_us:.0f}" if one in share else "" for one in ("vllm", "gather")),
            word(auto.low, auto.high) if auto and goal else "",
        )
    console.print(table)


SWEEP = (
    *({"PROGRAMS": programs} for programs in (16, 32, 64, 128, 256)),
    *({"CHUNK_BYTES": chunk, "PROGRAMS": (1 << 20) // chunk} for chunk in (4 * KIB, 8 * KIB, 32 * KIB)),
    {"WARPS": 8},
    {"HEAD_CHUNKS": 0},
    {"HEAD_CHUNKS": 128},
)
"""Constants of `cuda_gather` and `cuda_loads` that differ from theirs."""


def sweep(rounds: int, console: Console) -> list[dict[str, Any]]:
    """The kernel's share of the plain copy's rate with each of the settings; each is checked first."""
    found: list[dict[str, Any]] = []
    for constants, piece in itertools.product(SWEEP, (16 * KIB, 2 * MIB)):
        homes = [(cuda_loads if hasattr(cuda_loads, name) else cuda_gather, name) for name in constants]
        before = [getattr(home, name) for home, name in homes]
        try:
            for (home, name), value in zip(homes, constants.values(), strict=True):
                setattr(home, name, value)
            bench = Bench(64 * MIB, piece)
            bench.check("gather")
            turns = [(bench.plain(), bench.load("gather")) for _ in range(WARM_UP + rounds)][WARM_UP:]
            bench.close()
            ratio = statistics.median(plain / turn.total for plain, turn in turns)
            said = statistics.median(64 * MIB / turn.said for _, turn in turns) / 1e9
            found.append(constants | {"piece_bytes": piece, "ratio": ratio, "said": said})
            console.print(f"{constants}, {piece // KIB} KiB: {ratio:.3f} of plain, kernel {said:.1f} GB/s")
        except Exception as error:
            console.print(f"{constants}, {piece // KIB} KiB: failed: {_line(error)}")
        finally:
            for (home, name), value in zip(homes, before, strict=True):
                setattr(home, name, value)
    return found


def beside_compute(rounds: int, console: Console) -> dict[str, Any]:
    """Milliseconds that kernels take alone and while a load goes on: products of matrices, copies on the device."""
    bench = Bench(GIB, 64 * KIB)
    square = torch.randn((4096, 4096), dtype=torch.bfloat16, device=DEVICE)
    product, long = torch.empty_like(square), torch.zeros(GIB, dtype=torch.int8, device=DEVICE)
    other = torch.empty_like(long)
    work: dict[str, tuple[Callable[[], Any], int]] = {
        "products": (lambda: torch.mm(square, square, out=product), 50),
        "copies": (lambda: other.copy_(long), 15),
    }
    seen: dict[str, dict[str, list[float]]] = {}
    for number in range(-WARM_UP, rounds):
        for name, (kernel, times) in work.items():
            for variant in (None, "vllm", "gather"):
                if variant is not None and variant not in bench.workers:
                    continue
                torch.cuda.synchronize()
                end = bench.submit(variant) if variant else torch.cuda.synchronize
                began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                began.record()
                for _ in range(times):
                    kernel()
                ended.record()
                end()
                if number >= 0:
                    seen.setdefault(name, {}).setdefault(variant or "alone", []).append(began.elapsed_time(ended))
    bench.close()
    found = {name: {one: statistics.median(times) for one, times in by.items()} for name, by in seen.items()}
    for name, by in found.items():
        console.print(f"{name}, ms: " + ", ".join(f"{one} {time:.2f}" for one, time in by.items()))
    return found
