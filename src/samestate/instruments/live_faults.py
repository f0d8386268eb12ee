"""Faults that are armed and disarmed in a running engine, so that a dozen cost one start.

The audit connector offers itself here when it is made (a worker's when its caches are registered); a fault
then acts on it, or on the worker behind it, through public hooks, and takes its action back when disarmed.
One process, one fault at a time: an engine whose workers are other processes arms its fault at the start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from samestate.instruments.faults import Audited, FaultError, FullLookup, LiveFault, SyncLoad, Undo
from samestate.instruments.page_faults import (
    EarlyComplete,
    MissingGroup,
    NeighbourWrite,
    NullBlockSaved,
    ShortCopy,
    StalePage,
    SwappedLayers,
    ZeroPage,
)

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.kv_cache_interface import KVCacheConfig

LIVE_FAULTS: dict[str, type[LiveFault]] = {
    "full-lookup": FullLookup,
    "stale-page": StalePage,
    "zero-page": ZeroPage,
    "swapped-layers": SwappedLayers,
    "short-copy": ShortCopy,
    "neighbour-write": NeighbourWrite,
    "early-complete": EarlyComplete,
    "missing-group": MissingGroup,
    "null-block-saved": NullBlockSaved,
    "sync-load": SyncLoad,
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

    def arm(self, name: str | None) -> None:
        """Arm fault `name`, and only it, on the connectors offered so far; None disarms all.

        Raises:
            FaultError: an unknown name, or a connector that the fault needs is not in this process.

        """
        self._change(name)
        if self._fault is None:
            return
        missing = set(self._fault.roles) - {on.role for on in self._offered}
        if missing:
            self._change(None)
            said = " and ".join(sorted(role.name.lower() for role in missing))
            raise FaultError(f"fault {name!r}: no audited {said} connector in this process; arm it at the start")
        for on in self._offered:
            if on.role in self._fault.roles:
                self._fault.act(on, self._undo)

    def _change(self, name: str | None) -> None:
        if name is not None and name not in LIVE_FAULTS:
            raise FaultError(f"fault {name!r}: not available on vLLM; use one of {', '.join(sorted(LIVE_FAULTS))}")
        self._undo.close()
        self._name, self._fault = name, LIVE_FAULTS[name]() if name else None


_armoury = Armoury()
arm = _armoury.arm
arm_at_start = _armoury.arm_at_start
offer = _armoury.offer
