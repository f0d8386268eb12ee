"""What one process of an engine says of its autotuned kernels, in a file of its own (`RECORD_VARIABLE`)."""

from __future__ import annotations

from pathlib import Path

import msgspec

from samestate.evidence.record_base import NonNegative
from samestate.evidence.records import KernelSelection, KernelsSelected
from samestate.evidence.tuner_profile import ProfileError, TunerProfile, make, shown


class TunerReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Written anew with every selection, so that a killed process leaves its last word."""

    begun_ns: NonNegative
    """When the process began to watch, by the host's monotonic clock."""
    device: str
    versions: dict[str, str]
    selected: KernelsSelected


def report_name(pid: int) -> str:
    """The file of a process."""
    return f"tuners-{pid}.json"


def read_reports(folder: Path) -> list[TunerReport]:
    """All reports in a folder, the process that began first first. Raises ProfileError for one that cannot be read."""
    found = []
    for path in sorted(folder.glob("tuners-*.json")):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=TunerReport))
        except (OSError, msgspec.DecodeError) as error:
            raise ProfileError(f"{path}: cannot be read: {error}") from None
    return sorted(found, key=lambda one: one.begun_ns)


def profile_of(reports: list[TunerReport]) -> tuple[TunerProfile, list[str]]:
    """One profile of all ranks, and what a later process or tuner chose otherwise: the first one's choice is kept.

    Raises ProfileError where none tuned, or the processes ran in different places.
    """
    if not reports:
        raise ProfileError(
            "no process ran an autotuned kernel: is samestate installed where the engine runs, and has that a GPU?"
        )
    first = reports[0]
    for one in reports:
        if (one.device, one.versions) != (first.device, first.versions):
            where = f"rank {one.selected.rank} ran on {one.device}, rank {first.selected.rank} on {first.device}"
            raise ProfileError(f"{where}, or with other versions: one profile is for one kind")
    ranks: dict[int, dict[tuple[str, tuple[str, ...]], KernelSelection]] = {}
    otherwise: list[str] = []
    for one in reports:
        otherwise += [f"rank {one.selected.rank}: {line}" for line in one.selected.violations]
        mine = ranks.setdefault(one.selected.rank, {})
        for choice in one.selected.selections:
            kept = mine.setdefault((choice.kernel, tuple(choice.key)), choice)
            if kept.config != choice.config:
                said = f"{shown(kept.config)}, a later process {shown(choice.config)}"
                otherwise.append(f"rank {one.selected.rank}: {choice.kernel} ({', '.join(choice.key)}): {said}")
    return make(first.device, first.versions, {rank: list(mine.values()) for rank, mine in ranks.items()}), otherwise
