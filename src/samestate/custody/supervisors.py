"""Who keeps the process that a spec names."""

from __future__ import annotations

from samestate.custody.base import Supervisor
from samestate.custody.containers import DockerContainer
from samestate.custody.processes import PlainProcess, SystemdUnit
from samestate.custody.spec import ProcessSpec


def supervisor(process: ProcessSpec) -> Supervisor:
    """Made, and not asked anything yet."""
    match process.supervisor:
        case "systemd":
            return SystemdUnit(process)
        case "docker":
            return DockerContainer(process)
        case "process":
            return PlainProcess(process)
