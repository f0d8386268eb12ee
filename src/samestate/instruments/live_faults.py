"""Faults that are armed and disarmed in a running engine, so that dozens cost one start.

The audit connector offers itself here when it is made (a worker's when its caches are registered); a fault
then acts on it, or on the worker behind it, through public hooks, and takes its action back when disarmed.
One fault at a time, in every process of the engine: where workers have processes of their own, each is told.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from samestate.instruments.faults import Audited, FaultError, FullLookup, LiveFault, SyncLoad, Undo
from samestate.instruments.key_faults import (
    HitsOvercounted,
    HitsSilent,
    QueriesDoubled,
    ResetKeepsLocal,
    SaltIgnored,
    ShortHash,
)
from samestate.instruments.load_faults import (
    CrossedRequests,
    EarlyLoadComplete,
    FreshState,
    HalvesSwapped,
    MissingEntry,
    ReadDuringEviction,
    SecondReload,
    SwallowedLoadFailure,
    WideColumn,
)
from samestate.instruments.lookup_faults import (
    AttachChangesLookup,
    BlockRoundUp,
    BoundaryDip,
    JointTruncation,
    OrphanAttention,
    StoredNeverServed,
    ThirdSighting,
    UnalignedCredit,
)
from samestate.instruments.page_faults import (
    AttentionOnly,
    MissingGroup,
    NeighbourWrite,
    PastSharedPrefix,
    ShortCopy,
    StalePage,
    SwappedLayers,
    ZeroPage,
)
from samestate.instruments.rank_faults import RankZeroShard, SilentRank
from samestate.instruments.save_faults import (
    DuplicateKeepsDamage,
    EarlyComplete,
    FailedPutVisible,
    NullBlockSaved,
    OverwrittenBeforeRead,
    ScratchSaved,
    TrimmedKey,
    UnsavedGroup,
    WrongGrid,
)

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.kv_cache_interface import KVCacheConfig

LIVE_FAULTS: dict[str, type[LiveFault]] = {
    "full-lookup": FullLookup,
    "unaligned-credit": UnalignedCredit,
    "boundary-dip": BoundaryDip,
    "block-round-up": BlockRoundUp,
    "past-shared-prefix": PastSharedPrefix,
    "joint-truncation": JointTruncation,
    "attach-changes-lookup": AttachChangesLookup,
    "stored-never-served": StoredNeverServed,
    "third-sighting": ThirdSighting,
    "sync-load": SyncLoad,
    "fresh-state": FreshState,
    "wrong-grid": WrongGrid,
    "null-block-saved": NullBlockSaved,
    "scratch-saved": ScratchSaved,
    "trimmed-key": TrimmedKey,
    "overwritten-before-read": OverwrittenBeforeRead,
    "early-complete": EarlyComplete,
    "unsaved-group": UnsavedGroup,
    "failed-put-visible": FailedPutVisible,
    "duplicate-keeps-damage": DuplicateKeepsDamage,
    "stale-page": StalePage,
    "zero-page": ZeroPage,
    "missing-group": MissingGroup,
    "attention-only": AttentionOnly,
    "missing-entry": MissingEntry,
    "second-reload": SecondReload,
    "early-load-complete": EarlyLoadComplete,
    "swallowed-load-failure": SwallowedLoadFailure,
    "crossed-requests": CrossedRequests,
    "swapped-layers": SwappedLayers,
    "halves-swapped": HalvesSwapped,
    "short-copy": ShortCopy,
    "neighbour-write": NeighbourWrite,
    "wide-column": WideColumn,
    "rank-zero-shard": RankZeroShard,
    "silent-rank": SilentRank,
    "salt-ignored": SaltIgnored,
    "short-hash": ShortHash,
    "read-during-eviction": ReadDuringEviction,
    "orphan-attention": OrphanAttention,
    "reset-keeps-local": ResetKeepsLocal,
    "hits-silent": HitsSilent,
    "hits-overcounted": HitsOvercounted,
    "queries-doubled": QueriesDoubled,
}


class Armoury:
    """The connectors of one process, and the fault that acts on them."""

    def __init__(self) -> None:
        self._offered: list[Audited] = []
        self._name: str | None = None
        self._fault: LiveFault | None = None
        self._undo = Undo()

    def arm_at_start(self, name: str) -> None:
        """Arm fault `name` for the connectors that will be offered. Raises `FaultError` for an unknown name."""
        if name != self._name:
            self._change(name)

    def offer(self, inner: KVConnectorBase_V1, role: KVConnectorRole, config: KVCacheConfig) -> None:
        """A connector that faults may act on.

        Raises:
            FaultError: the armed fault does not fit it.

        """
        if isinstance(inner, OffloadingConnector):
            self._offered.append(Audited(inner, role, config))
            if self._fault and role in self._fault.roles:
                self._fault.act(self._offered[-1], self._undo)
        elif self._name:
            raise FaultError(f"fault {self._name!r}: needs an OffloadingConnector inside, not {type(inner).__name__}")

    def arm(self, name: str | None, elsewhere: Collection[KVConnectorRole] = ()) -> None:
        """Arm fault `name`, and only it, on the connectors offered so far; None disarms all.

        Args:
            elsewhere: Roles whose connectors are in other processes, and are told there.

        Raises:
            FaultError: an unknown name, or a connector that the fault needs is not there.

        """
        self._change(name)
        if self._fault is None:
            return
        missing = set(self._fault.roles) - {on.role for on in self._offered} - set(elsewhere)
        if missing:
            self._change(None)
            said = " and ".join(sorted(role.name.lower() for role in missing))
            raise FaultError(f"fault {name!r}: no audited {said} connector in this process")
        for on in self._offered:
            if on.role in self._fault.roles:
                self._fault.act(on, self._undo)

    def _change(self, name: str | None) -> None:
        if name is not None and name not in LIVE_FAULTS:
            raise FaultError(f"fault {name!r}: not available on vLLM; use one of {', '.join(sorted(LIVE_FAULTS))}")
        self._undo.close()
        self._name, self._fault = name, LIVE_FAULTS[name]() if name else None


def arm_in_worker(worker: object, name: str | None) -> None:
    """`arm`, as a call to an executor's workers, each in its own process. Raises `FaultError`."""
    _armoury.arm(name, elsewhere=(KVConnectorRole.SCHEDULER,))


_armoury = Armoury()
arm = _armoury.arm
arm_at_start = _armoury.arm_at_start
offer = _armoury.offer
