"""What a killed engine left in a folder continues in the next engine as computed cold."""

from __future__ import annotations

from pathlib import Path

import pytest

from quiet import Silent
from samestate.checks.analyzers import judge, source_sha256
from samestate.checks.base import Verdict
from samestate.engines.cache_places import place_beside
from samestate.engines.vllm import VllmEngine
from samestate.evidence.archive import Archive
from samestate.evidence.records import EngineKilled, EngineStopped
from samestate.lab.run import RunRequest, run_plan
from samestate.plans.load import freeze, load

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.deep]


def test_the_next_engine_continues_what_a_killed_one_stored(tiny_model: Path, tmp_path: Path) -> None:
    """The shipped plan, 16 tokens each."""
    plan = load("boundary-killed").model_copy(update={"output_tokens": 16})
    plan = freeze(plan, source_sha256(plan.analyzer.id))
    request = RunRequest(
        plan, tiny_model, tmp_path / "archive", VllmEngine, None, None, None, [], make_service=place_beside
    )
    archive = Archive.open(run_plan(request, Silent()).archive)
    judgement = judge(archive)
    assert judgement.verdict is Verdict.PASS, [one.message for result in judgement.results for one in result.findings]
    reloads = [row for row in judgement.table if row.arm == "candidate-2"]
    boundaries = [1792, 1792, *[3584] * 6, 5376]
    assert [(row.path, row.boundary) for row in reloads] == [("external", boundary) for boundary in boundaries]
    kinds = {
        arm: [type(line.rec) for process in archive.streams(arm) for line in archive.records(arm, process)]
        for arm in archive.arms
    }
    assert (kinds["candidate"].count(EngineKilled), kinds["candidate"].count(EngineStopped)) == (1, 0)
    assert (kinds["candidate-2"].count(EngineKilled), kinds["candidate-2"].count(EngineStopped)) == (0, 1)
