"""The probe of a swap: any plan, run into an archive of its own beside the journal.

Where the plan starts its own engine, that engine is the candidate: it is a child of this program and ends with it,
even by SIGKILL, so nothing of it can be promoted. The swap hears of it as it starts and as it stops.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from typing_extensions import override

from samestate.custody.base import CustodyError
from samestate.custody.spec import ProbeSpec
from samestate.engines.openai_client import OpenAIClient
from samestate.engines.server import ServedEngine, Server, ServerSpec
from samestate.lab.run import Progress, RunError, RunRequest, run_plan

ARCHIVE = "probe"
"""Folder of the probe's archive, beside the journal."""


class Asked(NamedTuple):
    """A plan ready to be run; whoever knows plans and engines by name makes it."""

    request: RunRequest
    progress: Progress


MakeProbe = Callable[[ProbeSpec, Path], Asked]
"""The spec's probe, into an archive at this place. Raises what is a line to read where it cannot run."""


class Candidate(Protocol):
    """Hears of the candidate that a plan starts."""

    def started(self, pid: int, url: str) -> None:
        """It answers; nothing was asked yet. May refuse by `CustodyError`."""

    def stopping(self) -> None:
        """It was asked, and is about to be stopped."""

    def stopped(self, process: str | None) -> None:
        """It is gone."""


class Ran(NamedTuple):
    """A probe that came to its end."""

    archive: Path
    seal_sha256: str


def run_probe(asked: Asked, candidate: Candidate | None) -> Ran:
    """Run the plan. Raises `CustodyError`; the archive is then without a seal.

    `candidate`: hears of the server that the plan starts; None: another process is the candidate.
    """

    def make_server(spec: ServerSpec) -> Server:
        return _Told(ServedEngine(spec), candidate) if candidate is not None else ServedEngine(spec)

    try:
        done = run_plan(asked.request._replace(make_server=make_server), asked.progress)
    except RunError as error:
        raise CustodyError(f"the probe did not run: {error}") from None
    return Ran(done.archive, done.seal_sha256)


class _Told(Server):
    """A served engine that says when it has started and when it is gone."""

    def __init__(self, inner: ServedEngine, candidate: Candidate) -> None:
        self._inner = inner
        self._candidate = candidate
        self._running = False

    @property
    @override
    def url(self) -> str:
        return self._inner.url

    @property
    @override
    def model(self) -> str:
        return self._inner.model

    @property
    @override
    def process(self) -> str | None:
        return self._inner.process

    @override
    def start(self, waiting: Callable[[float], None] = lambda seconds: None) -> None:
        self._inner.start(waiting)
        self._running = True
        self._candidate.started(self._inner.pid, self._inner.url)

    @override
    def close(self) -> None:
        running, self._running = self._running, False
        if running:
            self._candidate.stopping()
        self._inner.close()
        if running:
            self._candidate.stopped(self._inner.process)

    @override
    def log_tail(self) -> str:
        return self._inner.log_tail()

    @override
    def client(self, seconds: float = 600.0) -> OpenAIClient:
        return self._inner.client(seconds)
