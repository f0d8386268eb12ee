"""How fast stores write and read pages, beside what does the same without envelope, checksum and first-wins.

    python benchmarks/stores.py [--sizes 65536 …] [--rounds 6] [--folder DIR] [--out FILE.json]

In every round each store writes pages and reads them again, and its plain counterpart does so with files of the same
size in the same folder (write, rename; `preadv` into the same buffer), or with the same server through the client
library's `SET` and `GET`. What is read was just written: files come from the page cache, so the figures are the cost
of the store, not of the disk. Order rotates; figures are medians over the rounds, and ratios are medians of the rounds'
own ratios. ``copy`` is one plain copy of the same bytes in memory. A server is started where redis-server or
valkey-server is installed. Two cores, about a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import valkey
from kept_server import SERVER, running_server, url
from rich.console import Console
from rich.progress import track
from rich.table import Table

from samestate.cache.base import PageKey, PageStore, Read, Write
from samestate.cache.stores.urls import open_store

KIB, MIB = 1 << 10, 1 << 20
SIZES = [64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
BYTES_A_ROUND = 64 * MIB


class Pair(NamedTuple):
    """A store, and what does the same without it."""

    name: str
    store: PageStore
    plain_write: Callable[[int, memoryview], None]
    plain_read: Callable[[int, memoryview], None]
    plain_clear: Callable[[int], None]
    plain: str


class Figure(NamedTuple):
    """One store, one size; GB/s (10⁹)."""

    store: str
    page_bytes: int
    write: float
    read: float
    write_ratio: float
    """Of the plain counterpart's rate."""
    read_ratio: float
    read_of_copy: float
    """Of the rate of a plain copy in memory."""


def key(number: int) -> PageKey:
    return PageKey(number.to_bytes(4, "big") * 9)


def disk(folder: Path) -> Pair:
    plain = folder / "plain"
    plain.mkdir()

    def write(number: int, page: memoryview) -> None:
        file = os.open(plain / "tmp", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(file, page)
        os.close(file)
        os.rename(plain / "tmp", plain / str(number))

    def read(number: int, into: memoryview) -> None:
        file = os.open(plain / str(number), os.O_RDONLY)
        assert os.preadv(file, [into], 0) == len(into)
        os.close(file)

    store = open_store((folder / "store").as_uri(), "benchmark")
    return Pair("disk", store, write, read, lambda number: os.unlink(plain / str(number)), "file")


def server(port: int) -> Pair:
    client = valkey.Valkey(port=port)

    def read(number: int, into: memoryview) -> None:
        into[:] = client.get(f"plain {number}")

    return Pair(
        "valkey",
        open_store(url(port), "benchmark"),
        lambda number, page: client.set(f"plain {number}", page) and None,
        read,
        lambda number: client.unlink(f"plain {number}") and None,
        "client SET, GET",
    )


def rate(size: int, count: int, work: Callable[[int], None]) -> float:
    """GB/s."""
    began = time.perf_counter()
    for number in range(count):
        work(number)
    return size * count / (time.perf_counter() - began) / 1e9


def one_round(pair: Pair, page: memoryview, into: memoryview, plain_first: bool) -> dict[str, float]:
    """Rates of each side. What one wrote is gone before the other writes, so that both find as much room."""
    size = len(page)
    count = max(1, BYTES_A_ROUND // size)

    def store_write(number: int) -> None:
        assert pair.store.write(key(number), page) is Write.WRITTEN

    def store_read(number: int) -> None:
        assert pair.store.read(key(number), into) is Read.HIT

    def plain() -> dict[str, float]:
        write = rate(size, count, lambda number: pair.plain_write(number, page))
        read = rate(size, count, lambda number: pair.plain_read(number, into))
        for number in range(count):
            pair.plain_clear(number)
        return {"plain write": write, "plain read": read}

    def ours() -> dict[str, float]:
        write, read = rate(size, count, store_write), rate(size, count, store_read)
        pair.store.delete([key(number) for number in range(count)])
        return {"write": write, "read": read}

    def copy(number: int) -> None:
        into[:] = page

    rates = {**plain(), **ours()} if plain_first else {**ours(), **plain()}
    assert into == page
    return {**rates, "copy": rate(size, count, copy)}


def figure(name: str, size: int, rounds: list[dict[str, float]]) -> Figure:
    def median(of: Callable[[dict[str, float]], float]) -> float:
        return statistics.median(map(of, rounds))

    return Figure(
        name,
        size,
        median(lambda r: r["write"]),
        median(lambda r: r["read"]),
        median(lambda r: r["write"] / r["plain write"]),
        median(lambda r: r["read"] / r["plain read"]),
        median(lambda r: r["read"] / r["copy"]),
    )


def machine() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "server": subprocess.run([SERVER, "--version"], capture_output=True, text=True, check=True).stdout.split(
            " sha"
        )[0]
        if SERVER
        else None,
        "versions": {name: metadata.version(name) for name in ("samestate", "xxhash", "valkey")},
    }


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()


def show(figures: list[Figure], pairs: list[Pair], rounds: int, console: Console) -> None:
    table = Table(title=f"Stores of pages, {rounds} rounds: GB/s, and shares of the plain rate")
    for column in ("store", "page", "write", "of plain", "read", "of plain", "of a copy"):
        table.add_column(column, justify="left" if column == "store" else "right")
    for one in figures:
        page = f"{one.page_bytes // MIB} MiB" if one.page_bytes >= MIB else f"{one.page_bytes // KIB} KiB"
        shares = (f"{one.write:.2f}", f"{one.write_ratio:.2f}", f"{one.read:.2f}", f"{one.read_ratio:.2f}")
        table.add_row(one.store, page, *shares, f"{one.read_of_copy:.2f}")
    console.print(table)
    for pair in pairs:
        console.print(f"plain, for {pair.name}: {pair.plain}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what stores of pages cost.")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--folder", type=Path, help="Where files are written; default: the system's for temporary files."
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    console, before = Console(), machine()
    rounds: dict[tuple[str, int], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch, running_server(Path(scratch)) as port:
        pairs = [disk(Path(scratch))] + ([server(port)] if port else [])
        for number in track(range(-1, options.rounds), "rounds", console=Console(file=sys.stderr)):
            for size in options.sizes:
                page, into = memoryview(os.urandom(size)), memoryview(bytearray(size))
                for pair in pairs if number % 2 else pairs[::-1]:
                    seen = one_round(pair, page, into, plain_first=number % 2 == 0)
                    if number >= 0:
                        rounds.setdefault((pair.name, size), []).append(seen)
    figures = sorted(figure(name, size, seen) for (name, size), seen in rounds.items())
    show(figures, pairs, options.rounds, console)
    console.print(f"machine: {before['processor']}, {before['cores']} cores, load before {before['load_average']}")
    console.print(f"{before['versions']}, Python {before['python']}, Linux {before['kernel']}, {before['server']}")
    if options.out:
        result = {"machine": before, "load_after": os.getloadavg(), "rounds": options.rounds}
        result["figures"] = [one._asdict() for one in figures]
        result["samples"] = [
            {"store": name, "page_bytes": size, "rates": seen} for (name, size), seen in rounds.items()
        ]
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
