"""A repair of the engine itself is in every arm or in none, and only where it can be read back."""

from __future__ import annotations

import pytest

from samestate.evidence.controls import STABLE_TOPK
from samestate.plans.engine_repairs import check_engine_repairs, with_engine_repair
from samestate.plans.errors import PlanError
from samestate.plans.load import load, with_connector


@pytest.mark.parametrize("name", ["boundary", "boundary-instrumented", "shared-prefix", "cacheability"])
def test_all_arms_have_it(name: str) -> None:
    changed = with_engine_repair(load(name), STABLE_TOPK)
    assert {arm.repair for arm in changed.arms} == {STABLE_TOPK}
    check_engine_repairs(changed)


def test_it_goes_with_a_connector_and_not_with_its_repair() -> None:
    lmcache = with_connector(load("boundary"), "lmcache", release="0.5.6")
    assert [arm.repair for arm in with_engine_repair(lmcache, STABLE_TOPK).arms] == [STABLE_TOPK] * 2
    repaired = with_connector(load("boundary"), "lmcache", release="0.5.5", repair="strict-prefix")
    with pytest.raises(PlanError, match=r"^arms\[1\]\.repair: is 'strict-prefix', and an arm has one"):
        with_engine_repair(repaired, STABLE_TOPK)


def test_one_arm_alone_is_refused() -> None:
    plan = load("boundary")
    arms = [plan.arms[0], plan.arms[1].model_copy(update={"repair": STABLE_TOPK})]
    with pytest.raises(PlanError, match=r"^arms\[0\]\.repair: is none, and another arm has 'stable-topk'"):
        check_engine_repairs(plan.model_copy(update={"arms": arms}))


@pytest.mark.parametrize("name", ["local-hit", "latency", "budget-grid"])
def test_where_nobody_reads_it_back_it_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match=r"^arms\[0\]\.repair: 'stable-topk' is read back from an engine that runs in"):
        with_engine_repair(load(name), STABLE_TOPK)
