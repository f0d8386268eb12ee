"""Faults of one rank among two, armed in the processes of a running engine: the rank is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from instruments.conftest import Drilled, drill
from instruments.test_live_faults import place_names
from samestate.checks.base import Verdict
from samestate.faults.catalogue import FAULTS
from samestate.plans.drills import CLEAN, RANK_DRILLS

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.deep]


@pytest.fixture(scope="module")
def on_two_ranks(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Drilled:
    """One engine of two ranks, and its control."""
    return drill(tmp_path_factory.mktemp("ranks") / "archive", tiny_model, RANK_DRILLS)


@pytest.mark.parametrize("fault", RANK_DRILLS)
def test_the_rank_is_named(on_two_ranks: Drilled, fault: str) -> None:
    told = FAULTS[fault]
    found = [
        finding
        for op in on_two_ranks.operations(fault, armed=True)
        for check, finding in on_two_ranks.findings.get(op, ())
        if (check, finding.code) == (told.check, told.code)
    ]
    assert found
    assert {(one.verdict, one.place.rank) for one in found} == {(Verdict.FAIL, 1)}
    assert all(told.names <= place_names(one) for one in found)


@pytest.mark.parametrize("fault", RANK_DRILLS)
def test_it_is_gone_once_disarmed(on_two_ranks: Drilled, fault: str) -> None:
    assert {f"{fault}-{CLEAN}.1", f"{fault}-{CLEAN}.2"} < set(on_two_ranks.operations(fault, armed=False))
    for op in on_two_ranks.operations(fault, armed=False):
        assert on_two_ranks.findings.get(op, []) == [], op
