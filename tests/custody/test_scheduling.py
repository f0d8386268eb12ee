"""How the kernel treats a process beside its user and limits: which CPUs, how nicely, how soon it is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from samestate.custody.snapshot import snapshot
from samestate.custody.spec import IdentitySpec

NAMES = ("affinity", "nice", "oom_score_adj")
SLEEP = [sys.executable, "-c", "print(flush=True); input()"]


def seen(change: object = None) -> dict[str, str | None]:
    child = subprocess.Popen(SLEEP, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    try:
        if callable(change):
            change(child.pid)
        fields = snapshot(child.pid, "http://127.0.0.1:9", IdentitySpec())
    finally:
        child.communicate(b"\n")
    return {one.name: one.value for one in fields if one.name in NAMES}


def test_each_is_seen_and_each_alone_makes_a_difference() -> None:
    plain = seen()
    assert set(plain) == set(NAMES) and None not in plain.values()
    assert seen() == plain
    nice = os.getpriority(os.PRIO_PROCESS, 0) + 1
    assert seen(lambda pid: os.setpriority(os.PRIO_PROCESS, pid, nice)) == {**plain, "nice": str(nice)}
    worse = str(int(plain["oom_score_adj"] or 0) + 1)
    raised = seen(lambda pid: Path(f"/proc/{pid}/oom_score_adj").write_text(worse))
    assert raised == {**plain, "oom_score_adj": worse}
    cpus = os.sched_getaffinity(0)
    if len(cpus) > 1:
        one = min(cpus)
        pinned = seen(lambda pid: os.sched_setaffinity(pid, {one}))
        assert pinned == {**plain, "affinity": f"Cpus_allowed_list {one}"}
