"""Claims about markers: what a store shows, and what it does not (requirement 150)."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestate.checks.analyzers import MARKER_FROZEN_V1, judge
from samestate.checks.claim import Claim, Kind
from samestate.checks.claims import Evidence, lint
from samestate.checks.history import History

from . import marker_run as k


@pytest.fixture
def evidence(tmp_path: Path) -> Evidence:
    archive = k.build().write(tmp_path / "a")
    return Evidence(archive, judge(archive), History.read(archive))


def rules(of: Evidence, text: str, checks: list[str], kind: Kind = Kind.ATTRIBUTION) -> set[str]:
    seal = of.judgement.seal_sha256 or ""
    claim = Claim(id="c", kind=kind, text=text, archive=seal[:12], checks=checks)
    return {one.rule for one in lint([claim], {seal: of})}


def test_what_was_forced_may_be_said(evidence: Evidence) -> None:
    assert (
        rules(evidence, "The close at 64 was forced on the row that it was committed from", ["marker-class"]) == set()
    )


@pytest.mark.parametrize(
    "text",
    [
        "The model would have gone on thinking",
        "Without the budget the answer is another",
        "The close was forced; otherwise reasoning goes on",
    ],
)
def test_what_would_have_come_may_not(evidence: Evidence, text: str) -> None:
    assert rules(evidence, text, ["marker-class"]) == {"counterfactual"}


def test_an_attribution_rests_on_a_class(evidence: Evidence) -> None:
    assert rules(evidence, "The close was forced", ["trace-whole"]) == {"kind-without-check"}


def test_what_is_unknown_is_no_attribution(evidence: Evidence) -> None:
    frozen = evidence._replace(judgement=judge(evidence.archive, MARKER_FROZEN_V1))
    assert "not-passed" in rules(frozen, "The close was forced", ["marker-class"])


def test_no_time_of_a_traced_run_is_a_measurement(evidence: Evidence) -> None:
    assert "latency-not-eligible" in rules(evidence, "It took 2 s", ["marker-class"], Kind.LATENCY)
