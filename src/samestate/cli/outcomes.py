"""What a run with a fault came to: whether it was caught, by which check, and whether that named the place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from samestate.checks.analyzers import Judgement
from samestate.checks.base import Finding, Verdict
from samestate.faults.catalogue import Fault, Named

TOKENS = {"tokens_differ"}
"""Findings that say that something is wrong, and not what."""
NOBODY: Mapping[str, int] = MappingProxyType({})


class Fired(NamedTuple):
    """A required check that failed, and what it said."""

    check: str
    finding: Finding


class Outcome(NamedTuple):
    """One fault, run."""

    fault: Fault
    exercise: str
    fired: list[Fired]
    """In the order of the checks."""
    seconds: float
    acts_on: Mapping[str, int] = NOBODY
    """The rank or the group that the fault acts on, where that is one and known."""

    @property
    def caught(self) -> bool:
        return bool(self.fired)

    @property
    def best(self) -> Fired | None:
        """The finding that the catalogue expects, if it is there; else the first that names the place, else the first.

        Two analyzers may have the same finding in different checks; that of the expected check comes first.
        """
        expected = [one for one in self.fired if one.finding.code == self.fault.code]
        wanted = (one for one in expected if one.check == self.fault.check)
        naming = (one for one in self.fired if self._names(one.finding))
        return next(wanted, next(iter(expected), next(naming, next(iter(self.fired), None))))

    @property
    def as_expected(self) -> bool:
        """Whether the finding that must name it is there."""
        return self.best is not None and self.best.finding.code == self.fault.code

    @property
    def only_tokens(self) -> bool:
        """Half caught: all that was seen is that tokens differ."""
        return self.caught and all(one.finding.code in TOKENS for one in self.fired)

    @property
    def precise(self) -> bool:
        """Whether the best finding names what the fault acts on: the right rank, group, boundary or request."""
        return not self.only_tokens and self.best is not None and self._names(self.best.finding)

    @property
    def others(self) -> list[str]:
        """Other checks that failed."""
        best = self.best
        return list(dict.fromkeys(one.check for one in self.fired if best is not None and one.check != best.check))

    def _names(self, finding: Finding) -> bool:
        place = finding.place.model_dump()
        right = all(place[name] == value for name, value in self.acts_on.items() if name in self.fault.names)
        return right and all(place[_FIELD[name]] is not None for name in self.fault.names)


_FIELD = {
    Named.REQUEST: "op",
    Named.RANK: "rank",
    Named.GROUP: "group",
    Named.LAYER: "layer",
    Named.BOUNDARY: "boundary",
}


def failures(judgement: Judgement) -> list[Fired]:
    """Every fail of a required check."""
    return [
        Fired(result.check, finding)
        for result in judgement.results
        if result.check in judgement.required
        for finding in result.findings
        if finding.verdict is Verdict.FAIL
    ]


def named(finding: Finding) -> str:
    """The place, as a table says it: ``trunk.2, rank 1, group 0, [0, 512)``."""
    place = finding.place
    parts = [
        place.op,
        f"rank {place.rank}" if place.rank is not None else None,
        f"group {place.group}" if place.group is not None else None,
        f"[0, {place.boundary})" if place.boundary is not None else None,
    ]
    return ", ".join(part for part in parts if part) or "–"


def facts(outcome: Outcome) -> dict[str, Any]:
    """An outcome for `--json`."""
    best = outcome.best
    return {
        "fault": outcome.fault.name,
        "exercise": outcome.exercise,
        "caught": outcome.caught,
        "precise": outcome.precise,
        "only_tokens": outcome.only_tokens,
        "as_expected": outcome.as_expected,
        "check": best.check if best else None,
        "code": best.finding.code if best else None,
        "message": best.finding.message if best else None,
        "place": best.finding.place.model_dump(exclude_none=True) if best else None,
        "expected": {
            "check": outcome.fault.check,
            "code": outcome.fault.code,
            "names": sorted(outcome.fault.names),
        },
        "others": outcome.others,
        "seconds": round(outcome.seconds, 3),
    }


def counts(outcomes: Iterable[Outcome], false_alarms: int, clean_runs: int) -> str:
    """One line: how many were caught, how well, and what was said of clean runs."""
    all_ = list(outcomes)
    caught, precise = sum(one.caught for one in all_), sum(one.precise for one in all_)
    share = f" ({100 * precise // len(all_)} %)" if all_ else ""
    alarms = f"{false_alarms or 'no'} false alarm{'' if false_alarms == 1 else 's'}"
    half = sum(one.only_tokens for one in all_)
    return (
        f"{caught} of {len(all_)} faults caught, {precise}{share} by a check that names the place, {half} only as "
        f"tokens that differ; {alarms} in {clean_runs} clean run{'s' * (clean_runs != 1)}"
    )
