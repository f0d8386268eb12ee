"""One report of one archive: what every writer formats, and nothing that a writer has to work out."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from samestate.checks.analyzers import Judgement
from samestate.checks.base import CheckResult, Verdict
from samestate.checks.history import History, MissingEvidence
from samestate.evidence.places import read_place
from samestate.evidence.text import printable
from samestate.reports.latency import Latency, latency
from samestate.reports.page_map import PageMap, require_page_maps
from samestate.reports.timeline import CaseTimeline, require_timelines
from samestate.reports.words import Grid, by_repetition, comparison, grid, reason, short, shown, told

UNNAMED = "unknown"
"""The name of a plan that the archive has lost."""
RECORD_CHARACTERS = 1_200
"""Of a cited record; the rest is in the archive."""


class Cited(NamedTuple):
    """A record that a finding cites."""

    where: str
    """``arms/candidate/worker-0.jsonl:77``: file and line, from 1."""
    file: str | None
    """The file, inside the archive; None: there is no such file."""
    text: str
    """The line, cut at `RECORD_CHARACTERS`; empty when it was not read."""


class Report(NamedTuple):
    """What there is to say about one archive. All text is printable."""

    plan: str
    title: str
    question: str
    judgement: Judgement
    why: str
    """Why the verdict is what it is."""
    checks: list[CheckResult]
    """The required ones first; one that the analyzer has no result of is unknown."""
    told: list[CheckResult]
    """Those whose findings are worth reading, in that order."""
    cases: Grid
    timelines: list[CaseTimeline]
    no_timelines: str
    """Why there are none; empty when there are."""
    pages: list[PageMap]
    no_pages: str
    """Why they could not be drawn; empty also when none were read."""
    latency: Latency
    records: int
    """Records read."""
    facts: list[tuple[str, str]]
    """Name and value of what the verdict holds for."""
    cited: dict[str, Cited]
    """By place; only places that were asked for."""


def report(judgement: Judgement, history: History) -> Report:
    """Make a report of an archive's judgement and history. Lost evidence leaves gaps that say so; it never raises."""
    judgement = shown(judgement)
    by_check = {result.check: result for result in judgement.results}
    required = [by_check.get(check) or _absent(check) for check in judgement.required]
    others = [result for result in judgement.results if result.check not in judgement.required]
    drawn, no_timelines = require_timelines(history)
    pages, no_pages = require_page_maps(history)
    plan, title, question = UNNAMED, "plan.json is lost", ""
    with suppress(MissingEvidence):
        plan, title, question = history.plan.name, printable(history.plan.title), printable(history.plan.question)
    return Report(
        plan=plan,
        title=title,
        question=question,
        judgement=judgement,
        why=reason(judgement),
        checks=[*required, *others],
        told=told([*required, *others]),
        cases=grid(judgement),
        timelines=drawn,
        no_timelines=no_timelines,
        pages=pages,
        no_pages=no_pages,
        latency=latency(history, judgement),
        records=history.records,
        facts=list(_facts(judgement, history)),
        cited={},
    )


def _absent(check: str) -> CheckResult:
    """What stands for a required check without a result, so that no writer forgets it."""
    summary = "the analyzer has no result of this required check"
    return CheckResult(check=check, verdict=Verdict.UNKNOWN, summary=summary, unit="evidence", examined=0)


def _facts(judgement: Judgement, history: History) -> Iterable[tuple[str, str]]:
    yield "compared", comparison(judgement)
    yield from by_repetition(judgement)
    for arm in history.arms.values():
        for seen in arm.engines[:1]:
            version = seen.rec.versions.get(seen.rec.engine, "")
            connector = seen.rec.connector or "no connector"
            level = f", audited at {seen.rec.audit_level}" if seen.rec.audit_level else ""
            engine = f"{seen.rec.engine} {version}".strip()
            ranks = f", {len(arm.ranks)} rank(s)" if arm.ranks else ""
            yield f"arm {arm.name}", printable(f"{engine}, {connector}{level}{ranks}")
    with suppress(MissingEvidence):
        model = history.resolved.model
        yield "model", printable(f"{model.name} {short(model.sha256)}")
        yield "C", f"{history.resolved.checkpoint_interval:,} tokens"
    yield "records", f"{history.records:,}"
    yield "plan", short(judgement.plan_sha256)
    yield "analyzer", f"{judgement.analyzer} {short(judgement.analyzer_sha256)}"
    yield "seal", short(judgement.seal_sha256)


def cite(made: Report, root: Path, places: Iterable[str]) -> Report:
    """`made` with the records at `places` read from the archive at `root`, each file once."""
    wanted: dict[str, dict[int, str]] = {}
    cited: dict[str, Cited] = {}
    for where in dict.fromkeys(places):
        place = read_place(where)
        file = place.file if place else where
        there = _inside(root, file)
        cited[where] = Cited(where, file if there else None, "")
        if there and place:
            wanted.setdefault(file, {})[place.line] = where
    for file, lines in wanted.items():
        for number, text in _lines(root / file, lines):
            cited[lines[number]] = cited[lines[number]]._replace(text=text)
    return made._replace(cited=cited)


def _inside(root: Path, name: str) -> bool:
    path = PurePosixPath(name)
    with suppress(OSError, ValueError):  # a name that no file can have
        return not path.is_absolute() and ".." not in path.parts and (root / name).is_file()
    return False


def _lines(path: Path, wanted: Iterable[int]) -> Iterable[tuple[int, str]]:
    last, numbers = max(wanted), set(wanted)
    with suppress(OSError), path.open("rb") as file:
        for number, line in enumerate(file):
            if number in numbers:
                text = line[: 4 * RECORD_CHARACTERS].decode(errors="replace").rstrip("\n")
                cut = text[:RECORD_CHARACTERS]
                yield number, printable(cut if cut == text else f"{cut}…")
            if number >= last:
                return
