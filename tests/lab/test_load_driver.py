"""How a load is sent: so many at once, or each when it falls due; failures are told, and cost nobody else an answer."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from statistics import mean
from threading import Barrier, Lock
from typing import Any, cast

import pytest

from samestate.engines.base import Ask, EngineError, Generation, Timing
from samestate.engines.served import StreamingClient
from samestate.lab.load_driver import NANO, Level, LoadAsk, LoadDriver, Sent, arrivals

WAIT_S = 20.0
"""For company that must come; nobody waits so long where the driver works."""


class Server:
    """Answers when so many requests are there together, and counts them."""

    def __init__(self, together: int = 1, refused: str = "") -> None:
        self.lock, self.open, self.most, self.closed, self.refused = Lock(), 0, 0, 0, refused
        self.together = Barrier(together)

    def client(self) -> StreamingClient:
        return cast(StreamingClient, Client(self))


class Client:
    def __init__(self, server: Server) -> None:
        self._server = server

    def close(self) -> None:
        self._server.closed += 1

    def generate(self, asks: Sequence[Ask], output_tokens: int, seed: int, ignore_eos: bool) -> list[Generation]:
        (ask,) = asks
        server, began = self._server, time.monotonic_ns()
        with server.lock:
            server.open += 1
            server.most = max(server.most, server.open)
        server.together.wait(WAIT_S)
        with server.lock:
            server.open -= 1
        if ask.request == server.refused:
            raise EngineError("answered 429:\nit is busy")
        timing = Timing("127.0.0.1:1", 1, 1, began, time.monotonic_ns(), [(time.monotonic_ns(), output_tokens)])
        return [Generation(ask.request, [1] * output_tokens, None, "length", 0, timing=timing)]


def asks(count: int) -> list[LoadAsk]:
    return [LoadAsk(f"r{number}", f"r{number}", [number]) for number in range(count)]


def send(server: Server, level: Level, count: int, done: Callable[[str], None] = lambda op: None) -> Sent:
    return LoadDriver(server.client, 4, 0).send(level, asks(count), 7, done)


def began(sent: Sent) -> list[int]:
    return [one.generation.timing.began_ns for one in sent.answers if one.generation and one.generation.timing]


@pytest.mark.parametrize("at_once", [1, 3])
def test_so_many_at_once_and_never_more(at_once: int) -> None:
    server, over = Server(at_once), list[str]()
    sent = send(server, Level(at_once, None), 6, over.append)
    assert server.most == at_once
    assert server.closed == at_once
    assert sorted(over) == [f"r{number}" for number in range(6)]
    told = [one.generation.timing.concurrency for one in sent.answers if one.generation and one.generation.timing]
    assert max(told) == at_once
    assert [one.ask.op for one in sent.answers] == [f"r{number}" for number in range(6)]
    assert sent.due_ns == []


def test_an_open_loop_does_not_wait_for_answers() -> None:
    """None is answered before another one is there: a loop that waits for answers would never end."""
    server = Server(together=2)
    sent = send(server, Level(None, 100.0), 8)
    assert server.most >= 2
    assert all(begins >= due for begins, due in zip(began(sent), sent.due_ns, strict=True))


def test_a_seed_is_the_same_times_and_another_one_is_not() -> None:
    assert arrivals(2.0, 50, 7, 1000) == arrivals(2.0, 50, 7, 1000)
    assert arrivals(2.0, 50, 7, 1000) != arrivals(2.0, 50, 8, 1000)


def test_times_are_those_of_the_rate() -> None:
    due = arrivals(4.0, 4000, 1, 1000)
    assert due[0] == 1000
    assert due == sorted(due)
    assert mean(right - left for left, right in itertools.pairwise(due)) / NANO == pytest.approx(0.25, rel=0.05)


def test_one_that_fails_is_told_and_the_others_are_answered() -> None:
    sent = send(Server(refused="r1"), Level(2, None), 4)
    assert [one.error for one in sent.answers] == ["", "answered 429: it is busy", "", ""]
    assert [one.generation is None for one in sent.answers] == [False, True, False, False]


def test_a_server_that_is_not_there_ends_it() -> None:
    def connect() -> Any:
        raise EngineError("nobody answers")

    with pytest.raises(EngineError, match="nobody answers"):
        LoadDriver(connect, 4, 0).send(Level(2, None), asks(2), 0, lambda op: None)


@pytest.mark.parametrize(
    ("level", "name"), [(Level(4, None), "c4"), (Level(None, 2.0), "r2"), (Level(None, 0.5), "r0.5")]
)
def test_names(level: Level, name: str) -> None:
    assert level.name == name
