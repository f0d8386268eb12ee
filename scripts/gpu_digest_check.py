"""Page digests on a GPU: are they right, and how fast are they?

    PYTHONPATH=src python scripts/gpu_digest_check.py --out DIR

Holds every implementation against numpy's digest of the same bytes, then measures bytes digested per second beside a
copy within the device's memory. Prints a table, writes DIR/gpu_digest_check.json. Needs torch for CUDA and numpy; the
kernel is left out where Triton is missing. Exit code 0: all digests right; 1: one is wrong; 2: no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from samestate.instruments.device_digests import DeviceDigester, SumsOf, host_mix128, page_facts, torch_sums
from samestate.instruments.digests import SENTINEL, PageFacts

FactsOf = Callable[[list[torch.Tensor]], list[PageFacts]]

SIZES = [16, 17, 24, 100, 1000, 4096, 4098, 32768, 32769, 65537, 1 << 20, (1 << 20) + 6, (8 << 20) - 2, 8 << 20]
THROUGHPUT_SIZES = [16 << 10, 128 << 10, 1 << 20, 8 << 20]
VOLUME = 1 << 30
"""Bytes digested in one measurement."""
REPEATS = 20
SLEEP = 200_000_000
"""Clock cycles, about 0.1 s: longer than a host takes to queue a job."""


class Strides(NamedTuple):
    """Pages of one entry as they lie in a cache, bytes."""

    blocks: int
    size: int
    stride: int
    offset: int


STRIDES = [
    Strides(blocks=64, size=4096, stride=4096, offset=0),
    Strides(blocks=64, size=4000, stride=65536, offset=4096),
    Strides(blocks=33, size=1534, stride=8192, offset=2),
    Strides(blocks=33, size=8190, stride=8194, offset=6),
    Strides(blocks=17, size=1001, stride=4099, offset=3),
    Strides(blocks=8, size=1 << 20, stride=(1 << 20) + (64 << 10), offset=1 << 12),
]


class Speed(NamedTuple):
    """GB/s (10⁹ bytes of pages each second): median, slowest and fastest of the repeats."""

    what: str
    page_bytes: int
    pages: int
    median: float
    slowest: float
    fastest: float


def main() -> int:
    parser = argparse.ArgumentParser(description="Page digests on a GPU: correctness and throughput.")
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_digest_check.json, made if missing")
    out: Path = parser.parse_args().out
    if not torch.cuda.is_available():
        print("no CUDA device: run this on a GPU machine with a torch built for CUDA", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    digester = DeviceDigester(device)
    kernels: dict[str, SumsOf] = {"torch": torch_sums}
    if find_spec("triton"):
        from samestate.instruments.triton_digests import triton_sums

        kernels["triton"] = triton_sums
    implementations: dict[str, FactsOf] = {name: of_sums(kernel) for name, kernel in kernels.items()}
    implementations["digester"] = digester.facts

    machine = describe(device)
    print("  ".join(f"{name} {value}" for name, value in machine.items()))
    checks = {
        f"{name}: {check}": faults
        for name, facts_of in implementations.items()
        for check, faults in correctness(device, facts_of)
    }
    checks |= dict(order(device, digester))
    for check, faults in checks.items():
        print(f"{'WRONG' if faults else 'right'}  {check}", *faults[:3], sep="\n       ")

    print(f"\n{'':28}{'page bytes':>12}{'pages':>8}{'GB/s':>9}{'slowest':>9}{'fastest':>9}")
    speeds = list(throughput(device, digester, kernels))
    for speed in speeds:
        print(f"{speed.what:28}{speed.page_bytes:12}{speed.pages:8}", end="")
        print(f"{speed.median:9.1f}{speed.slowest:9.1f}{speed.fastest:9.1f}")
    out.mkdir(parents=True, exist_ok=True)
    result = {
        "machine": machine,
        "checks": {check: faults or "right" for check, faults in checks.items()},
        "throughput": [{**speed._asdict(), **machine} for speed in speeds],
        "repeats": REPEATS,
        "bytes_each": VOLUME,
    }
    (out / "gpu_digest_check.json").write_text(json.dumps(result, indent=1) + "\n")
    return 1 if any(checks.values()) else 0


def describe(device: torch.device) -> dict[str, str]:
    """What every figure depends on."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", f"--id={device.index}"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        driver = "unknown"
    triton = "none"
    if find_spec("triton"):
        import triton as package

        triton = package.__version__
    return {
        "device": torch.cuda.get_device_name(device),
        "driver": driver,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton,
    }


def of_sums(sums_of: SumsOf) -> FactsOf:
    return lambda pages: page_facts(pages, sums_of)


def right(raw: np.ndarray) -> PageFacts:
    """What numpy finds in a page."""
    words = raw[: raw.size // 8 * 8].reshape(-1, 8)
    sentinel = 8 * int((words == SENTINEL).all(axis=1).sum())
    return PageFacts(host_mix128(raw), int(np.count_nonzero(raw)), sentinel)


def random_bytes(count: int, device: torch.device) -> torch.Tensor:
    """Random bytes with a run of zeros and one of the sentinel."""
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, device=device)
    raw[count // 8 : count // 4] = 0
    raw[count // 2 : count // 2 + count // 8] = SENTINEL
    return raw


def compare(pages: list[torch.Tensor], facts_of: FactsOf, what: str) -> list[str]:
    """A line for each page whose facts differ from numpy's."""
    return [
        f"{what}, page {index}: {found}, numpy {expected}"
        for index, (page, found) in enumerate(zip(pages, facts_of(pages), strict=True))
        if found != (expected := right(page.cpu().numpy()))
    ]


def correctness(device: torch.device, facts_of: FactsOf) -> Iterator[tuple[str, list[str]]]:
    """Checks by name, each with what is wrong: nothing, where all is right."""
    torch.manual_seed(0)
    pages = [random_bytes(size, device) for size in SIZES]
    yield (
        f"{len(SIZES)} sizes, {SIZES[0]} B to {SIZES[-1] >> 20} MiB, one by one",
        [fault for page in pages for fault in compare([page], facts_of, f"{page.numel()} B")],
    )
    yield f"{len(SIZES)} sizes in one job", compare(pages, facts_of, "job")

    faults, count = [], 0
    for strides in STRIDES:
        blocks = random_bytes(strides.offset + strides.blocks * strides.stride, device).as_strided(
            (strides.blocks, strides.size), (strides.stride, 1), strides.offset
        )
        faults += compare(list(blocks), facts_of, str(strides))
        count += strides.blocks
    yield f"{count} pages as strided views of {len(STRIDES)} buffers", faults

    faults = []
    page = random_bytes(4099, device)
    before = facts_of([page])[0].digest
    for bit in range(page.numel() * 8 - 1, 0, -509):
        page[bit // 8] ^= 1 << bit % 8
        if facts_of([page])[0].digest == before:
            faults.append(f"bit {bit} flipped, the digest is the same")
        page[bit // 8] ^= 1 << bit % 8
    if facts_of([page])[0].digest != before:
        faults.append("all bits restored, the digest is another")
    yield "single bits of 4099 B", faults


def order(device: torch.device, digester: DeviceDigester) -> Iterator[tuple[str, list[str]]]:
    """Is a page read after what was queued before, and is a fill done when it returns?"""
    size = 1 << 20
    page, ones = torch.zeros(size, dtype=torch.uint8, device=device), torch.ones(size, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    faults = []
    expected = right(np.ones(size, np.uint8))
    with torch.cuda.stream(torch.cuda.Stream(device)):
        torch.cuda._sleep(SLEEP)
        page.copy_(ones)
        if digester.facts([page]) != [expected]:
            faults.append("the digest is of the page before the write queued on the current stream")
    yield "digester: waits for writes queued on the current stream", faults

    with torch.cuda.stream(torch.cuda.Stream(device)):
        torch.cuda._sleep(SLEEP)
        written = digester.fill([page])
    filled = bool((page == SENTINEL).all())
    yield "digester: a fill is done when it returns", [] if filled and written == size else [f"{written} B, {filled}"]


def throughput(device: torch.device, digester: DeviceDigester, kernels: dict[str, SumsOf]) -> Iterator[Speed]:
    """`device`: what the device does, by its events; `host`: all that `facts` does, by the host's clock."""
    buffer = random_bytes(VOLUME, device)
    target = torch.empty_like(buffer)
    yield speed("device: copy within memory", 1, VOLUME, partial(on_device, partial(target.copy_, buffer)))
    for size in THROUGHPUT_SIZES:
        pages = list(buffer.view(-1, size))
        for name, sums_of in kernels.items():
            yield speed(f"device: {name}", len(pages), size, partial(on_device, partial(sums_of, pages)))
        yield speed("host: digester.facts", len(pages), size, partial(on_host, partial(digester.facts, pages)))


def speed(what: str, pages: int, size: int, seconds: Callable[[], float]) -> Speed:
    for _ in range(3):
        seconds()
    rates = [pages * size / seconds() / 1e9 for _ in range(REPEATS)]
    return Speed(what, size, pages, statistics.median(rates), min(rates), max(rates))


def on_device(work: Callable[[], object]) -> float:
    """Seconds between two events around `work` on the current stream, queued while the device still sleeps."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(SLEEP)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def on_host(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
