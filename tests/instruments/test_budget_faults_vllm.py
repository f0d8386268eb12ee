"""Faults of reasoning budgets in real engines, by one arm of ``budget-grid``: each is caught and named."""

from collections.abc import Callable

import pytest

from quiet import Silent
from samestate.checks.analyzers import Judgement, judge, source_sha256
from samestate.checks.base import Finding, Verdict
from samestate.cli.outcomes import Outcome
from samestate.engines.base import EngineError
from samestate.engines.vllm import VllmEngine
from samestate.evidence.archive import Archive
from samestate.evidence.records import Scalar
from samestate.faults.catalogue import FAULTS, faults_on
from samestate.instruments.budget_armoury import BUDGET_FAULTS
from samestate.lab.errors import RunError
from samestate.lab.run import RunRequest, run_plan
from samestate.models.catalogue import ensure
from samestate.plans.load import freeze, load
from samestate.plans.model import Plan, ProbePlan

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.deep]

DRAFTS = 3
Run = Callable[..., Judgement]


def probes() -> list[ProbePlan]:
    """Budgets on every row of a step, a close of the model's own, and a stop inside a draft."""
    never = "user: close-never\nassistant: <think>"
    asked = [ProbePlan(name=f"b{budget}", text=never, budget=budget, max_tokens=budget + 30) for budget in range(5, 10)]
    asked.append(ProbePlan(name="own", text="user: close-after-6\nassistant: <think>", budget=20, max_tokens=40))
    return asked


def small(ranks: int) -> Plan:
    plan = load("budget-grid")
    assert plan.markers is not None
    arm = next(arm for arm in plan.arms if arm.name == f"draft-{DRAFTS}")
    markers = plan.markers.model_copy(update={"probes": probes(), "allowed_probes": len(probes())})
    settings: dict[str, Scalar] = plan.engine.settings | ({"tensor_parallel_size": ranks} if ranks > 1 else {})
    engine = plan.engine.model_copy(update={"settings": settings})
    plan = plan.model_copy(update={"arms": [arm], "markers": markers, "engine": engine})
    return freeze(plan, source_sha256(plan.analyzer.id))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    def run(fault: str | None, ranks: int = 1) -> Judgement:
        request = RunRequest(
            plan=small(ranks),
            model=ensure("qwen3-tiny"),
            out=tmp_path_factory.mktemp("budget") / "archive",
            make_engine=VllmEngine,
            serve_args=[],
            fault=fault,
            control=None,
            reference=None,
        )
        return judge(Archive.open(run_plan(request, Silent()).archive))

    return run


def findings(judgement: Judgement) -> list[tuple[str, Finding]]:
    return [
        (result.check, finding)
        for result in judgement.results
        if result.check in judgement.required
        for finding in result.findings
    ]


def assert_caught(judgement: Judgement, fault: str) -> None:
    told = FAULTS[fault]
    found = [finding for check, finding in findings(judgement) if (check, finding.code) == (told.check, told.code)]
    assert found, [(check, finding.code, finding.message) for check, finding in findings(judgement)]
    named = Outcome(told, "", [], 0.0)
    assert any(named._names(finding) for finding in found), found[0].place
    assert judgement.fault == fault
    assert judgement.verdict in (Verdict.FAIL, Verdict.UNKNOWN)


def test_the_catalogue_has_them_all() -> None:
    assert faults_on("budget-grid").keys() == BUDGET_FAULTS.keys()


def test_nothing_is_found_without_a_fault(run: Run) -> None:
    judgement = run(None)
    assert judgement.verdict is Verdict.PASS, [one for one in findings(judgement) if one[1].verdict is not Verdict.PASS]


@pytest.mark.parametrize("fault", [name for name in BUDGET_FAULTS if name != "rank-disagreement"])
def test_every_fault_is_caught_and_named(run: Run, fault: str) -> None:
    judgement = run(fault)
    assert_caught(judgement, fault)
    positive = FAULTS[fault].check == "budget-close"
    assert judgement.verdict is (Verdict.FAIL if positive else Verdict.UNKNOWN)


def test_ranks_that_disagree_are_caught(run: Run) -> None:
    assert_caught(run("rank-disagreement", ranks=2), "rank-disagreement")


def test_one_rank_cannot_disagree(run: Run) -> None:
    with pytest.raises((EngineError, RunError), match="one rank cannot"):
        run("rank-disagreement")
