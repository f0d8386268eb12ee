"""Families in their chains: which prefixes they restore, which are needed, and which bytes are orphans.

A *family* is what one boundary needs beyond the boundary before it: the attention pages of the tokens in between, and
the state at the boundary where a step ended there. Families are chained, parent to child, by boundary. A prefix is
*restorable* where every family from the first on has its pages and the last one has its state too; a family is *needed*
while it, or one below it, is restorable. Bytes that no restorable prefix needs are *orphans*.

Pure Python, not thread-safe. A look-up is one dictionary access; a change is told up and down its chain as far as it
matters there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from samestate.cache.family_nodes import Family, Member, Node, Shape


class FamilyGraph:
    """See the module. Whoever extends it hears through `_offer` of every family that may now be worth something else.

    Args:
        pages: Groups of which a family needs a page wherever a prefix runs through it.
        states: Groups of which only the last family of a prefix needs its page.

    """

    def __init__(self, pages: Collection[int], states: Collection[int]) -> None:
        self._pages = frozenset(pages)
        self._states = frozenset(states)
        self._clear()

    def _clear(self) -> None:
        self._shapes: dict[tuple[tuple[int, int], ...], Shape] = {}
        self._nodes: dict[Family, Node] = {}
        self._clock = 0
        self.bytes = 0
        """Of all pages."""
        self.orphan_bytes = 0

    def _offer(self, node: Node) -> None:
        """What this family is worth, or whether it may go, may have changed."""

    # --- questions ------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, family: Family) -> bool:
        return family in self._nodes

    def holds(self, family: Family, group: int) -> bool:
        """Whether this page is there, of use or not."""
        node = self._nodes.get(family)
        return node is not None and group in node.shape.sizes

    def is_restorable(self, family: Family) -> bool:
        """Whether the prefix that ends with this family can be restored."""
        node = self._nodes.get(family)
        return node is not None and self._restorable(node)

    def restorable(self, chain: Sequence[Family]) -> int:
        """How many families of this chain, from the first on, can be restored: the longest prefix."""
        return next((i for i in range(len(chain), 0, -1) if self.is_restorable(chain[i - 1])), 0)

    def members(self, family: Family) -> list[Member]:
        """What is there of a family."""
        node = self._nodes.get(family)
        return [Member(family, group, size) for group, size in node.shape.sizes.items()] if node else []

    # --- changes --------------------------------------------------------------------------------

    def add(
        self, family: Family, group: int, size: int, *, parent: Family | None = None, end: int = 0, hold: bool = False
    ) -> None:
        """A page of a family is there now. `end`: the boundary, in tokens; `parent`: the family of the one before it.

        Known before with another size: the new one counts. A parent that is not there is remembered as a link.
        `hold`: hold the family at once, as while the page is still being written.
        """
        node = self._node(family, parent, end)
        node.held += hold
        self._reshape(node, node.shape.sizes | {group: size})

    def link(self, family: Family, parent: Family, end: int = 0) -> bool:
        """A family that is there, or a link, has this parent; False: that was known, or the family is not there."""
        node = self._nodes.get(family)
        if node is None or node.parent is not None:
            return False
        self._node(family, parent, end)
        return True

    def remove(self, family: Family, group: int) -> int:
        """A page is gone, e.g. damaged; how many bytes it had, 0 if it was not there."""
        node = self._nodes.get(family)
        if node is None or group not in node.shape.sizes:
            return 0
        size = node.shape.sizes[group]
        self._reshape(node, {other: kept for other, kept in node.shape.sizes.items() if other != group})
        self._prune(node)
        return size

    # --- what follows from a change -------------------------------------------------------------

    def _restorable(self, node: Node) -> bool:
        return node.reachable and node.shape.stated

    def _needed(self, node: Node) -> bool:
        return node.needed_below > 0 or self._restorable(node)

    def _orphaned(self, node: Node) -> int:
        """Bytes of a family that serve no restorable prefix."""
        if not self._needed(node):
            return node.shape.size
        return 0 if self._restorable(node) else node.shape.state_size

    def _reaches(self, node: Node) -> bool:
        return node.shape.whole and (node.parent is None or node.parent.reachable)

    def _shape(self, sizes: dict[int, int]) -> Shape:
        key = tuple(sorted(sizes.items()))
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = Shape(dict(key), self._pages, self._states)
        return shape

    def _node(self, family: Family, parent: Family | None, end: int) -> Node:
        node = self._nodes.get(family)
        if node is None:
            self._clock += 1
            node = self._nodes[family] = Node(family, end, self._shape({}), self._clock)
            node.reachable = self._reaches(node)
        if node.parent is None and parent is not None and parent != family:
            above = self._node(parent, None, 0)
            node.parent = above
            above.adopt(node)
            if self._needed(node):
                self._tell(node)
            self._carry_down(node)
        node.end = end or node.end
        return node

    def _reshape(self, node: Node, sizes: dict[int, int]) -> None:
        """A family has other pages now: carry on what follows."""
        needed, orphaned = self._needed(node), self._orphaned(node)
        self.bytes -= node.shape.size
        node.shape = self._shape(sizes)
        self.bytes += node.shape.size
        self.orphan_bytes += self._orphaned(node) - orphaned
        if self._needed(node) != needed:
            self._tell(node)
        self._carry_down(node)
        self._offer(node)

    def _carry_down(self, node: Node) -> None:
        """Whether this family is reached may have changed, and so for those below it."""
        changed = [node]
        while changed:
            one = changed.pop()
            if self._reaches(one) == one.reachable:
                continue
            needed, orphaned = self._needed(one), self._orphaned(one)
            one.reachable = not one.reachable
            self.orphan_bytes += self._orphaned(one) - orphaned
            if self._needed(one) != needed:
                self._tell(one)
            changed += one.each_child()

    def _tell(self, node: Node) -> None:
        """Whether this family is needed has changed: those above it hear of it, as far as it matters to them."""
        self._offer(node)
        while (above := node.parent) is not None:
            needed, orphaned = self._needed(above), self._orphaned(above)
            above.needed_below += 1 if self._needed(node) else -1
            self.orphan_bytes += self._orphaned(above) - orphaned
            if self._needed(above) == needed:
                return
            node = above

    def _prune(self, node: Node) -> None:
        """Forget links that lead nowhere."""
        while not node.shape.sizes and node.children is None and not node.held:
            del self._nodes[node.name]
            node.stamp = -1
            if node.parent is None:
                return
            node.parent.disown(node)
            node = node.parent
        self._offer(node)
