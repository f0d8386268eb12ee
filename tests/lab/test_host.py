"""The host's load from ``/proc``; where it does not say, nothing is made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestate.lab.host import sample


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "loadavg").write_text("1.25 0.80 0.40 2/300 4711\n")
    (tmp_path / "stat").write_text("cpu  100 10 50 800 40 0 5 5 99 99\ncpu0 1 1 1 1\n")
    (tmp_path / "meminfo").write_text("MemTotal:  2048 kB\nMemFree: 1 kB\nMemAvailable: 1024 kB\nHugePages_Total: 0\n")
    return tmp_path


def test_what_proc_says(proc: Path) -> None:
    sampled = sample("t1-N32.cold", "before", proc)
    assert sampled is not None
    assert (sampled.op, sampled.when, sampled.load) == ("t1-N32.cold", "before", 1.25)
    assert (sampled.busy_ticks, sampled.total_ticks) == (170, 1010)
    assert (sampled.memory_total, sampled.memory_available) == (2 * 2**20, 2**20)
    assert sampled.cpus >= 1


@pytest.mark.parametrize("name", ["loadavg", "stat", "meminfo"])
def test_nothing_is_made_up(proc: Path, name: str) -> None:
    (proc / name).write_text("\n")
    assert sample("a", "after", proc) is None
    (proc / name).unlink()
    assert sample("a", "after", proc) is None
