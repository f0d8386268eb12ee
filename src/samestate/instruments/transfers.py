"""Transfers as a connector itself describes them: one small adapter per connector.

Without an adapter B is ``not_reported``: the audit never guesses it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from samestate.evidence.records import TransferGroup
from samestate.instruments.pages import Layout

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

Guard = Callable[[Callable[[], None]], None]
"""Runs a piece of observation; keeps its exceptions away from serving."""


class TransferAdapter(ABC):
    """Reads one connector class's transfers, on the worker side."""

    @abstractmethod
    def watch(self) -> None:
        """Start watching. Called before the connector registers the caches."""

    @abstractmethod
    def watch_pages(self, layout: Layout, poison: bool) -> None:
        """Digest the pages of every job from now on. Called once the caches are registered."""

    @abstractmethod
    def attend(self, watching: bool, digesting: bool) -> None:
        """Watch, or digest pages too, from now on. Only safe while no transfer is open."""

    @abstractmethod
    def forward_ran(self) -> None:
        """The model ran, or runs, this step's forward pass."""

    @abstractmethod
    def groups(self) -> list[TransferGroup]:
        """The transfer groups, known once the caches are registered."""

    @abstractmethod
    def step(self, metadata: KVConnectorMetadata) -> None:
        """The scheduler's orders for this step have arrived in this worker."""
