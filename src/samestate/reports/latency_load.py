"""A load as one table of words: every engine, level and phase, its paths beside its times."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from samestate.checks.latency_load import LoadCell, LoadStudy
from samestate.checks.latency_study import UNAVAILABLE
from samestate.reports.latency_tables import WordTable, rate, seconds

TITLE = "under load: medians of a phase's requests"


def load_table(study: LoadStudy) -> WordTable:
    """One row a phase; a 90th percentile and lateness where a phase has one."""
    headings = ["engine", "level", "attempted", "path", "suffix", "done", "open", "TTFT s", "total s", "tokens/s"]
    rows = list(map(_row, study.cells))
    if any(one.first_token_90 is not None for one in study.cells):
        headings.append("TTFT 90 %")
        rows = [[*row, seconds(one.first_token_90)] for row, one in zip(rows, study.cells, strict=True)]
    if any(one.latest is not None for one in study.cells):
        headings.append("late s")
        late = ["–" if one.latest is None else seconds(max(0.0, one.latest)) for one in study.cells]
        rows = [[*row, value] for row, value in zip(rows, late, strict=True)]
    return WordTable(TITLE, headings, rows, 4)


def _row(one: LoadCell) -> list[str]:
    return [
        one.engine,
        f"{one.concurrency} open" if one.concurrency is not None else f"{one.rate:g}/s",
        one.attempted,
        ", ".join(f"{path} {count}" for path, count in one.paths.items()) or UNAVAILABLE,
        ", ".join(f"{value:,}" for value in one.suffix) or "–",
        f"{one.answered}/{one.requests}",
        str(one.most_open),
        seconds(one.first_token),
        seconds(one.total),
        rate(one.tokens_per_second),
    ]


def print_load(study: LoadStudy, console: Console) -> None:
    """Print the table and what is to be said with it."""
    table = load_table(study)
    console.print(Text(table.title))
    drawn = Table(box=None, padding=(0, 1, 0, 0))
    for index, heading in enumerate(table.headings):
        words = index < table.words
        drawn.add_column(Text(heading), justify="left" if words else "right", overflow="fold", no_wrap=not words)
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    console.print(drawn)
    console.print()
    for note in study.notes:
        console.print(Text(f"  - {note}"))
    console.print()
