"""``failures``: what failed is not used.

No request goes on from a load that failed, and no load brings a page whose save did. That a load or a save fails is no
fault of state reuse, if what depends on it does without. Which page a failed save was to store is known where pages
are read.
"""

from __future__ import annotations

from collections.abc import Iterator

from samestate.checks.base import CheckResult, Finding
from samestate.checks.history import ArmHistory, History
from samestate.checks.layout import RankLayout
from samestate.checks.page_history import Transfer
from samestate.checks.prefixes import Prefixes
from samestate.checks.scenario import lineage
from samestate.checks.verdicts import conclude, fail, unknown

CHECK = "failures"

Page = tuple[int, int, str]
"""Rank, transfer group, digest of the prefix that the page ends."""


def failures(history: History) -> CheckResult:
    """Follow every load and every save of the candidates that was reported as failed."""
    findings: list[Finding] = []
    examined = failed = 0
    for arm in history.candidates:
        loads = [load for loads in arm.loads.values() for load in loads]
        examined += len(loads) + arm.saves.submitted
        failed += len(arm.saves.failed) + sum(bool(load.completed and not load.completed.rec.ok) for load in loads)
        findings += _credited(arm, Prefixes(history, arm))
        findings += _served(history, arm)
    summary = f"{failed or 'none'} of {examined} transfers failed; {len(findings) or 'none'} used all the same"
    return conclude(CHECK, findings, unit="transfers", examined=examined, summary=summary)


def _credited(arm: ArmHistory, prefixes: Prefixes) -> Iterator[Finding]:
    """The step after a failed load goes on from where the load should have led."""
    for request, loads in arm.loads.items():
        for load in loads:
            row = arm.resumed(request, load.submitted.t_ns)
            b = load.submitted.rec.boundary
            if load.completed is None or load.completed.rec.ok or row is None or b is None:
                continue
            if 0 < b <= row.start:
                rank, place = load.submitted.rec.rank, prefixes.place(request)
                message = (
                    f"{prefixes.name(request)}: rank {rank}: load {load.submitted.rec.job} of [0, {b}) failed, and "
                    f"{row.start} tokens are credited"
                )
                at = place.model_copy(update={"rank": rank, "boundary": b})
                yield fail("failed_load_credited", message, at, [load.completed.where, row.where])


def _served(history: History, arm: ArmHistory) -> Iterator[Finding]:
    """A load brings a page of which the last save failed."""
    failed: dict[Page, str] = {}
    for owner in reversed(lineage(history, arm)):
        layouts = {rank: RankLayout(seen) for rank, seen in owner.ranks.items()}
        prefixes = Prefixes(history, owner)
        for one in owner.pages.transfers if layouts else ():
            layout = layouts.get(one.rank)
            pages = list(_pages(one, layout, prefixes)) if layout else []
            if one.direction == "save" and one.completions:
                done = one.completions[0]
                for page, _ in pages:
                    failed.pop(page, None)
                    if not done.rec.ok:
                        failed[page] = done.where
            elif one.direction == "load" and owner is arm:
                bad = [(page, end) for page, end in pages if page in failed]
                if bad:
                    (_, group, _), end = bad[-1]
                    message = (
                        f"{prefixes.name(one.request)}: rank {one.rank}: load {one.job} brings {len(bad)} pages whose "
                        f"last save failed, the last is [0, {end}) of group {group}"
                    )
                    at = {"rank": one.rank, "group": group, "boundary": end}
                    place = prefixes.place(one.request).model_copy(update=at)
                    make = fail if history.whole(arm.name) else unknown
                    yield make("failed_save_served", message, place, [failed[bad[-1][0]], *one.evidence])


def _pages(one: Transfer, layout: RankLayout, prefixes: Prefixes) -> Iterator[tuple[Page, int]]:
    """The pages of a job, and where each ends, in tokens."""
    for part in one.parts:
        engine_group = layout.engine_group(part.group)
        for index in layout.blocks(part) if engine_group else ():
            assert engine_group is not None
            end = (index + 1) * engine_group.tokens_per_block
            digest = prefixes.digest(one.request, end)
            if digest is not None:
                yield (one.rank, part.group, digest), end
