"""What transfers say that they move, against the rank's tables, the prefix restored, and what was saved before."""

from __future__ import annotations

from collections.abc import Iterator

from samestate.checks.base import Finding, Place
from samestate.checks.boundary import Reload
from samestate.checks.history import ArmHistory
from samestate.checks.layout import RankLayout
from samestate.checks.verdicts import fail, unknown
from samestate.evidence.records import TransferPart


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
        parts = [part for load in loads for part in load.submitted.rec.parts]
        evidence = [load.submitted.where for load in loads]
        for part in parts:
            yield from _size(layout, part, f"{reload.op}: rank {rank}: a load", place, evidence)
        restored = reload.boundaries[rank]
        if restored is not None and restored <= reload.tokens:  # a farther one is a fail of `boundary`
            yield from _missing(layout, parts, local, restored, place, evidence)
        for load in loads:
            saved = {
                (one.part.group, index)
                for twin in twins
                for one in arm.saves.done.get((rank, twin), ())
                if one.n < load.submitted.n
                for index in layout.blocks(one.part)
            }
            blocks = [(part.group, index) for part in load.submitted.rec.parts for index in layout.blocks(part)]
            absent = [block for block in blocks if block not in saved]
            if absent:
                message = (
                    f"{reload.op}: rank {rank}: no completed save of {len(absent)} of the {len(blocks)} loaded blocks "
                    f"is recorded before, the first is block {absent[0][1]} of transfer group {absent[0][0]}"
                )
                yield unknown("not_saved_here", message, place, [load.submitted.where])


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


def _missing(
    layout: RankLayout, parts: list[TransferPart], local: int, restored: int, place: Place, evidence: list[str]
) -> Iterator[Finding]:
    for group in layout.groups:
        missing = layout.missing_blocks(group, parts, local, restored)
        if missing:
            message = (
                f"{place.op}: rank {place.rank}: {len(missing)} blocks of transfer group {group} that [0, {restored}) "
                f"needs are in no part of its loads, the first is block {missing[0]}"
            )
            at = place.model_copy(update={"group": group, "boundary": restored})
            yield unknown("missing_part", message, at, evidence)
