"""Jobs of a tier: which of its pages are moved, and that nothing touches a job's rows once it is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from vllm.v1.kv_offload.base import OffloadKey, ReqContext


class Job:
    """Pages between a store and rows of the memory tier. Its rows are the job's own only until it is over."""

    def __init__(
        self, job_id: int, keys: list[OffloadKey], rows: list[int], *, load: bool, prefix: Sequence[OffloadKey] = ()
    ) -> None:
        self.id = job_id
        self.keys = keys
        self.rows = rows
        self.load = load
        self.prefix = prefix
        """All keys of the request, in the order of its tokens, as far as they are known."""
        self.related = False
        """Whether the store knows the prefix."""
        self.begun = time.monotonic()
        self.seconds = 0.0
        """From its begin to its end."""
        self.moved = 0
        """Bytes."""
        self._lock = threading.Lock()
        self._over = False
        self._left = set(range(len(keys)))
        self._problems: dict[int, str] = {}

    @property
    def over(self) -> bool:
        """Whether all pages are done, or it was given up."""
        return self._over

    def touch_row(self, copy: Callable[[], None]) -> bool:
        """Copy to or from a row, unless the job is over; whether it was copied."""
        with self._lock:
            if not self._over:
                copy()
            return not self._over

    def count(self, moved: int) -> None:
        """So many bytes were moved."""
        with self._lock:
            self.moved += moved

    def done(self, index: int, problem: str | None) -> None:
        """A page is moved, or could not be."""
        with self._lock:
            if self._over:
                return
            self._left.discard(index)
            if problem is not None:
                self._problems[index] = problem
            if not self._left:
                self._end()

    def give_up(self, reason: str) -> None:
        """It ends here: pages that are not done have this problem."""
        with self._lock:
            if not self._over:
                self._problems |= dict.fromkeys(self._left, reason)
                self._end()

    def problems(self) -> dict[OffloadKey, str]:
        """Of a job that is over: what became of the pages that were not moved."""
        return {self.keys[index]: problem for index, problem in self._problems.items()}

    def _end(self) -> None:
        self._over = True
        self.seconds = time.monotonic() - self.begun


class Passage:
    """Calls that are under way, for whoever must come after them."""

    def __init__(self) -> None:
        self._left = threading.Condition()
        self._inside: set[object] = set()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """A call."""
        call = object()
        with self._left:
            self._inside.add(call)
        try:
            yield
        finally:
            with self._left:
                self._inside.discard(call)
                self._left.notify_all()

    def wait(self, seconds: float) -> bool:
        """Wait until the calls that are under way now are over; False: they are not."""
        with self._left:
            before = set(self._inside)
            return self._left.wait_for(lambda: not before & self._inside, seconds)


class OpenJobs:
    """Jobs that are not reported yet.

    Args:
        time_limit_s: The longest that a job may go without a page of its kind, load or save, being done.
        stood_still: Told of each that was given up for that.

    """

    def __init__(self, time_limit_s: float, stood_still: Callable[[Job], None]) -> None:
        self._limit = time_limit_s
        self._stood_still = stood_still
        self._jobs: dict[int, Job] = {}
        self._moved = threading.Condition()
        self._last_move = {True: 0.0, False: 0.0}
        """When a page of a load, or of a save, was last done."""

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._jobs

    def add(self, job: Job) -> None:
        self._jobs[job.id] = job

    def saving(self) -> set[OffloadKey]:
        """Pages on their way to the store, or there and not reported yet."""
        return {key for job in self._jobs.values() if not job.load for key in job.keys}

    def done(self, job: Job, index: int, problem: str | None) -> None:
        """A page of it is moved, or could not be. Called by threads."""
        with self._moved:
            job.done(index, problem)
            self._last_move[job.load] = time.monotonic()
            self._moved.notify_all()

    def take_over(self) -> list[Job]:
        """Those that are over since the last call."""
        for job in self._jobs.values():
            self._give_up_late(job)
        over = [job for job in self._jobs.values() if job.over]
        for job in over:
            del self._jobs[job.id]
        return over

    def drain(self) -> None:
        """Wait until all are over."""
        while unfinished := [job for job in self._jobs.values() if not job.over]:
            for job in unfinished:
                self._give_up_late(job)
            with self._moved:
                if not all(job.over for job in unfinished):
                    self._moved.wait(max(0.0, min(self._left(job) for job in unfinished if not job.over)))

    def _left(self, job: Job) -> float:
        """Seconds that it may still go without a page of its kind being done."""
        return max(job.begun, self._last_move[job.load]) + self._limit - time.monotonic()

    def _give_up_late(self, job: Job) -> None:
        if not job.over and self._left(job) <= 0:
            job.give_up("slow")
            self._stood_still(job)


def prefix_of(req_context: ReqContext) -> list[OffloadKey]:
    """A request's keys, in the order of its tokens."""
    positions = req_context._offload_key_positions
    return sorted(positions, key=positions.__getitem__)
