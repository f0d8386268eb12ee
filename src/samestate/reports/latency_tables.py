"""A latency study as tables of words, for every report: cells, comparisons, ranges, attempted against actual paths.

What is missing says ``unavailable``; it is never filled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from samestate.checks.latency_copies import GOAL
from samestate.checks.latency_paths import FIVE
from samestate.checks.latency_study import UNAVAILABLE, UNNAMED, Study

SHOWN_REASONS = 3
"""Of requests whose times do not count."""
GIGA = 1e9
"""Bytes in a GB."""


class WordTable(NamedTuple):
    """A heading, columns and rows of text; the first `words` columns are words, the others numbers."""

    title: str
    headings: list[str]
    rows: list[list[str]]
    words: int


def summary(study: Study) -> str:
    """Counts, each under its own name: pairs are the experiments, requests are not."""
    return (
        f"{study.pairs} paired repetition(s), {study.tasks} task, {study.inputs} inputs ({study.measured_inputs} "
        f"measured), {study.requests} requests ({study.measured} measured, {study.counted} count); order: {study.order}"
    )


def notes(study: Study) -> list[str]:
    """What reuse was worth, what was left out, and what is not claimed."""
    shown = [f"not counted: {line}" for line in study.not_counted[:SHOWN_REASONS]]
    more = len(study.not_counted) - len(shown)
    return [
        study.break_even,
        *_held_up(study),
        *shown,
        *([f"not counted: {more} more"] if more > 0 else []),
        *study.not_claimed,
    ]


def _held_up(study: Study) -> list[str]:
    if not study.held_up:
        return []
    return [
        f"{len(study.held_up)} of {study.counted} requests received their first token after their last step had begun: "
        f"the host had no time to pass it on, and their times and rates are its doing ({study.held_up[0]}, …)"
    ]


def tables(study: Study) -> Iterator[WordTable]:
    """All tables, in the order in which they are read."""
    yield _paths(study)
    yield _cells(study)
    yield _comparisons(study)
    yield _spreads(study)
    yield _by_path(study)
    if study.reloads:
        yield _reloads(study)
    if study.copies:
        yield _copies(study)


def _paths(study: Study) -> WordTable:
    actual = dict.fromkeys(path.value for path in FIVE)
    actual |= dict.fromkeys(path for one in study.attempted for path in one.actual)
    names = [*actual, *([UNNAMED] if UNNAMED not in actual else [])]
    used = [name for name in names if name != UNNAMED or any(name in one.actual for one in study.attempted)]
    rows = [
        [one.condition, str(one.requests), *(str(one.actual.get(name, 0)) for name in used)] for one in study.attempted
    ]
    return WordTable("attempted against actual path, measured requests", ["attempted", "requests", *used], rows, 1)


def _cells(study: Study) -> WordTable:
    rows = [
        [
            str(one.repetition),
            f"{one.tokens:,}",
            one.condition,
            ", ".join(f"{path} {count}" for path, count in one.paths.items()) or UNAVAILABLE,
            _each(one.suffix),
            _each(one.moved),
            seconds(one.first_token),
            seconds(one.total),
            rate(one.decode_rate),
        ]
        for one in study.cells
    ]
    headings = ["run", "N", "condition", "path", "suffix", "bytes", "TTFT s", "total s", "tokens/s"]
    return WordTable("medians of trials", headings, rows, 4)


def _comparisons(study: Study) -> WordTable:
    rows = []
    for one in study.comparisons:
        suffix = " / ".join(_each(side) for side in one.suffix)
        first, total = (one.note, "") if one.note else (ratio(one.first_token), ratio(one.total))
        rows.append([str(one.repetition), f"{one.tokens:,}", one.name, suffix, str(one.inputs), first, total])
    headings = ["run", "N", "ratio", "suffix", "inputs", "TTFT", "total"]
    return WordTable("ratios: medians of each input's own ratio", headings, rows, 4)


def _spreads(study: Study) -> WordTable:
    rows = []
    for one in study.spreads:
        interval = UNAVAILABLE if one.interval is None else f"{one.interval[0]:.3f}–{one.interval[1]:.3f}"
        rows.append([one.name, one.measure, one.called, f"{one.low:.3f}–{one.high:.3f}", str(one.inputs), interval])
    headings = ["ratio", "of", "called", "range", "inputs", "bootstrap 95 %"]
    return WordTable("over all groups", headings, rows, 3)


def _by_path(study: Study) -> WordTable:
    rows = [
        [
            f"{one.tokens:,}",
            one.path,
            str(one.requests),
            _each(one.suffix),
            _each(one.moved),
            seconds(one.first_token),
        ]
        for one in study.paths
    ]
    return WordTable("TTFT by actual path", ["N", "path", "requests", "suffix", "bytes", "TTFT s"], rows, 2)


def _reloads(study: Study) -> WordTable:
    rows = [
        [
            one.arm,
            f"{one.tokens:,}",
            _each(one.credited),
            _each(one.moved),
            milliseconds(one.copying),
            milliseconds(one.loading),
            milliseconds(one.local),
            milliseconds(one.first_token),
            one.note or ratio(one.ratio),
            UNAVAILABLE if one.met is None else "met" if one.met else "not met",
        ]
        for one in study.reloads
    ]
    headings = ["arm", "N", "p", "bytes", "copy ms", "load ms", "local hit ms", "reload ms", "ratio", "goal"]
    title = f"reload against its bytes at copy speed and a local hit of equal p (goal: ratio ≤ {GOAL:g})"
    return WordTable(title, headings, rows, 1)


def _copies(study: Study) -> WordTable:
    rows = [
        [
            one.arm,
            str(one.rank),
            one.route,
            one.device,
            f"{one.bytes:,}",
            str(one.copies),
            f"{one.rate / GIGA:.2f}",
            f"{one.slowest / GIGA:.2f}–{one.fastest / GIGA:.2f}",
        ]
        for one in study.copies
    ]
    headings = ["arm", "rank", "route", "onto", "bytes", "copies", "GB/s", "range"]
    return WordTable("copy speed, measured by the workers of this run", headings, rows, 4)


def milliseconds(value: float | None) -> str:
    """Of seconds: two decimals, or that there is none."""
    return UNAVAILABLE if value is None else f"{value * 1000:.2f}"


def seconds(value: float | None) -> str:
    """Three decimals, or that there is none."""
    return UNAVAILABLE if value is None else f"{value:.3f}"


def rate(value: float | None) -> str:
    """Tokens a second."""
    return UNAVAILABLE if value is None else f"{value:.2f}"


def ratio(value: float | None) -> str:
    """Three decimals, or that there is none."""
    return UNAVAILABLE if value is None else f"{value:.3f}"


def _each(values: Sequence[int]) -> str:
    """All different values; a dash where there is none."""
    return ", ".join(f"{value:,}" for value in values) or "–"
