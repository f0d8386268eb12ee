"""Prompts of an exact number of tokens that differ from each other early.

A prompt is head, filler and tail. The head opens with a code drawn from the tag, so that two
tags part within the first few tokens; it holds what the question at the end asks for. The
filler is numbered paragraphs, so that it is no pure loop. Texts lie in ``data/templates``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from hashlib import sha256
from importlib import resources
from string import Template as Text
from typing import NamedTuple

PARAGRAPHS = 120
"""Filler paragraphs before the numbering starts again."""


class PromptParts(NamedTuple):
    """The texts of one prompt."""

    head: str
    filler: str
    tail: str


class Template(NamedTuple):
    """A question with its background; see `parts`."""

    name: str
    title: str
    head: str
    filler: tuple[str, ...]
    tail: str

    def parts(self, tag: str) -> PromptParts:
        """The prompt for the document `tag`. The filler is the same for every tag."""
        digest = sha256(tag.encode()).hexdigest()
        known = {"tag": tag, "code": digest[:8], "secret": digest[8:14]}
        filler = "\n".join(Text(self.filler[n % len(self.filler)]).substitute(n=n + 1) for n in range(PARAGRAPHS))
        return PromptParts(Text(self.head).substitute(known), filler + "\n", Text(self.tail).substitute(known))


def render(parts: PromptParts, encode: Callable[[str], list[int]], tokens: int) -> list[int]:
    """Token ids of a prompt exactly `tokens` long: head, filler repeated and cut, tail.

    `encode` must add no special tokens. Raises `ValueError` when head and tail leave no room for filler.
    """
    head, filler, tail = (encode(part) for part in parts)
    room = tokens - len(head) - len(tail)
    if room < 1:
        least = len(head) + len(tail) + 1
        raise ValueError(f"a prompt of {tokens} tokens is too short for this template: ask for at least {least}")
    if not filler:
        raise ValueError("the tokenizer turns the filler text into no tokens: check the model's tokenizer files")
    repeats = -(-room // len(filler))
    return head + (filler * repeats)[:room] + tail


def own_text(tag: str, encode: Callable[[str], list[int]], tokens: int) -> list[int]:
    """Token ids of a text that only `tag` has, exactly `tokens` long: the part of a prompt that it does not share."""
    ids: list[int] = []
    block = 0
    while len(ids) < tokens:
        ids += encode(f" {sha256(f'{tag}:{block}'.encode()).hexdigest()}")
        block += 1
    return ids[:tokens]


def _load() -> dict[str, Template]:
    templates = {}
    for file in sorted((resources.files(__package__) / "data" / "templates").iterdir(), key=lambda f: f.name):
        data = tomllib.loads(file.read_text(encoding="utf-8"))
        name = file.name.removesuffix(".toml")
        templates[name] = Template(name, data["title"], data["head"], tuple(data["filler"]), data["tail"])
    return templates


TEMPLATES: dict[str, Template] = _load()
"""Every shipped template by name."""
