"""The sanitizer of one rank: digests the pages of every transfer job, poisons what a load must fill.

Levels: ``digest`` reads pages only; ``poison`` also writes the sentinel into the destination of each load before
the copy, and puts the neighbouring pages and block 0 under guard.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec

from samestate.cache.host_worker import TierPage
from samestate.evidence.records import (
    GuardsChecked,
    PageRow,
    PagesDigested,
    PageSide,
    PagesPoisoned,
)
from samestate.evidence.stream import StreamWriter
from samestate.instruments.pages import Layout, Placed, neighbours


class Run(NamedTuple):
    """Blocks of one transfer group that lie side by side in a request's block table."""

    group: int
    first: int
    """Index of the first in the table."""
    blocks: list[int]


class JobPage(NamedTuple):
    """One page of a job."""

    placed: Placed
    group: int
    """Transfer group."""
    ref: int
    """Position of the layer in its group."""
    position: int
    """Position of the block in its run."""
    block_index: int
    block: int


class Guard(NamedTuple):
    """A page that a load must leave alone, and its digest before."""

    placed: Placed
    block: int
    digest: str


class OpenLoad(NamedTuple):
    """A load between submission and completion."""

    request: str
    pages: list[JobPage]
    guards: list[Guard]
    step: int


class OpenSave(NamedTuple):
    """A save between submission and completion."""

    request: str
    pages: list[JobPage]
    stored: list[torch.Tensor]


Blocks: TypeAlias = GPULoadStoreSpec | Sequence[Run]
"""The engine's side of a job."""


class Tier(Protocol):
    """An external tier that can be read in this process."""

    def tier_pages(self, device: Any, tier: Any) -> Iterable[TierPage]:
        """Where a job's pages lie in the tier, by both sides of the job as the connector describes them."""


class PageAudit:
    """Digests, poison and guards of one rank. One thread, as vLLM's worker is.

    Args:
        layers: Layer names by transfer group, in the order of the group's references.
        tier: What is read, or None: stored bytes are then not recorded.
        poison: Fill destinations and guard their neighbours.

    """

    def __init__(
        self,
        rank: int,
        layout: Layout,
        layers: Sequence[Sequence[str]],
        tier: Tier | None,
        poison: bool,
        stream: StreamWriter,
    ) -> None:
        self._rank = rank
        self._layout = layout
        self._layers = layers
        self._tier = tier
        self._poison = poison
        self._stream = stream
        self._saves: dict[int, OpenSave] = {}
        self._loads: dict[int, OpenLoad] = {}
        self._step = 0

    def forward_ran(self) -> None:
        """The model ran a step: from now on it may have written pages itself."""
        self._step += 1

    def save_submitted(self, job: int, request: str, source: Blocks, target: LoadStoreSpec | None) -> None:
        pages = self._pages(source)
        self._record(job, request, "save", PageSide.SOURCE, "submitted", pages, self._engine(pages))
        self._saves[job] = OpenSave(request, pages, self._stored(pages, source, target))

    def save_completed(self, job: int) -> None:
        save = self._saves.pop(job)
        self._record(job, save.request, "save", PageSide.SOURCE, "completed", save.pages, self._engine(save.pages))
        self._record(job, save.request, "save", PageSide.STORED, "completed", save.pages, save.stored)

    def load_submitted(self, job: int, request: str, source: LoadStoreSpec | None, target: Blocks) -> None:
        pages = self._pages(target)
        self._record(job, request, "load", PageSide.STORED, "submitted", pages, self._stored(pages, target, source))
        guards = self._guard(pages) if self._poison else []
        if self._poison:
            self._give_up_guards({page.block for page in pages})
            written = self._layout.fill(self._engine(pages))
            self._stream.append(
                PagesPoisoned(rank=self._rank, job=job, pages=len(pages), bytes=written, guards=len(guards))
            )
        self._loads[job] = OpenLoad(request, pages, guards, self._step)

    def load_completed(self, job: int) -> None:
        load = self._loads.pop(job)
        self._record(job, load.request, "load", PageSide.DESTINATION, "completed", load.pages, self._engine(load.pages))
        if not self._poison:
            return
        now = self._layout.facts([guard.placed.whole[guard.block] for guard in load.guards])
        self._stream.append(
            GuardsChecked(
                rank=self._rank,
                job=job,
                steps_between=self._step - load.step,
                changed=[
                    [guard.placed.entry.entry, guard.block]
                    for guard, facts in zip(load.guards, now, strict=True)
                    if facts.digest != guard.digest
                ],
            )
        )

    def _pages(self, blocks: Blocks) -> list[JobPage]:
        runs = _runs(blocks) if isinstance(blocks, GPULoadStoreSpec) else blocks
        return [
            JobPage(placed, run.group, ref, position, run.first + position, block)
            for run in runs
            for position, block in enumerate(run.blocks)
            for ref, layer in enumerate(self._layers[run.group])
            for placed in self._layout.of_layer(layer)
        ]

    def _engine(self, pages: Sequence[JobPage]) -> list[torch.Tensor]:
        return [page.placed.pages[page.block] for page in pages]

    def _stored(self, pages: Sequence[JobPage], device: Blocks, tier: LoadStoreSpec | None) -> list[torch.Tensor]:
        if self._tier is None:
            return []
        whole = {(page.group, page.ref, page.position): page.page for page in self._tier.tier_pages(device, tier)}
        return [
            whole[page.group, page.ref, page.position][
                page.placed.page_offset : page.placed.page_offset + page.placed.entry.effective_bytes
            ]
            for page in pages
        ]

    def _guard(self, pages: Sequence[JobPage]) -> list[Guard]:
        """One whole page per guarded address: layers of several groups may share the same bytes."""
        guarded: dict[int, tuple[Placed, int]] = {}
        blocks = sorted({page.block for page in pages})
        loading = {page.block for load in self._loads.values() for page in load.pages}
        beside = [block for block in neighbours(blocks, self._layout.blocks) if block not in loading]
        for page in pages:
            for block in beside:
                whole = page.placed.whole[block]
                guarded.setdefault(whole.data_ptr(), (page.placed, block))
        facts = self._layout.facts([placed.whole[block] for placed, block in guarded.values()])
        return [
            Guard(placed, block, fact.digest) for (placed, block), fact in zip(guarded.values(), facts, strict=True)
        ]

    def _give_up_guards(self, blocks: set[int]) -> None:
        """A block that another load is about to fill is watched by that load's own rows."""
        for load in self._loads.values():
            load.guards[:] = [guard for guard in load.guards if guard.block not in blocks]

    def _record(
        self,
        job: int,
        request: str,
        direction: Literal["save", "load"],
        side: PageSide,
        moment: Literal["submitted", "completed"],
        pages: Sequence[JobPage],
        contents: list[torch.Tensor],
    ) -> None:
        if not contents:
            return
        rows = [
            PageRow(
                entry=page.placed.entry.entry,
                block_index=page.block_index,
                block=page.block,
                digest=facts.digest,
                nonzero=facts.nonzero,
                sentinel=facts.sentinel,
            )
            for page, facts in zip(pages, self._layout.facts(contents), strict=True)
        ]
        self._stream.append(
            PagesDigested(
                rank=self._rank, job=job, request=request, direction=direction, side=side, moment=moment, rows=rows
            )
        )


def _runs(spec: GPULoadStoreSpec) -> list[Run]:
    runs: list[Run] = []
    start = 0
    for group, (size, first) in enumerate(zip(spec.group_sizes, spec.block_indices, strict=True)):
        runs.append(Run(group, int(first), [int(block) for block in spec.block_ids[start : start + size]]))
        start += size
    return runs
