"""Containers through the docker package. Held against a played engine only; not tried on a real one.

A stopped container that is started again keeps its id, image and mounts; its process is another.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typing_extensions import override

from samestate.custody.base import CustodyError, Stopped, Supervisor, field, missing
from samestate.custody.spec import ProcessSpec
from samestate.engines.processes import identity
from samestate.evidence.canonical import sha256_hex
from samestate.evidence.custody_records import Field
from samestate.folders import cache_root


def container(name: str) -> Any:
    """The container as its engine has it now. Raises `CustodyError`."""
    try:
        import docker
    except ImportError:
        raise CustodyError("containers need the docker package; pip install 'samestate[custody]'") from None
    try:
        return docker.from_env().containers.get(name)
    except Exception as error:  # the package's own kinds, and those of its transports
        raise CustodyError(f"container {name}: {' '.join(str(error).split())}; is its engine there?") from None


def container_fields(name: str, prefix: str = "") -> list[Field]:
    """Image digest, id, restart count and mounts of a container, or why they cannot be told."""
    try:
        attributes = container(name).attrs
        mounts = [{key: one.get(key) for key in ("Source", "Destination", "RW")} for one in attributes["Mounts"]]
        return [
            field(f"{prefix}container.image", attributes["Image"]),
            field(f"{prefix}container.id", attributes["Id"]),
            field(f"{prefix}container.restarts", str(attributes["RestartCount"])),
            field(f"{prefix}container.mounts", json.dumps(sorted(mounts, key=lambda one: str(one["Destination"])))),
        ]
    except CustodyError as error:
        return [missing(f"{prefix}container", str(error))]
    except (LookupError, TypeError) as error:
        return [missing(f"{prefix}container", f"its engine does not say {error}")]


class DockerContainer(Supervisor):
    """A container that is there, stopped and started again; never made anew."""

    def __init__(self, process: ProcessSpec) -> None:
        assert process.container is not None
        self._name, self._seconds = process.container, process.stop_seconds

    @property
    @override
    def lock(self) -> Path:
        return cache_root() / "locks" / f"{sha256_hex(self._name.encode())[:16]}.lock"

    @override
    def identity(self) -> str | None:
        state = container(self._name).attrs.get("State", {})
        pid = state.get("Pid") or 0
        return identity(int(pid)) if state.get("Running") and pid else None

    @override
    def knows(self, who: str) -> None:
        pass  # its engine does

    @override
    def start(self) -> None:
        self._call("start")

    @override
    def stop(self) -> Stopped:
        who = self.identity()
        if who is None:
            return Stopped(None, killed=False, left=[])
        self._call("stop", timeout=round(self._seconds))
        code = container(self._name).attrs.get("State", {}).get("ExitCode")
        left = self.identity()
        return Stopped(who, killed=code == 137, left=[int(left.partition("@")[0])] if left else [])

    @override
    def fields(self) -> list[Field]:
        return container_fields(self._name)

    def _call(self, what: str, **options: Any) -> None:
        try:
            getattr(container(self._name), what)(**options)
        except CustodyError:
            raise
        except Exception as error:  # the package's own kinds
            raise CustodyError(f"container {self._name}: {what}: {' '.join(str(error).split())}") from None
