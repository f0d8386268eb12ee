"""``page-coverage``: what was compared was not nothing.

Every entry of every rank moved non-zero bytes, at registered addresses, and no page that held
something arrived as zeros. Zero is a legal fresh state, so equal pages alone show little (requirements 32, 33).
"""

from __future__ import annotations

from collections.abc import Iterator

from samestate.checks.base import CheckResult, Finding, Place
from samestate.checks.damage import PAGE_ROWS, Damage, job_name
from samestate.checks.damage import findings as damage_findings
from samestate.checks.history import CANDIDATE, History
from samestate.checks.layout import RankLayout, rank_layouts
from samestate.checks.page_history import Transfer
from samestate.checks.pages import Key
from samestate.checks.prefixes import Prefixes
from samestate.checks.verdicts import conclude, fail, unknown
from samestate.evidence.records import PageSide

CHECK = "page-coverage"


def page_coverage(history: History) -> CheckResult:
    """Count non-zero bytes of every page row of the candidate, in time order."""
    arm = history.arm(CANDIDATE)
    layouts, prefixes = rank_layouts(arm), Prefixes(history, arm)
    findings: list[Finding] = []
    filled: set[tuple[int, int]] = set()
    sources: dict[Key, int] = {}
    zeroed: set[Key] = set()
    examined = 0
    for transfer in arm.pages.transfers:
        layout = layouts.get(transfer.rank)
        if layout is None:
            continue
        findings += _outside(transfer, layout, prefixes)
        damages = []
        for side, moment in transfer.sides(readable=True):
            for row in transfer.rows(side, moment):
                if not layout.holds(row):
                    continue
                examined += 1
                digest = prefixes.digest(transfer.request, layout.end(row)) or ""
                key = (transfer.rank, row.entry, digest)
                if side is PageSide.SOURCE and moment == "submitted":
                    sources[key] = row.nonzero
                    zeroed.discard(key)
                if side is PageSide.DESTINATION and row.nonzero:
                    filled.add((transfer.rank, row.entry))
                if not row.nonzero and digest and sources.get(key) and key not in zeroed:
                    zeroed.add(key)
                    what = f"all bytes are zero ({side.value}); {sources[key]} bytes of its source were not"
                    damages.append(Damage("zero_page", row, what))
        findings += damage_findings(transfer, layout, prefixes, damages)
    lost = {(rank, entry) for rank, entry, _ in zeroed}
    findings += [*_vacuous(layouts, filled | lost)]
    entries = sum(len(layout.entries) for layout in layouts.values())
    summary = f"{len(filled)}/{entries} entries of {len(layouts)} rank(s) loaded non-zero bytes"
    return conclude(CHECK, findings, unit=PAGE_ROWS, examined=examined, summary=summary)


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


def _vacuous(layouts: dict[int, RankLayout], accounted: set[tuple[int, int]]) -> Iterator[Finding]:
    for rank, layout in sorted(layouts.items()):
        for entry in layout.entries.values():
            if (rank, entry.entry) not in accounted:
                what = f"entry {entry.entry} ({entry.kind.value} of {entry.layer})"
                message = f"rank {rank}: {what}: no load moved a non-zero byte"
                yield unknown("vacuous", message, Place(arm=CANDIDATE, rank=rank, layer=entry.layer))
