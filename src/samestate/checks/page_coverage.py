"""``page-coverage``: what was compared was not nothing.

Every entry of every rank moved non-zero bytes, at registered addresses, and no page that held
something arrived as zeros. Zero is a legal fresh state, so equal pages alone show little (requirements 32, 33).
"""

from __future__ import annotations

from collections.abc import Iterator

from samestate.checks.base import CheckResult, Finding, Place
from samestate.checks.damage import PAGE_ROWS, Damage, job_name
from samestate.checks.damage import findings as damage_findings
from samestate.checks.history import ArmHistory, History
from samestate.checks.layout import RankLayout, rank_layouts
from samestate.checks.page_history import Transfer
from samestate.checks.pages import Key
from samestate.checks.prefixes import Prefixes
from samestate.checks.verdicts import conclude, fail, unknown
from samestate.evidence.records import PageSide

CHECK = "page-coverage"


def page_coverage(history: History) -> CheckResult:
    """Count non-zero bytes of every page row of the candidates, in time order."""
    counts = _Counts()
    layouts: dict[int, RankLayout] = {}
    findings: list[Finding] = []
    for arm in history.candidates:
        if history.follows(arm.name) is None:
            counts.forget()
        of_arm = rank_layouts(arm)
        layouts |= of_arm
        findings += counts.findings(arm, of_arm, Prefixes(history, arm))
    lost = {(rank, entry) for rank, entry, _ in counts.zeroed}
    findings += [*_vacuous(history.candidates[-1].name, layouts, counts.filled | lost)] if layouts else []
    entries = sum(len(layout.entries) for layout in layouts.values())
    summary = f"{len(counts.filled)}/{entries} entries of {len(layouts)} rank(s) loaded non-zero bytes"
    if lost:
        summary += f"; pages of {len(lost)} arrived zero"
    return conclude(CHECK, findings, unit=PAGE_ROWS, examined=counts.examined, summary=summary)


class _Counts:
    """What was non-zero where it came from; what an arm saved is known in those that follow it."""

    def __init__(self) -> None:
        self.examined = 0
        self.filled: set[tuple[int, int]] = set()
        """Rank and entry that loaded non-zero bytes."""
        self.zeroed: set[Key] = set()
        self._sources: dict[Key, int] = {}

    def forget(self) -> None:
        """An empty external cache begins."""
        self._sources.clear()

    def findings(self, arm: ArmHistory, layouts: dict[int, RankLayout], prefixes: Prefixes) -> Iterator[Finding]:
        for transfer in arm.pages.transfers:
            layout = layouts.get(transfer.rank)
            if layout is None:
                continue
            yield from _outside(transfer, layout, prefixes)
            yield from damage_findings(transfer, layout, prefixes, list(self._zeroes(transfer, layout, prefixes)))

    def _zeroes(self, transfer: Transfer, layout: RankLayout, prefixes: Prefixes) -> Iterator[Damage]:
        for side, moment in transfer.sides(readable=True):
            for row in transfer.rows(side, moment):
                if not layout.holds(row):
                    continue
                self.examined += 1
                digest = prefixes.digest(transfer.request, layout.end(row)) or ""
                key = (transfer.rank, row.entry, digest)
                if side is PageSide.SOURCE and moment == "submitted":
                    self._sources[key] = row.nonzero
                    self.zeroed.discard(key)
                if side is PageSide.DESTINATION and row.nonzero:
                    self.filled.add((transfer.rank, row.entry))
                if not row.nonzero and digest and self._sources.get(key) and key not in self.zeroed:
                    self.zeroed.add(key)
                    what = f"all bytes are zero ({side.value}); {self._sources[key]} bytes of its source were not"
                    yield Damage("zero_page", row, what)


def _outside(transfer: Transfer, layout: RankLayout, prefixes: Prefixes) -> Iterator[Finding]:
    for seen in transfer.pages.values():
        strays = [row for row in seen.rec.rows if not layout.holds(row)]
        if strays:
            message = (
                f"{job_name(transfer, prefixes)}: entry "
                f"{strays[0].entry}, block {strays[0].block} is not in the layout ({len(strays)} such rows)"
            )
            place = prefixes.place(transfer.request).model_copy(update={"rank": transfer.rank})
            yield fail("outside_layout", message, place, [seen.where, layout.seen.where])


def _vacuous(arm: str, layouts: dict[int, RankLayout], accounted: set[tuple[int, int]]) -> Iterator[Finding]:
    """Entries that no arm loaded; `arm`: where the search for a load ended."""
    for rank, layout in sorted(layouts.items()):
        for entry in layout.entries.values():
            if (rank, entry.entry) not in accounted:
                what = f"entry {entry.entry} ({entry.kind.value} of {entry.layer})"
                message = f"rank {rank}: {what}: no load moved a non-zero byte"
                yield unknown("vacuous", message, Place(arm=arm, rank=rank, layer=entry.layer))
