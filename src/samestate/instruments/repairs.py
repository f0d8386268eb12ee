"""Repairs that are put onto a connector's release while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samestate.evidence.records import InterventionApplied

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole


class RepairError(ValueError):
    """The repair does not exist or does not fit; one line."""


def apply(name: str, inner: KVConnectorBase_V1, role: KVConnectorRole) -> InterventionApplied | None:
    """Put repair `name` onto `inner`; None where it does not act in this role. Raises `RepairError`."""
    raise RepairError(f"repair {name!r}: unknown")
