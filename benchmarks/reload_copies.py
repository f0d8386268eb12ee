"""Worker level of `reload.py` on the CPU: one job's pages from the memory tier to the device, beside a plain copy.

*Hand-over*: small loads from their submission until `get_finished` has them, asked as a served core's loop
asks (every millisecond), copied where they are submitted and by the worker's thread, in turns; and how long submitting
takes, for which the engine's step waits. A job has three groups of one state and one of pages, as a hybrid's has.

The worker is `samestate.cache.host_worker.HostWorker`, the plain copy one `memmove`. Both are timed from submission to
completion, in turns; the worker's blocks are in random order. For CUDA see `reload_cuda.py`.
"""

from __future__ import annotations

import ctypes
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

from samestate.cache.host_worker import HostWorker

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PIECES = (64 * KIB, 512 * KIB, 2 * MIB)
TOTALS = (2 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB)
SMALL = (256 * KIB, MIB, 2 * MIB, 4 * MIB)
GOAL_FROM = 64 * MIB
GOAL = 0.90
Interval: TypeAlias = Callable[[list[float]], tuple[float, float]]


class Copied(NamedTuple):
    """One size. Rates in GB/s (10⁹), medians over the rounds; the ratio is the median of the rounds' own."""

    total_bytes: int
    piece_bytes: int
    plain: float
    worker: float
    ratio: float
    low: float
    high: float
    """95 % bootstrap interval of the ratio's median."""
    by_its_own_word: float
    """The worker's rate by the time that it reports itself, which leaves out what goes before the copy."""


class HandedOver(NamedTuple):
    """One size; microseconds: medians over the rounds, and what 95 % of them do not exceed."""

    total_bytes: int
    inline: float
    inline_p95: float
    threaded: float
    threaded_p95: float
    ratio: float
    """Inline over threaded: median of the rounds' own, with its 95 % bootstrap interval."""
    low: float
    high: float
    inline_submit: float
    inline_submit_p95: float
    threaded_submit: float
    threaded_submit_p95: float


class Bench:
    """One worker over `total` bytes in pieces of `piece`, and a plain copy over as many."""

    def __init__(self, total: int, piece: int, seed: int) -> None:
        pages = total // piece
        self._total = total
        self._device = torch.zeros((pages, piece), dtype=torch.int8)
        caches = CanonicalKVCaches([CanonicalKVCacheTensor(self._device, piece)], [[CanonicalKVCacheRef(0, piece)]])
        self.worker = HostWorker(caches, 1, pages)
        self._source = torch.ones(total, dtype=torch.int8)
        self._target = torch.zeros(total, dtype=torch.int8)
        chance = random.Random(seed)
        self._rows, self._blocks = chance.sample(range(pages), pages), chance.sample(range(pages), pages)
        self._jobs = iter(range(1 << 30))
        self.said = 0.0
        self._store()

    def plain(self) -> float:
        """Seconds."""
        began = time.perf_counter()
        ctypes.memmove(self._target.data_ptr(), self._source.data_ptr(), self._total)
        return time.perf_counter() - began

    def load(self) -> float:
        """Seconds."""
        job = next(self._jobs)
        rows, blocks = self._specs()
        began = time.perf_counter()
        assert self.worker.submit_load(job, rows, blocks)
        self.worker.wait({job})
        seconds = time.perf_counter() - began
        (result,) = self.worker.get_finished()
        assert result.success and result.transfer_size == self._total, result
        self.said = result.transfer_time or float("nan")
        return seconds

    def _store(self) -> None:
        """Fill the tier, so that no page of memory is touched for the first time while it is measured."""
        self._device.fill_(7)
        job = next(self._jobs)
        rows, blocks = self._specs()
        assert self.worker.submit_store(job, blocks, rows)
        self.worker.wait({job})
        self.worker.get_finished()
        self._device.zero_()
        self.load()
        assert bool((self._device == 7).all()), "the worker copied something else"

    def _specs(self) -> tuple[CPULoadStoreSpec, GPULoadStoreSpec]:
        return CPULoadStoreSpec(self._rows), GPULoadStoreSpec(self._blocks, [len(self._blocks)], [0])


class HandOver:
    """A worker, and a job of `total` bytes or little less."""

    STATES, PAGES, REFS = 3, 5, 2

    def __init__(self, total: int) -> None:
        blocks = self.STATES + self.PAGES
        page = total // blocks // self.REFS
        tensors = [
            CanonicalKVCacheTensor(torch.zeros((4 * blocks, page), dtype=torch.int8), page) for _ in range(self.REFS)
        ]
        refs = [CanonicalKVCacheRef(index, page) for index in range(self.REFS)]
        self.worker = HostWorker(CanonicalKVCaches(tensors, [refs] * (self.STATES + 1)), 1, blocks)
        self.total = page * blocks * self.REFS
        self._device = GPULoadStoreSpec(list(range(blocks)), [1] * self.STATES + [self.PAGES], [0] * (self.STATES + 1))
        self._rows = CPULoadStoreSpec(list(range(blocks)))
        self._jobs = iter(range(1 << 30))

    def load(self, *, inline: bool) -> tuple[float, float]:
        """Seconds until it is reported, and those that its submission took."""
        self.worker.inline_bytes = self.total if inline else 0
        began = time.perf_counter()
        assert self.worker.submit_load(next(self._jobs), self._rows, self._device)
        submitted = time.perf_counter()
        while not (results := self.worker.get_finished()):
            time.sleep(0.001)
        seconds = time.perf_counter() - began
        assert results[0].success and results[0].transfer_size == self.total
        return seconds, submitted - began


def hand_over(total: int, rounds: int, interval: Interval) -> HandedOver:
    bench = HandOver(total)
    seen: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for number in range(-2, rounds):
        for inline in (True, False) if number % 2 else (False, True):
            one = bench.load(inline=inline)
            if number >= 0:
                seen[inline].append(one)
    bench.worker.shutdown()
    ratios = [mine[0] / other[0] for mine, other in zip(seen[True], seen[False], strict=True)]
    until, submit = ({inline: [one[i] for one in seen[inline]] for inline in seen} for i in (0, 1))
    return HandedOver(
        bench.total,
        *_middle_and_p95(until[True]),
        *_middle_and_p95(until[False]),
        statistics.median(ratios),
        *interval(ratios),
        *_middle_and_p95(submit[True]),
        *_middle_and_p95(submit[False]),
    )


def show_hand_overs(rounds: int, interval: Interval, console: Console) -> list[dict[str, Any]]:
    """Measure all sizes, and print them."""
    table = Table(title="Small loads, µs: copied at once, and by the thread")
    for column in (
        "KiB",
        "at once",
        "p95",
        "thread",
        "p95 ",
        "ratio",
        "95 %",
        "step waits",
        "p95  ",
        "thread's",
        "p95   ",
    ):
        table.add_column(column, justify="right")
    found = [hand_over(total, rounds, interval) for total in SMALL]
    for one in found:
        times = (one.inline, one.inline_p95, one.threaded, one.threaded_p95)
        waits = (one.inline_submit, one.inline_submit_p95, one.threaded_submit, one.threaded_submit_p95)
        table.add_row(
            f"{one.total_bytes // KIB:,}",
            *(f"{time:,.0f}" for time in times),
            f"{one.ratio:.2f}",
            f"{one.low:.2f} to {one.high:.2f}",
            *(f"{time:,.0f}" for time in waits),
        )
    console.print(table)
    return [one._asdict() for one in found]


def _middle_and_p95(seconds: list[float]) -> tuple[float, float]:
    """In microseconds."""
    return statistics.median(seconds) * 1e6, statistics.quantiles(seconds, n=20)[-1] * 1e6


def copies(
    totals: tuple[int, ...],
    rounds: int,
    interval: Interval,
) -> Iterator[tuple[Copied, list[dict[str, Any]]]]:
    """Every size, with the rounds that it was found in."""
    for total in totals:
        for piece in PIECES:
            if piece > total:
                continue
            bench = Bench(total, piece, seed=1)
            seen = []
            for number in range(-2, rounds):
                order: list[Callable[[], float]] = [bench.plain, bench.load]
                seconds = {one.__name__: one() for one in (order if number % 2 else order[::-1])}
                if number >= 0:
                    seen.append({**seconds, "said": bench.said})
            bench.worker.shutdown()
            ratios = [one["plain"] / one["load"] for one in seen]
            rates = {
                name: statistics.median(total / one[name] for one in seen) / 1e9 for name in ("plain", "load", "said")
            }
            yield (
                Copied(
                    total,
                    piece,
                    rates["plain"],
                    rates["load"],
                    statistics.median(ratios),
                    *interval(ratios),
                    rates["said"],
                ),
                seen,
            )
            del bench
