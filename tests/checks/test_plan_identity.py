from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from samestate.checks.base import Verdict
from samestate.evidence import records as r
from samestate.evidence.canonical import canonical_json, sha256_hex, token_digest
from samestate.plans.model import AnalyzerPin

from . import builder as b
from . import scenarios as s

CHECK = "plan-identity"


def resolve_again(run: b.Run, **change: object) -> None:
    """Change `resolved.json`, and let the arms cite it as if nothing were."""
    run.resolved = run.resolved.model_copy(update=change)
    digest = sha256_hex(canonical_json(run.resolved.model_dump(mode="json")))
    for arm in ("control", "candidate"):
        b.edit(run.client(arm), r.PlanResolved, {"resolved_sha256": digest})


def test_silent_when_everything_agrees(tmp_path: Path) -> None:
    result = b.result(b.build().judge(tmp_path / "a"), CHECK)
    assert (result.verdict, result.findings, result.examined) == (Verdict.PASS, [], 9)


def test_an_attempt_of_another_plan_fails(tmp_path: Path) -> None:
    run = b.build()
    run.attempts[0] = msgspec.structs.replace(run.attempts[0], plan_sha256="0" * 64)
    assert b.only(run.judge(tmp_path / "a"), CHECK).code == "wrong_plan"


@pytest.mark.parametrize(
    ("change", "codes"),
    [
        ({"plan_sha256": "0" * 64}, {"wrong_plan"}),
        ({"lengths": [31, 32, 34]}, {"wrong_lengths"}),
        ({"operations": ["N31.cold"]}, {"wrong_operations"}),
        ({"inputs": []}, {"wrong_inputs"}),
        (
            {"checkpoint_interval": 15},
            {"wrong_lengths", "wrong_operations", "wrong_inputs", "wrong_checkpoint_interval"},
        ),
    ],
)
def test_a_resolved_plan_that_is_not_the_plans_fails(
    tmp_path: Path, change: dict[str, object], codes: set[str]
) -> None:
    run = b.build()
    resolve_again(run, **change)
    judgement = run.judge(tmp_path / "a")
    assert b.result(judgement, CHECK).verdict is Verdict.FAIL
    assert set(b.codes(judgement, CHECK)) == codes


def test_an_arm_of_another_resolved_plan_fails(tmp_path: Path) -> None:
    run = b.build()
    b.edit(run.client(), r.PlanResolved, {"resolved_sha256": "0" * 64})
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.place.arm) == ("wrong_resolved", "candidate")


def test_an_arm_that_never_resolved_is_unknown_and_one_that_did_so_late_fails(tmp_path: Path) -> None:
    run = b.build()
    resolved = run.client().pop(1)
    assert b.only(run.judge(tmp_path / "a"), CHECK).code == "missing_resolved"
    run.client().append(resolved)
    assert b.only(run.judge(tmp_path / "b"), CHECK).code == "resolved_late"


def test_an_engine_at_another_interval_fails(tmp_path: Path) -> None:
    run = b.build()
    b.edit(run.client(), r.EngineStarted, {"checkpoint_interval": 8})
    assert b.only(run.judge(tmp_path / "a"), CHECK).code == "wrong_checkpoint_interval"


def test_a_missing_input_is_unknown(tmp_path: Path) -> None:
    run = b.build()
    run.inputs.pop(run.resolved.inputs[0].sha256)
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict, finding.place.case) == ("missing_input", Verdict.UNKNOWN, "N31")


def test_an_input_of_another_length_fails(tmp_path: Path) -> None:
    run = b.build()
    short = run.resolved.inputs[0]
    resolve_again(run, inputs=[short.model_copy(update={"tokens": 30}), *run.resolved.inputs[1:]])
    assert set(b.codes(run.judge(tmp_path / "a"), CHECK)) == {"wrong_input", "wrong_inputs"}


def share(run: b.Run, tokens: int) -> None:
    """Let target and first interposer of the first case agree in their first `tokens`."""
    target, interposer = run.resolved.inputs[:2]
    ids = run.inputs[target.sha256][:tokens] + run.inputs[interposer.sha256][tokens:]
    run.inputs[token_digest(ids)] = ids
    inputs = [target, interposer.model_copy(update={"sha256": token_digest(ids)}), *run.resolved.inputs[2:]]
    resolve_again(run, inputs=inputs)


def test_prompts_that_share_a_checkpoint_fail(tmp_path: Path) -> None:
    run = b.build()
    share(run, b.C)
    assert b.only(run.judge(tmp_path / "a"), CHECK).code == "shared_checkpoint"


def test_prompts_that_part_just_before_a_checkpoint_do_not(tmp_path: Path) -> None:
    run = b.build()
    share(run, b.C - 1)
    assert b.codes(run.judge(tmp_path / "a"), CHECK) == []


@pytest.mark.parametrize(
    ("pin", "code"),
    [
        (AnalyzerPin(id="boundary-v1", source_sha256=None), "not_frozen"),
        (AnalyzerPin(id="boundary-v1", source_sha256="0" * 64), "other_analyzer_source"),
    ],
)
def test_another_analyzer_source_is_unknown(tmp_path: Path, pin: AnalyzerPin, code: str) -> None:
    run = b.build()
    run.plan = run.plan.model_copy(update={"analyzer": pin})
    judgement = run.judge(tmp_path / "a")
    found = {finding.code: finding.verdict for finding in b.result(judgement, CHECK).findings}
    assert found[code] is Verdict.UNKNOWN
    assert judgement.verdict is not Verdict.PASS


def test_arms_that_the_attempt_does_not_name_fail(tmp_path: Path) -> None:
    run = b.build()
    run.attempts[0] = msgspec.structs.replace(run.attempts[0], arms=["candidate"])
    assert b.codes(run.judge(tmp_path / "a"), CHECK) == ["missing_arm", "unplanned_arm"]


@pytest.mark.parametrize(
    "change",
    [
        {"control_seal_sha256": "1" * 64},
        {"arms": ["control", "candidate", "candidate"]},
        {"arms": ["control", "candidate", "reference-control"], "reference_seal_sha256": "1" * 64},
    ],
)
def test_an_arm_that_the_attempt_names_twice_fails(tmp_path: Path, change: dict[str, object]) -> None:
    """Live and imported, or live twice."""
    run = b.build()
    run.attempts[0] = msgspec.structs.replace(run.attempts[0], **change)
    judgement = run.judge(tmp_path / "a")
    assert judgement.verdict is Verdict.FAIL
    assert "wrong_arms" in b.codes(judgement, CHECK)


def test_an_arm_that_the_attempt_names_and_is_not_there_is_unknown(tmp_path: Path) -> None:
    run = b.build(arms=("candidate",))
    run.attempts[0] = msgspec.structs.replace(run.attempts[0], control_seal_sha256="1" * 64)
    assert b.only(run.judge(tmp_path / "a"), CHECK).code == "missing_arm"


def test_an_import_from_another_seal_fails(tmp_path: Path) -> None:
    run = b.imported(b.build(arms=("candidate",)), control=b.build().write(tmp_path / "c"))
    run.attempts[0] = msgspec.structs.replace(run.attempts[0], control_seal_sha256="1" * 64)
    assert b.only(run.judge(tmp_path / "a"), CHECK).code == "wrong_import"


def test_an_import_that_passes_for_live_fails(tmp_path: Path) -> None:
    run = b.imported(b.build(arms=("candidate",)), control=b.build().write(tmp_path / "c"))
    run.attempts[0] = msgspec.structs.replace(run.attempts[0], arms=["control", "candidate"], control_seal_sha256=None)
    assert b.only(run.judge(tmp_path / "a"), CHECK).code == "wrong_import"


def test_an_import_without_its_source_is_unknown(tmp_path: Path) -> None:
    run = b.build()
    run.attempts[0] = msgspec.structs.replace(run.attempts[0], arms=["candidate"], control_seal_sha256="1" * 64)
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict) == ("missing_source", Verdict.UNKNOWN)


@pytest.mark.parametrize(
    ("prompt", "update", "words"),
    [
        ("one", {"shared": "5"}, f"agree in their first {s.C + 5} tokens, planned 5"),
        ("one", {"shared": "C+9"}, f"agree in their first {s.C + 5} tokens, planned {s.C + 9}"),
        ("one", {"shares": None, "shared": None}, f"agree in their first {s.C + 5} tokens, planned 0"),
    ],
)
def test_prompts_that_share_other_beginnings_than_planned_fail(
    tmp_path: Path, prompt: str, update: dict[str, str | None], words: str
) -> None:
    run = s.recorded(s.small(), tmp_path)
    assert b.codes(run.judge(tmp_path / "clean"), CHECK) == []
    prompts = [one.model_copy(update=update if one.name == prompt else {}) for one in run.plan.prompts]
    run.plan = run.plan.model_copy(update={"prompts": prompts})
    found = {finding.code: finding for finding in b.result(run.judge(tmp_path / "a"), CHECK).findings}
    assert words in found["shared_checkpoint"].message


def test_prompts_that_begin_as_one_through_a_third_share_what_both_do(tmp_path: Path) -> None:
    plan = s.small([s.step("trunk", "one", "two")])
    two = plan.prompts[1].model_copy(update={"name": "two", "tokens": "2C+9", "shared": "2C+5"})
    run = s.recorded(plan.model_copy(update={"prompts": [*plan.prompts, two]}), tmp_path)
    assert b.codes(run.judge(tmp_path / "a"), CHECK) == []


def test_an_arm_that_no_plan_knows_fails_though_the_attempt_names_it(tmp_path: Path) -> None:
    run = b.build()
    for (arm, process), records in list(run.streams.items()):
        if arm == "candidate":
            run.streams["candidate-3", process] = list(records)
    b.edit(run.attempts, r.AttemptStarted, {"arms": ["control", "candidate", "candidate-3"]})
    findings = b.result(run.judge(tmp_path / "a"), CHECK).findings
    assert ("unplanned_arm", Verdict.FAIL, "candidate-3") in {(f.code, f.verdict, f.place.arm) for f in findings}
