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
from samestate.evidence.records import PageRow, PageSide

CHECK = "page-coverage"


def page_coverage(history: History) -> CheckResult:
    """Count non-zero bytes of every page row of the candidates, in time order.

    A first round finds the pages that were ever zero, so that the second remembers the sources of no others.
    """
    zeros: set[Key] = set()
    counts, layouts, findings = _counted(history, zeros)
    if zeros:
        counts, layouts, findings = _counted(history, zeros)
    lost = {(rank, entry) for rank, entry, _ in counts.zeroed}
    findings += [*_vacuous(history.candidates[-1].name, layouts, counts.filled | lost)] if layouts else []
    entries = sum(len(layout.moved()) for layout in layouts.values())
    summary = f"{len(counts.filled)}/{entries} entries of {len(layouts)} rank(s) loaded non-zero bytes"
    if lost:
        summary += f"; pages of {len(lost)} arrived zero"
    return conclude(CHECK, findings, unit=PAGE_ROWS, examined=counts.examined, summary=summary)


def _counted(history: History, zeros: set[Key]) -> tuple[_Counts, dict[int, RankLayout], list[Finding]]:
    counts = _Counts(zeros)
    layouts: dict[int, RankLayout] = {}
    findings: list[Finding] = []
    for arm in history.candidates:
        if history.follows(arm.name) is None:
            counts.forget()
        of_arm = rank_layouts(arm)
        layouts |= of_arm
        findings += counts.findings(arm, of_arm, Prefixes(history, arm))
    return counts, layouts, findings


class _Counts:
    """What was non-zero where it came from; what an arm saved is known in those that follow it."""

    def __init__(self, zeros: set[Key]) -> None:
        self.examined = 0
        self.filled: set[tuple[int, int]] = set()
        """Rank and entry that loaded non-zero bytes."""
        self.zeroed: set[Key] = set()
        self._zeros = zeros
        """Pages with a row that is all zero, of the rounds so far."""
        self._sources: dict[Key, int] = {}
        self._last: tuple[list[PageRow], RankLayout, list[PageRow], bool] | None = None

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
            rows, full = self._held(transfer.rows(side, moment), layout)
            self.examined += len(rows)
            if side is PageSide.DESTINATION:
                self.filled |= {(transfer.rank, row.entry) for row in rows if row.nonzero}
            if full and not self._zeros:
                continue
            for row in rows:
                digest = prefixes.digest(transfer.request, layout.end(row)) or ""
                key = (transfer.rank, row.entry, digest)
                if not row.nonzero:
                    self._zeros.add(key)
                if key not in self._zeros:
                    continue
                if side is PageSide.SOURCE and moment == "submitted":
                    self._sources[key] = row.nonzero
                    self.zeroed.discard(key)
                if not row.nonzero and digest and self._sources.get(key) and key not in self.zeroed:
                    self.zeroed.add(key)
                    what = f"all bytes are zero ({side.value}); {self._sources[key]} bytes of its source were not"
                    yield Damage("zero_page", row, what)

    def _held(self, rows: list[PageRow], layout: RankLayout) -> tuple[list[PageRow], bool]:
        """The rows of registered pages, and whether none of them is all zero. Equal sides of a job are one list."""
        if self._last is None or self._last[0] is not rows or self._last[1] is not layout:
            held = [row for row in rows if layout.holds(row)]
            self._last = rows, layout, held, all([row.nonzero for row in held])
        return self._last[2:]


def _outside(transfer: Transfer, layout: RankLayout, prefixes: Prefixes) -> Iterator[Finding]:
    sides: dict[bytes, list[PageRow]] = {}
    for seen in transfer.pages.values():
        if seen.alike not in sides:
            sides[seen.alike] = [row for row in seen.rows if not layout.holds(row)]
        strays = sides[seen.alike]
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
        for entry in layout.moved():
            if (rank, entry.entry) not in accounted:
                what = f"entry {entry.entry} ({entry.kind.value} of {entry.layer})"
                message = f"rank {rank}: {what}: no load moved a non-zero byte"
                yield unknown("vacuous", message, Place(arm=arm, rank=rank, layer=entry.layer))
