"""Whole archives: the study's matrix, the fault tag, imports, damage."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from samestate.checks import analyzers
from samestate.checks.analyzers import ANALYZERS, AnalyzerError, judge, source_sha256
from samestate.checks.base import Place, Verdict
from samestate.checks.history import History
from samestate.checks.table import table
from samestate.checks.verdicts import conclude, unknown
from samestate.evidence import records as r
from samestate.evidence.archive import Archive
from samestate.plans.lending import objection
from samestate.plans.load import load, shipped, validate_checks
from samestate.plans.operations import boundary

from . import builder as b


@pytest.mark.parametrize(
    ("n", "expected"), [(3583, 1792), (3584, 1792), (3585, 3584), (5375, 3584), (5376, 3584), (5377, 5376)]
)
def test_boundary_golden_table(n: int, expected: int) -> None:
    assert boundary(n, 1792) == expected


def test_study_matrix_passes(tmp_path: Path) -> None:
    judgement = b.build(load("boundary"), 1792, ranks=4).judge(tmp_path / "a")
    assert judgement.verdict is Verdict.PASS
    assert b.result(judgement, "paired-equality").summary == "36/36 generations equal"
    assert b.result(judgement, "reload-equality").summary == "reloads equal to cold: candidate 9/9, control 9/9"
    assert "45/45 operations, 36/36 generations, 9/9 resets, 27/27 inputs" in b.result(judgement, "coverage").summary
    assert {row.tokens: (row.boundary, row.credited, row.suffix) for row in judgement.table} == {
        3583: (1792, 1792, 1791),
        3584: (1792, 1792, 1792),
        3585: (3584, 3584, 1),
        3587: (3584, 3584, 3),
        3588: (3584, 3584, 4),
        3589: (3584, 3584, 5),
        5375: (3584, 3584, 1791),
        5376: (3584, 3584, 1792),
        5377: (5376, 5376, 1),
    }
    assert all(row.equal and row.first_difference is None and len(row.rank_bytes) == 4 for row in judgement.table)
    assert "C=1792" in judgement.scope and judgement.plan_sha256 and judgement.plan_sha256[:12] in judgement.scope


def test_lookup_over_the_full_prompt_fails_at_the_exact_boundaries(tmp_path: Path) -> None:
    judgement = b.build(load("boundary"), 1792, fault="full-lookup").judge(tmp_path / "f")
    assert judgement.verdict is Verdict.FAIL
    assert b.failing(judgement) == {"paired-equality", "reload-equality", "boundary"}
    assert b.result(judgement, "paired-equality").summary == "34/36 generations equal"
    assert b.result(judgement, "reload-equality").summary == "reloads equal to cold: candidate 7/9, control 9/9"
    wrong = {row.tokens: row for row in judgement.table if row.verdict is not Verdict.PASS}
    assert sorted(wrong) == [3584, 5376]
    for n, row in wrong.items():
        assert (row.boundary, row.credited, row.scheduled, row.suffix) == (n, n - 1, 1, 0)
        assert (row.verdict, row.first_difference, row.equal) == (Verdict.FAIL, 0, False)
    first, second = b.result(judgement, "boundary").findings
    assert (first.code, second.code) == ("retained_lookup_boundary",) * 2
    assert "checkpoint of [0, 3584) restored, 3583 tokens credited, 1 scheduled" in first.message
    assert (first.place.case, first.place.op, first.place.boundary) == ("N3584", "N3584.reload", 3584)
    assert any(where.startswith("arms/candidate/worker-0.jsonl:") for where in first.evidence)
    assert any(where.startswith("arms/candidate/scheduler.jsonl:") for where in first.evidence)


def test_the_fault_tag_is_shown_and_never_judged_by(tmp_path: Path) -> None:
    tagged, plain = b.build(fault="full-lookup"), b.build(fault="full-lookup")
    plain.attempts[0] = msgspec.structs.replace(plain.attempts[0], fault=None)
    tagged.scheduler().append(r.FaultArmed(fault="full-lookup", parameters={}))
    plain.scheduler().append(r.FaultArmed(fault="other", parameters={"x": 1}))
    one, other = tagged.judge(tmp_path / "tagged"), plain.judge(tmp_path / "plain")
    assert (one.fault, other.fault) == ("full-lookup", None)
    assert (one.verdict, one.results, one.table) == (other.verdict, other.results, other.table)


def test_no_check_reads_the_fault() -> None:
    folder = Path(analyzers.__file__).parent
    readers = {path.name for path in folder.glob("*.py") if ".fault" in path.read_text(encoding="utf-8")}
    # `claims` and `known` say of an archive that is judged already what may be claimed, and what is accepted, of it.
    assert readers == {"analyzers.py", "claims.py", "history.py", "known.py"}


def test_an_imported_control_is_no_new_run_of_two_arms(tmp_path: Path) -> None:
    control = b.build().write(tmp_path / "c")
    run = b.imported(b.build(arms=("candidate",)), control=control)
    judgement = run.judge(tmp_path / "a")
    assert (judgement.verdict, judgement.comparison_kind) == (Verdict.PASS, "candidate_vs_archived")
    assert any((control.seal_sha256 or "?")[:12] in line for line in judgement.limitations)


def test_a_control_may_come_from_the_plan_that_the_plan_names(tmp_path: Path) -> None:
    plain = b.build()
    settings = next(rec.settings for rec in plain.client("control") if isinstance(rec, r.EngineStarted))
    b.edit(
        plain.client("control"), r.EngineStarted, {"settings": {**settings, "cache_config.mamba_cache_mode": "align"}}
    )
    control = plain.write(tmp_path / "c")
    run = b.imported(b.build(b.instrumented_plan(), arms=("candidate",)), control=control)
    judgement = run.judge(tmp_path / "a")
    assert (judgement.verdict, judgement.comparison_kind) == (Verdict.PASS, "candidate_vs_archived")
    assert judgement.analyzer == "boundary-instrumented-v1"
    assert not judgement.performance_eligible
    assert not any("bytes were not inspected" in line for line in judgement.limitations)


@pytest.mark.parametrize(
    ("update", "words"),
    [({"seed": 7}, "differs from plan boundary-instrumented in seed"), ({"name": "other"}, "is of plan other")],
)
def test_a_control_of_a_plan_that_may_not_lend_fails(tmp_path: Path, update: dict[str, object], words: str) -> None:
    control = b.build(b.small_plan().model_copy(update=update)).write(tmp_path / "c")
    run = b.imported(b.build(b.instrumented_plan(), arms=("candidate",)), control=control)
    judgement = run.judge(tmp_path / "a")
    finding = next(one for one in b.result(judgement, "plan-identity").findings if one.code == "wrong_lender")
    assert words in finding.message
    assert judgement.verdict is Verdict.FAIL


def test_a_lent_control_that_resolved_other_inputs_fails(tmp_path: Path) -> None:
    control = b.build(ranks=1)
    b.edit(control.client("control"), r.PlanResolved, {"resolved_sha256": "0" * 64})
    run = b.imported(b.build(b.instrumented_plan(), arms=("candidate",)), control=control.write(tmp_path / "c"))
    assert "wrong_resolved" in b.codes(run.judge(tmp_path / "a"), "plan-identity")


@pytest.mark.parametrize("analyzer", ["boundary-v1", "boundary-instrumented-v1"])
def test_only_a_plain_run_is_eligible_for_performance(tmp_path: Path, analyzer: str) -> None:
    assert judge(b.build().write(tmp_path / "plain"), analyzer).performance_eligible
    assert not judge(b.build(fault="full-lookup").write(tmp_path / "fault"), analyzer).performance_eligible
    digested = b.instrumented_plan()
    instruments = digested.instruments.model_copy(update={"audit_level": "digest", "save_delay_ms": 0})
    digested = digested.model_copy(update={"instruments": instruments})
    assert not judge(b.build(digested).write(tmp_path / "digest"), analyzer).performance_eligible


def test_live_arms_are_a_paired_run(tmp_path: Path) -> None:
    judgement = b.build().judge(tmp_path / "a")
    assert (judgement.verdict, judgement.comparison_kind) == (Verdict.PASS, "paired_live")
    assert not any("recorded earlier" in line for line in judgement.limitations)


def test_an_archive_without_plan_is_unknown(tmp_path: Path) -> None:
    archive = b.build().write(tmp_path / "a")
    (archive.root / "plan.json").unlink()
    judgement = judge(Archive.open(archive.root))
    assert judgement.verdict is Verdict.UNKNOWN
    assert judgement.table == [] and judgement.not_shown == []
    assert not any(one.verdict is Verdict.PASS for one in judgement.results if one.check in judgement.required)


@pytest.mark.parametrize("damage", ["{}", "[", '{"format": 1}'])
def test_an_unreadable_plan_is_unknown(tmp_path: Path, damage: str) -> None:
    archive = b.build().write(tmp_path / "a")
    (archive.root / "plan.json").write_text(damage)
    assert judge(Archive.open(archive.root)).verdict is Verdict.UNKNOWN


def test_an_unknown_analyzer_is_refused(tmp_path: Path) -> None:
    archive = b.build().write(tmp_path / "a")
    with pytest.raises(AnalyzerError, match=r"no analyzer 'nosuch'.*boundary-v1"):
        judge(archive, "nosuch")
    with pytest.raises(AnalyzerError):
        source_sha256("nosuch")


def test_without_a_required_check_no_run_passes(tmp_path: Path) -> None:
    plan = b.small_plan().model_copy(update={"required_checks": ["nosuch"]})
    judgement = b.build(plan).judge(tmp_path / "a")
    assert judgement.required == [*ANALYZERS["boundary-v1"].floor, "nosuch"]
    assert judgement.verdict is Verdict.UNKNOWN


@pytest.mark.parametrize("fault", [None, "full-lookup"])
def test_a_plan_cannot_require_less_than_the_floor(tmp_path: Path, fault: str | None) -> None:
    plan = b.small_plan().model_copy(update={"required_checks": ["integrity"]})
    judgement = b.build(plan, fault=fault).judge(tmp_path / "a")
    assert judgement.verdict is (Verdict.FAIL if fault else Verdict.PASS)
    assert "paired-equality" in judgement.required and "controls-equal" not in judgement.required


def test_no_row_passes_over_what_it_shows(tmp_path: Path) -> None:
    """Even if no check objected."""
    wrong, right = b.build(fault="full-lookup"), b.build()
    for run, root, expected in ((wrong, "w", Verdict.FAIL), (right, "r", Verdict.PASS)):
        history = History.read(run.write(tmp_path / root))
        passed = [conclude("integrity", [], unit="records", examined=1, summary="")]
        rows = {row.case: row.verdict for row in table(history, passed, ["integrity"])}
        assert rows == {"N31": Verdict.PASS, "N32": expected, "N33": Verdict.PASS}


@pytest.mark.parametrize("fault", [None, "full-lookup", "other"])
def test_a_fault_that_did_not_show_is_said(tmp_path: Path, fault: str | None) -> None:
    judgement = b.build(fault=fault).judge(tmp_path / "a")
    said = "Fault other was injected and did not show: no required check failed."
    assert (said in judgement.limitations) == (fault == "other")
    assert judgement.verdict is (Verdict.FAIL if fault == "full-lookup" else Verdict.PASS)


def test_a_fault_that_left_checks_without_evidence_is_said(tmp_path: Path) -> None:
    history = History.read(b.build(fault="other").write(tmp_path / "a"))
    passed = conclude("integrity", [], unit="records", examined=1, summary="")
    lost = unknown("missing_ranks", "rank 1 left no record", Place())
    unsure = conclude("ranks", [lost], unit="reloads", examined=1, summary="")
    (said,) = analyzers._hidden_fault(history, [passed, unsure], ["integrity", "ranks"])
    assert said == "Fault other was injected: no required check failed, unknown are ranks."


@pytest.mark.parametrize("name", list(shipped()))
def test_the_shipped_plan_requires_the_floor(name: str) -> None:
    plan = load(name)
    validate_checks(plan, ANALYZERS[plan.analyzer.id].checks, ANALYZERS[plan.analyzer.id].floor)


def test_the_instrumented_plan_is_the_boundary_plan_watched() -> None:
    plan, plain = load("boundary-instrumented"), load("boundary")
    assert objection(plan, plain) is None
    assert set(plan.required_checks) - set(plain.required_checks) == {
        "layout",
        "page-bytes",
        "page-coverage",
        "poison",
        "save-completion",
        "prefix-identity",
    }


def test_an_archive_without_pages_cannot_pass_the_instrumented_analyzer(tmp_path: Path) -> None:
    judgement = judge(b.build().write(tmp_path / "a"), "boundary-instrumented-v1")
    for check in ("layout", "page-bytes", "page-coverage", "poison", "save-completion", "prefix-identity"):
        assert b.result(judgement, check).verdict is Verdict.UNKNOWN


def test_no_instrumented_archive_passes_without_any_one_of_its_page_records(tmp_path: Path) -> None:
    plan = b.instrumented_plan().model_copy(update={"lengths": ["2C"], "output_tokens": 6})
    kept = len(b.build(plan).worker())
    passed = []
    for index in range(kept):
        run = b.build(plan)
        gone = run.worker().pop(index)
        if not isinstance(gone, b.Mark) and run.judge(tmp_path / str(index)).verdict is Verdict.PASS:
            passed.append(type(gone))
    assert passed == []


@pytest.mark.parametrize(
    "process",
    [("control", "client"), ("candidate", "client"), ("candidate", "scheduler"), ("candidate", "worker-0")],
)
def test_no_archive_passes_without_any_one_of_its_lines(tmp_path: Path, process: tuple[str, str]) -> None:
    """Even with a fresh seal over it: a record that is not there is never taken for granted."""
    plan = b.small_plan().model_copy(update={"lengths": ["2C"], "output_tokens": 6})
    kept = len(b.build(plan).streams[process])
    passed = []
    for index in range(kept):
        run = b.build(plan)
        gone = run.streams[process].pop(index)
        if not isinstance(gone, b.Mark) and run.judge(tmp_path / str(index)).verdict is Verdict.PASS:
            passed.append(type(gone))
    assert passed == []


def test_a_simulated_engine_is_said_to_be_one(tmp_path: Path) -> None:
    said = "No model ran: the engine was the simulated one, and the checkpoint only lent its name."
    for engine in ("vllm", "sim"):
        run = b.build()
        for arm in ("control", "candidate"):
            b.edit(run.client(arm), r.EngineStarted, {"engine": engine})
        assert (said in run.judge(tmp_path / engine).limitations) == (engine == "sim")
