"""What transfers say that they move, against the rank's tables, the prefix restored, and what was saved before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from samestate.checks.base import Finding, Place
from samestate.checks.boundary import Reload
from samestate.checks.history import ArmHistory, Load, Saved
from samestate.checks.layout import RankLayout
from samestate.checks.verdicts import fail, unknown
from samestate.evidence.records import TransferPart

Block = tuple[int, int]
"""Transfer group, and index in the request's block table."""


class Loaded(NamedTuple):
    """The loads of one rank that one step of a request went on from."""

    name: str
    """Whose: begins every message."""
    place: Place
    loads: list[Load]
    local: int
    """Tokens that were there already."""
    restored: int | None
    """B; None: what must be among the parts is not known."""


def load_parts(arm: ArmHistory, reload: Reload) -> Iterator[Finding]:
    """Parts of a reload's loads move whole blocks, all that [0, B) needs, and nothing that was not saved.

    Ranks and groups that never registered are left to `boundary`.
    """
    twins = _same_prompt(arm, reload.op)
    lookups = arm.lookups.get(reload.request or "", ())
    local = max((seen.rec.local_tokens for seen in lookups), default=0)
    for rank, loads in sorted(reload.loads.items()):
        if rank not in arm.ranks:
            continue
        layout = RankLayout(arm.ranks[rank])
        place = reload.place.model_copy(update={"rank": rank})
        b = reload.boundaries[rank]
        known = b if b is not None and b <= reload.tokens else None  # a farther one is a fail of `boundary`
        saved = [(one, block) for twin in twins for one, block in saved_blocks(arm, rank, twin, layout)]
        yield from rank_parts(layout, Loaded(reload.op, place, loads, local, known), partial(_before, saved))


def _before(saved: Sequence[tuple[Saved, Block]], load: Load) -> set[Block]:
    return {block for one, block in saved if one.n < load.submitted.n}


def rank_parts(layout: RankLayout, one: Loaded, saved: Callable[[Load], set[Block]]) -> Iterator[Finding]:
    """Parts move whole blocks, all that [local, B) needs, and nothing that `saved` does not hold for the load."""
    name, place = f"{one.name}: rank {one.place.rank}", one.place
    parts = [part for load in one.loads for part in load.submitted.rec.parts]
    evidence = [load.submitted.where for load in one.loads]
    for part in parts:
        yield from _size(layout, part, f"{name}: a load", place, evidence)
    if one.restored is not None:
        yield from _missing(layout, parts, one, evidence)
    for load in one.loads:
        there = saved(load)
        blocks = [(part.group, index) for part in load.submitted.rec.parts for index in layout.blocks(part)]
        absent = [block for block in blocks if block not in there]
        if absent:
            message = (
                f"{name}: no completed save of {len(absent)} of the {len(blocks)} loaded blocks "
                f"is recorded before, the first is block {absent[0][1]} of transfer group {absent[0][0]}"
            )
            yield unknown("not_saved_here", message, place, [load.submitted.where])


def saved_blocks(arm: ArmHistory, rank: int, request: str, layout: RankLayout) -> Iterator[tuple[Saved, Block]]:
    """Every block that completed saves of a request moved on one rank."""
    for one in arm.saves.done.get((rank, request), ()):
        yield from ((one, (one.part.group, index)) for index in layout.blocks(one.part))


def save_parts(arm: ArmHistory) -> Iterator[Finding]:
    """Parts of completed saves move whole blocks."""
    for (rank, request), saves in arm.saves.done.items():
        if rank not in arm.ranks:
            continue
        layout, place = RankLayout(arm.ranks[rank]), Place(arm=arm.name, rank=rank, request=request or None)
        for saved in saves:
            yield from _size(layout, saved.part, f"rank {rank}: a save of request {request}", place, [saved.where])


def _same_prompt(arm: ArmHistory, op: str) -> list[str]:
    """Requests that answered operations with the prompt of `op`."""
    prompts = {seen.rec.op: seen.rec.prompt_sha256 for seen in arm.started}
    alike = [other for other, prompt in prompts.items() if prompt is not None and prompt == prompts.get(op)]
    return [seen.rec.request for other in alike for seen in arm.outputs.get(other, ())]


def _size(layout: RankLayout, part: TransferPart, what: str, place: Place, evidence: list[str]) -> Iterator[Finding]:
    group = layout.groups.get(part.group)
    if group is None:
        return
    expected = layout.part_bytes(part)
    if part.bytes != expected or part.pages % group.entries:
        message = (
            f"{what} moves {part.bytes} bytes for {part.pages} pages of transfer group {part.group}, "
            f"which are {expected} ({group.bytes_per_block} a block of {group.entries} pages)"
        )
        yield fail("bytes_disagree", message, place.model_copy(update={"group": part.group}), evidence)


def _missing(layout: RankLayout, parts: list[TransferPart], one: Loaded, evidence: list[str]) -> Iterator[Finding]:
    restored = one.restored or 0
    for group in layout.groups:
        missing = layout.missing_blocks(group, parts, one.local, restored)
        if missing:
            message = (
                f"{one.name}: rank {one.place.rank}: {len(missing)} blocks of transfer group {group} that "
                f"[0, {restored}) needs are in no part of its loads, the first is block {missing[0]}"
            )
            at = one.place.model_copy(update={"group": group, "boundary": restored})
            yield unknown("missing_part", message, at, evidence)
