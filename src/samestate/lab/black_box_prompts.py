"""Prompts for somebody else's server: each begins with words of its own, so that it shares a prefix with nobody.

Where C is one token, whatever two prompts begin with alike is reused: so no two of a run have their first token in
common, as long as there are first tokens enough. Chance would not do: of 64 words, thirty prompts share some.
"""

from __future__ import annotations

from hashlib import sha256
from random import Random
from typing import TypeVar

from samestate.engines.black_box import BlackBox, Prompt
from samestate.models.templates import TEMPLATES, render

T = TypeVar("T")
_WORDS = """
apple river stone cloud green paper house light water table chair music plant bread horse glass winter summer
garden silver yellow mother father sister corner market bridge forest island mountain number letter answer
circle square pocket button engine ticket dinner coffee cotton shadow finger doctor farmer little simple quick
early warm cold long short round deep high wide open dark soft clean able above acid across action adult album
animal annual april army artist atom august author award baby band battle beach before begin behind bell
better bicycle bird black block blue board border both brain brother brush cake camera capital card castle
center certain cheese choice church city civil class climb club coach comfort cook copper culture custom daily
dance data desert detail device digit dollar double dozen draft dream drink drop duck dust eager east echo
edge eight electric empty enemy equal error escape estate event exact extra fabric face fair family fashion
festival field fifty fight file fire five flag flight floor focus food four frame friend front fruit future
game gate general giant gift girl global gold grain ground guard habit hammer happy harbor health height
hidden hill history holiday home hope hospital hotel human image impact inch index inner inside iron issue
jacket jazz joint journal judge juice july kernel kick kitchen knife label lake lamp large laser leader legal
lemon level library limit line lion list local logic lucky lunch machine magic major master media member metal
middle mile mind mirror model money moon morning movie advice afraid after again
"""
WORDS = _WORDS.split()
"""Of one token each in most vocabularies. No two have their first three letters in common, for tokenizers that take
several tokens for a word."""


class Prompts:
    """Makes prompts of a number of tokens: exactly, where the server has a tokenizer and takes ids; else nearly."""

    def __init__(self, box: BlackBox, run: str, template: str, *, exact: bool) -> None:
        """`run`: a word of this run alone. Raises `ClientError` where the tokenizer fails."""
        self._box = box
        self._run = run
        self._template = TEMPLATES[template]
        self.exact = exact
        self._seen: dict[int, int] = {}
        self._numbers: dict[str, int] = {}
        """Of prompts by tag, in the order in which they were first made."""

    def make(self, tag: str, tokens: int) -> Prompt:
        """The prompt of document `tag`; the same for the same tag and length. Raises `ClientError`."""
        own = f"{self._run}-{tag}"
        number = self._numbers.setdefault(tag, len(self._numbers))
        if not self.exact:
            count = self._words(tokens)
            words = [*self._beginning(number, WORDS), *_drawn(own, count)][:count]
            return Prompt(None, " ".join(words), tokens)
        beginning = self._beginning(number, self._first_ids())[:tokens]
        rest = tokens - len(beginning)
        return Prompt([*beginning, *(self._document(own, rest) if rest else ())], "", tokens)

    @property
    def alike(self) -> int:
        """Prompts so far whose first token another one has too, as there were no more; 0 in most vocabularies."""
        made, firsts = len(self._numbers), len(self._first_ids() if self.exact else WORDS)
        return made if made >= 2 * firsts else 2 * max(0, made - firsts)

    def _beginning(self, number: int, firsts: list[T]) -> list[T]:
        """Two of `firsts`: the first is this prompt's alone while they last, both together as long as pairs last."""
        run = Random(sha256(self._run.encode()).digest())
        one, two = (run.sample(firsts, len(firsts)) for _ in range(2))
        return [one[number % len(one)], two[number // len(two) % len(two)]]

    def _first_ids(self) -> list[int]:
        """Ids that a prompt may begin with: each is a token of our words. Raises `ClientError`."""
        return list(dict.fromkeys(self._box.encode(" ".join(WORDS))))

    def _document(self, own: str, tokens: int) -> list[int]:
        try:
            return render(self._template.parts(own), self._box.encode, tokens)
        except ValueError:  # too short for a question and its background
            return self._short(own, tokens)

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


def _drawn(own: str, count: int) -> list[str]:
    return Random(sha256(own.encode()).digest()).choices(WORDS, k=count)
