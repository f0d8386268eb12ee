"""What changed between two judged runs: checks, rows, and the tokens of every operation.

Compared is what the runs came to, never counts of records, times or hashes, which differ from run to run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from samestate.checks.analyzers import Judgement
from samestate.checks.base import CheckResult, Finding
from samestate.checks.equality import first_difference
from samestate.checks.history import History
from samestate.checks.table import CaseRow, MarkerRow
from samestate.reports.words import first_difference_of, number, plain, row_name, short, shown

Outputs = dict[tuple[str, str], list[int]]
"""Generated tokens by arm and operation."""
KINDS = ("verdict", "check", "finding", "row", "tokens")
ABSENT = "none"
_ROW_NAMES = {
    "first_difference": "first difference",
    "boundary": "B",
    "content_boundary": "B by content",
    "credited": "p",
    "rank_bytes": "bytes per rank",
}
_ROW_KEY = {"case", "repeat", "arm", "op"}


class Side(NamedTuple):
    """One of the two."""

    judgement: Judgement
    outputs: Outputs | None
    """None: only the judgement is there, not the records."""


class Change(NamedTuple):
    """One thing that is not the same in both."""

    kind: str
    """One of `KINDS`."""
    name: str
    a: str
    b: str


class Difference(NamedTuple):
    """All changes, and how much was compared to find them."""

    changes: list[Change]
    compared: dict[str, int]
    """Checks, rows and operations looked at, by word."""
    notes: list[str]
    """What a reader must know to trust it: what differs besides results, what could not be compared."""


def side(judgement: Judgement, history: History | None) -> Side:
    """One side, with the records where they are there."""
    if history is None:
        return Side(shown(judgement), None)
    outputs = {
        (arm.name, op): seen[0].rec.token_ids for arm in history.arms.values() for op, seen in arm.outputs.items()
    }
    return Side(shown(judgement), outputs)


def difference(a: Side, b: Side) -> Difference:
    """Compare two sides. That nothing changed says nothing where nothing was compared."""
    checks = _by_check(a), _by_check(b)
    rows = _by_row(a.judgement), _by_row(b.judgement)
    changes = []
    if a.judgement.verdict is not b.judgement.verdict:
        changes.append(Change("verdict", "run", plain(a.judgement.verdict), plain(b.judgement.verdict)))
    changes += [change for name in _names(*checks) for change in _check(name, checks[0].get(name), checks[1].get(name))]
    changes += [change for name in _names(*rows) for change in _row(name, rows[0].get(name), rows[1].get(name))]
    compared = {"checks": len(_names(*checks)), "rows": len(_names(*rows))}
    notes = list(_notes(a.judgement, b.judgement))
    if a.outputs is None or b.outputs is None:
        which = " and ".join(name for name, one in (("A", a), ("B", b)) if one.outputs is None)
        notes.append(f"tokens not compared: {which} without records")
    else:
        operations = _names(a.outputs, b.outputs)
        changes += [change for op in operations for change in _tokens(op, a.outputs.get(op), b.outputs.get(op))]
        compared["operations"] = len(operations)
        if not operations:
            notes.append("tokens not compared: neither has an output")
    return Difference(changes, compared, notes)


def _by_check(one: Side) -> dict[str, CheckResult]:
    return {result.check: result for result in one.judgement.results}


def _by_row(judgement: Judgement) -> dict[str, CaseRow]:
    """Rows by name; a case that comes again is numbered."""
    rows: dict[str, CaseRow] = {}
    seen: Counter[str] = Counter()
    for row in judgement.table:
        name = row_name(row)
        seen[name] += 1
        rows[name if seen[name] == 1 else f"{name} ({seen[name]})"] = row
    return rows


def _names(a: dict[Any, Any], b: dict[Any, Any]) -> list[Any]:
    return list(dict.fromkeys([*a, *b]))


def _check(name: str, a: CheckResult | None, b: CheckResult | None) -> Iterator[Change]:
    if a is None or b is None:
        yield Change("check", name, *(plain(one.verdict) if one else ABSENT for one in (a, b)))
        return
    if a.verdict is not b.verdict:
        yield Change("check", name, *(f"{plain(one.verdict)}: {one.summary}" for one in (a, b)))
    before, after = Counter(map(_sort, a.findings)), Counter(map(_sort, b.findings))
    for sort in dict.fromkeys([*before, *after]):
        if before[sort] != after[sort]:
            yield Change("finding", f"{name}: {sort}", number(before[sort]), number(after[sort]))


def _sort(finding: Finding) -> str:
    """A finding without its numbers: what was found, and on which operation, rank and layer."""
    place = finding.place
    parts = [place.arm, place.op or place.case, *_ranked(place.rank), place.layer]
    where = " ".join(part for part in parts if part)
    return f"{finding.code} ({plain(finding.verdict)}){f' at {where}' if where else ''}"


def _ranked(rank: int | None) -> list[str]:
    return [] if rank is None else [f"rank {rank}"]


def _row(name: str, a: CaseRow | None, b: CaseRow | None) -> Iterator[Change]:
    if a is None or b is None:
        yield Change("row", name, *(plain(one.verdict) if one else ABSENT for one in (a, b)))
        return
    for field in CaseRow.model_fields:
        if field not in (*_ROW_KEY, "marker") and getattr(a, field) != getattr(b, field):
            yield Change("row", f"{name}: {_ROW_NAMES.get(field, field)}", _cell(a, field), _cell(b, field))
    for field in MarkerRow.model_fields if a.marker or b.marker else ():
        before, after = (getattr(one.marker, field, None) for one in (a, b))
        if before != after:
            yield Change("row", f"{name}: {field.replace('_', ' ')}", _value(before), _value(after))


def _cell(row: CaseRow, field: str) -> str:
    if field == "first_difference":
        return first_difference_of(row)
    return _value(getattr(row, field))


def _value(value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case int() | None:
            return number(value)
        case list():
            return " / ".join(map(_value, value)) or ABSENT
        case _:
            return str(value).replace("_", " ")


def _tokens(op: tuple[str, str], a: list[int] | None, b: list[int] | None) -> Iterator[Change]:
    name = " ".join(op)
    if a is None or b is None:
        yield Change("tokens", name, *("no output" if one is None else f"{len(one)} tokens" for one in (a, b)))
        return
    index = first_difference(a, b)
    if index is not None:
        ends = (str(one[index]) if index < len(one) else "the end" for one in (a, b))
        yield Change("tokens", f"{name}: from token {index} on", *ends)


def _notes(a: Judgement, b: Judgement) -> Iterator[str]:
    for what, left, right in (
        ("plans", short(a.plan_sha256), short(b.plan_sha256)),
        ("analyzers", a.analyzer, b.analyzer),
        ("sources of the analyzers", short(a.analyzer_sha256), short(b.analyzer_sha256)),
        ("injected faults", a.fault or ABSENT, b.fault or ABSENT),
        ("kinds of comparison", a.comparison_kind, b.comparison_kind),
    ):
        if left != right:
            yield f"other {what}: A {left}, B {right}"
    for name, one in (("A", a), ("B", b)):
        if one.seal_sha256 is None:
            yield f"{name} has no seal: its run did not complete"
