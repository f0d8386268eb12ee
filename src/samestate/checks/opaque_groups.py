"""Cache groups whose spec says nothing of their kind, as a worker may register them.

Where a model's layers have pages of unequal size, vLLM hands workers each group inside ``UniformTypeKVCacheSpecs``
(``v1/kv_cache_interface.py`` of 0.33), which may hold any kind; its scheduler keeps the specs themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from samestate.evidence.records import EngineGroup, RankRegistered, SchedulerConfigured

WRAPPER = "UniformTypeKVCacheSpecs"


def told_by_scheduler(registered: RankRegistered, schedulers: Sequence[SchedulerConfigured]) -> RankRegistered:
    """The registration, with kind and spec of such groups as the one scheduler has them for the same layers and
    blocks of as many tokens.

    It stays as it is where there is no scheduler or several, and where that one's group has other layers: what nobody
    says is not known.
    """
    if len(schedulers) != 1 or not any(group.spec == WRAPPER for group in registered.engine_groups):
        return registered
    told = {group.group: group for group in schedulers[0].engine_groups}
    return replace(registered, engine_groups=[_told(group, told) for group in registered.engine_groups])


def _told(group: EngineGroup, told: dict[int, EngineGroup]) -> EngineGroup:
    theirs = told.get(group.group)
    if group.spec != WRAPPER or theirs is None:
        return group
    if (theirs.layers, theirs.tokens_per_block) != (group.layers, group.tokens_per_block):
        return group
    return replace(group, entry_kind=theirs.entry_kind, spec=theirs.spec)
