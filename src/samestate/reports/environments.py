"""What two runs stand on, side by side: settings, versions, controls, and every rank's process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from samestate.checks.environment import facts
from samestate.checks.history import ArmHistory
from samestate.checks.settings import effective_settings


class Differing(NamedTuple):
    """One name whose values differ."""

    name: str
    """``cache_config.block_size``, ``rank 0: variables.OMP_NUM_THREADS``."""
    a: str
    b: str


class Environments(NamedTuple):
    """What comparing two arms came to."""

    compared: int
    """Names that one side has at least."""
    differing: list[Differing]
    notes: list[str]
    """What an inventory does not speak for."""
    unseen: list[str]
    """What could not be compared."""


def compare_environments(a: ArmHistory, b: ArmHistory) -> Environments:
    """Name by name. Raises MissingEvidence where an engine does not say what it is."""
    was, now = _values(a), _values(b)
    names = sorted(was.keys() | now.keys())
    differing = [
        Differing(name, was.get(name, "absent"), now.get(name, "absent"))
        for name in names
        if was.get(name) != now.get(name)
    ]
    return Environments(len(names), differing, list(_notes(a, b)), list(_unseen(a, b)))


def _values(arm: ArmHistory) -> dict[str, str]:
    engine = arm.engine.rec
    found = {name: repr(value) for name, value in effective_settings(engine).items()}
    for one in engine.controls or []:
        found[f"controls.{one.name}"] = f"on ({(one.sha256 or 'no hash')[:12]})" if one.on else "off"
    for seen in arm.environments:
        card = {"device_uuid": seen.rec.device_uuid or "none"}
        found |= {f"rank {seen.rec.rank}: {name}": value for name, value in (facts(seen.rec) | card).items()}
    return found


def _notes(a: ArmHistory, b: ArmHistory) -> Iterator[str]:
    for side, arm in (("A", a), ("B", b)):
        for seen in arm.environments:
            rank, at = seen.rec.rank, seen.rec.observed_at
            yield f"{side}: rank {rank} was observed at {at}; it speaks for arm {arm.name} of that run alone"


def _unseen(a: ArmHistory, b: ArmHistory) -> Iterator[str]:
    """Ranks that an engine has and that were not observed; an engine that does not say which controls were on."""
    for side, arm in (("A", a), ("B", b)):
        ranks = range(arm.engine.rec.ranks)
        missing = sorted({*ranks} - {seen.rec.rank for seen in arm.environments})
        what = "devices, variables, backends and files are not compared"
        if missing and not arm.environments:
            yield f"{side}: no rank was observed; {what}"
        elif missing:
            yield f"{side}: rank {', '.join(map(str, missing))} was not observed; its {what}"
        if arm.engine.rec.controls is None:
            yield f"{side}: which controls were on is not recorded"
