"""Servers beside an engine that hold its external cache: types and one ABC."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from samestate.evidence.records import Scalar, ServiceStarted


class ServiceError(Exception):
    """The service could not start, died or left something that could not be removed.

    ``str(error)`` is one line that says what to do; ``log_tail`` holds the end of its log, possibly empty.
    """

    def __init__(self, message: str, log_tail: str = "") -> None:
        super().__init__(message)
        self.log_tail = log_tail


class ServiceSpec(NamedTuple):
    """One service, as a plan's arm asks for it."""

    arm: str
    """The first arm that uses it."""
    connector: str
    packages: Path | None
    """Folder with the connector's package; None: the environment's own."""
    options: dict[str, Scalar]
    """Of the arm; those of the connector's own side are not the service's."""
    external_cache_bytes: int
    data_dir: Path
    """For what it must find again after a restart; exists, empty, removed by the lab."""
    log_path: Path


class Service(ABC):
    """One server. Only safe when driven by one thread, one call at a time."""

    @property
    @abstractmethod
    def address(self) -> str:
        """``HOST:PORT`` or a URL, known before it starts and the same after a restart."""

    @property
    @abstractmethod
    def connector_options(self) -> Mapping[str, Scalar]:
        """What the connector is told: the arm's options of its own side, and what it must know of the service."""

    @abstractmethod
    def start(self, checkpoint_interval: int) -> ServiceStarted:
        """Start, wait until it answers, and say what was started. Raises `ServiceError`."""

    @abstractmethod
    def alive(self) -> bool:
        """Whether it still answers."""

    @abstractmethod
    def stop(self) -> int:
        """Stop and reap it, remove what it left behind; how many shared-memory segments that were.

        Safe to call twice, after a death, and before `start`, which may follow again. Raises `ServiceError`.
        """
