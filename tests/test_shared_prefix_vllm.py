"""Prompts that share beginnings, through vLLM's own offloading: every path is taken, and all of them are right."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestate.checks.analyzers import judge
from samestate.checks.base import Verdict
from samestate.evidence.archive import Archive

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.deep]


def test_every_path_is_taken_and_continues_as_cold(shared_archive: Path) -> None:
    judgement = judge(Archive.open(shared_archive))
    assert judgement.verdict is Verdict.PASS, [
        found.message for result in judgement.results for found in result.findings
    ]
    assert {row.path for row in judgement.table} == {"cold", "local", "external", "mixed"}
    assert all(row.equal for row in judgement.table)
    assert all(row.boundary == row.content_boundary == row.credited for row in judgement.table if row.external)


def test_four_at_once_were_in_one_step_and_another_salt_shared_nothing(shared_archive: Path) -> None:
    judgement = judge(Archive.open(shared_archive))
    assert sum(row.together is not None for row in judgement.table) == 4
    assert any("Up to 4 requests were in one step" in said for said in judgement.limitations)
    salted = [row for row in judgement.table if row.salted]
    assert [row.path for row in salted] == ["cold", "external"]
