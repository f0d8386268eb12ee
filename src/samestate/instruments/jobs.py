"""What every adapter writes down of a transfer job: its begin with its pages, waits for it, its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from typing_extensions import override

from samestate.evidence.records import (
    LoadCompleted,
    LoadSubmitted,
    SaveCompleted,
    SaveDelayed,
    SaveSubmitted,
    SaveWaited,
    TransferGroup,
    TransferPart,
)
from samestate.evidence.stream import StreamWriter
from samestate.instruments.layout import transfer_layers
from samestate.instruments.page_audit import Blocks, PageAudit, Tier
from samestate.instruments.pages import Layout
from samestate.instruments.transfers import Guard, TransferAdapter

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import LoadStoreSpec


class JobAdapter(TransferAdapter):
    """An adapter that records jobs of one rank. A subclass knows when they begin and end, and what they move."""

    def __init__(
        self, config: KVCacheConfig, rank: int, stream: StreamWriter, guard: Guard, save_delay_ms: int
    ) -> None:
        self.watching = True
        self.save_delay_ms = save_delay_ms
        self._config = config
        self._rank = rank
        self._stream = stream
        self._guard = guard
        self._pages: PageAudit | None = None
        self._all_pages: PageAudit | None = None
        self._digested: set[int] = set()
        """Open jobs whose pages were read already, since somebody waited for them."""

    @override
    def attend(self, watching: bool, digesting: bool) -> None:
        self.watching = watching
        self._pages = self._all_pages if digesting else None

    @override
    def forward_ran(self) -> None:
        if self._pages:
            self._pages.forward_ran()

    def audit_pages(self, layout: Layout, engine_groups: list[int], tier: Tier | None, poison: bool) -> None:
        """Digest pages from now on. `engine_groups`: vLLM's group of every transfer group."""
        layers = transfer_layers(self._config, engine_groups)
        self._pages = self._all_pages = PageAudit(self._rank, layout, layers, tier, poison, self._stream)

    def load_began(
        self,
        job: int,
        request: str,
        boundary: int | None,
        parts: list[TransferPart],
        source: LoadStoreSpec | None,
        target: Blocks,
    ) -> None:
        """A load was handed over. `source` and `target` are what the page audit reads, and fills."""
        self._stream.append(LoadSubmitted(rank=self._rank, job=job, request=request, boundary=boundary, parts=parts))
        if self._pages:
            self._pages.load_submitted(job, request, source, target)

    def save_began(
        self, job: int, request: str | None, parts: list[TransferPart], source: Blocks, target: LoadStoreSpec | None
    ) -> None:
        """A save was handed over, and is held back where saves are."""
        self._stream.append(SaveSubmitted(rank=self._rank, job=job, request=request, parts=parts))
        if self.save_delay_ms:
            self._stream.append(SaveDelayed(rank=self._rank, job=job, delay_ms=self.save_delay_ms))
        if self._pages:
            self._pages.save_submitted(job, request or "", source, target)

    def waited_for(self, jobs: Sequence[int], waited_ns: int, *, timed_out: bool = False) -> None:
        """The worker blocked until saves were done. What of them is still open is read by the caller, before."""
        self._stream.append(SaveWaited(rank=self._rank, jobs=list(jobs), waited_ns=waited_ns, timed_out=timed_out))

    def ended(self, job: int, *, load: bool, ok: bool, moved: int | None) -> None:
        """A job was reported as done; `moved`: bytes, None where that is not said."""
        self.read_pages(job, load=load)
        self._digested.discard(job)
        kind = LoadCompleted if load else SaveCompleted
        self._stream.append(kind(rank=self._rank, job=job, ok=ok, bytes=moved))

    def read_pages(self, job: int, *, load: bool) -> None:
        """Digest an open job's pages as they are when it is done, once."""
        if self._pages is None or job in self._digested:
            return
        self._digested.add(job)
        (self._pages.load_completed if load else self._pages.save_completed)(job)


def part_of(group: TransferGroup, first: int, blocks: int) -> TransferPart:
    """What `blocks` blocks of a group, from index `first` of the request's table on, are."""
    return TransferPart(
        group=group.group,
        first_block=first,
        pages=blocks * group.entries,
        bytes=blocks * group.bytes_per_block,
        boundary=(first + blocks) * group.tokens_per_block,
    )
