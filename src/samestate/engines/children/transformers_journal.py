"""The records of a transformers engine: what its scheduler and its one worker would say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from samestate.engines.children.transformers_cache import Layout, Page
from samestate.evidence.canonical import sha256_hex
from samestate.evidence.records import (
    Allocated,
    BatchRow,
    BatchScheduled,
    BatchSource,
    BlocksAssigned,
    LoadCompleted,
    LoadSubmitted,
    Lookup,
    PageRow,
    PagesDigested,
    PageSide,
    RequestFinished,
    SaveCompleted,
    SaveSubmitted,
    StateComputed,
    TransferPart,
)
from samestate.evidence.stream import StreamWriter
from samestate.instruments.digests import HostDigester

At = tuple[int, int]
"""Entry and block of a page, the block as an index in the request's table."""
Direction = Literal["save", "load"]
Moment = Literal["submitted", "completed"]


class Job(NamedTuple):
    """A transfer that was submitted."""

    number: int
    request: str
    bytes: int
    tables: Sequence[Sequence[int]]


class Journal:
    """Writes both streams. Without a worker's nothing of the caches is recorded, as without a connector."""

    def __init__(
        self, layout: Layout, scheduler: StreamWriter, worker: StreamWriter | None, *, reads_pages: bool
    ) -> None:
        self._layout, self._scheduler, self._worker = layout, scheduler, worker
        self._digester = HostDigester() if worker is not None and reads_pages else None
        self._steps = self._jobs = 0

    # --- scheduler ----------------------------------------------------------------------------------

    def looked_up(self, request: str, tokens: int, local: int, matched: int, salt: str | None) -> None:
        self._audit(
            Lookup(
                request=request,
                queried_tokens=tokens,
                local_tokens=local,
                matched_tokens=matched,
                is_async=matched > 0,
                salt=sha256_hex(salt.encode()) if salt else "",
            )
        )

    def allocated(self, request: str, external: int, tables: Sequence[Sequence[int]]) -> None:
        self._audit(Allocated(request=request, external_tokens=external, block_ids=[list(one) for one in tables]))

    def assigned(self, request: str, new: Sequence[Sequence[int]]) -> None:
        """Blocks that a request has from now on."""
        if self._digester is not None and any(new):
            blocks = [list(one) for one in new]
            self._scheduler.append(BlocksAssigned(step=self._steps, request=request, blocks=blocks))

    def scheduled(self, request: str, start: int, count: int, new: Sequence[Sequence[int]]) -> None:
        """A step begins."""
        self._steps += 1
        self.assigned(request, new)
        row = BatchRow(request=request, start=start, scheduled=count, drafted=0)
        sources = (BatchSource.CONNECTOR, BatchSource.SCHEDULER) if self._worker else (BatchSource.SCHEDULER,)
        for source in sources:
            self._scheduler.append(BatchScheduled(step=self._steps, source=source, rows=[row], preempted=[]))

    def computed(self, request: str, boundary: int, tables: Sequence[Sequence[int]]) -> None:
        """The step ends on a boundary, so its blocks will hold the state of [0, boundary)."""
        if self._digester is None:
            return
        slot = boundary // self._layout.interval - 1
        states = [group for group in range(len(self._layout.groups)) if self._layout.is_state(group)]
        blocks = [[group, tables[group][slot]] for group in states]
        self._scheduler.append(StateComputed(step=self._steps, request=request, boundary=boundary, blocks=blocks))

    def finished(self, request: str) -> None:
        self._audit(RequestFinished(request=request))

    # --- worker -------------------------------------------------------------------------------------

    def save_submitted(self, request: str, pages: Mapping[At, Page], tables: Sequence[Sequence[int]]) -> Job:
        job = self._job(request, pages, tables)
        self._write(SaveSubmitted(rank=0, job=job.number, request=request, parts=self._parts(pages)))
        self._digest(job, "save", PageSide.SOURCE, "submitted", pages)
        return job

    def save_completed(self, job: Job, source: Mapping[At, Page], stored: Mapping[At, Page]) -> None:
        self._digest(job, "save", PageSide.SOURCE, "completed", source)
        self._digest(job, "save", PageSide.STORED, "completed", stored)
        self._write(SaveCompleted(rank=0, job=job.number, ok=True, bytes=job.bytes))

    def load_submitted(
        self, request: str, boundary: int, stored: Mapping[At, Page], tables: Sequence[Sequence[int]]
    ) -> Job:
        job = self._job(request, stored, tables)
        parts = self._parts(stored)
        self._write(LoadSubmitted(rank=0, job=job.number, request=request, boundary=boundary, parts=parts))
        self._digest(job, "load", PageSide.STORED, "submitted", stored)
        return job

    def load_completed(self, job: Job, landed: Mapping[At, Page]) -> None:
        self._digest(job, "load", PageSide.DESTINATION, "completed", landed)
        self._write(LoadCompleted(rank=0, job=job.number, ok=True, bytes=job.bytes))

    # --- both ---------------------------------------------------------------------------------------

    def _job(self, request: str, pages: Mapping[At, Page], tables: Sequence[Sequence[int]]) -> Job:
        self._jobs += 1
        return Job(self._jobs, request, sum(page.numel() for page in pages.values()), [list(one) for one in tables])

    def _parts(self, pages: Mapping[At, Page]) -> list[TransferPart]:
        """What a job moves, group by group; its blocks lie side by side."""
        parts = []
        for group in range(len(self._layout.groups)):
            members = {entry.number for entry in self._layout.members(group)}
            mine = {at: page for at, page in pages.items() if at[0] in members}
            if mine:
                blocks = [block for _, block in mine]
                parts.append(
                    TransferPart(
                        group=group,
                        first_block=min(blocks),
                        pages=len(mine),
                        bytes=sum(page.numel() for page in mine.values()),
                        boundary=(max(blocks) + 1) * self._layout.interval,
                    )
                )
        return parts

    def _digest(self, job: Job, direction: Direction, side: PageSide, moment: Moment, pages: Mapping[At, Page]) -> None:
        if self._digester is None:
            return
        groups = {entry.number: group for group in range(len(job.tables)) for entry in self._layout.members(group)}
        order = sorted(pages, key=lambda at: (groups[at[0]], at[1], at[0]))
        facts = self._digester.facts([pages[at] for at in order])
        rows = [
            PageRow(
                entry=entry,
                block_index=block,
                block=job.tables[groups[entry]][block],
                digest=fact.digest,
                nonzero=fact.nonzero,
                sentinel=0,
            )
            for (entry, block), fact in zip(order, facts, strict=True)
        ]
        self._write(
            PagesDigested(
                rank=0, job=job.number, request=job.request, direction=direction, side=side, moment=moment, rows=rows
            )
        )

    def _audit(self, record: Lookup | Allocated | RequestFinished) -> None:
        """The scheduler's, under audit."""
        if self._worker is not None:
            self._scheduler.append(record)

    def _write(self, record: SaveSubmitted | SaveCompleted | LoadSubmitted | LoadCompleted | PagesDigested) -> None:
        if self._worker is not None:
            self._worker.append(record)
