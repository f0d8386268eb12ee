"""Engines whose drafts come from EAGLE or MTP: vLLM restores one whole block less, and that is the boundary then."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from samestate.checks.analyzers import judge
from samestate.checks.base import Verdict
from samestate.evidence import records as r
from samestate.evidence import verify
from samestate.plans.load import load
from samestate.plans.model import Plan

from . import builder as b
from . import test_hit_length as hit_length
from .scenarios import recorded, request, sealed


def dropping(lengths: list[str]) -> Plan:
    """The boundary plan on a simulated engine that gives up the last whole block of a hit."""
    plan = b.small_plan()
    settings = {**plan.engine.settings, "block_size": 512, "eagle_block_drop": 1, "max_num_seqs": 1}
    return plan.model_copy(update={"engine": plan.engine.model_copy(update={"settings": settings}), "lengths": lengths})


def dropped(plan: Plan) -> Plan:
    """The same on such an engine."""
    settings = {**plan.engine.settings, "eagle_block_drop": 1}
    return plan.model_copy(update={"engine": plan.engine.model_copy(update={"settings": settings})})


def says(run: b.Run, drops: bool) -> None:
    """Let every engine of the run say whether it gives the block up."""
    for arm in ("control", "candidate"):
        for process in ("client", "scheduler"):
            records = run.streams[arm, process]
            for index, rec in enumerate(records):
                if isinstance(rec, r.EngineStarted):
                    records[index] = msgspec.structs.replace(rec, settings={**rec.settings, r.DROPS_LAST_BLOCK: drops})


def test_silent_where_the_block_is_given_up(tmp_path: Path) -> None:
    archive = sealed(dropping(["2C-1", "2C", "2C+1", "3C-1", "3C"]), tmp_path)
    judgement = judge(archive)
    result = b.result(judgement, "boundary")
    assert (judgement.verdict, result.findings, result.examined) == (Verdict.PASS, [], 4)
    assert result.summary == (
        "4/4 reloads at B = p = C·(⌊N/C⌋−1) on 1 rank(s); 1 prompt(s) without a checkpoint, computed again"
    )
    boundaries = {row.case: row.boundary for row in judgement.table}
    assert boundaries == {"N1023": None, "N1024": 512, "N1025": 512, "N1535": 512, "N1536": 1024}
    assert b.result(judgement, "transfers").examined == 4
    assert {one.check: one.verdict for one in verify.judge(archive.root).results}["boundary"] == "pass"


def test_nothing_but_prompts_without_a_checkpoint_is_no_pass(tmp_path: Path) -> None:
    judgement = judge(sealed(dropping(["C+1", "2C-1"]), tmp_path))
    assert {b.result(judgement, check).verdict for check in ("boundary", "transfers", "non-vacuity")} == {
        Verdict.UNKNOWN
    }


def test_fires_where_the_block_is_restored_all_the_same(tmp_path: Path) -> None:
    run = b.build()
    says(run, drops=True)
    judgement = run.judge(tmp_path / "a")
    assert set(b.codes(judgement, "boundary")) == {"wrong_boundary"}
    places = [finding.place.op for finding in b.result(judgement, "boundary").findings]
    assert places == ["N31.reload", "N33.reload"]
    assert judgement.verdict is Verdict.FAIL


def test_a_word_that_is_no_yes_changes_nothing(tmp_path: Path) -> None:
    run = b.build()
    says(run, drops=False)
    assert run.judge(tmp_path / "a").verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("n", "strict", "dropped"), [(31, 16, 0), (32, 16, 16), (33, 32, 16), (47, 32, 16), (48, 32, 32)]
)
def test_the_two_rules(n: int, strict: int, dropped: int) -> None:
    assert (b.boundary(n, 16), b.boundary(n, 16, drops_last=True)) == (strict, dropped)


def test_fires_where_a_block_less_is_restored_though_none_is_given_up(tmp_path: Path) -> None:
    run = recorded(dropping(["2C", "2C+1"]), tmp_path / "run")
    says(run, drops=False)
    judgement = run.judge(tmp_path / "a")
    finding = b.only(judgement, "boundary")
    assert (finding.code, finding.verdict, finding.place.op) == ("wrong_boundary", Verdict.FAIL, "N1025.reload")
    assert finding.message == "N1025.reload: checkpoint of [0, 512) restored, expected [0, 1024) for N=1025"


def test_a_salted_lookup_where_nothing_is_due_is_found_by_both(tmp_path: Path) -> None:
    run = recorded(dropping(["2C-1", "2C"]), tmp_path / "run")
    b.edit(run.scheduler(), r.Lookup, {"salt": "another"}, request=request(run, "N1023.reload"))
    archive = run.write(tmp_path / "a")
    assert b.codes(judge(archive), "transfers") == ["salted"]
    assert {one.check: one.verdict for one in verify.judge(str(archive.root)).results}["transfers"] == "fail"


@pytest.mark.parametrize("name", ["shared-prefix-steps", "conversation"])
def test_a_whole_plan_raises_no_alarm_where_the_block_is_given_up(tmp_path: Path, name: str) -> None:
    """Prompts below 2C take another path than the plan foresees, and nothing else is said."""
    results = judge(sealed(dropped(load(name)), tmp_path)).results
    odd = {one.check: one.verdict for one in results if one.verdict in {Verdict.FAIL, Verdict.UNKNOWN}}
    assert odd == {"paths": Verdict.UNKNOWN}


@pytest.mark.parametrize(("drops", "due"), [(True, 512), (False, 1024)])
def test_a_silent_zero_is_a_fail_at_the_boundary_that_is_due(tmp_path: Path, drops: bool, due: int) -> None:
    plan = hit_length.plan()
    run = recorded(dropped(plan) if drops else plan, tmp_path / "run")
    hit_length.hit(run, "2c-plus-1.2", 0)
    found = [one for one in b.result(run.judge(tmp_path / "a"), "hit-length").findings if one.code == "silent_zero"]
    assert [(one.verdict, one.place.op) for one in found] == [(Verdict.FAIL, "2c-plus-1.2")]
    assert f"expected {due}: it was there" in found[0].message


def test_more_than_the_block_leaves_is_found_on_an_engine_with_a_connector(tmp_path: Path) -> None:
    run = recorded(hit_length.plan(), tmp_path / "run")
    says(run, drops=True)
    result = b.result(run.judge(tmp_path / "a"), "hit-length")
    assert (result.verdict, {one.code for one in result.findings}) == (Verdict.FAIL, {"above_boundary"})
    assert result.summary.startswith("hits of C·(⌊N/C⌋−1) ")
