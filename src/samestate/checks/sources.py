"""Which steps computed a reused prefix, as far as the records say who may have: the control's, or others?

An attention page is stored once, by whoever computed it first; the state at p comes from a step that ended there. On a
GPU a matrix product of another number of rows rounds otherwise, so a page that was computed in another step than the
control's is right and need not be equal to the bit. What continues from it cannot then be laid to reuse, unless the run
itself shows that the engine computes the same bytes in both (`invariance`).

A source of a page from outside is an earlier request that saved it, where every save of the arm is recorded with its
request, else any that begins so and had reached its end. A source of local tokens is any such request since the
last reset. What a source had itself reused is followed to its sources.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

from samestate.checks.boundary import STATE
from samestate.checks.geometry import Mismatch
from samestate.checks.history import ArmHistory, History, Row
from samestate.checks.invariance import Block, Invariance, covering
from samestate.checks.layout import RankLayout
from samestate.checks.prefixes import Prefixes
from samestate.checks.scenario import Generation, Unlike, generations, lineage
from samestate.evidence.records import OperationName
from samestate.plans.scenarios import CONTROL, cold_op

Page = tuple[int, int]
"""Transfer group, index in the request's block table."""


class Sources:
    """Where what the generations of the candidates reused may come from. Raises MissingEvidence."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._all = generations(history, history.candidates)
        self._order = {(one.arm.name, one.op.op): number for number, one in enumerate(self._all)}
        self._prefixes = {arm.name: Prefixes(history, arm) for arm in history.candidates}
        self._saved = {arm.name: _saved(history, arm) for arm in history.candidates}
        self._resets = {arm.name: _resets_before(history, arm) for arm in history.candidates}
        self.seen = Invariance(history)
        self._walks: dict[str, _Walk] = {}
        """By the cold run that is compared with."""

    def unlike(self, one: Generation) -> Mismatch | None:
        """The first block that a source of `one` computed in other steps, or in company; None: there is none."""
        if one.first is None:
            return None
        if one.prompt not in self._walks:
            self._walks[one.prompt] = _Walk(self, one)
        return self._walks[one.prompt].reused(one, one.first.start, state=True)

    # --- who may have brought it ----------------------------------------------------------------

    def outside(self, one: Generation, page: Page | None, end: int) -> Iterator[Generation]:
        """Earlier requests that may have stored a page that ends at `end`; `page` None: its place is not known."""
        for other in self._earlier(one, {arm.name for arm in lineage(self._history, one.arm)}):
            saved = self._saved[other.arm.name]
            if not self._begins_alike(one, other, end):
                continue
            if saved is None or page is None:
                if _reached(one, other) >= end:
                    yield other
            elif page in saved.get(other.request or "", ()):
                yield other

    def inside(self, one: Generation, end: int) -> Iterator[Generation]:
        """Requests of its engine, since the last reset, that had [0, `end`) in their blocks."""
        resets = self._resets[one.arm.name]
        for other in self._earlier(one, {one.arm.name}):
            since = resets.get(other.op.op) == resets.get(one.op.op)
            if since and _reached(one, other) >= end and self._begins_alike(one, other, end):
                yield other

    def pages(self, one: Generation) -> list[tuple[Page, int, int, bool]] | None:
        """Pages of [local, p): page, first token, end, whether it is a state. None: their places are not known."""
        registered = next(iter(one.arm.ranks.values()), None)
        if one.first is None or one.local is None or registered is None or not registered.rec.transfer_groups:
            return None
        layout = RankLayout(registered)
        found = []
        for group in layout.groups:
            engine_group = layout.engine_group(group)
            if engine_group is None:
                return None
            size = engine_group.tokens_per_block
            for index in layout.missing_blocks(group, [], one.local, one.first.start):
                at = (group, index), index * size, (index + 1) * size, engine_group.entry_kind in STATE
                found.append(at)
        return sorted(found, key=lambda page: page[1:3])

    def reference(self, one: Generation) -> list[Row]:
        """The steps of its cold run."""
        return list(self._history.arm(CONTROL).schedule(cold_op(one.prompt)) or ())

    @property
    def interval(self) -> int:
        """C."""
        return self._history.resolved.checkpoint_interval

    def _earlier(self, one: Generation, arms: set[str]) -> Iterator[Generation]:
        """Those of `arms` that began before it. Of its own arm by the scheduler's order."""
        for other in self._all:
            if other.arm.name not in arms or (other.arm.name, other.op.op) == (one.arm.name, one.op.op):
                continue
            if other.arm.name != one.arm.name or self._before(other, one):
                yield other

    def _before(self, other: Generation, one: Generation) -> bool:
        """In the scheduler's order; in the plan's where no step of `other` is recorded."""
        if other.first is None or one.first is None:
            return self._order[other.arm.name, other.op.op] < self._order[one.arm.name, one.op.op]
        return other.first.n < one.first.n

    def _begins_alike(self, one: Generation, other: Generation, end: int) -> bool:
        digest = self._prefixes[one.arm.name].digest(one.request or "", end)
        return digest is not None and digest == self._prefixes[other.arm.name].digest(other.request or "", end)


def unlike_sources(history: History) -> Unlike:
    """`Sources.unlike`; nothing is looked at before it is asked for."""
    made = cache(lambda: Sources(history))
    return lambda one: made().unlike(one)


class _Walk:
    """From one generation to those that computed what it reused, against the steps of its cold run."""

    def __init__(self, sources: Sources, one: Generation) -> None:
        self._sources = sources
        self._cold = cold_op(one.prompt)
        self._reference = sources.reference(one)
        self._known: dict[tuple[str, str, int, bool], Mismatch | None] = {}

    def reused(self, one: Generation, end: int, *, state: bool) -> Mismatch | None:
        """The first of the pages of [0, `end`) that `one` found; `state`: with the state that it went on from."""
        p, local, c = one.first.start if one.first else 0, one.local, self._sources.interval
        pages = self._sources.pages(one)
        inside = min(end, p if local is None else local)
        for start in range(0, inside, c):
            until = min(start + c, inside)
            for source in self._sources.inside(one, until):
                if found := self._brought(source, until, state=state and until == p):
                    return found
        if pages is None:
            for start in range((local or 0) // c * c, end, c):
                until = min(start + c, end)
                for source in self._sources.outside(one, None, until):
                    if found := self._brought(source, until, state=state and until == p):
                        return found
            return None
        for page, start, until, is_state in pages:
            if start >= end or (is_state and not (state and until == p == end)):
                continue
            for source in self._sources.outside(one, page, min(until, p)):
                if found := self._brought(source, min(until, end), state=is_state):
                    return found
        return None

    def _brought(self, source: Generation, end: int, *, state: bool) -> Mismatch | None:
        """How [0, `end`) of a source came about."""
        key = source.arm.name, source.op.op, end, state
        if key not in self._known:
            self._known[key] = self._computed(source, end, state=state)
        return self._known[key]

    def _computed(self, source: Generation, end: int, *, state: bool) -> Mismatch | None:
        if source.first is None:
            message = f"its tokens [0, {end}) may come from {source.op.op}, of which no step is recorded"
            return Mismatch(message, [source.output.where] if source.output else [])
        p = source.first.start
        if end <= p:
            return self.reused(source, end, state=state)
        if p and (found := self.reused(source, p, state=True)):
            return found
        return self._own(source, p, end, state=state)

    def _own(self, source: Generation, p: int, end: int, *, state: bool) -> Mismatch | None:
        """Block by block, the steps of a source against those of the cold run, but where they give the same bytes."""
        c, seen = self._sources.interval, self._sources.seen
        for start in range(p // c * c, end, c):
            block = Block(max(start, p), min(start + c, end))
            theirs, mine = covering(source.schedule or (), block), covering(self._reference, block)
            beside = seen.company.beside(source, theirs)
            if [row.shape for row in theirs] == [row.shape for row in mine] and not beside:
                continue
            if seen.shown(source, block, mine, state=state and block.end == end):
                continue
            company = f" with {', '.join(beside)}" if beside else ""
            cold = _said(mine).removeprefix("a step ")
            message = (
                f"its tokens {block} may come from {source.op.op}, which computed them in {_said(theirs)}{company}, "
                f"{self._cold} in {cold}"
            )
            return Mismatch(message, [row.where for row in (*theirs[:1], *mine[:1])])
        return None


def _saved(history: History, arm: ArmHistory) -> dict[str, set[Page]] | None:
    """By request, the pages that its saves moved; None: not every save of the arm is known."""
    saves, watched = arm.saves, arm.pages.transfers
    if not history.whole(arm.name) or saves.unpaired or not saves.submitted or (saves.failed and not watched):
        return None
    layouts = {rank: RankLayout(seen) for rank, seen in arm.ranks.items()}
    moved = [(one.rank, one.request, part) for one in watched if one.direction == "save" for part in one.parts]
    if not watched:
        moved += [(rank, request, one.part) for (rank, request), done in saves.done.items() for one in done]
        opened = [(rank, seen.rec) for (rank, _), seen in saves.open.items()]
        moved += [(rank, rec.request or "", part) for rank, rec in opened for part in rec.parts]
    found: dict[str, set[Page]] = {}
    for rank, request, part in moved:
        layout = layouts.get(rank)
        if not request or layout is None or layout.engine_group(part.group) is None:
            return None
        found.setdefault(request, set()).update((part.group, index) for index in layout.blocks(part))
    return found


def _resets_before(history: History, arm: ArmHistory) -> dict[str, int]:
    """By operation, how many resets of the local cache the engine had confirmed before it."""
    found, confirmed = {}, 0
    for case in history.cases(arm.name):
        for op in case.operations:
            if op.name is OperationName.RESET:
                seen = arm.resets.get(op.op, [])
                confirmed += bool(seen) and all(one.rec.local_reset for one in seen)
            found[op.op] = confirmed
    return found


def _reached(one: Generation, other: Generation) -> int:
    """Tokens that another had in its blocks before `one` began."""
    before = one.first.n if one.first and other.arm.name == one.arm.name else None
    if not other.schedule:  # It may have reached any of its prompt.
        return other.tokens
    return max((row.end for row in other.schedule if before is None or row.n < before), default=0)


def _said(rows: Sequence[Row]) -> str:
    """``a step [0, 544)``."""
    if not rows:
        return "steps that are not recorded"
    ranges = [f"[{row.start}, {row.end})" + (f" with {row.drafted} drafts" if row.drafted else "") for row in rows]
    return f"a step {ranges[0]}" if len(ranges) == 1 else f"steps {', '.join(ranges)}"
