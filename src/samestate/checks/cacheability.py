"""``cacheability``: what was stored whole, and cannot have been evicted, is served.

A prefix that is never found costs a recomputation and nothing else, so nothing shows it: no token, no error. Known from
records: which pages of which prefixes were saved on every rank, and how many bytes since. Every boundary of a prompt
whose pages were all saved before its lookup must be found, or one beyond it. Requirements 24, 79.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from samestate.checks.base import CheckResult, Finding
from samestate.checks.history import ArmHistory, History
from samestate.checks.layout import RankLayout
from samestate.checks.prefixes import Prefixes
from samestate.checks.scenario import Generation, generations
from samestate.checks.verdicts import conclude, fail, not_exercised, unknown
from samestate.plans.operations import boundary

CHECK = "cacheability"
SPARE = 2
"""How much larger than what was stored the cache must be before eviction is ruled out: tiers pad, and keep heads."""

Page = tuple[int, int, str]
"""Rank, transfer group, digest of the prefix that the page ends."""


class Stored(NamedTuple):
    """A boundary of a prompt whose pages were all saved."""

    boundary: int
    since_ns: int
    """When the last save of its longest-stored page was completed."""


def cacheability(history: History) -> CheckResult:
    """Hold the lookup of every generation of every candidate against what was saved by then."""
    findings: list[Finding] = []
    examined = served = 0
    for arm in history.candidates:
        store = Store(history, arm)
        for one in generations(history, [arm]):
            stored = store.longest(one)
            if stored is None:
                continue
            examined += 1
            found = list(_served(history, one, stored))
            served += not found
            findings += found
    if not examined:
        message = "no prompt had a boundary that was stored whole, and surely still there"
        return not_exercised(CHECK, "nothing_stored", message, unit="lookups")
    summary = f"{served}/{examined} lookups found all that was stored whole"
    return conclude(CHECK, findings, unit="lookups", examined=examined, summary=summary)


def _served(history: History, one: Generation, stored: Stored) -> Iterator[Finding]:
    assert one.lookup is not None and one.first is not None
    said = one.lookup.rec.local_tokens + (one.lookup.rec.matched_tokens or 0)
    found = max(said, one.first.start)
    if found >= stored.boundary:
        return
    message = (
        f"{one.name} (N={one.tokens}): {found} tokens were found, and every page of [0, {stored.boundary}) had been "
        "saved on every rank, too little since then to push it out"
    )
    place = one.place.model_copy(update={"boundary": stored.boundary})
    evidence = [one.lookup.where, one.first.where]
    yield (fail if history.whole(one.arm.name) else unknown)("stored_not_served", message, place, evidence)


class Store:
    """What an arm saved. What another arm did, whose cache it should find, may have died with that arm's engine."""

    def __init__(self, history: History, arm: ArmHistory) -> None:
        self._prefixes = Prefixes(history, arm)
        self._layouts = {rank: RankLayout(seen) for rank, seen in arm.ranks.items()}
        self._capacity = history.plan.engine.external_cache_bytes
        self._saved: dict[Page, list[int]] = {}
        """When saves of a page were completed, in order."""
        times: list[tuple[int, int]] = []
        for (rank, request), saves in arm.saves.done.items():
            layout = self._layouts.get(rank)
            for one in saves if layout else ():
                assert layout is not None
                group, blocks = one.part.group, layout.blocks(one.part)
                times.append((one.completed_ns, self._padded(layout, group) * len(blocks)))
                for index in blocks:
                    digest = self._prefixes.digest(request, (index + 1) * self._size(layout, group))
                    if digest is not None:
                        self._saved.setdefault((rank, group, digest), []).append(one.completed_ns)
        times.sort()
        self._times = [t for t, _ in times]
        self._bytes = [0]
        for _, size in times:
            self._bytes.append(self._bytes[-1] + size)

    def longest(self, one: Generation) -> Stored | None:
        """The farthest boundary of its prompt that must be found; None: there is none, or it cannot be known."""
        if one.request is None or one.first is None or one.lookup is None:
            return None
        if one.request in one.arm.preempted or one.op.together is not None or not self._layouts:
            return None
        sizes = {self._size(layout, group) for layout in self._layouts.values() for group in layout.groups}
        step = max(sizes, default=0)
        last = boundary(one.tokens, step, drops_last=one.arm.drops_last_block) if step else 0
        for end in range(last, one.lookup.rec.local_tokens, -step if step else -1):
            since = self._since(one, end)
            if since is not None and self._stored_since(since, one.lookup.t_ns) * SPARE <= self._capacity:
                return Stored(end, since)
        return None

    def _since(self, one: Generation, boundary: int) -> int | None:
        """Since when every page of [local, boundary) is stored; None: not all of them are."""
        assert one.lookup is not None
        oldest = one.lookup.t_ns
        for rank, layout in self._layouts.items():
            for group in layout.groups:
                size = self._size(layout, group)
                for index in layout.missing_blocks(group, [], one.lookup.rec.local_tokens, boundary):
                    digest = self._prefixes.digest(one.request or "", (index + 1) * size)
                    saved = self._saved.get((rank, group, digest or ""), [])
                    before = [t for t in saved if t <= one.lookup.t_ns]
                    if not before:
                        return None
                    oldest = min(oldest, max(before))
        return oldest

    def _stored_since(self, since: int, until: int) -> int:
        """Bytes, over all ranks and with padding, whose saves were completed from `since` on."""
        return self._bytes[bisect_right(self._times, until)] - self._bytes[bisect_right(self._times, since - 1)]

    def _size(self, layout: RankLayout, group: int) -> int:
        engine_group = layout.engine_group(group)
        return engine_group.tokens_per_block if engine_group else 0

    def _padded(self, layout: RankLayout, group: int) -> int:
        """Bytes of one block, every layer's page with its padding."""
        engine_group = layout.engine_group(group)
        return engine_group.page_bytes * len(engine_group.layers) if engine_group else 0
