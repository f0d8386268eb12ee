"""What a latency study shows: medians by condition, ratios, ranges over groups, attempted against actual paths.

A group is one length in one repetition. Nothing is imputed: a missing cell is ``unavailable``, and requests that
computed another suffix are ``not comparable`` (requirements 109–117).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence
from statistics import median
from typing import NamedTuple, TypeVar

from samestate.checks.history import History, MissingEvidence
from samestate.checks.latency_copies import copy_speeds, reload_costs
from samestate.checks.latency_figures import Attempted, Cell, Comparison, PathCell, Spread, Study
from samestate.checks.latency_paths import FIVE, ActualPath
from samestate.checks.latency_sample import CONDITIONS, OFF, ON, Condition, Sample, samples
from samestate.checks.latency_statistics import Range, bootstrap, median_of_ratios, middle, over_groups
from samestate.evidence.records import OperationName
from samestate.plans.scenarios import CANDIDATE, CONTROL

__all__ = [
    "ASKED",
    "NOT_COMPARABLE",
    "UNAVAILABLE",
    "UNNAMED",
    "Asked",
    "Comparison",
    "Study",
    "break_even",
    "limitations",
    "not_counted",
    "study",
    "summarized",
]

K = TypeVar("K", bound=Hashable)

UNAVAILABLE, NOT_COMPARABLE = "unavailable", "not comparable"
UNNAMED = "unknown"
"""Of a path that the records do not name."""
NOT_CLAIMED = (
    "No confidence interval is claimed where none is printed: a range over groups is the spread of what was seen.",
    "ON cold against OFF cold compares two engines end to end; it isolates neither transfers nor watching.",
    "Nothing is claimed about concurrency, or about capacity beyond the engine's own memory.",
)


class Asked(NamedTuple):
    """A comparison to make."""

    of: Condition
    to: Condition
    saves: bool = False
    """What reuse saves: the one side computes everything, the other reuses. Else both must compute one suffix."""

    @property
    def name(self) -> str:
        return f"{self.of} / {self.to}"


ASKED = (
    Asked(Condition(OFF, OperationName.COLD), Condition(ON, OperationName.RELOAD), saves=True),
    Asked(Condition(ON, OperationName.COLD), Condition(OFF, OperationName.COLD)),
    Asked(Condition(OFF, OperationName.REPEAT), Condition(ON, OperationName.REPEAT)),
    Asked(Condition(ON, OperationName.RELOAD), Condition(ON, OperationName.REPEAT)),
)


def study(history: History, *, eligible: bool) -> Study:
    """The study of a run; `eligible`: its times may be measurements. Raises MissingEvidence for another plan."""
    plan = history.plan
    if plan.latency is None:
        raise MissingEvidence("no_latency", f"plan {plan.name} measures no latency")
    found = samples(history)
    run = ineligible(history) or (None if eligible else "the run is tagged as no normal one")
    refused = dict(not_counted(found, run, plan.output_tokens))
    seed = plan.latency.order_seed
    order = "ascending by trial, then by length" if seed is None else f"shuffled by seed {seed}"
    speeds = copy_speeds(history)
    counted = [one for one in found if one.measured and (one.arm, one.op) not in refused]
    beside = [arm.name for arm in plan.arms if arm.name not in (CONTROL, CANDIDATE)]
    asks = _side_by_side(beside) if beside else _Asks(CONDITIONS, ASKED)
    made = summarized(found, refused, order=order, seed=plan.seed, conditions=asks.conditions, asked=asks.asked)
    if beside:
        made = made.model_copy(update={"break_even": _break_evens(made.comparisons, asks.asked)})
    return made.model_copy(update={"copies": speeds, "reloads": reload_costs(counted, speeds)})


class _Asks(NamedTuple):
    conditions: Sequence[Condition]
    asked: Sequence[Asked]


def _side_by_side(arms: Sequence[str]) -> _Asks:
    """What is compared of engines that take turns: each with the one without a cache, and reloads with the first's."""
    cold, repeat, reload = OperationName.COLD, OperationName.REPEAT, OperationName.RELOAD
    off = Condition(OFF, cold)
    conditions = [off, Condition(OFF, repeat)]
    conditions += [Condition(arm, name) for arm in arms for name in (cold, repeat, reload)]
    asked = [Asked(off, Condition(arm, reload), saves=True) for arm in arms]
    asked += [Asked(Condition(arm, cold), off) for arm in arms]
    asked += [Asked(Condition(arm, reload), Condition(arms[0], reload)) for arm in arms[1:]]
    return _Asks(conditions, asked)


def _break_evens(comparisons: Sequence[Comparison], asked: Sequence[Asked]) -> str:
    return "; ".join(f"{one.to.arm}: {break_even(comparisons, one.name)}" for one in asked if one.saves)


def limitations(history: History) -> list[str]:
    """What order and host leave open, as recorded (requirements 106, 107); nothing for another plan."""
    try:
        latency = history.plan.latency
    except MissingEvidence:
        return []
    if latency is None:
        return []
    found = [
        "Trials ran in fixed ascending order of trial and length; request history is not randomized."
        if latency.order_seed is None
        else f"Trials were shuffled by seed {latency.order_seed}, once, for all engines alike."
    ]
    sampled = [seen.rec for arm in history.arms.values() for of_op in arm.hosts.values() for seen in of_op]
    if not sampled:
        return [*found, "The host's load was not sampled: what else worked there is not known."]
    loads = [rec.load for rec in sampled]
    cpus = max(rec.cpus for rec in sampled)
    free = min(rec.memory_available / rec.memory_total for rec in sampled if rec.memory_total)
    return [
        *found,
        f"The host's load was {min(loads):.1f} to {max(loads):.1f} on {cpus} processors, {free:.0%} of its memory or "
        "more was free: other work was sampled, and its influence not removed.",
    ]


def ineligible(history: History) -> str | None:
    """Why no time of the run counts; None: they may (requirement 105)."""
    for arm in history.arms.values():
        for seen in arm.engines[:1]:
            if seen.rec.audit_level not in (None, "metadata"):
                return f"arm {arm.name} was watched at level {seen.rec.audit_level}"
            if seen.rec.engine != "vllm":
                return f"arm {arm.name} ran the simulated engine"
        if arm.pages.delayed:
            return f"arm {arm.name} had its saves held back"
        if arm.markers.streams:
            return f"arm {arm.name} had its sampler recorded"
    return None


def not_counted(found: Sequence[Sample], run: str | None, output_tokens: int) -> Iterator[tuple[tuple[str, str], str]]:
    """(arm, operation) of every measured request whose times do not count, and why."""
    outputs: dict[str, set[str | None]] = {}
    for one in found:
        outputs.setdefault(one.case, set()).add(one.output)
    for one in found:
        if not one.measured:
            continue
        if run is not None:
            why = run
        elif outputs[one.case] - {None} and len(outputs[one.case]) > 1:
            why = "its input had not one and the same output in all conditions"
        elif one.generated != output_tokens:
            why = f"{one.generated} of {output_tokens} tokens were generated"
        elif one.first_token is None or one.total is None or len(one.timed) > 1:
            why = "it was not timed, or not once"
        elif one.path is None:
            why = one.taken.why
        else:
            continue
        yield (one.arm, one.op), why


def summarized(
    found: Sequence[Sample],
    refused: dict[tuple[str, str], str],
    *,
    order: str,
    seed: int,
    conditions: Sequence[Condition] = CONDITIONS,
    asked: Sequence[Asked] = ASKED,
) -> Study:
    """The study over samples; `refused`: measured ones that do not count, and why. The first of `asked` breaks even."""
    measured = [one for one in found if one.measured]
    counted = [one for one in measured if (one.arm, one.op) not in refused]
    groups = sorted({(one.repetition, one.tokens) for one in measured})
    arms: dict[int, set[str]] = {}
    for one in found:
        arms.setdefault(one.repetition, set()).add(one.condition.arm)
    comparisons = [compare(counted, group, one) for one in asked for group in groups]
    return Study(
        pairs=sum(OFF in names and len(names) > 1 for names in arms.values()),
        tasks=1,
        inputs=len({one.case for one in found}),
        measured_inputs=len({one.case for one in measured}),
        requests=len(found),
        measured=len(measured),
        counted=len(counted),
        not_counted=[f"{arm}: {op}: {why}" for (arm, op), why in refused.items()],
        held_up=[f"{one.arm}: {one.op}" for one in counted if one.held_up],
        order=order,
        cells=[cell(counted, group, condition) for group in groups for condition in conditions],
        comparisons=comparisons,
        spreads=list(_spreads(comparisons, counted, seed, asked)),
        attempted=attempted(measured, conditions),
        paths=by_path(counted),
        break_even=break_even(comparisons, asked[0].name),
        not_claimed=list(NOT_CLAIMED),
    )


def cell(counted: Sequence[Sample], group: tuple[int, int], condition: Condition) -> Cell:
    """Medians of the trials of one condition in one group; a cell without trials has no times."""
    mine = [one for one in _of_group(counted, group) if one.condition == condition]
    return Cell(
        repetition=group[0],
        tokens=group[1],
        condition=str(condition),
        trials=len(mine),
        first_token=middle([one.first_token for one in mine if one.first_token is not None]),
        total=middle([one.total for one in mine if one.total is not None]),
        decode_rate=middle([one.decode_rate for one in mine if one.decode_rate is not None]),
        paths=dict(Counter(_word(one.path) for one in mine)),
        credited=_each(one.credited for one in mine),
        suffix=_each(one.suffix for one in mine),
        moved=_each(one.moved for one in mine),
    )


def compare(counted: Sequence[Sample], group: tuple[int, int], asked: Asked) -> Comparison:
    """One comparison in one group, input by input."""
    mine = _of_group(counted, group)
    of = {one.case: one for one in mine if one.condition == asked.of}
    to = {one.case: one for one in mine if one.condition == asked.to}
    both = [case for case in of if case in to]
    note = UNAVAILABLE if not both else _objection([(of[case], to[case]) for case in both], saves=asked.saves)
    ratios = both if not note else []
    return Comparison(
        repetition=group[0],
        tokens=group[1],
        name=asked.name,
        inputs=len(both),
        first_token=median_of_ratios(_firsts(of, ratios), _firsts(to, ratios)),
        total=median_of_ratios(_totals(of, ratios), _totals(to, ratios)),
        suffix=[_each(one.suffix for one in side.values()) for side in (of, to)],
        note=note,
    )


def _objection(pairs: Sequence[tuple[Sample, Sample]], *, saves: bool) -> str:
    """Why pairs are not comparable; empty: they are."""
    if any(one.path is None or one.suffix is None for pair in pairs for one in pair):
        return f"{NOT_COMPARABLE}: a path is not known"
    if saves:
        for cold, reused in pairs:
            if cold.path is not ActualPath.RECOMPUTE:
                return f"{NOT_COMPARABLE}: {cold.condition} took path {_word(cold.path)}, not recompute"
            if reused.path is ActualPath.RECOMPUTE:
                return f"{NOT_COMPARABLE}: {reused.condition} reused nothing"
        return ""
    unequal = [(left.suffix, right.suffix) for left, right in pairs if left.suffix != right.suffix]
    if unequal:
        return f"{NOT_COMPARABLE}: {unequal[0][0]} tokens computed against {unequal[0][1]}"
    return ""


def attempted(measured: Collection[Sample], conditions: Sequence[Condition] = CONDITIONS) -> list[Attempted]:
    """Attempted × actual, over all measured requests, counted or not (requirements 113, 114)."""
    found = []
    for condition in conditions:
        mine = [one for one in measured if one.condition == condition]
        actual = Counter(_word(one.path) for one in mine)
        found.append(Attempted(condition=str(condition), requests=len(mine), actual=dict(actual)))
    return found


def break_even(comparisons: Sequence[Comparison], name: str) -> str:
    """The shortest reused prefix that paid in every group of its length and of all longer ones.

    Only of what was measured: between two lengths nothing is interpolated.
    """
    reused: dict[int, list[float]] = {}
    for one in comparisons:
        if one.name == name and not one.note and one.first_token is not None and one.suffix[1]:
            reused.setdefault(one.tokens - max(one.suffix[1]), []).append(one.first_token)
    if not reused:
        return f"break-even: {UNAVAILABLE}"
    paying = None
    for prefix in sorted(reused, reverse=True):
        if min(reused[prefix]) <= 1:
            break
        paying = prefix
    measured = ", ".join(f"{prefix:,}" for prefix in sorted(reused))
    if paying is None:
        return f"break-even: none of the measured reused prefixes paid ({measured} tokens)"
    return f"break-even: reuse paid from {paying:,} reused tokens on (measured: {measured})"


def by_path(counted: Collection[Sample]) -> list[PathCell]:
    """Every length by every one of the five paths, and others that were taken; what nothing took has no time."""
    others = [path for path in (ActualPath.EXTERNAL, ActualPath.MIXED) if any(one.path is path for one in counted)]
    found = []
    for tokens in sorted({one.tokens for one in counted}):
        for path in (*FIVE, *others):
            mine = [one for one in counted if one.tokens == tokens and one.path is path]
            found.append(
                PathCell(
                    tokens=tokens,
                    path=path.value,
                    requests=len(mine),
                    first_token=middle([one.first_token for one in mine if one.first_token is not None]),
                    suffix=_each(one.suffix for one in mine),
                    moved=_each(one.moved for one in mine),
                )
            )
    return found


def _spreads(
    comparisons: Sequence[Comparison], counted: Sequence[Sample], seed: int, all_asked: Sequence[Asked]
) -> Iterator[Spread]:
    for asked in all_asked:
        mine = [one for one in comparisons if one.name == asked.name and not one.note]
        groups = {(one.repetition, one.tokens) for one in mine}
        for measure, group_values in (
            ("first token", [one.first_token for one in mine]),
            ("total", [one.total for one in mine]),
        ):
            spread = over_groups([value for value in group_values if value is not None])
            if spread is not None:
                yield _spread(asked, measure, spread, _input_ratios(counted, asked, measure, groups), seed)


def _spread(asked: Asked, measure: str, spread: Range, ratios: list[float], seed: int) -> Spread:
    interval = bootstrap(ratios, seed)
    return Spread(
        name=asked.name,
        measure=measure,
        low=spread.low,
        high=spread.high,
        groups=spread.groups,
        called=spread.name,
        interval=[interval.low, interval.high] if interval else None,
        inputs=len(ratios),
    )


def _input_ratios(
    counted: Sequence[Sample], asked: Asked, measure: str, groups: Collection[tuple[int, int]]
) -> list[float]:
    """One ratio an input: over repetitions its median, for the same input again is no other input."""
    sides = [
        {
            (one.repetition, one.case): one
            for one in counted
            if one.condition == side and (one.repetition, one.tokens) in groups
        }
        for side in (asked.of, asked.to)
    ]
    pick = _firsts if measure == "first token" else _totals
    of, to = (pick(side, list(side)) for side in sides)
    ratios: dict[str, list[float]] = {}
    for key in of:
        if to.get(key):
            ratios.setdefault(key[1], []).append(of[key] / to[key])
    return [median(values) for values in ratios.values()]


def _of_group(counted: Sequence[Sample], group: tuple[int, int]) -> list[Sample]:
    return [one for one in counted if (one.repetition, one.tokens) == group]


def _firsts(side: dict[K, Sample], keys: Sequence[K]) -> dict[K, float]:
    return {key: value for key in keys if (value := side[key].first_token) is not None}


def _totals(side: dict[K, Sample], keys: Sequence[K]) -> dict[K, float]:
    return {key: value for key in keys if (value := side[key].total) is not None}


def _word(path: ActualPath | None) -> str:
    return path.value if path is not None else UNNAMED


def _each(values: Iterator[int | None] | Collection[int | None]) -> list[int]:
    return sorted({value for value in values if value is not None})
