"""Pages that are not what they should be, and the findings that name them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from samestate.checks.base import Finding
from samestate.checks.layout import RankLayout
from samestate.checks.page_history import Transfer
from samestate.checks.prefixes import Prefixes
from samestate.checks.verdicts import fail, unknown
from samestate.evidence.records import PageRow

PAGE_ROWS = "page rows (internal checks)"
"""Unit of what is counted by page: never a number of trials (requirements 40)."""


class Damage(NamedTuple):
    """One page of a job that is not what it should be, or cannot be judged."""

    code: str
    row: PageRow
    what: str
    unclear: bool = False
    """Evidence is missing, so it is unknown rather than a fail."""


def findings(
    transfer: Transfer,
    layout: RankLayout,
    prefixes: Prefixes,
    damages: Sequence[Damage],
    evidence: Sequence[str] = (),
) -> Iterator[Finding]:
    """One finding for each code of a job: its first page, and how many more there are."""
    for code in dict.fromkeys(damage.code for damage in damages):
        alike = [damage for damage in damages if damage.code == code]
        first = alike[0]
        more = f" (and {len(alike) - 1} more pages of the job)" if len(alike) > 1 else ""
        message = f"{job_name(transfer, prefixes)}: {layout.name(first.row)}: {first.what}{more}"
        place = layout.place(prefixes.place(transfer.request), first.row)
        yield (unknown if first.unclear else fail)(code, message, place, [*transfer.evidence, *evidence])


def job_name(transfer: Transfer, prefixes: Prefixes) -> str:
    """``N3584.reload: rank 0: load 12``."""
    return f"{prefixes.name(transfer.request)}: rank {transfer.rank}: {transfer.direction} {transfer.job}"
