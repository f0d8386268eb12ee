"""How a process ends shows in its stream: in order with the account, killed without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from samestate.evidence.marker_records import TRACE_ARM, TRACE_FOLDER, RecorderStarted, RecorderStopped, RunAheadDropped
from samestate.evidence.records import InterventionApplied
from samestate.evidence.stream import Defect, read_stream

PROGRAM = """
import multiprocessing, os, signal, sys
from types import SimpleNamespace as Of
from samestate.evidence.marker_records import RunAheadDropped
from samestate.instruments.budget_recorder import open_ring, stop
from samestate.instruments.interventions import applied

CONFIG = Of(
    reasoning_config=Of(reasoning_start_token_ids=[3], reasoning_end_token_ids=[4]),
    parallel_config=Of(tensor_parallel_size=2),
    scheduler_config=Of(async_scheduling=True),
    use_v2_model_runner=False,
    num_speculative_tokens=3,
)

def serve(rank, end):
    if end == "patched":
        applied("before", [])
    ring = open_ring(CONFIG, [], rank)
    if end == "patched":
        applied("after", [])
    ring.put(RunAheadDropped(request="a", tokens=[7]))
    ring.drain()
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "stopped":
        stop()
    if end == "exit":
        sys.exit(3)

if __name__ == "__main__":
    method, end = sys.argv[1:]
    if method == "main":
        serve(1, end)
    else:
        serve(None, "left")
        child = multiprocessing.get_context(method).Process(target=serve, args=(1, end))
        child.start()
        child.join()
"""


def run(folder: Path, method: str, end: str) -> None:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    environ = os.environ | {TRACE_FOLDER: str(folder), TRACE_ARM: "candidate"}
    subprocess.run([sys.executable, str(program), method, end], env=environ, check=False)


def stream(folder: Path, process: str) -> tuple[list[Any], list[str]]:
    """Records after the first, and what is wrong with the file."""
    lines = list(read_stream(folder / f"budget-{process}.jsonl"))
    found = [line.rec for line in lines if not isinstance(line, Defect)]
    return found[1:], [line.what for line in lines if isinstance(line, Defect)]


def assert_whole(folder: Path, process: str, rank: int | None) -> None:
    records, defects = stream(folder, process)
    assert defects == []
    started, dropped, stopped, _ = records
    assert isinstance(started, RecorderStarted)
    assert (started.rank, started.ranks, started.speculative_tokens, started.asynchronous) == (rank, 2, 3, True)
    assert dropped == RunAheadDropped(request="a", tokens=[7])
    assert stopped == RecorderStopped(rank=rank, written=2, dropped=0)


def test_a_process_that_leaves_in_order_writes_the_account(tmp_path: Path) -> None:
    for end in ("left", "exit", "stopped"):
        folder = tmp_path / end
        folder.mkdir()
        run(folder, "main", end)
        assert_whole(folder, "1", 1)


def test_a_child_of_either_kind_writes_its_own(tmp_path: Path) -> None:
    for method in ("spawn", "fork"):
        folder = tmp_path / method
        folder.mkdir()
        run(folder, method, "exit")
        assert_whole(folder, "1", 1)
        assert_whole(folder, "scheduler", None)


def test_what_lies_upon_vllm_is_told_and_counted_by_the_rank_and_not_by_the_scheduler(tmp_path: Path) -> None:
    run(tmp_path, "spawn", "patched")
    records, defects = stream(tmp_path, "1")
    assert defects == []
    assert records[1:3] == [InterventionApplied(name=name, functions=[]) for name in ("before", "after")]
    assert records[-2] == RecorderStopped(rank=1, written=4, dropped=0)
    assert_whole(tmp_path, "scheduler", None)


def test_a_killed_process_leaves_its_steps_and_no_account(tmp_path: Path) -> None:
    run(tmp_path, "spawn", "killed")
    records, defects = stream(tmp_path, "1")
    assert [type(record) for record in records] == [RecorderStarted, RunAheadDropped]
    assert "no stream_closed at the end" in defects[0]
    assert_whole(tmp_path, "scheduler", None)
