"""How long `samestate check` takes and how much memory, as archives grow: the curve up to a million page rows.

    python benchmarks/check_scale.py [--grow layers] [--rows 10000 ...] [--runs 3] [--damaged] [--convert] [--out DIR]

Makes a sealed archive of each size (`made_archive.py`), runs `samestate check --json` on it in a child process of its
own, `--runs` times, and tells wall time, processor time and peak resident memory of the child. The best run is shown:
the work is the same in all, so the others only waited for other work on the machine. Archives grow by cases, as those
of longer plans do, or by layers with the same requests. `--damaged`: every tenth row that arrives is other than it
was saved, so that the check must fail. `--convert`: `samestate archive convert` too. Writes a JSON file and a curve
(SVG) into DIR. Two cores, about a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from made_archive import Made, Shape, make
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from scale_curve import Series, curve

GOAL_S = 5.0
"""Longest that a million page rows may take, on two cores."""
GOAL_ROWS = 1_000_000
CASES = 77
"""Of every archive, when they grow by layers."""
SAMESTATE = [sys.executable, "-m", "samestate"]
EXPECTED = {False: ("pass", 0), True: ("fail", 1)}
"""Verdict and exit code, by whether the archive was damaged on purpose."""


class Run(NamedTuple):
    """One child process."""

    wall_s: float
    cpu_s: float
    """User and system together."""
    peak_mib: float
    """Peak resident set."""


class Point(NamedTuple):
    """One size of archive."""

    entries: int
    """Of the rank."""
    page_rows: int
    records: int
    stream_bytes: int
    operations: int
    """Generations of the watched arm."""
    runs: list[Run]
    converted: Run | None
    parquet_bytes: int | None

    @property
    def best(self) -> Run:
        return min(self.runs, key=lambda run: run.wall_s)


def child(arguments: list[str]) -> tuple[Run, subprocess.CompletedProcess[bytes]]:
    """Run samestate in a process of its own and take its usage from the kernel."""
    began = time.perf_counter()
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen([*SAMESTATE, *arguments], stdout=out)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        done = subprocess.CompletedProcess(arguments, process.returncode, out.read())
    return Run(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024), done


def check(root: Path, damaged: bool) -> Run:
    run, done = child(["check", "--json", str(root)])
    verdict = json.loads(done.stdout).get("verdict")
    if (verdict, done.returncode) != EXPECTED[damaged]:
        raise SystemExit(f"{root}: verdict {verdict}, exit code {done.returncode}: this archive is not what was made")
    return run


def shape_of(rows: int, grow: str) -> Shape:
    """As many layers as give `rows` with `CASES` cases, when archives grow by layers."""
    if grow == "cases":
        return Shape()
    return Shape(layers_a_group=max(1, round(rows / CASES / Shape(layers_a_group=1).rows_a_case)))


def measure(rows: int, shape: Shape, runs: int, damaged: bool, convert: bool, scratch: Path) -> Point:
    root = scratch / f"rows-{rows}"
    made: Made = make(root, rows, shape, damage_every=10 if damaged else 0)
    checked = [check(root, damaged) for _ in range(runs)]
    converted, size = None, None
    if convert:
        converted, done = child(["archive", "convert", str(root), str(scratch / f"columns-{rows}")])
        if done.returncode:
            raise SystemExit(f"{root}: convert ended with exit code {done.returncode}")
        size = sum(path.stat().st_size for path in (scratch / f"columns-{rows}").iterdir())
    return Point(shape.entries, made.page_rows, made.records, made.bytes, 4 * made.cases, checked, converted, size)


def machine() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in ("samestate", "msgspec", "pydantic")},
    }


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()


def show(points: list[Point], console: Console, title: str) -> None:
    table = Table(title=title)
    for column in (
        "page rows",
        "entries",
        "generations",
        "MB",
        "wall, s",
        "CPU, s",
        "peak, MiB",
        "rows/s",
        "convert, s",
    ):
        table.add_column(column, justify="right")
    for point in points:
        best = point.best
        table.add_row(
            f"{point.page_rows:,}",
            f"{point.entries:,}",
            f"{point.operations:,}",
            f"{point.stream_bytes / 1e6:.1f}",
            f"{best.wall_s:.2f}",
            f"{best.cpu_s:.2f}",
            f"{best.peak_mib:.0f}",
            f"{point.page_rows / best.wall_s:,.0f}",
            f"{point.converted.wall_s:.2f}" if point.converted else "–",
        )
    console.print(table)
    first, last = points[0], points[-1]
    if last.page_rows >= GOAL_ROWS:
        word = "within" if last.best.wall_s <= GOAL_S else "over"
        console.print(f"{word} the goal of {GOAL_S:.0f} s: {last.best.wall_s:.2f} s for {last.page_rows:,} page rows")
    if last is not first:
        grown = (last.best.peak_mib - first.best.peak_mib) * 2**20
        line = f"memory grows by {grown / (last.page_rows - first.page_rows):.1f} bytes a page row"
        if last.operations >= 2 * first.operations:
            line += f", {grown / (last.operations - first.operations) / 1000:.1f} kB a generation"
        console.print(line)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure how samestate check scales.")
    parser.add_argument("--grow", choices=("cases", "layers"), default="cases")
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 30_000, 100_000, 300_000, 1_000_000])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--damaged", action="store_true")
    parser.add_argument("--convert", action="store_true")
    parser.add_argument("--out", type=Path, metavar="DIR")
    options = parser.parse_args()
    console, before = Console(width=110), machine()
    points: list[Point] = []
    with tempfile.TemporaryDirectory() as scratch, Progress(console=Console(file=sys.stderr), transient=True) as bar:
        for rows in bar.track(sorted(options.rows), description="sizes"):
            shape = shape_of(rows, options.grow)
            points.append(measure(rows, shape, options.runs, options.damaged, options.convert, Path(scratch)))
    damaged = ", one row in ten that arrives damaged" if options.damaged else ""
    show(points, console, f"samestate check, archives that grow by {options.grow}{damaged}")
    console.print(f"machine: {before['processor']}, {before['cores']} cores, load before {before['load_average']}")
    console.print(f"{before['versions']}, Python {before['python']}")
    if options.out:
        name = f"check-scale-{options.grow}" + ("-damaged" if options.damaged else "")
        options.out.mkdir(parents=True, exist_ok=True)
        result = {"machine": before, "load_after": os.getloadavg(), "points": [as_json(point) for point in points]}
        (options.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        (options.out / f"{name}.svg").write_text(_curve(points))
    return 0


def as_json(point: Point) -> dict[str, Any]:
    converted = point.converted._asdict() if point.converted else None
    return {**point._asdict(), "runs": [run._asdict() for run in point.runs], "converted": converted}


def _curve(points: list[Point]) -> str:
    series = [
        Series("wall time, s", "#1f77b4", [point.best.wall_s for point in points]),
        Series("peak memory, 100 MiB", "#d62728", [point.best.peak_mib / 100 for point in points]),
    ]
    return curve("page rows", [point.page_rows for point in points], series)


if __name__ == "__main__":
    sys.exit(main())
