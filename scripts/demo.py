"""The demonstration: one run under the strict-prefix rule, one with the lookup over the full prompt.

Exit code 0 only when both came out as they must: the first passes; the second fails at
exactly the two prompts that end on a checkpoint boundary, from what the archive holds.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "demo-runs"
CLEAN = RUNS / "clean"
FAULTY = RUNS / "full-lookup"
SAMESTATE = Path(sys.executable).parent / "samestate"
CASES = 9
DIFFERING = {3584, 5376}

Judgement = dict[str, Any]


def stage(title: str, *arguments: str | Path) -> int:
    """Run samestate, show what it prints and how long it took; its exit code."""
    print(f"\n── {title}\n$ samestate {' '.join(map(str, arguments))}", flush=True)
    started = time.monotonic()
    code = subprocess.run([SAMESTATE, *arguments], cwd=ROOT, check=False).returncode
    print(f"── exit code {code}, {time.monotonic() - started:.1f} s", flush=True)
    return code


def judge(archive: Path) -> Judgement:
    """What `samestate check` says of a sealed archive, from its records alone."""
    done = subprocess.run([SAMESTATE, "check", archive, "--json"], cwd=ROOT, stdout=subprocess.PIPE, check=False)
    judgement: Judgement = json.loads(done.stdout)
    return judgement


def clean_faults(code: int, judgement: Judgement) -> list[str]:
    """What is wrong with the first run; empty when it came out right."""
    equal = sum(row["equal"] is True for row in judgement["table"])
    wrong = []
    if code != 0 or judgement["verdict"] != "pass":
        wrong.append(f"clean: expected pass and exit code 0, got {judgement['verdict']} and {code}")
    if equal != CASES:
        wrong.append(f"clean: expected {CASES} equal reloads, got {equal}")
    return wrong


def faulty_faults(code: int, judgement: Judgement) -> list[str]:
    """What is wrong with the second run; empty when it failed exactly as it must."""
    rows = {row["tokens"]: row for row in judgement["table"]}
    wrong = []
    if code != 1 or judgement["verdict"] != "fail":
        wrong.append(f"full-lookup: expected fail and exit code 1, got {judgement['verdict']} and {code}")
    differing = {n for n, row in rows.items() if row["equal"] is False}
    unjudged = {n for n, row in rows.items() if row["equal"] is None}
    if len(rows) != CASES or differing != DIFFERING or unjudged:
        wrong.append(
            f"full-lookup: expected N={sorted(DIFFERING)} to differ, got {sorted(differing)} of {sorted(rows)}"
        )
    for n in sorted(differing & DIFFERING):
        seen = {key: rows[n][key] for key in ("boundary", "credited", "scheduled")}
        if seen != {"boundary": n, "credited": n - 1, "scheduled": 1}:
            wrong.append(f"full-lookup: at N={n} expected B={n}, p={n - 1}, one token scheduled, got {seen}")
    return wrong


def main() -> int:
    shutil.rmtree(RUNS, ignore_errors=True)
    RUNS.mkdir()
    started = time.monotonic()
    clean = stage("1 of 2: lookup of N-1 tokens", "run", "boundary", "--out", CLEAN)
    if clean != 0:
        print(f"\nThe first run did not pass (exit code {clean}), so the second has no control.", file=sys.stderr)
        return 1
    faulty = stage(
        "2 of 2: lookup of all N tokens, judged against the control of the first",
        *("run", "boundary", "--fault", "full-lookup", "--control", CLEAN, "--out", FAULTY),
    )
    if faulty not in (0, 1, 3):
        print(f"\nThe second run could not be judged (exit code {faulty}).", file=sys.stderr)
        return 1
    wrong = clean_faults(clean, judge(CLEAN)) + faulty_faults(faulty, judge(FAULTY))
    print(f"\n── what came out, {time.monotonic() - started:.1f} s in all")
    if wrong:
        print("\n".join(wrong))
        return 1
    print(
        f"clean:       pass, {CASES} of {CASES} reloads continue as cold\n"
        "full-lookup: fail, N=3584 and N=5376 differ; there B=N, p=N-1, one token scheduled; the others equal\n"
        "Both as they must be."
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("\ndemo: stopped")
