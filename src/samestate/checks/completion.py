"""``save-completion``: saves completed, not before their time, and whoever depended on one waited for it.

Two things depend on a save: a load of the same page, and a new owner of one of its source blocks.
Each must come after the completion, or after a wait that covers it (requirements 35-38).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import NamedTuple

from samestate.checks.base import CheckResult, Finding, Place
from samestate.checks.history import ArmHistory, History
from samestate.checks.layout import RankLayout, rank_layouts
from samestate.checks.page_history import Assigned, Transfer, Wait
from samestate.checks.page_sets import PageSets
from samestate.checks.prefixes import Prefixes
from samestate.checks.verdicts import conclude, fail, unknown
from samestate.evidence.records import BatchSource, PageRow, PageSide

CHECK = "save-completion"
BATCHES_TO_WAIT = 3
"""A wait belongs to the step that assigned the block. The worker makes it once that step's batch is out;
with asynchronous scheduling the next batch may be out by then, but never the one after."""


_BlockKey = tuple[int, str]
"""Rank, digest of the prefix that a block ends."""


class Reuse(NamedTuple):
    """Something that must not happen before a save is done."""

    what: str
    t_ns: int
    until_ns: int
    """A wait that ends by then lies before the reuse."""
    where: str


def save_completion(history: History) -> CheckResult:
    """Pair every save of the candidates with its completion, and every early reuse with its wait."""
    planned_ms = history.plan.instruments.save_delay_ms
    arms = [
        _Saves(arm, rank_layouts(arm), Prefixes(history, arm), history.whole(arm.name), planned_ms)
        for arm in history.candidates
    ]
    findings = [finding for saves in arms for finding in saves.findings()]
    made, reuses = sum(len(saves.saves) for saves in arms), sum(saves.reuses for saves in arms)
    if made and not reuses:
        message = "no page was loaded or reused after it was saved: nothing depended on a completion"
        findings.append(unknown("vacuous", message, Place(arm=history.candidates[0].name)))
    waited, early = sum(saves.waited for saves in arms), sum(saves.early for saves in arms)
    summary = (
        f"{sum(saves.completed for saves in arms)}/{made} saves completed, "
        f"{sum(saves.delayed for saves in arms)} delayed; {reuses} dependent reuses, "
        f"waits paired {waited}/{early}{'' if early else ': none came early'}"
    )
    return conclude(CHECK, findings, unit="saves", examined=made, summary=summary)


class _Saves:
    """The saves of an arm and what depends on them."""

    def __init__(
        self, arm: ArmHistory, layouts: dict[int, RankLayout], prefixes: Prefixes, whole: bool, planned_ms: int
    ) -> None:
        self._whole, self._planned_ms = whole, planned_ms
        transfers = [one for one in arm.pages.transfers if one.rank in layouts]
        self.saves = [one for one in transfers if one.direction == "save"]
        self.completed = self.delayed = self.reuses = self.early = self.waited = 0
        self._arm, self._layouts, self._prefixes = arm, layouts, prefixes
        self._sets = {rank: PageSets(layout) for rank, layout in layouts.items()}
        self._shared: dict[frozenset[int], frozenset[int]] = {}
        """One object for equal sets of entries, which most blocks have."""
        self._loads: dict[_BlockKey, list[tuple[Transfer, frozenset[int]]]] = {}
        """Loads of a block, and of which entries, in order."""
        for load in transfers:
            if load.direction == "load":
                for key, entries in self._blocks(load, load.rows(PageSide.DESTINATION, "completed")):
                    self._loads.setdefault(key, []).append((load, entries))

    def findings(self) -> Iterator[Finding]:
        for save in self.saves:
            name = f"{self._prefixes.name(save.request)}: rank {save.rank}: save {save.job}"
            place = self._prefixes.place(save.request).model_copy(update={"rank": save.rank})
            yield from self._completion(save, name, place)
            yield from self._dependents(save, name, place)
        yield from self._timed_out()

    def _completion(self, save: Transfer, name: str, place: Place) -> Iterator[Finding]:
        if save.submitted is None:
            yield unknown("save_unpaired", f"{name} completed and was never submitted", place, save.evidence)
        elif not save.completions:
            yield unknown("save_not_completed", f"{name} was never completed", place, save.evidence)
        elif len(save.completions) > 1:
            message = f"{name} was completed {len(save.completions)} times"
            yield fail("completed_twice", message, place, save.evidence)
        elif not save.completions[0].rec.ok:
            yield unknown("save_failed", f"{name} failed", place, save.evidence)
        else:
            self.completed += 1
        self.delayed += save.delayed is not None
        if (save.delayed.rec.delay_ms if save.delayed else 0) < self._planned_ms:
            message = f"{name} was not held back for the planned {self._planned_ms} ms"
            yield unknown("not_delayed", message, place, save.evidence)
        if save.delayed and save.completions and save.completions[0].t_ns < save.due_ns:
            after = (save.completions[0].t_ns - save.delayed.t_ns) / 1e6
            message = f"{name} is held back for {save.delayed.rec.delay_ms} ms and completed after {after:.1f} ms"
            yield fail("early_complete", f"{message}{self._first_page(save)}", place, save.evidence)

    def _timed_out(self) -> Iterator[Finding]:
        """Waits that gave up, also for a job that is not on record."""
        owners = {(save.rank, save.job): save for save in self.saves}
        for (rank, job), waits in sorted(self._arm.pages.waits.items()):
            request = owners[rank, job].request if (rank, job) in owners else ""
            place = self._prefixes.place(request).model_copy(update={"rank": rank})
            for wait in waits:
                if wait.timed_out:
                    message = (
                        f"{self._prefixes.name(request)}: rank {rank}: the wait for save {job} gave up after "
                        f"{wait.waited_ns / 1e6:.0f} ms, and the worker went on with the job open"
                    )
                    yield fail("wait_timed_out", message, place, [wait.where])

    def _dependents(self, save: Transfer, name: str, place: Place) -> Iterator[Finding]:
        done = min((one.t_ns for one in save.completions), default=None)
        waits = self._arm.pages.waits.get((save.rank, save.job), [])
        for reuse in self._reuses(save):
            self.reuses += 1
            if done is not None and done <= reuse.t_ns:
                continue
            self.early += 1
            if any(self._covers(wait, save, reuse) for wait in waits):
                self.waited += 1
                continue
            said = f"{len(waits)} waits name it, none covers this" if waits else "no wait names it"
            message = f"{name}{self._first_page(save)}: {reuse.what} before it was done; {said}"
            evidence = [reuse.where, *save.evidence, *(wait.where for wait in waits)]
            make = fail if self._whole else unknown
            yield make("reuse_before_completion", message, place, evidence)

    def _covers(self, wait: Wait, save: Transfer, reuse: Reuse) -> bool:
        """The wait was over after the delay was, and before the reuse."""
        return not wait.timed_out and max(save.t_ns, save.due_ns) <= wait.t_ns <= reuse.until_ns

    def _reuses(self, save: Transfer) -> Iterator[Reuse]:
        rows = save.rows(PageSide.SOURCE, "submitted")
        loads = {
            (load.rank, load.job, load.t_ns): load
            for key, entries in self._blocks(save, rows)
            for load, loaded in self._loads.get(key, ())
            if load.t_ns >= save.t_ns and not entries.isdisjoint(loaded)
        }
        for load in loads.values():
            what = f"load {load.job} of {self._prefixes.name(load.request)} read its page"
            yield Reuse(what, load.t_ns, load.t_ns, load.evidence[0])
        since = self._last_ran(save)
        layout = self._layouts[save.rank]
        ends: dict[int, set[int]] = {}
        for pages in self._sets[save.rank].of(rows):
            if pages.block:
                held = layout.holds(pages.rows[0])
                ends.setdefault(pages.block, set()).update([layout.end(pages.rows[0])] if held else [])
        for block in sorted(ends):
            owners = self._arm.pages.assigned_after(block, min(since, save.t_ns))
            new = next((one for one in owners if self._takes(one, save, ends[block], since)), None)
            if new is not None:
                until = self._arm.steps.after(new.t_ns, BATCHES_TO_WAIT)
                yield Reuse(f"block {block} went to {self._prefixes.name(new.request)}", new.t_ns, until, new.where)

    def _takes(self, new: Assigned, save: Transfer, ends: set[int], since: int) -> bool:
        """Whether an assignment takes a block away from what was saved, not to share it; `ends`: of its pages."""
        if new.request == save.request:
            return new.t_ns > save.t_ns
        if new.t_ns <= since:
            return False
        lookups = self._arm.lookups.get(new.request, ())
        local = max((seen.rec.local_tokens for seen in lookups if seen.t_ns <= new.t_ns), default=0)
        return not any(end <= local and self._prefixes.shared(save.request, new.request, end) for end in ends)

    def _last_ran(self, save: Transfer) -> int:
        """When the saved request was last in a batch before its save: its pages may be freed from then on."""
        latest = self._arm.steps.line_at(save.t_ns)
        rows = takewhile(
            lambda row: row.n <= latest, self._arm.schedules.get((save.request, BatchSource.SCHEDULER), ())
        )
        last = max((row.n for row in rows), default=None)
        time = self._arm.steps.time_of(last) if last is not None else None
        return save.t_ns if time is None else time

    def _blocks(self, transfer: Transfer, rows: list[PageRow]) -> list[tuple[_BlockKey, frozenset[int]]]:
        """What the rows are the state of, block by block, and of which entries."""
        layout = self._layouts[transfer.rank]
        entries: dict[int, set[int]] = {}
        for pages in self._sets[transfer.rank].of(rows):
            if layout.holds(pages.rows[0]):
                entries.setdefault(layout.end(pages.rows[0]), set()).update([row.entry for row in pages.rows])
        found = []
        for end, of_end in entries.items():
            digest = self._prefixes.digest(transfer.request, end)
            if digest is not None:
                found.append(((transfer.rank, digest), self._shared.setdefault(frozenset(of_end), frozenset(of_end))))
        return found

    def _first_page(self, save: Transfer) -> str:
        layout = self._layouts[save.rank]
        rows = [row for row in save.rows(PageSide.SOURCE, "submitted") if layout.holds(row)]
        return f" ({layout.name(rows[0])})" if rows else ""
