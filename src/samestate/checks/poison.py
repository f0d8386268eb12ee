"""``poison``: every load overwrote every poisoned byte, and touched nothing beside its pages (requirements 39)."""

from __future__ import annotations

from collections.abc import Iterator

from samestate.checks.base import CheckResult, Finding, Place
from samestate.checks.history import ArmHistory, History
from samestate.checks.layout import RankLayout, rank_layouts
from samestate.checks.page_history import NEVER, Transfer
from samestate.checks.prefixes import Prefixes
from samestate.checks.verdicts import conclude, fail, not_exercised, unknown
from samestate.evidence.records import BatchSource, PageSide

CHECK = "poison"


def poison(history: History) -> CheckResult:
    """Hold the destination rows and the guards of every load of the candidates against the sentinel."""
    findings: list[Finding] = []
    loads = pages = guards = left = 0
    for arm in history.candidates:
        layouts, prefixes = rank_layouts(arm), Prefixes(history, arm)
        for load in (one for one in arm.pages.transfers if one.direction == "load" and one.rank in layouts):
            loads += 1
            name = f"{prefixes.name(load.request)}: rank {load.rank}: load {load.job}"
            place = prefixes.place(load.request).model_copy(update={"rank": load.rank})
            rows = load.rows(PageSide.DESTINATION, "completed")
            left += sum(row.sentinel for row in rows)
            pages += load.poisoned.rec.pages if load.poisoned else 0
            guards += load.poisoned.rec.guards if load.poisoned else 0
            findings += _poisoned(load, name, place, len(rows))
            findings += _left(load, layouts[load.rank], name, place)
            findings += _guards(arm, load, layouts[load.rank], name, place)
    summary = f"{left} poisoned bytes left in {pages} pages of {loads} loads; {guards} guards"
    return conclude(CHECK, findings, unit="loads", examined=loads, summary=summary)


def poison_as_planned(history: History) -> CheckResult:
    """`poison`, where the plan asks for it; elsewhere the question does not come up."""
    level = history.plan.instruments.audit_level
    if level == "poison":
        return poison(history)
    message = f"pages were watched at level {level}: no load was poisoned"
    return not_exercised(CHECK, "not_planned", message, unit="loads")


def _poisoned(load: Transfer, name: str, place: Place, rows: int) -> Iterator[Finding]:
    if load.poisoned is None or not load.poisoned.rec.pages:
        yield unknown("not_poisoned", f"{name}: its destination was not poisoned", place, load.evidence)
    elif not rows or rows < load.poisoned.rec.pages:
        message = f"{name}: {load.poisoned.rec.pages} pages were poisoned, {rows} were read afterwards"
        yield unknown("missing_rows", message, place, [load.poisoned.where, *load.evidence])


def _left(load: Transfer, layout: RankLayout, name: str, place: Place) -> Iterator[Finding]:
    rows = [row for row in load.rows(PageSide.DESTINATION, "completed") if row.sentinel and layout.holds(row)]
    if not rows:
        return
    total, more = sum(row.sentinel for row in rows), f" (and {len(rows) - 1} more pages)" if len(rows) > 1 else ""
    message = f"{name}: {layout.name(rows[0])}: {rows[0].sentinel} poisoned bytes are left{more}, {total} in all"
    yield fail("sentinel_left", message, layout.place(place, rows[0]), load.evidence)


def _guards(arm: ArmHistory, load: Transfer, layout: RankLayout, name: str, place: Place) -> Iterator[Finding]:
    if load.poisoned is None:
        return
    if not load.poisoned.rec.guards:
        yield unknown("no_guards", f"{name}: no neighbouring page was guarded", place, [load.poisoned.where])
        return
    if load.guards is None:
        yield unknown("guards_not_checked", f"{name}: its guards were never checked", place, [load.poisoned.where])
        return
    since, until = load.poisoned.t_ns, load.guards.t_ns
    evidence = [load.poisoned.where, load.guards.where]
    for entry_index, block in load.guards.rec.changed:
        entry = layout.entries.get(entry_index)
        layer = entry.layer if entry else None
        what = f"{name}: block {block} of entry {entry_index} ({layer or 'not in the layout'}) is no page of the load"
        at = place.model_copy(update={"layer": layer})
        if load.guards.rec.steps_between == 0:
            yield fail("guard_changed", f"{what} and changed before any step ran", at, evidence)
        elif not _used(arm, block, since, until):
            message = f"{what} and changed; {load.guards.rec.steps_between} steps ran meanwhile"
            yield unknown("guard_changed", message, at, evidence)


def _used(arm: ArmHistory, block: int, since: int, until: int) -> bool:
    """Whether the engine itself may have written the block: its owner got it, or ran, in between."""
    owners = [one for one in arm.pages.assigned.get(block, ()) if one.t_ns <= until]
    if any(one.t_ns >= since for one in owners):
        return True
    held = [one for (_, of), ones in arm.pages.computed.items() if of == block for one in ones]
    if any(since <= one.t_ns <= until for one in held):
        return True
    return bool(owners) and _ran(arm, owners[-1].request, since, until)


def _ran(arm: ArmHistory, request: str, since: int, until: int) -> bool:
    """Whether a request was in a batch between two times, or in the one that was under way at the first."""
    rows = arm.schedules.get((request, BatchSource.SCHEDULER), ())
    first = arm.steps.line_at(since)
    times = (arm.steps.time_of(row.n) for row in rows if row.n >= first)
    return any((time if time is not None else NEVER) <= until for time in times)
