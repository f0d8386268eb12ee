"""Documents beside a swap's records: written, and held against the records."""

from __future__ import annotations

from pathlib import Path

from samestate.evidence.custody_records import JOURNAL
from samestate.reports.custody_documents import CARD, TICKETS, differing, documents


def is_custody(folder: Path) -> bool:
    """Whether a folder holds the records of a swap."""
    return (folder / JOURNAL).is_file()


def write_documents(folder: Path) -> None:
    """Write everything that the records give; tickets that they no longer open go. Raises OSError."""
    made = documents(folder)
    (folder / TICKETS).mkdir(exist_ok=True)
    for old in (folder / TICKETS).glob("*.json"):
        old.unlink()
    for name, data in made.items():
        (folder / name).write_bytes(data)


def read_card(folder: Path) -> str:
    """The result card."""
    return documents(folder)[CARD].decode()


def reproduced(folder: Path) -> list[str]:
    """What of the documents is not, byte for byte, what the records give."""
    return differing(folder)
