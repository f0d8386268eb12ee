"""What lies inside a value that a module is given or returns, each part under a name of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_DEEPEST = 4
"""Lists and dictionaries that are looked into."""


def parts(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Everything in a value that is no list and no dictionary, in order: ``name``, ``name[0]``, ``name['key'][1]``.

    A list or dictionary that lies deeper than is looked into stays whole.
    """
    if isinstance(value, list | tuple) and depth < _DEEPEST:
        for index, one in enumerate(value):
            yield from parts(f"{name}[{index}]", one, depth + 1)
    elif isinstance(value, dict) and depth < _DEEPEST:
        for key, one in value.items():
            yield from parts(f"{name}[{key!r}]", one, depth + 1)
    else:
        yield name, value


def tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors among `parts`."""
    return ((place, one) for place, one in parts(name, value) if isinstance(one, torch.Tensor))


def given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """`parts` of a call's arguments: ``args[0]``, then keywords by their names."""
    for index, value in enumerate(args):
        yield from parts(f"args[{index}]", value)
    for name, value in kwargs.items():
        yield from parts(name, value)
