"""What a rank registers of a transformers cache: its groups and its entries, as records."""

from __future__ import annotations

from samestate.engines.children.transformers_cache import Layout
from samestate.evidence.records import EngineGroup, Entry, EntryKind, RankRegistered, TransferGroup

MOST_BLOCKS = 2**31
"""A block is the number of a snapshot, given out once: the cache has no pool of blocks that could be full."""


def engine_groups(layout: Layout) -> list[EngineGroup]:
    """One group for each kind of page."""
    found = []
    for number in range(len(layout.groups)):
        members = layout.members(number)
        layers = list(dict.fromkeys(entry.place for entry in members))
        page = max(sum(entry.bytes for entry in members if entry.place == layer) for layer in layers)
        found.append(
            EngineGroup(
                group=number,
                entry_kind=EntryKind.RECURRENT if layout.is_state(number) else members[0].kind,
                spec=", ".join(layout.classes(number)),
                tokens_per_block=layout.interval,
                layers=layers,
                page_bytes=page,
                effective_bytes=page,
            )
        )
    return found


def registration(layout: Layout, digest: str) -> RankRegistered:
    """The one rank's; without entries where no page is read, which an empty `digest` says."""
    return RankRegistered(
        rank=0,
        world_size=1,
        num_blocks=MOST_BLOCKS,
        engine_groups=engine_groups(layout),
        transfer_groups=[
            TransferGroup(
                group=number,
                engine_group=number,
                entries=len(layout.members(number)),
                bytes_per_block=layout.block_bytes(number),
                tokens_per_block=layout.interval,
            )
            for number in range(len(layout.groups))
        ],
        entries=_entries(layout) if digest else [],
        digest=digest,
    )


def _entries(layout: Layout) -> list[Entry]:
    """Every entry; addresses are those in a block as it is saved, since the cache has no blocks of its own."""
    found = []
    for group in range(len(layout.groups)):
        members, offset = layout.members(group), 0
        for entry in members:
            found.append(
                Entry(
                    entry=entry.number,
                    layer=entry.place,
                    engine_group=group,
                    kind=entry.kind,
                    logical_dtype=str(entry.dtype).removeprefix("torch."),
                    transfer_dtype="uint8",
                    is_byte_view=True,
                    shape=list(entry.shape),
                    storage_offset=offset,
                    block_stride=layout.block_bytes(group),
                    page_bytes=sum(one.bytes for one in members if one.place == entry.place),
                    effective_bytes=entry.bytes,
                )
            )
            offset += entry.bytes
    return sorted(found, key=lambda one: one.entry)
