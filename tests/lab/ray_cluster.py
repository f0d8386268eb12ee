"""A Ray cluster of two nodes on this machine, and what tests look at while runs go on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from samestate.evidence.archive import Archive
from samestate.evidence.records import OperationOutput
from samestate.lab.executors import Done

STORE = {"object_store_memory": 80 * 2**20}


@contextmanager
def two_nodes() -> Iterator[Any]:
    """Two nodes of one CPU each; skips where there is no Ray."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **STORE})
    try:
        made.add_node(num_cpus=1, **STORE)
        yield made
    finally:
        made.shutdown()


def done_by_number(ends: Iterable[Done]) -> list[Done]:
    return sorted(ends, key=lambda one: one.number)


def outputs(archive: Archive) -> list[tuple[str, str, list[int]]]:
    """Arm, operation and tokens of everything that was generated."""
    return [
        (arm, line.rec.op, line.rec.token_ids)
        for arm in archive.arms
        for line in archive.records(arm, "client")
        if isinstance(line.rec, OperationOutput)
    ]


def running(word: str) -> list[int]:
    """Processes that were started with this argument."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if word.encode() in words:
            found.append(int(entry.parent.name))
    return found


def parent(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])
