"""``prefix-identity``: B by content. Which boundary do the loaded bytes represent, and was that one credited?

The bytes of each recurrent page are filed when they are saved, under the boundary that the
scheduler's own step ends say the block holds, never under a connector's label. What a load brings
is looked up there. One boundary can have several right digests (computed by decode, recomputed by
prefill after a preemption): all that were filed count.

Filed and looked up are fingerprints of whole blocks (`page_sets`). Where one is not found, a second round files the
bytes that were asked for page by page, and no others: memory goes with blocks, and with what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from samestate.checks.base import CheckResult, Finding
from samestate.checks.boundary import STATE
from samestate.checks.damage import Damage, findings, job_name
from samestate.checks.history import ArmHistory, History, MissingEvidence
from samestate.checks.layout import RankLayout, rank_layouts
from samestate.checks.page_history import Computed, Transfer
from samestate.checks.page_sets import PageSet, PageSets
from samestate.checks.prefixes import Prefixes
from samestate.checks.verdicts import conclude, fail, unknown
from samestate.evidence.records import BatchSource, PageRow, PageSide

CHECK = "prefix-identity"
NULL_BLOCK = 0
NO_STATE = ("null_block_saved", "saved_uncomputed_state")
"""Damages of a save after which what its key holds is no state."""


class State(NamedTuple):
    """What a page is the state of."""

    prefix: str
    """Digest of the tokens [0, boundary)."""
    boundary: int


@dataclass(slots=True)
class Content:
    """What the bytes of one load of one rank represent."""

    request: str
    boundaries: set[int | None] = field(default_factory=set)
    """Of every state page; None: never filed."""


@dataclass(slots=True)
class _Asked:
    """What a round could not find by block, so that the next one files it by page."""

    digests: set[tuple[int, int, str]] = field(default_factory=set)
    """Rank, entry and digest of the bytes."""
    states: set[tuple[int, int, State]] = field(default_factory=set)


@dataclass(slots=True)
class _Filed:
    """The states filed so far, by an arm and those that it follows."""

    blocks: dict[tuple[int, int | None, State], set[bytes]] = field(default_factory=dict)
    """Fingerprints by rank and engine group."""
    states: dict[tuple[int, int, str], set[State]] = field(default_factory=dict)
    """By rank, entry and digest of the bytes: those that were asked for."""
    known: set[tuple[int, int, State]] = field(default_factory=set)
    stateless: dict[tuple[int, int, State, str], str] = field(default_factory=dict)
    """By rank, entry, prefix and digest, of those that were asked for: why what was saved there is no state."""


class _Read(NamedTuple):
    """What the ledgers of all candidates came to."""

    findings: list[Finding]
    contents: list[list[Content]]
    """By candidate, in order."""
    right: int
    filed: int
    looked_up: int


def prefix_identity(history: History) -> CheckResult:
    """Hold the content of every load of the candidates against what its request was credited."""
    read = _read(history)
    loads = sum(map(len, read.contents))
    summary = (
        f"B by content is p in {read.right}/{loads} loads; "
        f"{read.filed} states filed from step ends, {read.looked_up} looked up"
    )
    return conclude(CHECK, read.findings, unit="loads", examined=loads, summary=summary)


def content_boundaries(history: History) -> dict[tuple[str, str], int]:
    """B by content of what each generation loaded, by arm and operation; without those that are not one boundary."""
    try:
        read = _read(history)
    except MissingEvidence:
        return {}
    found: dict[tuple[str, str], int] = {}
    for arm, of_arm in zip(history.candidates, read.contents, strict=True):
        by_request: dict[str, set[int | None]] = {}
        for content in of_arm:
            by_request.setdefault(content.request, set()).update(content.boundaries)
        for _, op in history.generations(arm=arm.name):
            output = arm.output(op.op)
            boundaries = by_request.get(output.rec.request, set()) if output else set()
            if len(boundaries) == 1 and (boundary := next(iter(boundaries))) is not None:
                found[arm.name, op.op] = boundary
    return found


def _read(history: History) -> _Read:
    """The ledgers' result, worked out once for these arms. Raises MissingEvidence."""
    for arms, read in history.contents_read:
        if arms is history.arms and isinstance(read, _Read):
            return read
    asked = _Asked()
    read = _round(history, asked)
    if asked.digests or asked.states:
        read = _round(history, asked)
    history.contents_read.append((history.arms, read))
    return read


def _round(history: History, asked: _Asked) -> _Read:
    """An arm that follows another goes on with what that one filed."""
    filed: dict[str | None, _Filed] = {}
    for arm in history.candidates:
        filed[arm.name] = filed.get(history.follows(arm.name), _Filed())
    ledgers = [_Ledger(history, arm, filed[arm.name], asked) for arm in history.candidates]
    findings = [finding for ledger in ledgers for finding in ledger.findings()]
    return _Read(
        findings,
        [ledger.contents for ledger in ledgers],
        sum(ledger.right for ledger in ledgers),
        sum(ledger.filed for ledger in ledgers),
        sum(ledger.looked_up for ledger in ledgers),
    )


class _Ledger:
    """States by digest, filed and looked up in time order."""

    def __init__(self, history: History, arm: ArmHistory, filed: _Filed, asked: _Asked) -> None:
        self.contents: list[Content] = []
        self.right = self.filed = self.looked_up = 0
        self._arm = arm
        self._whole = history.whole(arm.name)
        self._layouts = rank_layouts(arm)
        self._prefixes = Prefixes(history, arm)
        self._aligned = arm.engine.rec.settings.get("cache_config.mamba_cache_mode") == "align"
        self._filed, self._asked = filed, asked
        self._state_pages = {
            rank: PageSets(layout, lambda entry: entry.kind in STATE) for rank, layout in self._layouts.items()
        }
        self._loaded: dict[tuple[int, int, int], str] = {}
        """By rank, entry and block: the request whose load last filled it. No more than the pool has pages."""
        self._seen: dict[tuple[int, str], set[int]] = {}
        """By rank and request: state entries whose loaded pages were looked up."""

    def findings(self) -> Iterator[Finding]:
        for transfer in self._arm.pages.transfers:
            layout = self._layouts.get(transfer.rank)
            if layout is None:
                continue
            if transfer.direction == "save":
                yield from findings(transfer, layout, self._prefixes, self._filed_pages(transfer, layout))
            else:
                evidence = self._first_batch(transfer)
                yield from findings(transfer, layout, self._prefixes, list(self._look_up(transfer, layout)), evidence)
                yield from self._order(transfer, layout)
        yield from self._missing()

    # --- saves --------------------------------------------------------------------------------

    def _filed_pages(self, save: Transfer, layout: RankLayout) -> list[Damage]:
        rows = save.rows(PageSide.SOURCE, "submitted")
        damages = list(self._file(save, layout, rows))
        for damage in damages:
            row, own = damage.row, self._state(save.request, layout.end(damage.row))
            asked = (save.rank, row.entry, row.digest) in self._asked.digests
            if asked and own is not None and damage.code in NO_STATE and not damage.unclear:
                self._filed.stateless[save.rank, row.entry, own, row.digest] = damage.what
        return _in_order(damages, rows)

    def _file(self, save: Transfer, layout: RankLayout, rows: list[PageRow]) -> Iterator[Damage]:
        for pages in self._sets(rows, layout, save.rank):
            row = pages.rows[0]
            if pages.block == NULL_BLOCK:
                what = "the null block was saved, which holds no state"
                unclear = any(not done.rec.ok for done in save.completions)
                yield from (Damage("null_block_saved", one, what, unclear) for one in pages.rows)
                continue
            claimed = layout.end(row)
            held = self._held(layout.entries[row.entry].engine_group, pages.block, save)
            own = self._state(save.request, claimed)
            if own is None:
                what = "the tokens it belongs to are not recorded"
                yield from (Damage("key_unknown", one, what, unclear=True) for one in pages.rows)
            elif not held:
                # A page that was loaded was judged then, and may be saved again as what it came as.
                strange = [one for one in pages.rows if not self._was_loaded(save, one, claimed)]
                yield from (self._uncomputed(save, one) for one in strange)
            elif claimed in held:
                self._add(save.rank, pages, own)
            else:
                self._add(save.rank, pages, self._state(save.request, held[-1]))
                what = f"saved under this key is the state of [0, {held[-1]}), by the scheduler's step ends"
                unclear = not self._whole
                yield from (Damage("saved_other_boundary", one, what, unclear) for one in pages.rows)

    def _sets(self, rows: Sequence[PageRow], layout: RankLayout, rank: int) -> list[PageSet]:
        """State pages that were registered, by block."""
        return [one for one in self._state_pages[rank].of(rows) if layout.holds(one.rows[0])]

    def _held(self, group: int, block: int, save: Transfer) -> list[int]:
        """Boundaries that the block may hold at the save, the latest last: the request's last one, and the one
        before it when the last one's step may still have to run; or that of the request whose block it shares."""
        until = self._arm.pages.computed_until
        mine = list(islice((one for one in until(group, block, save.t_ns) if one.request == save.request), 2))
        latest = next(until(group, block, save.t_ns), None)
        if latest and not mine and self._prefixes.shared(latest.request, save.request, latest.boundary):
            mine = [latest]
        pending = bool(mine) and self._in_last_batch(mine[0], save.t_ns)
        return [one.boundary for one in (mine[1::-1] if pending else mine[:1])]

    def _in_last_batch(self, computed: Computed, t_ns: int) -> bool:
        """Whether at most one batch was made between a state's record and a time."""
        return self._arm.steps.after(computed.t_ns, 2) > t_ns

    def _was_loaded(self, save: Transfer, row: PageRow, end: int) -> bool:
        """Whether the block was last filled by a load, of this request or of one that shares its prefix."""
        loader = self._loaded.get((save.rank, row.entry, row.block))
        return loader is not None and (loader == save.request or self._prefixes.shared(loader, save.request, end))

    def _uncomputed(self, save: Transfer, row: PageRow) -> Damage:
        rows = self._arm.schedules.get((save.request, BatchSource.SCHEDULER), ())
        if any(one.drafted for one in rows):
            return Damage("drafts_not_filed", row, "steps with drafts say of no block what it holds", unclear=True)
        loads = self._seen.get((save.rank, save.request))
        unclear = not self._whole or (loads is not None and row.entry not in loads)
        return Damage("saved_uncomputed_state", row, "the saved page holds no computed boundary", unclear)

    def _add(self, rank: int, pages: PageSet, state: State | None) -> None:
        if state is None:
            return
        self.filed += len(pages.rows)
        if pages.whole:
            self._filed.blocks.setdefault((rank, pages.group, state), set()).add(pages.digests)
        if not self._asked.digests:
            return
        for row in pages.rows:
            if (rank, row.entry, row.digest) in self._asked.digests:
                self._filed.states.setdefault((rank, row.entry, row.digest), set()).add(state)
            if (rank, row.entry, state) in self._asked.states:
                self._filed.known.add((rank, row.entry, state))

    # --- loads --------------------------------------------------------------------------------

    def _look_up(self, load: Transfer, layout: RankLayout) -> Iterator[Damage]:
        first = self._arm.resumed(load.request, load.t_ns)
        credited = first.start if first else None
        due = self._state(load.request, credited) if credited is not None else None
        content = Content(load.request)
        damages: list[Damage] = []
        seen = self._seen.setdefault((load.rank, load.request), set())
        restored = self._restored(load, layout)
        for pages in self._sets(restored, layout, load.rank):
            self.looked_up += len(pages.rows)
            seen.update(row.entry for row in pages.rows)
            self._loaded |= {(load.rank, row.entry, pages.block): load.request for row in pages.rows}
            if due is not None and pages.whole:
                filed = self._filed.blocks.get((load.rank, pages.group, due), ())
                if pages.digests in filed:
                    content.boundaries.add(credited)
                    continue
            for row in pages.rows:
                found = self._found(load, row, due)
                content.boundaries.add(self._represents(load.request, found, credited))
                if credited is None:
                    damages.append(Damage("content_unknown", row, "no batch of its request is recorded", unclear=True))
                else:
                    damages += self._judge(load, row, found, credited)
        if content.boundaries:
            self.contents.append(content)
            self.right += not damages
        yield from _in_order(damages, restored)

    def _found(self, load: Transfer, row: PageRow, due: State | None) -> set[State]:
        """What the bytes of a page were filed as; nothing, if nobody asked before this round."""
        self._asked.digests.add((load.rank, row.entry, row.digest))
        if due is not None:
            self._asked.states.add((load.rank, row.entry, due))
        return self._filed.states.get((load.rank, row.entry, row.digest), set())

    def _missing(self) -> Iterator[Finding]:
        """Every request that loaded was looked up by all its state entries, or nothing is known of the others."""
        for (rank, request), seen in self._seen.items():
            layout = self._layouts[rank]
            missing = [entry for entry in layout.entries.values() if entry.kind in STATE and entry.entry not in seen]
            if missing:
                message = (
                    f"{self._prefixes.name(request)}: rank {rank}: no loaded page of {len(missing)} state entries was "
                    f"read, the first is entry {missing[0].entry} ({missing[0].kind.value} of {missing[0].layer})"
                )
                at = {"rank": rank, "layer": missing[0].layer}
                yield unknown("missing_rows", message, self._prefixes.place(request).model_copy(update=at))

    def _restored(self, load: Transfer, layout: RankLayout) -> list[PageRow]:
        """The farthest state page of every entry: the one that is computed on."""
        farthest: dict[int, PageRow] = {}
        for row in load.rows(PageSide.DESTINATION, "completed"):
            if layout.holds(row) and layout.is_state(row):
                best = farthest.setdefault(row.entry, row)
                farthest[row.entry] = max(best, row, key=lambda one: one.block_index)
        return list(farthest.values())

    def _represents(self, request: str, found: set[State], credited: int | None) -> int | None:
        """The boundary of the bytes: that credited if it is among them, else one of the request's own first."""
        own = [state.boundary for state in found if self._state(request, state.boundary) == state]
        if credited in own:
            return credited
        return max(own, default=max((state.boundary for state in found), default=None))

    def _judge(self, load: Transfer, row: PageRow, found: set[State], credited: int) -> Iterator[Damage]:
        due = self._state(load.request, credited)
        if due is not None and due in found:
            return
        if found:
            boundary = self._represents(load.request, found, credited) or 0
            other = self._whose(load.request, boundary, found)
            what = f"these bytes are the state of [0, {boundary}){other}, {credited} credited"
            yield Damage("content_not_credited", row, what, unclear=due is None or not self._whole)
        elif due is not None and (load.rank, row.entry, due) in self._filed.known:
            what = f"these bytes were never computed as a state; that of [0, {credited}) was saved with others"
            yield Damage("content_not_computed", row, what, unclear=not self._whole)
        elif due is not None and (why := self._filed.stateless.get((load.rank, row.entry, due, row.digest))):
            what = f"these bytes were saved under this key, and are no state: {why}"
            yield Damage("content_not_computed", row, what, unclear=not self._whole)
        else:
            what = f"these bytes were never saved in this run, nor was the state of [0, {credited})"
            yield Damage("content_unknown", row, what, unclear=True)

    def _whose(self, request: str, boundary: int, found: set[State]) -> str:
        """Empty for a state of the request's own; else what is foreign about it."""
        if self._state(request, boundary) in found:
            return ""
        tokens = self._prefixes.unsalted(request, boundary)
        salted = tokens is not None and any(state.prefix.startswith(tokens) for state in found)
        return " under another cache salt" if salted else " of another prompt"

    def _order(self, load: Transfer, layout: RankLayout) -> Iterator[Finding]:
        """Recurrent state is read when its step begins, so it must have arrived before the step was scheduled."""
        rows = self._restored(load, layout)
        first = self._arm.resumed(load.request, load.t_ns)
        scheduled = self._arm.steps.time_of(first.n) if first else None
        if not rows or first is None or scheduled is None or not load.completions:
            return
        if load.completions[0].t_ns <= scheduled:
            return
        message = (
            f"{job_name(load, self._prefixes)}: {layout.name(rows[0])}: the batch that starts at {first.start} was "
            "scheduled before the state had arrived, and is given a copy of it when it begins (synchronous load)"
        )
        make = fail if self._aligned and self._whole else unknown
        yield make(
            "state_read_before_load",
            message,
            layout.place(self._prefixes.place(load.request), rows[0]),
            [first.where, *load.evidence],
        )

    # --- both ---------------------------------------------------------------------------------

    def _state(self, request: str, boundary: int) -> State | None:
        digest = self._prefixes.digest(request, boundary)
        return State(digest, boundary) if digest else None

    def _first_batch(self, load: Transfer) -> list[str]:
        first = self._arm.resumed(load.request, load.t_ns)
        return [first.where] if first else []


def _in_order(damages: list[Damage], rows: Sequence[PageRow]) -> list[Damage]:
    """Damages in the order of their rows: the first one is named."""
    if not damages:
        return damages
    order = {id(row): at for at, row in enumerate(rows)}
    return sorted(damages, key=lambda damage: order[id(damage.row)])
