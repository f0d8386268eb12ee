"""The servers beside the engines of a run: started before the first arm that uses one, kept for arms that follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from samestate.engines.services import Service, ServiceError, ServiceSpec
from samestate.evidence.records import Scalar, ServiceStarted, ServiceStopped
from samestate.evidence.stream import StreamWriter
from samestate.lab.errors import RunError
from samestate.plans.model import ArmPlan

NEEDING = ("lmcache", "samestate-disk", "samestate-valkey", "samestate-object")
"""Connectors that are of no use without what is beside the engine."""
MakeService = Callable[[ServiceSpec], Service | None]
"""None where the connector has no server."""


def no_service(spec: ServiceSpec) -> Service | None:
    """For connectors that need none. Raises `RunError` for one that does."""
    if spec.connector in NEEDING:
        raise RunError(f"arm {spec.arm}: connector {spec.connector!r} needs its server, and this run can start none")
    return None


class Services:
    """By arm, one service each; arms that follow one another share it."""

    def __init__(self, make: MakeService, data: Path, log_path: Callable[[str], Path]) -> None:
        self._make = make
        self._data = data
        self._log_path = log_path
        self._by_arm: dict[str, Service] = {}
        self._last_use: dict[int, str] = {}
        self._running: set[int] = set()
        self._started: dict[int, ServiceStarted] = {}

    def plan(self, arm: ArmPlan, packages: Path | None, external_cache_bytes: int) -> None:
        """Make the arm's service, or share that of the arm which it follows; nothing starts yet."""
        service = self._by_arm.get(arm.follows or "")
        if service is None and arm.connector != "none" and arm.follows is None:
            data_dir = self._data / arm.name
            data_dir.mkdir()
            log_path = self._log_path(arm.name).with_name("service.log")
            spec = ServiceSpec(arm.name, arm.connector, packages, arm.options, external_cache_bytes, data_dir, log_path)
            service = self._make(spec)
        if service is not None:
            self._by_arm[arm.name] = service
            self._last_use[id(service)] = arm.name

    def address(self, arm: ArmPlan) -> str | None:
        """``HOST:PORT`` of the arm's service."""
        service = self._by_arm.get(arm.name)
        return service.address if service else None

    def connector_options(self, arm: ArmPlan) -> Mapping[str, Scalar]:
        """Options for the arm's connector, without those of its service."""
        service = self._by_arm.get(arm.name)
        return service.connector_options if service else arm.options

    def begin(self, arm: ArmPlan, checkpoint_interval: int | None, client: StreamWriter) -> None:
        """Have the arm's service run, restarted where the plan says so. Raises `RunError` and `ServiceError`."""
        service = self._by_arm.get(arm.name)
        if service is None:
            return
        if checkpoint_interval is None:
            raise RunError(
                f"arm {arm.name}: its service must know C before the engine says it; "
                "put the control first, or set engine.settings.block_size"
            )
        continues = id(service) in self._running and arm.service == "kept"
        if continues:
            self.require_alive(arm)
        else:
            service.stop()
            self._started[id(service)] = service.start(checkpoint_interval)
            self._running.add(id(service))
        client.append(msgspec.structs.replace(self._started[id(service)], continues=continues))

    def alive(self, arm: ArmPlan) -> bool:
        """Whether the arm's service still answers; True without one."""
        service = self._by_arm.get(arm.name)
        return service is None or service.alive()

    def require_alive(self, arm: ArmPlan) -> None:
        """Raise `ServiceError` when the arm's service no longer answers: an engine without it tests nothing."""
        if not self.alive(arm):
            raise ServiceError(
                f"arm {arm.name}: its service died or no longer answers; see its service.log, then run again"
            )

    def end(self, arm: ArmPlan, *, alive: bool, client: StreamWriter) -> None:
        """Stop the arm's service, unless an arm follows. Raises `ServiceError`."""
        service = self._by_arm.get(arm.name)
        if service is None:
            return
        kept = self._last_use[id(service)] != arm.name
        leftovers = 0 if kept else service.stop()
        if not kept:
            self._running.discard(id(service))
        started = self._started[id(service)]
        client.append(ServiceStopped(service=started.service, alive=alive, kept=kept, leftovers=leftovers))

    def close(self) -> None:
        """Stop whatever still runs, after a failure too."""
        for service in {id(one): one for one in self._by_arm.values()}.values():
            with suppress(ServiceError):
                service.stop()
