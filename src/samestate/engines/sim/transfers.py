"""The workers' side: loads into memory, saves out of it, and the external tier."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from samestate.engines.base import EngineSpec
from samestate.engines.sim import blocks
from samestate.engines.sim.blocks import Key, Place
from samestate.engines.sim.conduct import Conduct, Hit, Landing
from samestate.engines.sim.journal import SENTINEL, Journal, Shown, page_digest
from samestate.engines.sim.state import ATTENTION, NULL_BLOCK, STATE_GROUPS, Rank, Settings
from samestate.engines.sim.tier import Tier
from samestate.evidence.records import (
    GuardsChecked,
    LoadCompleted,
    LoadSubmitted,
    PageSide,
    PagesPoisoned,
    SaveCompleted,
    SaveDelayed,
    SaveSubmitted,
    SaveWaited,
    TransferPart,
)


class PendingSave(NamedTuple):
    """A save that was submitted and is not reported yet."""

    job: int
    request: str
    places: list[Place]
    keys: list[Key]
    parts: list[TransferPart]
    due_ns: int


class Workers:
    """All ranks, which do the same work on their own shards."""

    def __init__(self, spec: EngineSpec, settings: Settings, journal: Journal, conduct: Conduct, tier: Tier) -> None:
        self.ranks = [Rank(rank, settings) for rank in range(settings.tensor_parallel_size)]
        self.conduct = conduct
        self.tier = tier
        self._spec, self._settings, self._journal = spec, settings, journal
        self._pending: list[PendingSave] = []
        self._fresh: list[int] = []
        """Blocks that were taken and are not cleared yet."""
        self._late: list[tuple[Rank, Landing]] = []
        self._jobs = 0

    # --- blocks that change hands ---------------------------------------------------------------

    def taken(self, block: int) -> int:
        """A block has a new owner."""
        self._fresh.append(block)
        return block

    def clear_fresh(self) -> None:
        """Wait for the saves that still read a new block, then clear it."""
        waited_for = {block for block in self._fresh if self.conduct.waits_for_saves(block)}
        for save in [one for one in self._pending if any(place.block in waited_for for place in one.places)]:
            began = time.monotonic_ns()
            _sleep_until(save.due_ns)
            waited = time.monotonic_ns() - began
            self._journal.on_ranks(
                lambda rank: SaveWaited(rank=rank, jobs=[save.job], waited_ns=waited, timed_out=False)  # noqa: B023
            )
            self._complete(save)
        for block in self._fresh:
            for rank in self.ranks:
                rank.clear(block)
        self._fresh.clear()

    # --- loads ----------------------------------------------------------------------------------

    def load(self, sequence: blocks.Sequence, hit: Hit) -> bool:
        """Bring what was hit; whether that worked."""
        conduct, journal = self.conduct, self._journal
        places = [Place(group, slot, sequence.tables[group][slot]) for group, slot in hit.pages]
        keys = list(hit.pages.values())
        job, parts = self._job(places, hit.boundary)
        request = sequence.request
        journal.on_ranks(
            lambda rank: LoadSubmitted(rank=rank, job=job, request=request, boundary=hit.boundary, parts=parts),
            conduct.loads_on,
        )
        stored = [
            [conduct.fetch(number, place, key, self.tier) for place, key in zip(places, keys, strict=True)]
            if conduct.loads_on(number)
            else [None] * len(places)
            for number in range(len(self.ranks))
        ]
        at = Shown("load", PageSide.STORED, "submitted", job, request, places)
        journal.digest(self._settings, at, stored, conduct.loads_on)
        guards = self._poison(job, places) if self._spec.audit_level == "poison" else {}
        done = conduct.load_succeeds(request)
        for number, rank in enumerate(self.ranks):
            for place, page in zip(places, stored[number], strict=True):
                arrived = conduct.arrives(number, place.group, page) if page is not None and done else None
                landings = conduct.lands(number, place, arrived) if arrived is not None else []
                if conduct.late(number):
                    self._late += [(rank, landing) for landing in landings]
                    continue
                for landing in landings:
                    rank.write(*_order(landing))
        at = Shown("load", PageSide.DESTINATION, "completed", job, request, places)
        journal.digest(self._settings, at, self._pages(places), conduct.loads_on)
        if guards:
            journal.on_ranks(lambda rank: self._guards_checked(rank, job, guards), conduct.loads_on)
        journal.on_ranks(
            lambda rank: LoadCompleted(
                rank=rank,
                job=job,
                ok=done,
                bytes=sum(len(page) for page in stored[rank] if page is not None) if done else 0,
            ),
            conduct.loads_on,
        )
        return done

    def land_late(self) -> None:
        """What was on its way arrives."""
        for rank, landing in self._late:
            rank.write(*_order(landing))
        self._late.clear()

    # --- saves ----------------------------------------------------------------------------------

    def save(self, request: str, wanted: Mapping[Place, Key]) -> None:
        """Save pages under their keys; those whose key is there are left out."""
        kept = {place: key for place, key in wanted.items() if not self.conduct.skips(key, self.tier)}
        if not kept:
            return
        places, keys = list(kept), list(kept.values())
        job, parts = self._job(places)
        delay, journal = self._spec.save_delay_ms, self._journal
        journal.on_ranks(lambda rank: SaveSubmitted(rank=rank, job=job, request=request, parts=parts))
        if delay:
            journal.on_ranks(lambda rank: SaveDelayed(rank=rank, job=job, delay_ms=delay))
        pages = self._pages(places)
        journal.digest(self._settings, Shown("save", PageSide.SOURCE, "submitted", job, request, places), pages)
        due = self.conduct.due(time.monotonic_ns() + delay * 1_000_000) if delay else 0
        self._pending.append(PendingSave(job, request, places, keys, parts, due))
        if not delay:
            self.settle()

    def settle(self) -> None:
        """Let every pending save be done; the engine has nothing else to do."""
        for save in list(self._pending):
            _sleep_until(save.due_ns)
            self._complete(save)

    def _complete(self, save: PendingSave) -> None:
        self._pending.remove(save)
        pages, done = self._pages(save.places), self.conduct.save_succeeds(save.job)
        stored = [
            [
                self.conduct.stored(rank, place, key, page) if done else bytes(len(page))
                for place, key, page in zip(save.places, save.keys, of_rank, strict=True)
            ]
            for rank, of_rank in enumerate(pages)
        ]
        if done or self.conduct.publishes_failed():
            for index, key in enumerate(save.keys):
                self.tier.put(key, [of_rank[index] for of_rank in stored], self.conduct.victim())
        at = Shown("save", PageSide.SOURCE, "completed", save.job, save.request, save.places)
        self._journal.digest(self._settings, at, pages)
        if done:
            self._journal.digest(self._settings, at._replace(side=PageSide.STORED), stored)
        moved = sum(part.bytes for part in save.parts) if done else 0
        self._journal.on_ranks(lambda rank: SaveCompleted(rank=rank, job=save.job, ok=done, bytes=moved))

    # --- both -----------------------------------------------------------------------------------

    def _pages(self, places: Sequence[Place]) -> list[list[bytes]]:
        """The effective bytes of pages in the engine's memory, by rank."""
        return [
            [bytes(rank.memory[place.block][: self._settings.effective_bytes(place.group)]) for place in places]
            for rank in self.ranks
        ]

    def _job(self, places: Sequence[Place], boundary: int | None = None) -> tuple[int, list[TransferPart]]:
        """A new job number, and what the job moves on each rank, by group."""
        self._jobs += 1
        parts = []
        for group in (ATTENTION, *STATE_GROUPS):
            slots = [place.slot for place in places if place.group == group]
            if slots:
                entries = sum(part.group == group for part in self._settings.parts)
                part = TransferPart(
                    group=group,
                    first_block=slots[0],
                    pages=len(slots) * entries,
                    bytes=len(slots) * self._settings.effective_bytes(group),
                    boundary=(slots[-1] + 1) * self._settings.block_size,
                )
                parts.append(part)
        return self._jobs, parts

    def _poison(self, job: int, places: Sequence[Place]) -> dict[int, list[str]]:
        """Fill the destination of a load; digests of the pages beside it and of block 0, by block and rank."""
        blocks_ = {place.block for place in places}
        beside = {block + step for block in blocks_ for step in (-1, 1)} | {NULL_BLOCK}
        guarded = sorted(block for block in beside - blocks_ if 0 <= block < self._settings.num_gpu_blocks)
        sizes = [self._settings.effective_bytes(place.group) for place in places]
        for rank in self.ranks:
            for place, size in zip(places, sizes, strict=True):
                rank.write(place.block, (SENTINEL * (size // 8 + 1))[:size])
        pages = sum(part.group == place.group for place in places for part in self._settings.parts)
        self._journal.on_ranks(
            lambda rank: PagesPoisoned(rank=rank, job=job, pages=pages, bytes=sum(sizes), guards=len(guarded)),
            self.conduct.loads_on,
        )
        return {block: [page_digest(rank.memory[block]) for rank in self.ranks] for block in guarded}

    def _guards_checked(self, rank: int, job: int, guards: dict[int, list[str]]) -> GuardsChecked:
        memory = self.ranks[rank].memory
        changed = [[ATTENTION, block] for block, was in guards.items() if page_digest(memory[block]) != was[rank]]
        return GuardsChecked(rank=rank, job=job, steps_between=0, changed=changed)


def _order(landing: Landing) -> tuple[int, bytes, int]:
    return landing.block, landing.page, landing.offset


def _sleep_until(due_ns: int) -> None:
    while (left := due_ns - time.monotonic_ns()) > 0:
        time.sleep(left / 1e9)
