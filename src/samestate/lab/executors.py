"""Where the runs of a matrix happen: here, one after the other, or each as a task of a Ray cluster."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from typing import Any, NamedTuple

from samestate import __version__
from samestate.lab import executors_task
from samestate.lab.errors import RunError

SEALED, UNKNOWN, EXCLUDED = "sealed", "unknown", "excluded"
CONNECT_SECONDS = 10.0
_NO_RAY = "--executor ray: Ray is not installed; pip install 'samestate[ray]', or leave the option out"


class Planned(NamedTuple):
    """One run."""

    arguments: list[str]
    """Of ``samestate run``, without ``--out``."""
    files: dict[str, str]
    """Text by name, for an argument of that name: what lies only here."""
    archive: str
    """A path that is one and the same on all nodes, or an fsspec URL."""


class Done(NamedTuple):
    """How a run ended."""

    number: int
    """Of the run among those that were asked, from 0."""
    outcome: str
    """``sealed``; ``unknown``: it began and left no sealed archive; ``excluded``: it never ran."""
    reason: str | None
    """One line; None: sealed."""
    node: str | None


class Share(NamedTuple):
    """What a run asks of its node."""

    cpus: float = 1
    gpus: float = 0

    def __str__(self) -> str:
        return f"{self.cpus:g} CPUs and {self.gpus:g} GPUs"


def here(runs: Sequence[Planned]) -> Iterator[Done]:
    """One after the other, on this machine."""
    for index, run in enumerate(runs):
        yield _done(index, executors_task.perform(*run, __version__))


def over_ray(runs: Sequence[Planned], address: str | None, share: Share) -> Iterator[Done]:
    """Each as a task, as they end. A task is never tried twice: what died is told.

    `address`: of the cluster; None: as `ray.init` finds one, else it starts one here. Until the last one, whatever is
    printed goes to stderr: Ray would write its warnings between a caller's lines of JSON. Raises `RunError` where there
    is no Ray, no cluster or no node that could ever take a run.
    """
    with redirect_stdout(sys.stderr):
        yield from _over(_connected(address), runs, share)


def _over(ray: Any, runs: Sequence[Planned], share: Share) -> Iterator[Done]:
    try:
        _require_room(ray.nodes(), share)
        # By value: a node without samestate must be able to say so.
        ray.cloudpickle.register_pickle_by_value(executors_task)
        task = ray.remote(executors_task.on_ray).options(
            num_cpus=share.cpus, num_gpus=share.gpus, max_retries=0, scheduling_strategy="SPREAD"
        )
        left = {task.remote(*run, __version__): index for index, run in enumerate(runs)}
        try:
            while left:
                for ended in ray.wait(list(left))[0]:
                    yield _ended(ray, ended, left.pop(ended))
        finally:
            for running in left:
                ray.cancel(running)
            if left:
                ray.wait(list(left), num_returns=len(left), timeout=10)
    finally:
        ray.shutdown()


def _connected(address: str | None) -> Any:
    try:
        import ray
    except ImportError:
        raise RunError(_NO_RAY) from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        _require_listener(address)
        ray.init(address=address, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    except Exception as error:  # Ray raises what its parts do: ConnectionError, RuntimeError, ValueError
        said = " ".join(str(error).split()) or type(error).__name__
        raise RunError(f"--address: no Ray cluster at {address or 'this machine'} ({said:.200}); start one") from None
    return ray


def _require_listener(address: str | None) -> None:
    """Ray itself tries for minutes. Raises OSError and ValueError; ``auto`` and ``local`` are Ray's to find."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if colon:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()


def _require_room(nodes: Iterable[dict[str, Any]], share: Share) -> None:
    """A task that no node can hold would wait for ever."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    if not any(one.get("CPU", 0) >= share.cpus and one.get("GPU", 0) >= share.gpus for one in alive):
        most = ", ".join(f"{one.get('CPU', 0):g} and {one.get('GPU', 0):g}" for one in alive)
        raise RunError(
            f"--gpus-per-run, --cpus-per-run: a run asks {share}, and the cluster's nodes have {most}; ask less, or "
            "start such a node first"
        )


def _ended(ray: Any, ended: Any, index: int) -> Done:
    try:
        return _done(index, ray.get(ended))
    except ray.exceptions.RayError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = lines[-1] if isinstance(error, ray.exceptions.RayTaskError) else " ".join(lines)
        return Done(index, UNKNOWN, f"its task died: {type(error).__name__}: {said:.300}", None)


def _done(index: int, told: dict[str, str | None]) -> Done:
    return Done(index, told["outcome"] or UNKNOWN, told["reason"], told["node"])
