"""A tie is marked where its first difference stands."""

from __future__ import annotations

import pytest

from samestate.checks.base import Verdict
from samestate.checks.table import CaseRow
from samestate.reports.words import first_difference_of


@pytest.mark.parametrize(("tie", "said"), [(True, "1,207 (tie)"), (False, "1,207")])
def test_a_tie_is_marked(tie: bool, said: str) -> None:
    row = CaseRow(
        case="a",
        tokens=512,
        first_difference=1207,
        equal=False,
        boundary=None,
        boundary_reported=False,
        content_boundary=None,
        credited=0,
        scheduled=256,
        suffix=512,
        rank_bytes=[],
        verdict=Verdict.UNKNOWN,
        arm="candidate",
        op="a.2",
        tie=tie,
    )
    assert first_difference_of(row) == said
