"""How long each operation took by its own records, cold beside reused. Shown, never claimed.

Times are of the host's monotonic clock as the client's stream has them: from the moment an operation was handed to
the engine to the end of its answer. No record says when a first token came.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from math import floor, log10
from typing import NamedTuple

from samestate.checks.analyzers import Judgement
from samestate.checks.history import ArmHistory, History
from samestate.checks.seen import Seen
from samestate.evidence.records import OperationName, OperationStarted
from samestate.plans.scenarios import CONTROL
from samestate.reports.latency_waterfall import Waterfall, waterfalls

LEFT_OUT = {OperationName.RESET, OperationName.INTERPOSER}
"""They have a purpose of their own, and nothing to be compared with."""
_PAGE_LEVELS = {"digest", "poison"}
_MS = 1e6


class Timed(NamedTuple):
    """One generation that ran alone."""

    arm: str
    case: str
    op: str
    name: OperationName
    tokens: int
    """N."""
    generated: int
    credited: int | None
    """p; None: not recorded."""
    first_batch: float | None
    """Milliseconds from the start of the operation until its first batch was made; None: not recorded."""
    total: float
    """Milliseconds from the start of the operation to its end."""
    where: str
    """The record of its start."""


class Latency(NamedTuple):
    """The operations of a run with their times."""

    arms: list[tuple[str, list[Timed]]]
    """By arm, the control first, in order of time."""
    imported: set[str]
    """Arms that ran for another archive."""
    ineligible: list[str]
    """Why no time of this run may count as a measurement; empty: it may."""
    together: int
    """Generations that ran with others: their times overlap, and are not shown."""
    waterfalls: Sequence[Waterfall] = ()
    """Of a latency study: where a reload's time to its first token goes."""

    @property
    def longest(self) -> float:
        """Milliseconds."""
        return max((one.total for _, timed in self.arms for one in timed), default=0.0)

    @property
    def names(self) -> list[str]:
        """Kinds of operations, cold ones first."""
        names = {one.name for _, timed in self.arms for one in timed}
        return sorted(names, key=lambda name: (name is not OperationName.COLD, name))

    @property
    def trials(self) -> str:
        """How many operations stand behind each arm, case and kind."""
        counts = Counter((one.arm, one.case, one.name) for _, timed in self.arms for one in timed).values()
        if not counts:
            return "no trials"
        low, high = min(counts), max(counts)
        return f"{low} trial{'s' * (low > 1)}" if low == high else f"{low} to {high} trials"


def latency(history: History, judgement: Judgement) -> Latency:
    """Every generation of every arm that ended well and ran alone."""
    arms, together = [], 0
    for arm in sorted(history.arms.values(), key=lambda arm: arm.name != CONTROL):
        together += sum(started.rec.together is not None for started in arm.started)
        timed = [one for started in arm.started for one in _timed(arm, started)]
        if timed:
            arms.append((arm.name, timed))
    imported = {arm.name for arm in history.arms.values() if arm.imported_from is not None}
    return Latency(arms, imported, list(_ineligible(history, judgement)), together, waterfalls(history))


def _timed(arm: ArmHistory, started: Seen[OperationStarted]) -> Iterator[Timed]:
    rec = started.rec
    ends, output = arm.ends.get(rec.op, []), arm.output(rec.op)
    alone = rec.together is None and rec.name not in LEFT_OUT
    if not alone or output is None or len(ends) != 1 or not ends[0].rec.ok or ends[0].t_ns < started.t_ns:
        return
    rows = list(arm.schedule(rec.op) or ())[:1]
    first = arm.steps.time_of(rows[0].n) if rows else None
    yield Timed(
        arm=arm.name,
        case=rec.case,
        op=rec.op,
        name=rec.name,
        tokens=rec.prompt_tokens,
        generated=len(output.rec.token_ids),
        credited=rows[0].start if rows else None,
        first_batch=(first - started.t_ns) / _MS if first is not None and first >= started.t_ns else None,
        total=(ends[0].t_ns - started.t_ns) / _MS,
        where=started.where,
    )


def _ineligible(history: History, judgement: Judgement) -> Iterator[str]:
    """What the records say against a measurement; last what the judgement says on its own."""
    engines = [(arm, seen.rec) for arm in history.arms.values() for seen in arm.engines[:1]]
    reasons = []
    if any(engine.engine == "sim" for _, engine in engines):
        reasons.append("the engine was the simulated one")
    if history.fault:
        reasons.append("a fault was injected")
    if levels := sorted({engine.audit_level for _, engine in engines if engine.audit_level in _PAGE_LEVELS}):
        reasons.append(f"pages were read at level {' and '.join(levels)}")
    if any(arm.pages.delayed for arm in history.arms.values()):
        reasons.append("saves were held back")
    if imported := [arm.name for arm in history.arms.values() if arm.imported_from is not None]:
        verb = "was" if len(imported) == 1 else "were"
        reasons.append(f"{', '.join(imported)} {verb} imported, and ran at another time")
    yield from reasons
    if not reasons and not judgement.performance_eligible:
        yield "the judgement says so"


# --- drawing --------------------------------------------------------------------------------------

STEPS = 4
"""Of every axis, however long."""
_ROUND = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
BAR_HEIGHT, CASE_GAP = 17, 8
"""Pixels."""


class Bar(NamedTuple):
    """An operation on the axis; lengths in parts of it."""

    timed: Timed
    y: int
    """Of its top, pixels."""
    case: str
    """Before the first bar of a case; else empty."""
    waited: float
    """Until the first batch; 0: not recorded."""
    whole: float


class Chart(NamedTuple):
    """The bars of one arm, case by case."""

    arm: str
    imported: bool
    bars: list[Bar]
    height: int
    """Pixels."""

    @property
    def label_percent(self) -> int:
        """Of the width, left of the axis, for the names of cases and operations."""
        return 16 if all(len(bar.case) <= 6 for bar in self.bars) else 24


class Axis(NamedTuple):
    """From 0 to `end` milliseconds, the same for all charts."""

    end: float
    ticks: list[float]


def charts(made: Latency, most: int) -> tuple[Axis, list[Chart]]:
    """One chart an arm, of its first `most` cases."""
    axis = axis_to(made.longest)
    return axis, [_chart(arm, arm in made.imported, timed, axis, most) for arm, timed in made.arms]


def _chart(arm: str, imported: bool, timed: list[Timed], axis: Axis, most: int) -> Chart:
    by_case: dict[str, list[Timed]] = {}
    for one in timed:
        by_case.setdefault(one.case, []).append(one)
    bars, y = list[Bar](), 0
    for case, group in islice(by_case.items(), most):
        for at, one in enumerate(group):
            waited = min(1.0, (one.first_batch or 0.0) / axis.end)
            bars.append(Bar(one, y, "" if at else case, waited, one.total / axis.end))
            y += BAR_HEIGHT
        y += CASE_GAP
    return Chart(arm, imported, bars, y)


def axis_to(longest: float) -> Axis:
    """An axis with round numbers on it that holds `longest` milliseconds."""
    if longest <= 0:
        return Axis(float(STEPS), list(map(float, range(STEPS + 1))))
    rough = longest / STEPS
    unit = 10.0 ** floor(log10(rough))
    step = next(unit * part for part in _ROUND if unit * part >= rough * (1 - 1e-9))
    return Axis(step * STEPS, [step * at for at in range(STEPS + 1)])
