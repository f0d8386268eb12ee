"""``page-bytes``: pages arrive byte for byte as they were saved.

A page is known by what it is the state of, (digest of the request's tokens up to its end, entry),
on one rank. Only the first damage of a page is named: damaged pages can be saved back under
their valid keys, and would then be reported where they were not made. Rows are repeated
internal checks, never trials (requirements 39-43).

`page_proof` looks first, at whole blocks. Only what it doubts is followed here, row by row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from samestate.checks.base import CheckResult, Finding
from samestate.checks.damage import PAGE_ROWS, Damage, job_name
from samestate.checks.damage import findings as damage_findings
from samestate.checks.history import ArmHistory, History
from samestate.checks.layout import RankLayout, rank_layouts
from samestate.checks.page_history import Moment, Transfer
from samestate.checks.page_proof import Doubts, Proof, failed, moved_all, readable_ranks
from samestate.checks.prefixes import Prefixes
from samestate.checks.verdicts import conclude, fail, unknown
from samestate.evidence.records import PageRow, PageSide

CHECK = "page-bytes"

Key = tuple[int, int, str]
"""Rank, entry, digest of the prefix."""
Tables = dict[tuple[PageSide, Moment], dict[tuple[int, int], PageRow]]
"""Rows by side and moment, and there by (entry, block index)."""


Origin = tuple[str, int, str]
"""Chain of arms, rank, digest of a page's bytes."""
Position = tuple[int, int, int]
"""Arm, job, row: what came first."""


@dataclass(slots=True)
class _Known:
    """What was saved so far of the pages in doubt, by an arm and those that it follows."""

    saved: dict[Key, list[str]] = field(default_factory=dict)
    """Digests of what was last saved; several where a save does not say whether it moved anything (LMCache's
    server skips a key that it has), and one key has several right digests."""
    damaged: set[Key] = field(default_factory=set)


def page_bytes(history: History) -> CheckResult:
    """Byte identity along the path of every save and load of the candidates."""
    proof = Proof(history)
    origins = _Origins({})
    arms = _judged(history, proof, origins)
    if origins.asked:
        origins = _Origins(_first_saved(history, proof, origins.asked))
        arms = _judged(history, proof, origins)
    findings = [
        finding
        for arm, (of_bytes, bytes_) in zip(history.candidates, arms, strict=True)
        for finding in (*of_bytes, *_missing_groups(arm, bytes_))
    ]
    equal = sum(bytes_.equal for _, bytes_ in arms) if proof.doubtful else proof.equal
    examined = sum(bytes_.examined for _, bytes_ in arms) if proof.doubtful else proof.equal
    readable = any(readable_ranks(arm) for arm in history.candidates)
    stored = "stored copies read" if readable else "the tier cannot be read"
    summary = f"{equal}/{examined} page rows equal along their path; {stored}"
    return conclude(CHECK, findings, unit=PAGE_ROWS, examined=examined, summary=summary)


def _judged(history: History, proof: Proof, origins: _Origins) -> list[tuple[list[Finding], _Bytes]]:
    """The candidates, in order; one that follows another goes on with what that one saved."""
    known: dict[str, _Known] = {}
    judged = []
    for number, arm in enumerate(history.candidates):
        chain = proof.chains[arm.name]
        bytes_ = _Bytes(history, arm, known.setdefault(chain, _Known()), proof, origins, number)
        judged.append((list(bytes_.findings()) if proof.doubtful else [], bytes_))
    return judged


class _Origins:
    """Whose page some bytes first were. A first round only collects what is asked, so that no more is remembered."""

    def __init__(self, found: dict[Origin, tuple[Position, str]]) -> None:
        self.asked: set[Origin] = set()
        self._found = found

    def of(self, chain: str, rank: int, digest: str, before: Position) -> str:
        """``: those of …``, when a page with these bytes was saved before; else empty."""
        self.asked.add((chain, rank, digest))
        position, owner = self._found.get((chain, rank, digest), (before, ""))
        return f": those of {owner}" if position < before else ""


def _first_saved(history: History, proof: Proof, asked: set[Origin]) -> dict[Origin, tuple[Position, str]]:
    """Where each of the digests was saved first, and as what."""
    found: dict[Origin, tuple[Position, str]] = {}
    for number, arm in enumerate(history.candidates):
        layouts, prefixes, chain = rank_layouts(arm), Prefixes(history, arm), proof.chains[arm.name]
        for job, save in enumerate(arm.pages.transfers):
            layout = layouts.get(save.rank)
            if layout is None or save.direction != "save" or failed(save):
                continue
            for index, row in enumerate(_table(save.rows(PageSide.SOURCE, "submitted"), layout).values()):
                origin = (chain, save.rank, row.digest)
                if origin not in asked or origin in found or not prefixes.digest(save.request, layout.end(row)):
                    continue
                owner = f"[0, {layout.end(row)}) of {prefixes.name(save.request)}, entry {row.entry}"
                found[origin] = ((number, job, index), owner)
    return found


def _table(rows: list[PageRow], layout: RankLayout) -> dict[tuple[int, int], PageRow]:
    return {(row.entry, row.block_index): row for row in rows if layout.holds(row)}


class _Bytes:
    """Follows every page of an arm that is in doubt from save to load, in time order; counts the others as equal."""

    def __init__(
        self, history: History, arm: ArmHistory, known: _Known, proof: Proof, origins: _Origins, number: int
    ) -> None:
        self.layouts = rank_layouts(arm)
        self.whole = history.whole(arm.name)
        self.prefixes = Prefixes(history, arm)
        self.examined = self.equal = 0
        self._transfers = arm.pages.transfers
        self._readable = readable_ranks(arm)
        self._saved, self._damaged = known.saved, known.damaged
        self._chain, self._origins, self._number = proof.chains[arm.name], origins, number
        self._suspects = proof.suspects[self._chain]

    def findings(self) -> Iterator[Finding]:
        for job, transfer in enumerate(self._transfers):
            layout = self.layouts.get(transfer.rank)
            if layout is None:
                continue
            tables: Tables = {at: _table(one.rows, layout) for at, one in transfer.pages.items()}
            yield from self._complete(transfer, layout, tables)
            doubts = Doubts(self._suspects, layout, self.prefixes, transfer)
            follow = self._save if transfer.direction == "save" else self._load
            damages = list(follow(transfer, layout, tables, doubts, job))
            yield from damage_findings(transfer, layout, self.prefixes, damages)

    def _complete(self, transfer: Transfer, layout: RankLayout, tables: Tables) -> Iterator[Finding]:
        """Every page that the job's parts name has its row on every side that can be read."""
        expected = {page for part in transfer.parts for page in layout.pages(part)}
        readable = transfer.rank in self._readable
        for side, moment in transfer.sides(readable=readable):
            missing = expected - tables.get((side, moment), {}).keys()
            if not missing and transfer.submitted is not None:
                continue
            message = (
                f"{job_name(transfer, self.prefixes)}: "
                f"{len(missing)} of {len(expected)} {side.value} pages have no row ({moment})"
            )
            place = self.prefixes.place(transfer.request).model_copy(update={"rank": transfer.rank})
            yield unknown("missing_rows", message, place, transfer.evidence)

    def _save(
        self, transfer: Transfer, layout: RankLayout, tables: Tables, doubts: Doubts, job: int
    ) -> Iterator[Damage]:
        completed = tables.get((PageSide.SOURCE, "completed"), {})
        stored = tables.get((PageSide.STORED, "completed"), {})
        lost, moved = failed(transfer), moved_all(transfer)
        for index, (page, source) in enumerate(tables.get((PageSide.SOURCE, "submitted"), {}).items()):
            key = self._key(transfer, layout, source)
            if key is None:
                yield Damage("key_unknown", source, "the tokens it belongs to are not recorded", unclear=True)
                continue
            if lost:
                continue
            self.examined += 1
            if not doubts.about(source):
                self.equal += 1
                continue
            after, kept = completed.get(page), stored.get(page)
            damage = None
            if after is not None and after.digest != source.digest:
                damage = Damage("source_overwritten", source, "its source was overwritten while the save was pending")
            elif kept is not None and kept.digest != source.digest:
                origin = self._origin(transfer, kept, (self._number, job, index))
                damage = Damage("stored_differs", source, f"the tier holds other bytes than were saved{origin}")
            self._saved[key] = [source.digest] if moved else [*self._saved.get(key, ()), source.digest]
            self._damaged.discard(key)
            if damage is None:
                self.equal += 1
            else:
                self._damaged.add(key)
                yield damage

    def _load(
        self, transfer: Transfer, layout: RankLayout, tables: Tables, doubts: Doubts, job: int
    ) -> Iterator[Damage]:
        stored = tables.get((PageSide.STORED, "submitted"), {})
        at = (self._number, job, 0)
        for page, arrived in tables.get((PageSide.DESTINATION, "completed"), {}).items():
            key = self._key(transfer, layout, arrived)
            if key is None:
                yield Damage("key_unknown", arrived, "the tokens it belongs to are not recorded", unclear=True)
                continue
            self.examined += 1
            if not doubts.about(arrived):
                self.equal += 1
                continue
            if key in self._damaged:
                continue
            sent = stored.get(page, arrived)
            if key not in self._saved:
                yield Damage("not_saved_here", arrived, "no save of it is recorded in this run", unclear=True)
            elif sent.digest not in self._saved[key]:
                what = f"other bytes were loaded than were last saved{self._origin(transfer, sent, at)}"
                yield Damage("stale_page", arrived, what, unclear=not self.whole)
            elif arrived.digest != sent.digest:
                what = f"other bytes arrived than the tier holds{self._origin(transfer, arrived, at)}"
                yield Damage("destination_differs", arrived, what)
            else:
                self.equal += 1
                continue
            self._damaged.add(key)

    def _key(self, transfer: Transfer, layout: RankLayout, row: PageRow) -> Key | None:
        digest = self.prefixes.digest(transfer.request, layout.end(row))
        return (transfer.rank, row.entry, digest) if digest else None

    def _origin(self, transfer: Transfer, found: PageRow, before: Position) -> str:
        """Whose bytes were found, when a page with these bytes was saved before."""
        return self._origins.of(self._chain, transfer.rank, found.digest, before)


def _missing_groups(arm: ArmHistory, bytes_: _Bytes) -> Iterator[Finding]:
    """A restored prefix needs the state of every recurrent group and every attention page before it."""
    layouts, prefixes = bytes_.layouts, bytes_.prefixes
    together: dict[tuple[int, str, int], list[Transfer]] = {}
    for transfer in arm.pages.transfers:
        if transfer.direction == "load" and transfer.rank in layouts:
            allocated = arm.pages.allocated_line(transfer.request, transfer.t_ns)
            together.setdefault((transfer.rank, transfer.request, allocated), []).append(transfer)
    for (rank, request, _), loads in together.items():
        layout, parts = layouts[rank], [part for load in loads for part in load.parts]
        place = prefixes.place(request).model_copy(update={"rank": rank})
        evidence = [where for load in loads for where in load.evidence]
        restored = _restored(arm, loads)
        if restored is None:
            message = f"{prefixes.name(request)}: rank {rank}: which prefix was restored is not recorded"
            yield unknown("not_reported", message, place, evidence)
            continue
        local = _local_tokens(arm, request, loads[0].t_ns)
        for group in layout.groups:
            missing = layout.missing_blocks(group, parts, local, restored)
            if missing:
                kinds = sorted({entry.kind.value for entry in layout.members(group)})
                message = (
                    f"{prefixes.name(request)}: rank {rank}: group {group} ({', '.join(kinds)}): {len(missing)} "
                    f"pages of [0, {restored}) were neither loaded nor local, the first is page {missing[0]}"
                )
                at = place.model_copy(update={"group": group, "boundary": restored})
                yield (fail if bytes_.whole else unknown)("missing_group", message, at, evidence)


def _restored(arm: ArmHistory, loads: list[Transfer]) -> int | None:
    """B, as the loads describe it; where they do not, what was credited."""
    described = [load.boundary for load in loads if load.boundary is not None]
    if described:
        return max(described)
    row = arm.resumed(loads[0].request, loads[0].t_ns)
    return row.start if row else None


def _local_tokens(arm: ArmHistory, request: str, t_ns: int) -> int:
    """Tokens that the local cache held when the connector was last asked before the load."""
    asked = [seen.rec.local_tokens for seen in arm.lookups.get(request, ()) if seen.t_ns <= t_ns]
    return asked[-1] if asked else 0
