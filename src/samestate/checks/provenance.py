"""``provenance``: every reused prefix is one that an earlier request had computed, under the same salt.

p is what the scheduler credited, whatever the connector says of it. [0, p) must be the beginning of an earlier request
that reached p, and where recurrent state lies at step ends alone, a step of such a request must have
ended at p. B, where a load reports it, must be p.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from samestate.checks.base import CheckResult, Finding, Place, Verdict
from samestate.checks.boundary import expected_ranks, restored
from samestate.checks.geometry import missing_steps, only_step_ends, sources_agree
from samestate.checks.history import History, Load, Row
from samestate.checks.prefixes import Prefixes
from samestate.checks.scenario import Generation, generations, lineage
from samestate.checks.transfers import load_done
from samestate.checks.verdicts import conclude, fail, unknown
from samestate.evidence.records import EngineGroup, EntryKind

CHECK = "provenance"
IMPOSSIBLE = {
    "foreign_salt",
    "never_computed",
    "state_never_computed",
    "boundary_not_credited",
    "retained_lookup_boundary",
}
"""Findings after which what was reused cannot be the state of [0, p)."""


def provenance(history: History) -> CheckResult:
    """Follow what every generation of every candidate reused to where it was computed."""
    origins = _Origins(history)
    findings = [*sources_agree(history), *_sizes_known(history)]
    good = reused = 0
    for generation in origins.generations:
        found = list(origins.findings(generation))
        hit = bool(generation.first and generation.first.start)
        reused += hit
        good += hit and not found
        findings += found
    summary = f"{good}/{reused} reused prefixes were computed before, under their salt, up to a step end"
    return conclude(CHECK, findings, unit="generations", examined=len(origins.generations), summary=summary)


def impossible(history: History) -> set[tuple[str, str]]:
    """Arm and operation of the generations whose reused state cannot be right; raises MissingEvidence."""
    origins = _Origins(history)
    return {
        (one.arm.name, one.op.op)
        for one in origins.generations
        if any(found.verdict is Verdict.FAIL and found.code in IMPOSSIBLE for found in origins.findings(one))
    }


def _sizes_known(history: History) -> Iterator[Finding]:
    """Whether a kernel saves states within steps decides where states are: not to know it is not to judge."""
    for arm in history.candidates:
        place = Place(arm=arm.name)
        if not arm.schedulers:
            message = f"arm {arm.name}: no scheduler_configured record: where states are kept is not known"
            yield unknown("not_recorded", message, place)
        registered = {(rank, _recurrent(seen.rec.engine_groups), seen.where) for rank, seen in arm.ranks.items()}
        for seen in arm.schedulers:
            groups = _recurrent(seen.rec.engine_groups)
            for rank, others, where in sorted(registered):
                if groups != others:
                    message = (
                        f"arm {arm.name}: recurrent groups are {_said(groups)} to the scheduler and {_said(others)} "
                        f"to rank {rank}: where states are kept is not known"
                    )
                    yield unknown("groups_disagree", message, place, [seen.where, where])
        recurrent = any(_recurrent(seen.rec.engine_groups) for seen in arm.schedulers)
        if recurrent and "cache_config.mamba_cache_mode" not in arm.engine.rec.settings:
            message = (
                f"arm {arm.name}: no cache_config.mamba_cache_mode is recorded: where states are kept is not known"
            )
            yield unknown("not_recorded", message, place, [arm.engine.where])


def _recurrent(groups: Sequence[EngineGroup]) -> tuple[int, ...]:
    return tuple(sorted(group.group for group in groups if group.entry_kind is EntryKind.RECURRENT))


def _said(groups: tuple[int, ...]) -> str:
    return ", ".join(map(str, groups)) or "none"


class _Origins:
    """What came before each generation of a scenario."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._prefixes = {arm.name: Prefixes(history, arm) for arm in history.candidates}
        self._ranks = {arm.name: expected_ranks(arm) for arm in history.candidates}
        self._aligned = {arm.name: only_step_ends(arm) for arm in history.candidates}
        self.generations = generations(history, history.candidates)

    def findings(self, one: Generation) -> Iterator[Finding]:
        """Findings about one generation; one without an output or a step is unknown."""
        first, output = one.first, one.output
        if first is None or output is None:
            yield unknown("missing_batches", f"{one.name}: no step or no output is recorded", one.place)
            return
        gap = missing_steps(one.schedule, one.tokens + len(output.rec.token_ids) - 1)
        if gap is not None:
            yield unknown("missing_batches", f"{one.name}: {gap}", one.place, [first.where])
        if first.start:
            yield from self._computed_before(one, first)
        yield from self._loads(one, first)

    # --- where it was computed ------------------------------------------------------------------

    def _computed_before(self, one: Generation, first: Row) -> Iterator[Finding]:
        p, earlier = first.start, self._before(one)
        place = one.place.model_copy(update={"boundary": p})
        alike = [other for other in earlier if self._begins_alike(one, other, p)]
        lost = [other for other in earlier if self._unclear(other)]
        sure = not (lost or self._unread(one)) and all(
            self._history.whole(name) for name in {one.arm.name, *(o.arm.name for o in earlier)}
        )
        make = fail if sure else unknown
        reached = [other for other in alike if any(row.end >= p for row in other.schedule or ())]
        if not reached:
            foreign = [other for other in earlier if self._begins_alike(one, other, p, salted=False)]
            if foreign:
                message = (
                    f"{one.name}: {p} tokens reused, computed by {foreign[0].op.op} under another cache salt alone"
                )
                yield make("foreign_salt", message, place, [first.where])
            else:
                message = f"{one.name}: {p} tokens reused, and no earlier request that begins so computed them"
                yield make("never_computed", message, place, [first.where])
            return
        ends = sorted({row.end for other in alike for row in self._steps_before(one, other) if not row.drafted})
        if self._aligned[one.arm.name] and p not in ends:
            below, above = [end for end in ends if end < p][-1:], [end for end in ends if end > p][:1]
            near = " and ".join(map(str, below + above)) or "none"
            message = (
                f"{one.name}: request {one.request} reuses the state of [0, {p}), and no step of a request that begins "
                f"so had ended at {p} (nearest step ends: {near})"
            )
            yield make("state_never_computed", message, place, [first.where, *(row.where for row in self._last(alike))])

    def _before(self, one: Generation) -> list[Generation]:
        """Earlier generations of this arm and of those it follows, and the others of its batch."""
        arms = {arm.name for arm in lineage(self._history, one.arm)}
        at = self.generations.index(one)
        return [
            other
            for index, other in enumerate(self.generations)
            if other.arm.name in arms and index != at and (index < at or self._one_batch(one, other))
        ]

    def _one_batch(self, one: Generation, other: Generation) -> bool:
        same = (one.arm.name, one.op.together) == (other.arm.name, other.op.together)
        return same and one.op.together is not None

    def _begins_alike(self, one: Generation, other: Generation, p: int, *, salted: bool = True) -> bool:
        mine, theirs = self._prefixes[one.arm.name], self._prefixes[other.arm.name]
        of, of_other = (mine.digest, theirs.digest) if salted else (mine.unsalted, theirs.unsalted)
        digest = of(one.request or "", p)
        return digest is not None and digest == of_other(other.request or "", p)

    def _steps_before(self, one: Generation, other: Generation) -> list[Row]:
        """Of a request in the same batch only steps before this one's first had left their state."""
        rows = list(other.schedule or ())
        if not self._one_batch(one, other) or one.first is None:
            return rows
        return [row for row in rows if row.n < one.first.n]

    def _unclear(self, other: Generation) -> bool:
        """Whether not all that a request computed, and where its steps ended, is recorded."""
        if other.output is None or not other.schedule or self._unread(other):
            return True
        end = other.tokens + len(other.output.rec.token_ids) - 1
        return missing_steps(other.schedule, end) is not None or any(row.drafted for row in other.schedule)

    def _unread(self, one: Generation) -> bool:
        """Whether the tokens of its prompt are not recorded: what it begins as is not known then."""
        return self._prefixes[one.arm.name].digest(one.request or "", one.tokens) is None

    def _last(self, alike: Sequence[Generation]) -> list[Row]:
        return [row for other in alike[-1:] for row in list(other.schedule or ())[:1]]

    # --- what the loads say ---------------------------------------------------------------------

    def _loads(self, one: Generation, first: Row) -> Iterator[Finding]:
        adapter = any(registered.rec.transfer_groups for registered in one.arm.ranks.values())
        loads = one.loads
        if one.external and adapter:
            for rank in sorted(self._ranks[one.arm.name] - set(loads)):
                place = one.place.model_copy(update={"rank": rank})
                yield unknown("missing_rank", f"{one.name}: rank {rank} records no load", place)
        for rank, of_rank in sorted(loads.items()):
            place = one.place.model_copy(update={"rank": rank})
            for load in of_rank:
                yield from load_done(one.name, load, place)
            for row, together in one.resumptions(rank).items():
                yield from self._boundary(one, row, together, place)

    def _boundary(self, one: Generation, row: Row, loads: list[Load], place: Place) -> Iterator[Finding]:
        b, p, n = restored(loads), row.start, one.tokens
        if b is None or b == p:
            return
        evidence = [row.where, *(load.submitted.where for load in loads)]
        at = place.model_copy(update={"boundary": b})
        if b >= n:
            message = (
                f"{one.name}: rank {place.rank}: checkpoint of [0, {b}) restored for N={n}, {p} tokens credited: "
                "the last token is applied twice (lookup over the full prompt)"
            )
            yield fail("retained_lookup_boundary", message, at, evidence)
            return
        message = f"{one.name}: rank {place.rank}: checkpoint of [0, {b}) restored, {p} tokens credited"
        make = fail if b > p or self._history.whole(one.arm.name) else unknown
        yield make("boundary_not_credited", message, at, evidence)
