"""The main job on a real vLLM: what the sealed archives of real runs are judged to be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from samestate.checks.analyzers import Judgement, judge
from samestate.checks.base import Verdict
from samestate.evidence.archive import Archive

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

STRICT = {3583: 1792, 3584: 1792, 3585: 3584, 3587: 3584, 3588: 3584, 3589: 3584, 5375: 3584, 5376: 3584, 5377: 5376}
"""N and the B of the strict prefix, at C = 1792."""
WITHOUT_ENGINE = (
    "import sys; sys.modules['torch'] = sys.modules['vllm'] = None; from samestate.cli.main import main; main()"
)


def judged(root: Path) -> Judgement:
    return judge(Archive.open(root))


def summary(judgement: Judgement, check: str) -> str:
    return next(result.summary for result in judgement.results if result.check == check)


def codes(judgement: Judgement, check: str) -> set[str]:
    return {finding.code for result in judgement.results if result.check == check for finding in result.findings}


@pytest.mark.smoke
@pytest.mark.parametrize("archive", ["short_archive", pytest.param("clean_archive", marks=pytest.mark.deep)])
def test_under_the_strict_prefix_rule_a_reload_continues_as_cold(request: pytest.FixtureRequest, archive: str) -> None:
    judgement = judged(request.getfixturevalue(archive))
    assert judgement.verdict is Verdict.PASS
    assert {row.tokens: row.boundary for row in judgement.table} == STRICT
    assert all(row.credited == row.boundary and row.equal for row in judgement.table)
    assert "36/36" in summary(judgement, "paired-equality")
    assert "candidate 9/9" in summary(judgement, "reload-equality")


def test_the_archive_is_judged_alike_where_neither_torch_nor_vllm_is(short_archive: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_ENGINE, "check", str(short_archive)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "verdict pass" in done.stdout


@pytest.mark.regression
@pytest.mark.parametrize("archive", ["short_fault", pytest.param("faulted_archive", marks=pytest.mark.deep)])
def test_the_lookup_over_the_full_prompt_fails_at_the_two_exact_boundaries(
    request: pytest.FixtureRequest, archive: str
) -> None:
    judgement = judged(request.getfixturevalue(archive))
    assert (judgement.verdict, judgement.fault) == (Verdict.FAIL, "full-lookup")
    assert judgement.comparison_kind == "candidate_vs_archived"
    rows = {row.tokens: row for row in judgement.table}
    wrong = {n for n, row in rows.items() if not row.equal}
    assert wrong == {3584, 5376}
    assert {(rows[n].boundary, rows[n].credited, rows[n].scheduled) for n in wrong} == {
        (3584, 3583, 1),
        (5376, 5375, 1),
    }
    assert "34/36" in summary(judgement, "paired-equality")
    assert "retained_lookup_boundary" in codes(judgement, "boundary")


@pytest.mark.deep
def test_the_sanitizer_passes_a_clean_engine(instrumented_archive: Path) -> None:
    judgement = judged(instrumented_archive)
    assert judgement.verdict is Verdict.PASS
    assert not judgement.performance_eligible
    assert {row.tokens: row.content_boundary for row in judgement.table} == STRICT
    assert "0 poisoned bytes left" in summary(judgement, "poison")
    waits = summary(judgement, "save-completion").rpartition("waits paired ")[2].split("/")
    # On a crowded machine nobody is early; test_live_faults shows that an unpaired wait fails.
    assert int(waits[0]) == int(waits[1].split(":")[0])


@pytest.mark.deep
def test_the_bytes_alone_name_the_boundary_that_was_restored(instrumented_fault: Path) -> None:
    judgement = judged(instrumented_fault)
    rows = {row.tokens: row for row in judgement.table}
    assert {n: (rows[n].content_boundary, rows[n].credited) for n in (3584, 5376)} == {
        3584: (3584, 3583),
        5376: (5376, 5375),
    }
    assert "content_not_credited" in codes(judgement, "prefix-identity")
    assert not codes(judgement, "page-bytes")
