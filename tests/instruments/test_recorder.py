"""Streams of a process, and of those that are forked from it, as vLLM's workers are on CUDA."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from samestate.evidence.records import EngineStopped, StreamClosed
from samestate.evidence.stream import Defect, read_stream
from samestate.instruments import recorder


@pytest.fixture(autouse=True)
def driver() -> Iterator[None]:
    """The process closes its streams itself, as the engine's child does."""
    recorder.begin_anew()
    recorder.drive()
    yield
    recorder.close()
    recorder.begin_anew()


def forked(work: Callable[[], None]) -> None:
    """Do the work in a fork of this process, and let it end without any clearing up."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def whole(path: Path) -> list[str]:
    """Kinds of the records of a stream that is whole."""
    records = [one.rec for one in read_stream(path) if not isinstance(one, Defect)]
    assert [one for one in read_stream(path) if isinstance(one, Defect)] == []
    assert isinstance(records[-1], StreamClosed)
    return [type(record).__name__ for record in records]


def test_a_fork_leaves_its_parents_streams_alone_and_closes_its_own(tmp_path: Path) -> None:
    ours = recorder.stream(tmp_path, "candidate", "scheduler")
    ours.append(EngineStopped())  # waits in memory, in both processes

    def worker() -> None:
        theirs = recorder.stream(tmp_path, "candidate", "worker-0")
        theirs.append(EngineStopped())
        recorder.release(theirs)

    forked(worker)
    ours.append(EngineStopped())
    recorder.close()
    assert whole(tmp_path / "scheduler.jsonl") == ["StreamOpened", "EngineStopped", "EngineStopped", "StreamClosed"]
    assert whole(tmp_path / "worker-0.jsonl") == ["StreamOpened", "EngineStopped", "StreamClosed"]


def test_whoever_kept_a_parents_writer_cannot_write_with_it(tmp_path: Path) -> None:
    ours = recorder.stream(tmp_path, "candidate", "scheduler")

    def worker() -> None:
        ours.append(EngineStopped())
        ours.flush()
        ours.close()

    forked(worker)
    recorder.close()
    assert whole(tmp_path / "scheduler.jsonl") == ["StreamOpened", "StreamClosed"]
