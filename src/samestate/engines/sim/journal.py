"""The streams of a simulated engine, and what it says of itself at its start."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple

from samestate.engines.base import EngineSpec
from samestate.engines.sim.blocks import Place
from samestate.engines.sim.state import ATTENTION, EOS, STATE_GROUPS, Rank, Settings
from samestate.evidence.controls import CONTROLS
from samestate.evidence.records import (
    DROPS_LAST_BLOCK,
    AnyRecord,
    Control,
    EngineGroup,
    EngineStarted,
    Entry,
    PageRow,
    PagesDigested,
    PageSide,
    RankRegistered,
    TransferGroup,
)
from samestate.evidence.stream import StreamWriter

SENTINEL = b"\x41" * 8
"""What a poisoned page is filled with."""
Pages = Sequence[Sequence[bytes | None]]
"""By rank, the pages of a job; None: not there."""


class Shown(NamedTuple):
    """Which pages of which job are recorded, and when."""

    direction: Literal["save", "load"]
    side: PageSide
    moment: Literal["submitted", "completed"]
    job: int
    request: str
    places: Sequence[Place]


class Journal:
    """Writes the ``scheduler`` stream, and under audit those of the workers."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        connected = spec.connector != "none"
        self.audited = connected and spec.audit_level != "off"
        self.reads_pages = connected and spec.audit_level in ("digest", "poison")
        self._scheduler: StreamWriter | None = None
        self._workers: list[StreamWriter] = []

    def open(self, ranks: int) -> None:
        self._scheduler = self._stream("scheduler")
        if self.audited:
            self._workers = [self._stream(f"worker-{rank}") for rank in range(ranks)]

    def close(self) -> None:
        for stream in (*self._workers, self._scheduler):
            if stream is not None:
                stream.close()

    def say(self, record: AnyRecord) -> None:
        """The scheduler's."""
        assert self._scheduler is not None
        self._scheduler.append(record)

    def audit(self, record: AnyRecord) -> None:
        """The scheduler's, under audit."""
        if self.audited:
            self.say(record)

    def on_ranks(self, record: Callable[[int], AnyRecord], taking_part: Callable[[int], bool] = lambda _: True) -> None:
        """One record of every worker that takes part."""
        for rank, worker in enumerate(self._workers):
            if taking_part(rank):
                worker.append(record(rank))

    def digest(
        self, settings: Settings, shown: Shown, pages: Pages, taking_part: Callable[[int], bool] = lambda _: True
    ) -> None:
        """Record the pages of a job where pages are read at all; a page has a row for each entry in it."""
        if not self.reads_pages:
            return

        def rows(rank: int) -> list[PageRow]:
            return [
                _row(number, place, page[part.offset : part.offset + part.size])
                for place, page in zip(shown.places, pages[rank], strict=True)
                if page is not None
                for number, part in enumerate(settings.parts)
                if part.group == place.group
            ]

        def record(rank: int) -> PagesDigested:
            return PagesDigested(
                rank=rank,
                job=shown.job,
                request=shown.request,
                direction=shown.direction,
                side=shown.side,
                moment=shown.moment,
                rows=rows(rank),
            )

        self.on_ranks(record, taking_part)

    def _stream(self, process: str) -> StreamWriter:
        return StreamWriter(self._spec.stream_dir / f"{process}.jsonl", self._spec.arm, process, tolerant=True)


def page_digest(page: bytes | bytearray) -> str:
    return blake2b(page, digest_size=16).hexdigest()


def _row(entry: int, place: Place, page: bytes) -> PageRow:
    return PageRow(
        entry=entry,
        block_index=place.slot,
        block=place.block,
        digest=page_digest(page),
        nonzero=len(page) - page.count(0),
        sentinel=sum(8 for at in range(0, len(page) - 7, 8) if page[at : at + 8] == SENTINEL),
    )


def describe(spec: EngineSpec, settings: Settings, process: str, *, audited: bool) -> EngineStarted:
    """What the engine says of itself."""
    connector = "SimConnector" if spec.connector != "none" else None
    effective: dict[str, str | int | float | bool | None] = {
        "cache_config.block_size": settings.block_size,
        "cache_config.enable_prefix_caching": True,
        "cache_config.mamba_cache_mode": "align",
        "cache_config.num_gpu_blocks": settings.num_gpu_blocks,
        "kv_transfer_config": connector,
        "kv_transfer_config.kv_role": "kv_both" if connector else None,
        "model_config.max_model_len": settings.max_model_len,
        "parallel_config.tensor_parallel_size": settings.tensor_parallel_size,
        "scheduler_config.max_num_batched_tokens": settings.max_num_batched_tokens,
        "scheduler_config.max_num_seqs": settings.max_num_seqs,
    }
    if settings.num_speculative_tokens:
        effective["speculative_config.num_speculative_tokens"] = settings.num_speculative_tokens
    if settings.eagle_block_drop:
        effective[DROPS_LAST_BLOCK] = True
    return EngineStarted(
        engine="sim",
        process=process,
        versions={"python": platform.python_version()},
        checkpoint_interval=settings.block_size,
        max_model_len=settings.max_model_len,
        tensor_parallel=settings.tensor_parallel_size,
        pipeline_parallel=1,
        data_parallel=1,
        decode_context_parallel=1,
        connector=connector,
        audit_level=spec.audit_level if audited else None,
        settings=effective,
        eos_token_ids=[EOS],
        controls=[Control(name=name, on=False, sha256=None) for name in CONTROLS],
    )


def engine_groups(settings: Settings) -> list[EngineGroup]:
    """The cache groups, as scheduler and workers know them."""
    kinds = {part.group: (part.kind, part.layer) for part in settings.parts}
    return [
        EngineGroup(
            group=group,
            entry_kind=kinds[group][0],
            spec="FullAttentionSpec" if group == ATTENTION else "MambaSpec",
            tokens_per_block=settings.block_size,
            layers=[kinds[group][1]],
            page_bytes=settings.page_bytes,
            effective_bytes=settings.effective_bytes(group),
        )
        for group in (ATTENTION, *STATE_GROUPS)
    ]


def transfer_groups(settings: Settings) -> list[TransferGroup]:
    """How the connector moves them: one transfer group for each."""
    return [
        TransferGroup(
            group=group,
            engine_group=group,
            entries=sum(part.group == group for part in settings.parts),
            bytes_per_block=settings.effective_bytes(group),
            tokens_per_block=settings.block_size,
        )
        for group in (ATTENTION, *STATE_GROUPS)
    ]


def registration(
    rank: int, ranks: Sequence[Rank], settings: Settings, groups: list[TransferGroup], entries: bool
) -> RankRegistered:
    """A rank's cache registration; `entries`: pages are read."""
    return RankRegistered(
        rank=rank,
        world_size=len(ranks),
        num_blocks=settings.num_gpu_blocks,
        engine_groups=engine_groups(settings),
        transfer_groups=groups,
        entries=[
            Entry(
                entry=number,
                layer=part.layer,
                engine_group=part.group,
                kind=part.kind,
                logical_dtype="uint8",
                transfer_dtype="uint8",
                is_byte_view=True,
                shape=[part.size],
                storage_offset=part.offset,
                block_stride=settings.page_bytes,
                page_bytes=settings.page_bytes,
                effective_bytes=part.size,
            )
            for number, part in enumerate(settings.parts)
            if entries
        ],
        digest="blake2b-128" if entries else "",
    )
