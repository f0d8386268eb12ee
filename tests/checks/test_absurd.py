"""Numbers that no run can have are a finding, never a crash and never a memory full of them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from samestate.checks.base import Verdict
from samestate.evidence import records as r

from . import builder as b

HUGE = 2**63


@pytest.mark.parametrize("field", ["start", "scheduled", "drafted"])
def test_a_row_beyond_all_counting_is_a_defect(tmp_path: Path, field: str) -> None:
    run = b.build()
    b.edit_rows(run, "N32.cold", lambda rows: [msgspec.structs.replace(rows[0], **{field: HUGE}), *rows[1:]])
    judgement = run.judge(tmp_path / "a")
    assert judgement.verdict is Verdict.UNKNOWN
    messages = [finding.message for finding in b.result(judgement, "integrity").findings]
    assert len(messages) == 2 and all("numbers that no run can have" in message for message in messages)


def test_a_state_that_is_no_pair_is_a_defect(tmp_path: Path) -> None:
    run = b.build(b.instrumented_plan())
    b.edit(run.scheduler(), r.StateComputed, {"blocks": [[1]]}, request=b.request_id("candidate", "N32.cold"))
    judgement = run.judge(tmp_path / "a")
    assert judgement.verdict is not Verdict.PASS
    assert "defect" in b.codes(judgement, "integrity")


@pytest.mark.parametrize("size", [17, 10**12, 2**70])
def test_ranks_that_never_registered_are_named_up_to_a_limit(tmp_path: Path, size: int) -> None:
    run = b.build()
    b.edit(run.worker(), r.RankRegistered, {"world_size": size})
    judgement = run.judge(tmp_path / "a")
    findings = b.result(judgement, "boundary").findings
    assert judgement.verdict is Verdict.UNKNOWN
    never = [finding.place.rank for finding in findings if "never registered" in finding.message]
    assert never == list(range(1, 17))


def test_ranks_that_registered_are_not_limited(tmp_path: Path) -> None:
    judgement = b.build(ranks=20).judge(tmp_path / "a")
    assert judgement.verdict is Verdict.PASS
    assert b.result(judgement, "boundary").summary.endswith("on 20 rank(s)")
