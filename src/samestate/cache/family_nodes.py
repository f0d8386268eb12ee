"""What a family index is made of: a family with its place in the chains, and which pages families have."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple, NewType, TypeAlias

Family = NewType("Family", bytes)
"""vLLM's block hash of the whole prefix up to the boundary: the same in all groups."""
Score: TypeAlias = tuple[int, float, int]
"""The lowest goes first."""


class Member(NamedTuple):
    """A page or a state: one group of one family."""

    family: Family
    group: int
    size: int
    """Bytes."""


class Want(IntEnum):
    """Who else has a word in when a family goes."""

    NO = 0
    GROWING = 1
    """Pages that it, or a family of its chain, lacks may be on their way: it is not taken for an orphan yet."""
    ASKED = 2
    """A request that is on its way needs it: it goes only when nothing else can."""


class Shape:
    """Which pages a family has, and how large they are. Shared by all families that have the same."""

    __slots__ = ("size", "sizes", "state_size", "stated", "whole")

    def __init__(self, sizes: dict[int, int], pages: frozenset[int], states: frozenset[int]) -> None:
        self.sizes = sizes
        self.size = sum(sizes.values())
        self.whole = pages <= sizes.keys()
        self.stated = bool(sizes) and states <= sizes.keys()
        self.state_size = sum(size for group, size in sizes.items() if group in states)


class Node:
    """A family. One without pages is only a link of a chain."""

    __slots__ = (
        "children",
        "end",
        "held",
        "name",
        "needed_below",
        "parent",
        "queued",
        "reachable",
        "shape",
        "stamp",
        "used",
        "uses",
        "wanted",
    )

    def __init__(self, name: Family, end: int, shape: Shape, used: int) -> None:
        self.name = name
        self.parent: Node | None = None
        self.end = end
        self.children: Node | set[Node] | None = None
        self.shape = shape
        self.held = 0
        self.needed_below = 0
        """Children that are needed."""
        self.reachable = False
        """All pages up to this boundary are there."""
        self.used = used
        self.uses = 0
        self.wanted = Want.NO
        self.stamp = -1
        """Of its entry in the queue that counts; -1: it has none."""
        self.queued: Score = (0, 0.0, 0)

    def each_child(self) -> Iterator[Node]:
        if isinstance(self.children, Node):
            yield self.children
        elif self.children:
            yield from self.children

    def adopt(self, child: Node) -> None:
        if self.children is None:
            self.children = child
        elif isinstance(self.children, Node):
            self.children = {self.children, child}
        else:
            self.children.add(child)

    def disown(self, child: Node) -> None:
        if self.children is child:
            self.children = None
        else:
            assert isinstance(self.children, set)
            self.children.discard(child)
            if len(self.children) == 1:
                (self.children,) = self.children
