"""Prompts that continue an answer: recomputed from records, and what they reused of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from samestate.checks.analyzers import judge
from samestate.checks.base import Verdict
from samestate.evidence import records as r
from samestate.evidence.canonical import token_digest
from samestate.plans.load import load

from . import builder as b
from . import scenarios as s

EQUALITY = "floor-equality"


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> b.Run:
    return s.recorded(load("conversation"), tmp_path_factory.mktemp("conversation"))


@pytest.fixture
def run(records: b.Run) -> b.Run:
    """A copy to spoil."""
    streams = {at: list(stream) for at, stream in records.streams.items()}
    return b.Run(records.plan, records.resolved, dict(records.inputs), list(records.attempts), streams)


def started(run: b.Run, op: str, arm: str) -> r.OperationStarted:
    (found,) = [rec for rec in run.client(arm) if isinstance(rec, r.OperationStarted) and rec.op == op]
    return found


def answer(run: b.Run, op: str, arm: str = "control") -> list[int]:
    (found,) = [rec for rec in run.client(arm) if isinstance(rec, r.OperationOutput) and rec.op == op]
    return found.token_ids


def prompt(run: b.Run, op: str, arm: str) -> list[int]:
    return run.inputs[started(run, op, arm).prompt_sha256 or ""]


def test_the_shipped_plan_passes(tmp_path: Path) -> None:
    judgement = judge(s.sealed(load("conversation"), tmp_path))
    assert judgement.verdict is Verdict.PASS
    assert set(judgement.required) == {
        *load("conversation").required_checks,
        "cacheability",
        "resets",
        "controls",
        "topology",
    }
    assert b.result(judgement, "turns").summary == (
        "15/15 turns reused a prefix, 11 of them a state that decode computed (5 from outside)"
    )
    assert {row.path for row in judgement.table} == {"cold", "local", "external"}


def test_a_state_saved_under_the_key_of_the_prompt_alone_fails(tmp_path: Path) -> None:
    judgement = judge(s.sealed(load("conversation"), tmp_path, fault="trimmed-key"))
    assert judgement.verdict is Verdict.FAIL
    assert "prefix-identity" in b.failing(judgement)


def test_turns_are_made_of_the_controls_answers(run: b.Run) -> None:
    for arm, one, two in (("control", "first.cold", "kept.cold"), ("candidate", "first.2", "kept.2")):
        first, kept = prompt(run, one, arm), prompt(run, two, arm)
        assert kept[: len(first) + 8] == first + answer(run, "first.cold")
    first, stripped = prompt(run, "first.2", "candidate"), prompt(run, "stripped.2", "candidate")
    assert stripped[: len(first) + 4] == first + answer(run, "first.cold")[4:]
    assert len(stripped) == 2 * 256 + 23


def test_another_prompt_than_the_records_make_fails(run: b.Run, tmp_path: Path) -> None:
    """The candidate continues an answer of its own: the prompt is whole, and in inputs.json."""
    ids = prompt(run, "kept.2", "candidate")
    other = [*ids[:510], ids[510] + 1, *ids[511:]]
    run.inputs[token_digest(other)] = other
    b.edit(run.client(), r.OperationStarted, {"prompt_sha256": token_digest(other)}, op="kept.2")
    judgement = run.judge(tmp_path / "a")
    assert "wrong_prompt" in b.codes(judgement, "coverage")
    assert judgement.verdict is Verdict.FAIL


def test_an_answer_that_was_changed_makes_other_prompts(run: b.Run, tmp_path: Path) -> None:
    """Of every arm: the records no longer make what was asked."""
    s.spoil(run, "first.cold", 6, "control")
    judgement = run.judge(tmp_path / "a")
    wrong = [found.place.op for found in b.result(judgement, "coverage").findings if found.code == "wrong_prompt"]
    assert {"kept.cold", "kept.2", "stripped.2", "branch.2"} <= set(wrong)
    assert "missing_input" in b.codes(judgement, "plan-identity")


def test_an_answer_that_is_not_recorded_is_unknown(run: b.Run, tmp_path: Path) -> None:
    b.drop(run.client("control"), r.OperationOutput, op="first.cold")
    judgement = run.judge(tmp_path / "a")
    assert "missing_answer" in b.codes(judgement, "coverage")
    assert "missing_answer" in b.codes(judgement, "plan-identity")
    assert not {"coverage", "plan-identity"} & b.failing(judgement)


def drop_own(run: b.Run) -> None:
    (own,) = [one for one in run.resolved.inputs if (one.case, one.role) == ("kept", "own")]
    del run.inputs[own.sha256 or ""]


def drop_turn(run: b.Run) -> None:
    del run.inputs[started(run, "kept.2", "candidate").prompt_sha256 or ""]


@pytest.mark.parametrize("spoil", [drop_own, drop_turn])
def test_an_input_that_is_gone_is_unknown(run: b.Run, tmp_path: Path, spoil: Callable[[b.Run], None]) -> None:
    spoil(run)
    judgement = run.judge(tmp_path / "a")
    assert set(b.codes(judgement, "plan-identity")) & {"missing_input", "missing_answer"}
    assert judgement.verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(("case", "fixed"), [("kept", True), ("first", False)])
def test_what_is_made_later_is_what_the_plan_says(run: b.Run, tmp_path: Path, case: str, fixed: bool) -> None:
    """A turn that was fixed before the first request, or a first prompt that was not."""
    digest = started(run, "kept.2", "candidate").prompt_sha256 if fixed else None
    inputs = [
        one.model_copy(update={"sha256": digest}) if (one.case, one.role) == (case, "target") else one
        for one in run.resolved.inputs
    ]
    run.resolved = run.resolved.model_copy(update={"inputs": inputs})
    judgement = run.judge(tmp_path / "a")
    assert "wrong_inputs" in b.codes(judgement, "plan-identity")


# --- what decode computed ---------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["kept.2", "third-stripped.3", "fourth.3"])
def test_a_difference_after_what_decode_computed_is_unknown(run: b.Run, tmp_path: Path, op: str) -> None:
    """The prompt reuses it (`kept.2`), or a state that goes on from it (`third-stripped.3`)."""
    s.spoil(run, op, 5)
    judgement = run.judge(tmp_path / "a")
    finding = b.only(judgement, EQUALITY)
    assert (finding.code, finding.place.op, judgement.verdict) == ("decode_state", op, Verdict.UNKNOWN)
    assert "goes on from a state that decode had computed" in finding.message


def test_a_difference_without_it_fails(run: b.Run, tmp_path: Path) -> None:
    """`stripped` leaves the answer's beginning out, so what it reuses is the state of the prompt alone."""
    s.spoil(run, "stripped.3", 5)
    s.prefill(run, "stripped.cold", [0, 256, 512, 535], "control")
    judgement = run.judge(tmp_path / "a")
    finding = b.only(judgement, EQUALITY)
    assert (finding.code, judgement.verdict) == ("tokens_differ", Verdict.FAIL)


def test_an_impossible_state_is_not_excused_by_decode(run: b.Run, tmp_path: Path) -> None:
    s.spoil(run, "kept.3", 5)
    b.edit(run.worker(), r.LoadSubmitted, {"boundary": 621}, request=s.request(run, "kept.3"))
    assert "tokens_differ" in b.codes(run.judge(tmp_path / "a"), EQUALITY)


def test_a_conversation_that_reuses_no_decoded_state_shows_nothing_of_it(tmp_path: Path) -> None:
    plan = load("conversation")
    prompts = [one for one in plan.prompts if one.name in ("first", "kept", "company")]
    early = [one.model_copy(update={"tokens": "2C-40"}) if one.name == "first" else one for one in prompts]
    scenario = [step for step in plan.scenario[:3] if step.arm == "batched"]
    scenario += [s.step("first", path="cold"), s.step("kept", path="local"), s.RESET, s.step("kept", path="external")]
    judgement = judge(s.sealed(plan.model_copy(update={"prompts": early, "scenario": scenario}), tmp_path))
    assert judgement.verdict is Verdict.UNKNOWN
    assert b.codes(judgement, "turns") == ["decode_not_reused"]


def test_a_turn_without_steps_is_unknown(run: b.Run, tmp_path: Path) -> None:
    name = s.request(run, "kept.2")
    for index, rec in enumerate(run.scheduler()):
        if isinstance(rec, r.BatchScheduled):
            rows = [row for row in rec.rows if row.request != name]
            run.scheduler()[index] = msgspec.structs.replace(rec, rows=rows)
    assert "missing_batches" in b.codes(run.judge(tmp_path / "a"), "turns")
