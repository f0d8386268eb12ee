"""Many requests at once to one server: so many open at a time, or each when it falls due. Every one is sent once.

A closed loop keeps a number of requests open; an open loop sends at times drawn beforehand from a seed, whether or not
the server keeps up. Each request has a client of its own, made before the clock runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue
from random import Random
from threading import Lock
from typing import NamedTuple

from samestate.engines.base import Ask, EngineError, Generation
from samestate.engines.served import StreamingClient

HEAD_START_NS = 50_000_000
"""Before the first request of an open loop falls due, so that it too can be on time."""
NANO = 1e9


class Level(NamedTuple):
    """How hard the server is driven."""

    concurrency: int | None
    """Requests that are open at once."""
    rate: float | None
    """Requests a second, on average; one of the two is given."""

    @property
    def name(self) -> str:
        """``c4``, ``r2``, ``r0.5``."""
        return f"c{self.concurrency}" if self.concurrency is not None else f"r{self.rate:g}"


class LoadAsk(NamedTuple):
    """One request to make."""

    op: str
    case: str
    token_ids: list[int]


class LoadAnswer(NamedTuple):
    """What came of it."""

    ask: LoadAsk
    generation: Generation | None
    """None: it failed. Its timing says how many were open when it was sent."""
    error: str
    """One line; empty: it was answered."""


class Sent(NamedTuple):
    """A phase that is over."""

    due_ns: list[int]
    """Of an open loop, by request; else empty."""
    answers: list[LoadAnswer]
    """In the order of the asks."""


class LoadDriver:
    """Drives a server by clients that `connect` makes, each connected and without idle time after an answer."""

    def __init__(self, connect: Callable[[], StreamingClient], output_tokens: int, seed: int) -> None:
        self._connect = connect
        self._output_tokens = output_tokens
        self._seed = seed
        self._open = 0
        self._lock = Lock()

    def send(self, level: Level, asks: Sequence[LoadAsk], seed: int, done: Callable[[str], None]) -> Sent:
        """Send all of them; `done` is told each one that is over. Raises `EngineError` where no client connects."""
        workers = min(level.concurrency or len(asks), len(asks))
        idle: SimpleQueue[StreamingClient] = SimpleQueue()
        with ExitStack() as closing:
            for _ in range(workers):
                client = self._connect()
                closing.callback(client.close)
                idle.put(client)
            pool = closing.enter_context(ThreadPoolExecutor(workers, thread_name_prefix="samestate-load"))
            due = arrivals(level.rate, len(asks), seed, time.monotonic_ns() + HEAD_START_NS) if level.rate else []
            pending = []
            for index, ask in enumerate(asks):
                if due:
                    time.sleep(max(0, due[index] - time.monotonic_ns()) / NANO)
                pending.append(pool.submit(self._one, idle, ask, done))
            return Sent(due, [one.result() for one in pending])

    def _one(self, idle: SimpleQueue[StreamingClient], ask: LoadAsk, done: Callable[[str], None]) -> LoadAnswer:
        client = idle.get()
        with self._lock:
            self._open += 1
            together = self._open
        try:
            (generation,) = client.generate([Ask(ask.op, ask.token_ids)], self._output_tokens, self._seed, True)
        except EngineError as error:
            return LoadAnswer(ask, None, " ".join(str(error).split()))
        finally:
            with self._lock:
                self._open -= 1
            idle.put(client)
            done(ask.op)
        timing = generation.timing
        timing = timing._replace(concurrency=together) if timing is not None else None
        return LoadAnswer(ask, generation._replace(timing=timing), "")


def arrivals(rate: float, count: int, seed: int, begins_ns: int) -> list[int]:
    """When `count` requests fall due, on the monotonic clock: gaps drawn from an exponential, the first one at once."""
    random, at, due = Random(seed), 0.0, []
    for _ in range(count):
        due.append(begins_ns + round(at * NANO))
        at += random.expovariate(rate)
    return due
