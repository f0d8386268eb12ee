"""The demonstration on LMCache: a release that looks up one token too many, the same release repaired, and the release
that has the repair, all against one control.

Exit code 0 only when each came out as it must, from what its archive holds.
"""

from __future__ import annotations

import shutil
import sys
import time
from typing import NamedTuple

from demo import CASES, DIFFERING, ROOT, Judgement, judge, stage

RUNS = ROOT / "demo-runs" / "lmcache"
GENERATIONS = 36


class Run(NamedTuple):
    """One run and what it must come to."""

    name: str
    title: str
    options: list[str]
    differing: set[int]
    """The N whose reloads continue wrongly."""


DEMO = [
    Run("0.5.5", "LMCache 0.5.5: lookup of all N tokens", ["--lmcache-version", "0.5.5"], DIFFERING),
    Run(
        "0.5.5-repaired",
        "LMCache 0.5.5 with the repair: both of its lookups leave the last token out",
        ["--lmcache-version", "0.5.5", "--repair", "strict-prefix"],
        set(),
    ),
    Run("0.5.6", "LMCache 0.5.6: lookup of N-1 tokens", ["--lmcache-version", "0.5.6"], set()),
]


def faults(run: Run, code: int, judgement: Judgement) -> list[str]:
    """What is wrong with a run; empty when it came out as it must."""
    verdict = "fail" if run.differing else "pass"
    wrong = []
    if (code, judgement["verdict"]) != (int(bool(run.differing)), verdict):
        wrong.append(
            f"expected {verdict} and exit code {int(bool(run.differing))}, got {judgement['verdict']} and {code}"
        )
    equal = f"{GENERATIONS - len(run.differing)}/{GENERATIONS} generations equal"
    said = next(result["summary"] for result in judgement["results"] if result["check"] == "paired-equality")
    if not said.startswith(equal):
        wrong.append(f"expected {equal}, got {said}")
    rows = {row["tokens"]: row for row in judgement["table"]}
    differing = {n for n, row in rows.items() if row["equal"] is False}
    if len(rows) != CASES or differing != run.differing or any(row["equal"] is None for row in rows.values()):
        wrong.append(
            f"expected N={sorted(run.differing)} of {CASES} to differ, got {sorted(differing)} of {sorted(rows)}"
        )
    for n, row in rows.items():
        if not row["rank_bytes"] or min(row["rank_bytes"]) <= 0:
            wrong.append(f"N={n}: expected a reload with bytes transferred, got {row['rank_bytes']}")
        b, p = row["boundary"], row["credited"]
        if b is None or p is None:
            wrong.append(f"N={n}: expected B and p, got B={b}, p={p}")
        elif (b, p) != ((n, n - 1) if n in run.differing else (b, b)) or (n not in run.differing and b >= n):
            wrong.append(f"N={n}: expected {'B=N, p=N-1' if n in run.differing else 'p=B<N'}, got B={b}, p={p}")
    return [f"{run.name}: {what}" for what in wrong]


def main() -> int:
    shutil.rmtree(RUNS, ignore_errors=True)
    RUNS.mkdir(parents=True)
    started = time.monotonic()
    control: list[str] = []
    wrong = []
    for index, run in enumerate(DEMO):
        archive = RUNS / run.name
        title = f"{index + 1} of {len(DEMO)}: {run.title}"
        command = ["run", "boundary", "--connector", "lmcache", *run.options, *control, "--out", str(archive)]
        code = stage(title, *command)
        if code not in (0, 1, 3):
            print(f"\n{run.name} could not be judged (exit code {code}).", file=sys.stderr)
            return 1
        control = control or ["--control", str(archive)]
        wrong += faults(run, code, judge(archive))
    print(f"\n── what came out, {time.monotonic() - started:.1f} s in all")
    if wrong:
        print("\n".join(wrong))
        return 1
    print(
        "0.5.5:                 fail, 34/36 equal; N=3584 and N=5376 differ; there B=N, p=N-1\n"
        "0.5.5, strict-prefix:  pass, 36/36 equal, p=B\n"
        "0.5.6:                 pass, 36/36 equal, p=B\n"
        "Nine reloads each, all with bytes transferred, against one control. All as they must be."
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("\ndemo: stopped")
