"""Loads on CUDA, part of `reload.py`: one job from pinned memory to the device, by vLLM's worker and by ours.

Memory is as in engines: a region whose rows of 2 MiB hold a page of each of several tensors (vLLM's own worker and
region, allocated and pinned by them). A job loads every row into a block, both in random order. In every round each
takes one turn, the order rotating, beside a plain copy of as many bytes from pinned memory: vLLM's worker as it is
(``vllm``), ours with every load by the kernel (``gather``), with every load through the buffer (``staged``), and as it
chooses (``auto``). They share one tier and one device side. A load is timed from its submission *until complete*, when
the event behind it has passed, asked without a pause, and *until reported*, when `get_finished` then has it.

Before it is timed, each loads once into blocks that were emptied, and every byte is compared. One that fails is said
to, and left out; the others go on. Sizes for which there is a goal come first.

*Sweep*, where asked for: kernel and buffer with other constants, 64 MiB in pieces of 16 KiB and of 64 KiB.

*Beside compute*: what 1 GiB of loads in pieces of 64 KiB costs kernels that run at the same time on the same device.
"""

from __future__ import annotations

import copy
import itertools
import os
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
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from samestate.cache import cuda_gather, cuda_loads, cuda_staged

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
ROW = 2 * MIB
PIECES = (16 * KIB, 64 * KIB, 512 * KIB, 2 * MIB)
TOTALS = (64 * MIB, 256 * MIB, GIB, 16 * MIB, 2 * MIB)
DEVICE = "cuda"
GOAL_FROM, GOAL = 64 * MIB, 0.90
WARM_UP = 3
VARIANTS = ("vllm", "gather", "staged", "auto")
GIVE_UP = 10.0
"""Seconds for one load."""
Interval: TypeAlias = Callable[[list[float]], tuple[float, float]]
Word: TypeAlias = Callable[[float, float], str]


class Turn(NamedTuple):
    """Seconds."""

    total: float
    """Until reported."""
    complete: float
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
    complete: float
    """The same, until complete."""
    complete_low: float
    complete_high: float
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
    """A tier of rows and its device side, and the workers over them: `row / piece` tensors, `total / row` rows."""

    _regions = itertools.count()

    def __init__(self, total: int, piece: int, row: int = ROW, seed: int = 1) -> None:
        rows = total // row
        self.total = total
        self._content = torch.randint(-128, 128, (row // piece, rows, piece), dtype=torch.int8, device=DEVICE)
        self._blocks = self._content.clone()
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(one, piece) for one in self._blocks],
            [[CanonicalKVCacheRef(index, piece) for index in range(row // piece)]],
        )
        region = SharedOffloadRegion(f"reload-{os.getpid()}-{next(self._regions)}", rows, 0, row, row, lambda: None)
        worker = CPUOffloadingWorker(caches, 1, rows, region)
        self._source = torch.ones(total, dtype=torch.int8).pin_memory()
        self._target = torch.zeros(total, dtype=torch.int8, device=DEVICE)
        self._jobs = itertools.count()
        self._worker = worker
        self.workers: dict[str, CPUOffloadingWorker] = {"vllm": worker}
        self.failed: dict[str, str] = {}
        chance = random.Random(seed)
        self._rows, self._places = chance.sample(range(rows), rows), chance.sample(range(rows), rows)
        source, target = self._specs()
        job = next(self._jobs)
        assert worker.submit_store(job, target, source)
        worker.wait({job})
        assert [one.job_id for one in worker.get_finished()] == [job]
        for mode in VARIANTS[1:]:
            ours = copy.copy(worker)  # Same tier, same handlers; `install` puts ours before the loads of this one.
            try:
                cuda_loads.install(ours, mode)  # `auto` may leave them as they are: then that is what it is.
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
        event = _event(worker._load_handler, job)
        while not event.query():
            if time.perf_counter() - began > GIVE_UP:
                raise TimeoutError(f"not over after {GIVE_UP:.0f} s")
        completed = time.perf_counter()
        while not (results := worker.get_finished()):
            if time.perf_counter() - began > GIVE_UP:
                raise TimeoutError(f"not reported after {GIVE_UP:.0f} s")
        ended = time.perf_counter()
        (result,) = results
        assert result.success and result.job_id == job and result.transfer_size == self.total, result
        return Turn(ended - began, completed - began, submitted - began, result.transfer_time or float("nan"))

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


def _event(handler: Any, job: int) -> Any:
    """What passes when a job of vLLM's handler, or of ours, is over."""
    for one in getattr(handler, "_jobs", ()):
        if one.job_id == job:
            return one.ended
    return getattr(handler, "_inner", handler)._transfer_events[job]


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
        complete = [plain / turn.complete for plain, turn in mine]
        shares[variant] = Share(
            statistics.median(total / turn.total for _, turn in mine) / 1e9,
            statistics.median(ratios),
            *interval(ratios),
            statistics.median(complete),
            *interval(complete),
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
    for title, kind in (("submitted to reported", ""), ("submitted to complete", "complete")):
        table = Table(title=f"Loads on CUDA: share of the plain copy's rate, {title}")
        for column in ("MiB", "piece, KiB", "plain GB/s", *VARIANTS, "staged 95 %", "staged: goal", "auto: goal"):
            table.add_column(column, justify="right")
        for row in sorted(rows):
            found = {
                name: (share.complete, share.complete_low, share.complete_high)
                if kind
                else (share.ratio, share.low, share.high)
                for name, share in row.shares.items()
            }
            goal = row.total_bytes >= GOAL_FROM
            table.add_row(
                f"{row.total_bytes // MIB:,}",
                f"{row.piece_bytes // KIB:,}",
                f"{row.plain:.1f}",
                *(f"{found[one][0]:.3f}" if one in found else "" for one in VARIANTS),
                f"{found['staged'][1]:.3f} to {found['staged'][2]:.3f}" if "staged" in found else "",
                *(word(*found[one][1:]) if goal and one in found else "" for one in ("staged", "auto")),
            )
        console.print(table)
    table = Table(title="Loads on CUDA: µs to submit; GB/s by the worker's word")
    for column in ("MiB", "piece, KiB", *VARIANTS, *(f"{one}, GB/s" for one in VARIANTS)):
        table.add_column(column, justify="right")
    for row in sorted(rows):
        shares = [row.shares.get(one) for one in VARIANTS]
        table.add_row(
            f"{row.total_bytes // MIB:,}",
            f"{row.piece_bytes // KIB:,}",
            *(f"{one.submit_us:.0f}" if one else "" for one in shares),
            *(f"{one.said:.1f}" if one else "" for one in shares),
        )
    console.print(table)


SWEEP: tuple[tuple[str, Any, dict[str, int]], ...] = (
    *(
        ("staged", cuda_staged, {"TAIL_BYTES": tail * MIB, "PROGRAMS": programs})
        for tail in (2, 4, 8, 16)
        for programs in (32, 64)
    ),
    *(
        ("staged", cuda_staged, {"SLAB_BYTES": size * MIB, "SLABS": slabs, "TAIL_BYTES": tail * MIB})
        for size, slabs, tail in ((4, 8, 4), (8, 4, 4), (8, 8, 8), (32, 2, 4), (32, 2, 8), (32, 4, 16), (64, 2, 8))
    ),
    *(("staged", cuda_staged, {"PROGRAMS": programs}) for programs in (8, 16, 128)),
    *(("gather", cuda_gather, {"PROGRAMS": programs}) for programs in (16, 32, 64, 128)),
    *(("gather", cuda_gather, {"HEAD_CHUNKS": chunks}) for chunks in (0, 128)),
)
"""Ways of loading, and constants of a module that differ from its own."""


def sweep(rounds: int, console: Console) -> list[dict[str, Any]]:
    """Their shares of the plain copy's rate with each of the settings; each is checked first."""
    found: list[dict[str, Any]] = []
    for (mode, home, constants), piece in itertools.product(SWEEP, (16 * KIB, 64 * KIB)):
        before = {name: getattr(home, name) for name in constants}
        where = f"{mode}, {constants}, {piece // KIB} KiB"
        try:
            for name, value in constants.items():
                setattr(home, name, value)
            bench = Bench(64 * MIB, piece)
            bench.check(mode)
            turns = [(bench.plain(), bench.load(mode)) for _ in range(WARM_UP + rounds)][WARM_UP:]
            bench.close()
            ratio = statistics.median(plain / turn.total for plain, turn in turns)
            said = statistics.median(64 * MIB / turn.said for _, turn in turns) / 1e9
            found.append({"mode": mode, "piece_bytes": piece, "ratio": ratio, "said": said} | constants)
            console.print(f"{where}: {ratio:.3f} of plain, {said:.1f} GB/s by its word")
        except Exception as error:
            console.print(f"{where}: failed: {_line(error)}")
        finally:
            for name, value in before.items():
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
            for variant in (None, "vllm", "gather", "staged"):
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
