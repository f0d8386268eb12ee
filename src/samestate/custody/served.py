"""What a process serves by its own word: its command line names the checkpoint and the chat template."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
_MODEL = ("--model", "--model-path")
_TEMPLATE = ("--chat-template",)
_COMMAND = "serve"
"""The word behind it names the model: ``vllm serve MODEL``."""


class Served(NamedTuple):
    """Paths as the process itself sees them, absolute; None: its command line names none that is there."""

    model: str | None
    """A folder. A name of a hub is none."""
    template: str | None
    """A file."""


def served(pid: int) -> Served:
    """By the command line of `pid`, the last word on each counting. Raises nothing."""
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="surrogateescape").split("\0")[:-1]
        cwd = os.readlink(PROC / str(pid) / "cwd")
    except OSError:
        return Served(None, None)
    model = _named(words, _MODEL) or _behind(words)
    template = _named(words, _TEMPLATE)
    return Served(
        model=_there(pid, cwd, model) if model else None, template=_there(pid, cwd, template) if template else None
    )


def place_of(pid: int, path: str) -> Path:
    """Where a path of the process lies for whoever reads it from here."""
    return PROC / str(pid) / "root" / path.lstrip("/")


def elsewhere(pid: int, declared: str, says: str | None) -> bool:
    """Whether the process names a place that is there and is not the declared one, whatever links lead to it."""
    if says is None:
        return False
    try:
        return not os.path.samefile(place_of(pid, says), declared)
    except OSError:
        return not Path(declared).exists()


def _named(words: Sequence[str], flags: Sequence[str]) -> str | None:
    found = None
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in flags:
            found = value if equals else next(iter(words[index + 1 : index + 2]), None)
    return found


def _behind(words: Sequence[str]) -> str | None:
    """The word behind the command."""
    with suppress(ValueError, IndexError):
        word = words[words.index(_COMMAND) + 1]
        return None if word.startswith("-") else word
    return None


def _there(pid: int, cwd: str, said: str) -> str | None:
    path = os.path.join(cwd, said)
    with suppress(OSError):
        os.stat(place_of(pid, path))
        return path
    return None
