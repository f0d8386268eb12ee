"""Repairs, releases and servers beside the engine, against the plan."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from samestate.checks.base import Verdict
from samestate.evidence import records as r
from samestate.evidence.controls import STABLE_TOPK

from . import builder as b

INTERVENTION, SERVICES = "intervention", "services"
LOOKUP = r.PatchedFunction(module="lmcache.adapter", qualname="Adapter.lookup", source_sha256="a" * 64)
MATCHED = r.PatchedFunction(module="lmcache.connector", qualname="Connector.matched", source_sha256="b" * 64)


def beside(repair: str | None = None, release: str | None = None) -> b.Run:
    """A run of the boundary plan with LMCache, its server, and what was planned of it."""
    plan = b.small_plan()
    candidate = plan.arms[1].model_copy(update={"connector": "lmcache", "repair": repair, "release": release})
    run = b.build(plan.model_copy(update={"arms": [plan.arms[0], candidate]}))
    start = r.ServiceStarted(service="lmcache", version=release or "0.5.6", options={}, continues=False)
    run.client().insert(0, start)
    run.client().append(r.ServiceStopped(service="lmcache", alive=True, kept=False, leftovers=0))
    if repair:
        run.scheduler().insert(0, r.InterventionApplied(name=repair, functions=[LOOKUP, MATCHED]))
    if release:
        for arm, versions in (("candidate", {"sim": "1", "lmcache": release}), ("control", {"sim": "1"})):
            b.edit(run.client(arm), r.EngineStarted, {"versions": versions})
    return run


def test_where_none_is_planned_and_none_recorded_neither_comes_up(tmp_path: Path) -> None:
    judgement = b.build().judge(tmp_path / "a")
    assert judgement.verdict is Verdict.PASS
    for check in (INTERVENTION, SERVICES):
        assert b.result(judgement, check).verdict is Verdict.NOT_EXERCISED
        assert check not in judgement.required


def test_silent_when_everything_is_as_planned(tmp_path: Path) -> None:
    judgement = beside("strict-prefix", "0.5.5").judge(tmp_path / "a")
    assert judgement.verdict is Verdict.PASS
    assert {INTERVENTION, SERVICES} <= set(judgement.required)
    assert b.result(judgement, INTERVENTION).summary == "2 arms: strict-prefix on 2 functions, lmcache 0.5.5"
    assert b.result(judgement, SERVICES).summary == (
        "1/1 arms with a server (lmcache 0.5.5) that was alive at the end; no shared-memory segments left behind"
    )


def applied(run: b.Run, **change: object) -> None:
    b.edit(run.scheduler(), r.InterventionApplied, change)


@pytest.mark.parametrize(
    ("change", "code"), [({"name": "other"}, "wrong_intervention"), ({"functions": []}, "empty_intervention")]
)
def test_another_repair_than_planned_fails(tmp_path: Path, change: dict[str, object], code: str) -> None:
    run = beside("strict-prefix")
    applied(run, **change)
    judgement = run.judge(tmp_path / "a")
    finding = b.only(judgement, INTERVENTION)
    assert (finding.code, finding.verdict, judgement.verdict) == (code, Verdict.FAIL, Verdict.FAIL)


def test_two_repairs_in_one_process_fail(tmp_path: Path) -> None:
    run = beside("strict-prefix")
    run.scheduler().insert(0, r.InterventionApplied(name="strict-prefix", functions=[LOOKUP, MATCHED]))
    assert b.only(run.judge(tmp_path / "a"), INTERVENTION).code == "repeated_intervention"


def test_a_repair_that_is_not_recorded_is_unknown(tmp_path: Path) -> None:
    run = beside("strict-prefix")
    b.drop(run.scheduler(), r.InterventionApplied)
    judgement = run.judge(tmp_path / "a")
    assert b.only(judgement, INTERVENTION).code == "missing_intervention"
    assert judgement.verdict is Verdict.UNKNOWN


@pytest.mark.parametrize("arm", ["candidate", "control"])
def test_a_repair_that_nobody_planned_fails(tmp_path: Path, arm: str) -> None:
    run = b.build()
    run.scheduler(arm).insert(0, r.InterventionApplied(name="strict-prefix", functions=[LOOKUP]))
    judgement = run.judge(tmp_path / "a")
    assert b.only(judgement, INTERVENTION).code == "unplanned_intervention"
    assert judgement.verdict is Verdict.FAIL


def test_one_repair_replaces_the_same_functions_everywhere(tmp_path: Path) -> None:
    run = beside("strict-prefix")
    worker = r.InterventionApplied(name="strict-prefix", functions=[LOOKUP])
    run.worker().insert(0, worker)
    finding = b.only(run.judge(tmp_path / "a"), INTERVENTION)
    assert (finding.code, finding.verdict) == ("interventions_differ", Verdict.FAIL)
    assert "lmcache.connector.Connector.matched" in finding.message
    run.worker()[0] = msgspec.structs.replace(worker, functions=[MATCHED, LOOKUP])
    assert b.codes(run.judge(tmp_path / "b"), INTERVENTION) == []


EXPAND = r.PatchedFunction(module="vllm.kpool", qualname="expand", source_sha256="c" * 64)


def ordered(arms: tuple[str, ...] = ("control", "candidate"), ranks: int = 2) -> b.Run:
    """The boundary plan with the repair of vLLM itself in these arms, in force on every rank of theirs."""
    plan = b.small_plan()
    planned = [arm.model_copy(update={"repair": STABLE_TOPK if arm.name in arms else None}) for arm in plan.arms]
    run = b.build(plan.model_copy(update={"arms": planned}), ranks=ranks)
    for arm in arms:
        for rank in range(ranks):
            run.scheduler(arm).insert(0, r.InterventionApplied(name=STABLE_TOPK, functions=[EXPAND], rank=rank))
    return run


def test_a_repair_of_the_engine_is_in_force_on_every_rank_of_all_arms(tmp_path: Path) -> None:
    judgement = ordered().judge(tmp_path / "a")
    assert (judgement.verdict, b.codes(judgement, INTERVENTION)) == (Verdict.PASS, [])
    assert b.result(judgement, INTERVENTION).summary == "2 arms: stable-topk on 1 functions"


@pytest.mark.parametrize("arm", ["candidate", "control"])
def test_a_rank_without_the_repair_of_the_engine_is_unknown(tmp_path: Path, arm: str) -> None:
    run = ordered()
    b.drop(run.scheduler(arm), r.InterventionApplied, rank=1)
    judgement = run.judge(tmp_path / "a")
    finding = b.only(judgement, INTERVENTION)
    assert (finding.code, finding.place.arm, finding.place.rank) == ("missing_intervention", arm, 1)
    assert judgement.verdict is Verdict.UNKNOWN


def test_a_rank_that_does_not_say_which_it_is_has_no_repair(tmp_path: Path) -> None:
    run = ordered(ranks=1)
    b.edit(run.scheduler(), r.InterventionApplied, {"rank": None})
    assert b.only(run.judge(tmp_path / "a"), INTERVENTION).code == "missing_intervention"


def test_a_rank_with_two_repairs_or_another_source_fails(tmp_path: Path) -> None:
    run = ordered()
    other = msgspec.structs.replace(EXPAND, source_sha256="d" * 64)
    run.scheduler().append(r.InterventionApplied(name=STABLE_TOPK, functions=[other], rank=1))
    judgement = run.judge(tmp_path / "a")
    assert set(b.codes(judgement, INTERVENTION)) == {"repeated_intervention", "interventions_differ"}
    assert judgement.verdict is Verdict.FAIL


def test_a_repair_of_the_engine_in_one_arm_alone_fails(tmp_path: Path) -> None:
    judgement = ordered(("candidate",)).judge(tmp_path / "a")
    assert (b.only(judgement, INTERVENTION).code, judgement.verdict) == ("uneven_intervention", Verdict.FAIL)


@pytest.mark.parametrize(
    ("versions", "code", "verdict"),
    [
        ({"sim": "1", "lmcache": "0.5.6"}, "wrong_release", Verdict.FAIL),
        ({"sim": "1"}, "missing_release", Verdict.UNKNOWN),
    ],
)
def test_the_planned_release_must_run(tmp_path: Path, versions: dict[str, str], code: str, verdict: Verdict) -> None:
    run = beside(release="0.5.5")
    b.edit(run.client(), r.EngineStarted, {"versions": versions})
    judgement = run.judge(tmp_path / "a")
    finding = b.only(judgement, INTERVENTION)
    assert (finding.code, finding.verdict, judgement.verdict) == (code, verdict, verdict)


def test_a_release_that_only_one_arm_has_is_no_other_setting_and_another_version_is(tmp_path: Path) -> None:
    assert b.codes(beside(release="0.5.5").judge(tmp_path / "a"), "settings") == []
    run = beside()
    b.edit(run.client(), r.EngineStarted, {"versions": {"sim": "1", "lmcache": "0.5.5"}})
    assert b.codes(run.judge(tmp_path / "b"), "settings") == ["setting_differs"]


@pytest.mark.parametrize(
    ("kind", "change", "code", "verdict"),
    [
        (r.ServiceStarted, {"continues": True}, "wrong_service", Verdict.FAIL),
        (r.ServiceStarted, {"version": "0.5.4"}, "wrong_release", Verdict.FAIL),
        (r.ServiceStopped, {"alive": False}, "service_died", Verdict.UNKNOWN),
    ],
)
def test_a_server_that_was_not_what_was_planned(
    tmp_path: Path, kind: type[r.Record], change: dict[str, object], code: str, verdict: Verdict
) -> None:
    run = beside(release="0.5.5")
    b.edit(run.client(), kind, change)
    judgement = run.judge(tmp_path / "a")
    finding = b.only(judgement, SERVICES)
    assert (finding.code, finding.verdict, judgement.verdict) == (code, verdict, verdict)


@pytest.mark.parametrize("kind", [r.ServiceStarted, r.ServiceStopped])
def test_a_server_that_is_not_recorded_is_unknown(tmp_path: Path, kind: type[r.Record]) -> None:
    run = beside()
    b.drop(run.client(), kind)
    judgement = run.judge(tmp_path / "a")
    assert b.only(judgement, SERVICES).code == "missing_service"
    assert judgement.verdict is Verdict.UNKNOWN


def test_a_server_that_was_started_twice_fails(tmp_path: Path) -> None:
    run = beside()
    run.client().insert(0, run.client()[0])
    assert b.only(run.judge(tmp_path / "a"), SERVICES).code == "service_restarted"


def test_a_server_beside_a_control_fails(tmp_path: Path) -> None:
    run = beside()
    run.client("control").insert(0, run.client()[0])
    finding = b.only(run.judge(tmp_path / "a"), SERVICES)
    assert (finding.code, finding.place.arm) == ("unplanned_service", "control")


def test_what_a_server_left_behind_is_said_and_not_judged(tmp_path: Path) -> None:
    run = beside()
    b.edit(run.client(), r.ServiceStopped, {"leftovers": 3})
    result = b.result(run.judge(tmp_path / "a"), SERVICES)
    assert (result.verdict, result.findings) == (Verdict.PASS, [])
    assert result.summary.endswith("3 shared-memory segments left behind")


def test_a_server_left_running_for_nobody_fails(tmp_path: Path) -> None:
    run = beside()
    b.edit(run.client(), r.ServiceStopped, {"kept": True})
    finding = b.only(run.judge(tmp_path / "a"), SERVICES)
    assert (finding.code, finding.verdict, finding.place.arm) == ("service_left_running", Verdict.FAIL, "candidate")


@pytest.mark.parametrize(
    ("service", "continues", "codes"),
    [
        ("kept", True, []),
        ("kept", False, ["wrong_service"]),
        ("restarted", False, []),
        ("restarted", True, ["wrong_service"]),
    ],
)
def test_an_arm_that_follows_finds_the_server_as_planned(
    tmp_path: Path, service: str, continues: bool, codes: list[str]
) -> None:
    run = beside()
    update = {"follows": "before", "service": service}
    arms = [run.plan.arms[0], run.plan.arms[1].model_copy(update=update)]
    run.plan = run.plan.model_copy(update={"arms": arms})
    b.edit(run.client(), r.ServiceStarted, {"continues": continues})
    assert b.codes(run.judge(tmp_path / "a"), SERVICES) == codes


def test_a_server_that_was_not_there_while_the_engine_worked_fails(tmp_path: Path) -> None:
    """Its end stands before the first operation."""
    run = beside()
    client = run.client()
    client.insert(1, client.pop())
    finding = b.only(run.judge(tmp_path / "a"), SERVICES)
    assert (finding.code, finding.verdict) == ("service_misplaced", Verdict.FAIL)
    late = beside()
    late.client().insert(-1, late.client().pop(0))
    assert b.only(late.judge(tmp_path / "b"), SERVICES).code == "service_misplaced"


def test_a_server_beside_a_connector_that_has_none_fails(tmp_path: Path) -> None:
    run = beside()
    arms = [run.plan.arms[0], run.plan.arms[1].model_copy(update={"connector": "native"})]
    run.plan = run.plan.model_copy(update={"arms": arms})
    assert b.only(run.judge(tmp_path / "a"), SERVICES).code == "unplanned_service"


@pytest.mark.parametrize(("ran", "codes"), [(True, []), (False, ["wrong_option"]), (None, ["wrong_option"])])
def test_a_server_runs_with_the_planned_options(tmp_path: Path, ran: bool | None, codes: list[str]) -> None:
    run = beside()
    options = {"separate-object-groups": True, "lmcache.mp.mq_timeout": 5}
    arms = [run.plan.arms[0], run.plan.arms[1].model_copy(update={"options": options})]
    run.plan = run.plan.model_copy(update={"arms": arms})
    given = {} if ran is None else {"separate_object_groups": ran}
    b.edit(run.client(), r.ServiceStarted, {"options": given})
    assert b.codes(run.judge(tmp_path / "a"), SERVICES) == codes
