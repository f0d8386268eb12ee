"""Two lots of fields against each other: an unlisted difference fails and is named, a missing field is unknown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from samestate.checks.base import Finding
from samestate.checks.custody_history import Noted, values
from samestate.checks.verdicts import fail, unknown
from samestate.evidence import custody_records as c

_FAMILIES = ("environment", "model.files", "config")
"""Read as a whole: a name that is not there is not there, and not unseen."""


def compare(before: Noted, after: Noted, changes: Sequence[str], ignored: Sequence[str]) -> Iterator[Finding]:
    """Findings where two lots of fields are not as they must be. `changes` and `ignored`: patterns as of a shell."""
    first, second = values(before.rec.fields), values(after.rec.fields)
    where = [before.where, after.where]
    for side, noted in (("before", before), ("after", after)):
        for name, count in Counter(one.name for one in noted.rec.fields).items():
            if count > 1 and not listed(name, ignored):
                yield unknown("doubled", f"{name}: recorded {count} times {side}, so one hides another", None, where)
    for name in sorted(first.keys() | second.keys()):
        if listed(name, ignored):
            continue
        one, other = first.get(name), second.get(name)
        if one is None or other is None:
            yield _absent(name, first, second, where)
        elif one.value is None or other.value is None:
            side, why = ("before", one.missing) if one.value is None else ("after", other.missing)
            yield unknown(f"missing_{side}", f"{name}: missing {side}, {why}", None, where)
        elif listed(name, changes):
            if one.value == other.value:
                yield fail("unchanged", f"{name}: was to change and did not", None, where)
        elif one.value != other.value:
            yield fail("differs", f"{name}: {_short(one.value)} before, {_short(other.value)} after", None, where)


def named(findings: Iterable[Finding]) -> set[str]:
    """Fields that findings of `compare` are about."""
    return {finding.message.partition(": ")[0] for finding in findings}


def listed(name: str, patterns: Sequence[str]) -> bool:
    """Whether one of the patterns names the field."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _absent(name: str, first: dict[str, c.Field], second: dict[str, c.Field], where: list[str]) -> Finding:
    side = "before" if name not in first else "after"
    lot = first if side == "before" else second
    family = next((word for word in _FAMILIES if name.startswith(f"{word}.")), None)
    # A family that could not be read says so under its own name; the environment's own name is its whole.
    whole = lot.get(family) if family else None
    read = whole is not None and whole.value is not None if family == "environment" else whole is None
    if family is not None and read:
        return fail("differs", f"{name}: is not there {side}", None, where)
    return unknown(f"missing_{side}", f"{name}: no record from {side}", None, where)


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}…"
