"""``transfers`` of a scenario: what candidates loaded was whole, was saved before, and was asked for under its salt.

As `transfers` of a matrix, but a load may bring what another request saved that begins alike, in this arm or in
one that it follows, and may bring only what the local cache lacks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from samestate.checks.base import CheckResult, Finding, Place
from samestate.checks.boundary import restored
from samestate.checks.history import ArmHistory, History, Load
from samestate.checks.layout import RankLayout
from samestate.checks.parts import Block, Loaded, rank_parts, save_parts, saved_blocks
from samestate.checks.prefixes import Prefixes
from samestate.checks.scenario import Generation, generations, lineage
from samestate.checks.transfers import CHECK, rank_bytes, saves_completed
from samestate.checks.verdicts import conclude, fail, unknown
from samestate.evidence.canonical import sha256_hex

__all__ = ["CHECK", "transfers"]


def transfers(history: History) -> CheckResult:
    """Hold loads, saves and lookups of every candidate against the rank's tables and against each other."""
    checked = generations(history, history.candidates)
    arms = {arm.name: _Arm(history, arm) for arm in history.candidates}
    findings: list[Finding] = []
    good = loaded = moved = 0
    for one in checked:
        found = [*arms[one.arm.name].parts(one), *_salts(one)]
        loaded += bool(one.loads)
        good += bool(one.loads) and not found
        moved += sum(rank_bytes(one.loads).values())
        findings += found
    for arm in history.candidates:
        findings += _unknown_groups(arm)
        findings += saves_completed(arm, must_save=history.follows(arm.name) is None)
        findings += save_parts(arm)
    summary = f"{good}/{loaded} generations that loaded brought whole prefixes that were saved before, {moved} bytes"
    return conclude(CHECK, findings, unit="generations", examined=len(checked), summary=summary)


def _unknown_groups(arm: ArmHistory) -> Iterator[Finding]:
    """Transfers of groups that the rank never registered: nothing can hold their pages to anything."""
    moved = [(load.submitted.rec.rank, load.submitted) for loads in arm.loads.values() for load in loads]
    parts = [(rank, part.group, seen.where) for rank, seen in moved for part in seen.rec.parts]
    parts += [(rank, one.part.group, one.where) for (rank, _), saves in arm.saves.done.items() for one in saves]
    known = {rank: {group.group for group in seen.rec.transfer_groups} for rank, seen in arm.ranks.items()}
    lost: dict[tuple[int, int], list[str]] = {}
    for rank, group, where in parts:
        if group not in known.get(rank, set()):
            lost.setdefault((rank, group), []).append(where)
    for (rank, group), wheres in sorted(lost.items()):
        message = f"arm {arm.name}: rank {rank}: {len(wheres)} transfers move group {group}, which it never registered"
        yield unknown("unknown_group", message, Place(arm=arm.name, rank=rank, group=group), wheres[:1])


def _salts(one: Generation) -> Iterator[Finding]:
    planned = sha256_hex(one.op.salt.encode()) if one.op.salt else ""
    for seen in one.arm.lookups.get(one.request or "", ()):
        if seen.rec.salt != planned:
            message = f"{one.name}: its lookup had {_named(seen.rec.salt)}, planned {_named(planned)}"
            yield fail("wrong_salt", message, one.place, [seen.where])


def _named(salt: str) -> str:
    return f"the salt of SHA-256 {salt[:12]}" if salt else "no cache salt"


class _Arm:
    """A candidate, and what it and those it follows saved, by beginnings of prompts."""

    def __init__(self, history: History, arm: ArmHistory) -> None:
        self._arm = arm
        self._layouts = {rank: RankLayout(seen) for rank, seen in arm.ranks.items()}
        self._lineage = lineage(history, arm)
        self._prefixes = {one.name: Prefixes(history, one) for one in self._lineage}

    def parts(self, one: Generation) -> Iterator[Finding]:
        """Findings about a generation's loads; a rank that never registered is left to others."""
        local = max((seen.rec.local_tokens for seen in self._arm.lookups.get(one.request or "", ())), default=0)
        for rank in sorted(one.loads.keys() & self._layouts.keys()):
            place = one.place.model_copy(update={"rank": rank})
            for loads in one.resumptions(rank).values():
                b = restored(loads)
                known = b if b is not None and b <= one.tokens + one.op.output_tokens else None
                loaded = Loaded(one.name, place, loads, local, known)
                yield from rank_parts(self._layouts[rank], loaded, partial(self._saved, one, rank))

    def _saved(self, one: Generation, rank: int, load: Load) -> set[Block]:
        """Blocks saved, by the time of the load, of requests that agree with this one up to the block's end."""
        found = set[Block]()
        for arm in self._lineage:
            if rank not in arm.ranks:
                continue
            layout = RankLayout(arm.ranks[rank])
            for request in [request for of_rank, request in arm.saves.done if of_rank == rank]:
                for saved, block in saved_blocks(arm, rank, request, layout):
                    before = arm is not self._arm or saved.n < load.submitted.n
                    if before and block not in found and self._alike(one, arm, request, self._end(layout, block)):
                        found.add(block)
        return found

    def _end(self, layout: RankLayout, block: Block) -> int:
        group = layout.engine_group(block[0])
        return (block[1] + 1) * group.tokens_per_block if group else 0

    def _alike(self, one: Generation, arm: ArmHistory, request: str, end: int) -> bool:
        mine = self._prefixes[self._arm.name].digest(one.request or "", end)
        return mine is not None and mine == self._prefixes[arm.name].digest(request, end)
