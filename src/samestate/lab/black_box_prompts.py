"""Prompts for somebody else's server: each begins with words of its own, so that it shares a prefix with nobody."""

from __future__ import annotations

from hashlib import sha256
from random import Random

from samestate.engines.black_box import BlackBox, Prompt
from samestate.models.templates import TEMPLATES, render

# fmt: off
WORDS = [
    "apple", "river", "stone", "cloud", "green", "paper", "house", "light", "water", "table",
    "chair", "music", "plant", "bread", "horse", "glass", "winter", "summer", "garden", "silver",
    "yellow", "mother", "father", "sister", "window", "corner", "market", "bridge", "forest", "island",
    "mountain", "number", "letter", "answer", "circle", "square", "pocket", "button", "engine", "ticket",
    "dinner", "coffee", "butter", "cotton", "shadow", "finger", "doctor", "farmer", "little", "simple",
    "quick", "early", "warm", "cold", "long", "short", "round", "deep", "high", "wide",
    "open", "dark", "soft", "clean",
]
# fmt: on
"""Of one token each in most vocabularies."""


class Prompts:
    """Makes prompts of a number of tokens: exactly, where the server has a tokenizer and takes ids; else nearly."""

    def __init__(self, box: BlackBox, run: str, template: str, *, exact: bool) -> None:
        """`run`: a word of this run alone. Raises `ClientError` where the tokenizer fails."""
        self._box = box
        self._run = run
        self._template = TEMPLATES[template]
        self.exact = exact
        self._seen: dict[int, int] = {}

    def make(self, tag: str, tokens: int) -> Prompt:
        """The prompt of document `tag`; the same for the same tag and length."""
        own = f"{self._run}-{tag}"
        if not self.exact:
            words = self._words(tokens)
            return Prompt(None, _words(own, words), tokens)
        try:
            ids = render(self._template.parts(own), self._box.encode, tokens)
        except ValueError:  # too short for a question and its background
            ids = self._short(own, tokens)
        return Prompt(ids, "", tokens)

    def learn(self, prompt: Prompt, tokens: int) -> None:
        """The server counted so many tokens in a text."""
        if prompt.ids is None:
            self._seen[len(prompt.text.split())] = tokens

    def _short(self, own: str, tokens: int) -> list[int]:
        """Of hexadecimal words, each a token or more."""
        digits = "".join(sha256(f"{own}:{n}".encode()).hexdigest() for n in range(-(-tokens // 16)))
        return self._box.encode(" ".join(digits[at : at + 4] for at in range(0, len(digits), 4)))[:tokens]

    def _words(self, tokens: int) -> int:
        """By the line through the shortest and the longest text so far."""
        if not self._seen:
            return max(1, tokens - 1)
        few, many = min(self._seen), max(self._seen)
        slope = (self._seen[many] - self._seen[few]) / (many - few) if many > few else 1.0
        return max(1, round(few + (tokens - self._seen[few]) / max(slope, 0.1)))


def _words(own: str, count: int) -> str:
    drawn = Random(sha256(own.encode()).digest())
    return " ".join(drawn.choice(WORDS) for _ in range(count))
