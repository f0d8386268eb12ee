"""The work of a soak: conversations in turns, some of which begin alike, and who is asked next."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

C = 256
"""Tokens from boundary to boundary."""
OPENINGS = 12
"""So many texts does a conversation begin with one of: what other conversations reuse too."""
TURNS = 4
OPEN = 24
"""Conversations in flight at once; so many others have their turns before one has its next."""
ANSWER_TOKENS = 8


class Conversation(NamedTuple):
    """What is said to the engine; what it answers is the control's to say."""

    number: int
    opening: list[int]
    said: list[list[int]]
    """By turn."""


class Request(NamedTuple):
    """One turn."""

    conversation: int
    turn: int
    prompt: list[int]

    @property
    def name(self) -> str:
        return f"{self.conversation}.{self.turn}"


class Answered(NamedTuple):
    """What an engine made of a request."""

    conversation: int
    turn: int
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    """Of the tokens, natural logarithm."""
    margins: list[float]
    """By how much each token was preferred to the runner-up."""
    cached: int
    """Tokens of the prompt that were not computed."""
    preempted: list[int]
    """How many tokens it had at each preemption."""

    @property
    def name(self) -> str:
        return f"{self.conversation}.{self.turn}"


def conversations(requests: int, seed: int) -> list[Conversation]:
    """As many as `requests` turns make. Every third turn ends on a boundary, or a token before or behind one."""
    chance = random.Random(seed)
    openings = [_text(chance, chance.randrange(C // 2, 2 * C)) for _ in range(OPENINGS)]
    made = []
    for number in range(-(-requests // TURNS)):
        opening = chance.choice(openings)
        length, said = len(opening), []
        for turn in range(min(TURNS, requests - number * TURNS)):
            more = chance.randrange(40, C + C // 3)
            if chance.random() < 1 / 3:
                more += -(length + more) % C + chance.choice([-1, 0, 1])
            said.append(_text(chance, more))
            length += more + ANSWER_TOKENS
            del turn
        made.append(Conversation(number, opening, said))
    return made


def _text(chance: random.Random, tokens: int) -> list[int]:
    return [chance.randrange(5, 250) for _ in range(tokens)]


class Turns:
    """Who is asked next: `OPEN` conversations take turns in a random order, a turn follows the answer to the last.

    Args:
        known: The control's answers, where there are any: then every turn continues those, whatever else was answered.

    """

    def __init__(self, work: Iterable[Conversation], seed: int, known: Iterable[Answered] = ()) -> None:
        self._waiting = list(work)
        self._chance = random.Random(seed)
        self._known = {one.name: one.tokens for one in known}
        self._ready: list[tuple[Conversation, Request]] = []
        self._open = 0
        self._asked: dict[str, Conversation] = {}

    def take(self) -> Request | None:
        """The next request; None: there is none before an answer comes, or none at all."""
        while self._waiting and self._open < OPEN:
            one = self._waiting.pop(0)
            self._open += 1
            self._ready.append((one, Request(one.number, 0, one.opening + one.said[0])))
        if not self._ready:
            return None
        conversation, request = self._ready.pop(self._chance.randrange(len(self._ready)))
        self._asked[request.name] = conversation
        return request

    def answered(self, request: Request, tokens: list[int]) -> None:
        conversation, turn = self._asked.pop(request.name), request.turn + 1
        if turn == len(conversation.said):
            self._open -= 1
            return
        answer = self._known.get(request.name, tokens)
        prompt = request.prompt + answer + conversation.said[turn]
        self._ready.append((conversation, Request(request.conversation, turn, prompt)))


class Resumed:
    """In the place of `Turns`: prompts that reach into an answer, as they are computed after each preemption.

    What was decoded before is then computed as a prompt is, and has other bits. So is the control of what came after.
    """

    def __init__(self, known: Iterable[Answered]) -> None:
        self._left = [
            Request(one.conversation, one.turn, one.prompt + one.tokens[:given])
            for one in known
            for given in sorted(set(one.preempted) - {0})
        ]

    def take(self) -> Request | None:
        return self._left.pop(0) if self._left else None

    def answered(self, request: Request, tokens: list[int]) -> None:
        """Nothing follows."""


def keep(answers: Iterable[Answered], path: Path) -> None:
    path.write_text("".join(json.dumps(one._asdict()) + "\n" for one in answers))


def read(path: Path) -> list[Answered]:
    return [Answered(**_typed(json.loads(line))) for line in path.read_text().splitlines()]


def _typed(line: dict[str, Any]) -> dict[str, Any]:
    assert set(line) == set(Answered._fields), sorted(line)
    return line
