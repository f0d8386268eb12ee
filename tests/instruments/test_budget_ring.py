"""The ring of the budget recorder drops and counts; it never waits and never raises."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from samestate.evidence.marker_records import RecorderStopped, RunAheadDropped
from samestate.evidence.records import StreamClosed
from samestate.evidence.stream import Defect, StreamWriter, read_stream
from samestate.instruments.budget_ring import BudgetRing


def ring(folder: Path, capacity: int) -> BudgetRing:
    return BudgetRing(StreamWriter(folder / "budget-0.jsonl", "candidate", "budget-0", tolerant=True), 0, capacity)


def records(folder: Path) -> list[Any]:
    """All but the first, which opens the stream."""
    return [line.rec for line in read_stream(folder / "budget-0.jsonl") if not isinstance(line, Defect)][1:]


def record(token: int) -> RunAheadDropped:
    return RunAheadDropped(request="a", tokens=[token])


def test_a_ring_that_is_not_full_keeps_everything_in_order(tmp_path: Path) -> None:
    held = ring(tmp_path, 3)
    for token in range(9):
        held.put(record(token))
        if token % 3 == 2:
            held.drain()
    held.stop()
    assert records(tmp_path) == [
        *map(record, range(9)),
        RecorderStopped(rank=0, written=9, dropped=0),
        StreamClosed(dropped=0),
    ]


def test_what_does_not_fit_is_dropped_and_counted(tmp_path: Path) -> None:
    held = ring(tmp_path, 2)
    for token in range(5):
        held.put(record(token))
    assert held.dropped == 3
    held.drain()
    held.put(record(9))
    held.stop()
    stopped = RecorderStopped(rank=0, written=3, dropped=3)
    assert records(tmp_path)[:4] == [record(0), record(1), record(9), stopped]


def test_a_record_that_could_not_be_made_or_is_no_record_counts_too(tmp_path: Path) -> None:
    held = ring(tmp_path, 8)
    held.lose(ValueError("no such row"))
    held.put(record(-1))
    held.put(record(1))
    held.stop()
    assert records(tmp_path) == [record(1), RecorderStopped(rank=0, written=1, dropped=2), StreamClosed(dropped=2)]


def test_a_second_stop_writes_nothing(tmp_path: Path) -> None:
    held = ring(tmp_path, 1)
    held.stop()
    held.stop()
    assert [type(rec) for rec in records(tmp_path)] == [RecorderStopped, StreamClosed]


def test_each_drain_reaches_the_file(tmp_path: Path) -> None:
    held = ring(tmp_path, 1)
    held.put(record(4))
    held.drain()
    assert records(tmp_path) == [record(4)]
    held.stop()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is full")
def test_a_full_disk_never_reaches_serving(tmp_path: Path) -> None:
    link = tmp_path / "budget-0.jsonl"
    writer = StreamWriter(link, "candidate", "budget-0", tolerant=True)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, next(int(fd.name) for fd in Path("/proc/self/fd").iterdir() if fd.exists() and fd.samefile(link)))
    os.close(full)
    held = BudgetRing(writer, 0, 4)
    held.put(record(1))
    held.drain()
    held.stop()
    assert held.dropped >= 1
