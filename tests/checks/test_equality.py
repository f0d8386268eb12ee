from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestate.checks.base import Verdict
from samestate.checks.equality import first_difference
from samestate.evidence import records as r

from . import builder as b
from .test_geometry import split

PAIRED, RELOAD, CONTROLS = "paired-equality", "reload-equality", "controls-equal"


def spoil(run: b.Run, op: str, at: int = 3, arm: str = "candidate") -> None:
    """Another token at index `at` of one output."""
    for index, rec in enumerate(run.client(arm)):
        if isinstance(rec, r.OperationOutput) and rec.op == op:
            ids = [*rec.token_ids[:at], rec.token_ids[at] + 1, *rec.token_ids[at + 1 :]]
            run.client(arm)[index] = msgspec.structs.replace(rec, token_ids=ids)


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_first_difference(left: list[int], right: list[int]) -> None:
    index = first_difference(left, right)
    assert (index is None) == (left == right)
    if index is not None:
        assert left[:index] == right[:index]
        assert left[index : index + 1] != right[index : index + 1]


def test_silent_on_equal_outputs(tmp_path: Path) -> None:
    judgement = b.build().judge(tmp_path / "a")
    assert b.result(judgement, PAIRED).summary == "12/12 generations equal"
    for check in (PAIRED, RELOAD):
        assert (b.result(judgement, check).verdict, b.result(judgement, check).findings) == (Verdict.PASS, [])


def test_one_token_fails_both_comparisons(tmp_path: Path) -> None:
    run = b.build()
    spoil(run, "N32.reload", at=3)
    judgement = run.judge(tmp_path / "a")
    assert (judgement.verdict, b.failing(judgement)) == (Verdict.FAIL, {PAIRED, RELOAD})
    assert b.result(judgement, PAIRED).summary == "11/12 generations equal"
    finding = b.only(judgement, PAIRED)
    assert finding.message == "candidate N32.reload differs from control N32.reload from token 3 on"
    assert (finding.place.arm, finding.place.case, finding.place.op) == ("candidate", "N32", "N32.reload")
    assert [where.split(":")[0] for where in finding.evidence] == [
        "arms/control/client.jsonl",
        "arms/candidate/client.jsonl",
    ]
    row = {row.case: row for row in judgement.table}["N32"]
    assert (row.first_difference, row.equal, row.verdict) == (3, False, Verdict.FAIL)
    assert {row.verdict for row in judgement.table if row.case != "N32"} == {Verdict.PASS}


def test_an_interposer_counts_in_the_pairs_alone(tmp_path: Path) -> None:
    """Nothing was reused in it, so its difference is laid to nothing."""
    run = b.build()
    spoil(run, "N32.interposer-2")
    judgement = run.judge(tmp_path / "a")
    assert (judgement.verdict, b.codes(judgement, RELOAD)) == (Verdict.UNKNOWN, [])
    finding = b.only(judgement, PAIRED)
    assert (finding.code, finding.verdict, finding.place.op) == ("cold_differs", Verdict.UNKNOWN, "N32.interposer-2")


def test_engines_that_differ_cold_lay_nothing_to_the_reload(tmp_path: Path) -> None:
    run = b.build()
    for op in ("N32.cold", "N32.reload"):
        spoil(run, op)
    judgement = run.judge(tmp_path / "a")
    assert (judgement.verdict, b.codes(judgement, PAIRED)) == (Verdict.UNKNOWN, ["cold_differs"] * 2)
    cold, reload = b.result(judgement, PAIRED).findings
    assert "neither reused anything" in cold.message
    assert "their cold runs differ too" in reload.message
    assert b.result(judgement, RELOAD).verdict is Verdict.PASS


def test_a_reload_that_differs_from_its_own_cold_run_fails_however_the_engines_compute(tmp_path: Path) -> None:
    run = b.build()
    spoil(run, "N32.cold")
    judgement = run.judge(tmp_path / "a")
    assert (b.codes(judgement, PAIRED), b.failing(judgement)) == (["cold_differs"], {RELOAD})


def test_a_control_that_repeats_itself_lays_a_cold_difference_to_the_candidate(tmp_path: Path) -> None:
    run = with_reference(tmp_path, spoiled=False)
    spoil(run, "N32.interposer-2")
    judgement = run.judge(tmp_path / "a")
    assert (b.only(judgement, PAIRED).code, b.failing(judgement)) == ("tokens_differ", {PAIRED})


def test_a_difference_under_other_batches_cannot_be_attributed(tmp_path: Path) -> None:
    run = b.build()
    spoil(run, "N31.reload")
    b.edit_rows(run, "N31.reload", split)
    judgement = run.judge(tmp_path / "a")
    assert judgement.verdict is Verdict.UNKNOWN
    for check in (PAIRED, RELOAD):
        assert (b.only(judgement, check).code, b.only(judgement, check).verdict) == (
            "geometry_mismatch",
            Verdict.UNKNOWN,
        )


def test_a_missing_output_is_unknown(tmp_path: Path) -> None:
    run = b.build()
    b.drop(run.client("control"), r.OperationOutput, op="N32.cold")
    finding = b.only(run.judge(tmp_path / "a"), PAIRED)
    assert (finding.code, finding.verdict) == ("missing_output", Verdict.UNKNOWN)


def test_outputs_of_another_length_fail_though_equal(tmp_path: Path) -> None:
    run = b.build()
    for arm in ("control", "candidate"):
        (output,) = [rec for rec in run.client(arm) if isinstance(rec, r.OperationOutput) and rec.op == "N32.cold"]
        b.edit(run.client(arm), r.OperationOutput, {"token_ids": output.token_ids[:-1]}, op="N32.cold")
    assert b.codes(run.judge(tmp_path / "a"), PAIRED) == ["wrong_length"] * 2


def test_a_control_that_differs_from_itself_is_unknown(tmp_path: Path) -> None:
    run = b.build()
    for arm in ("control", "candidate"):
        spoil(run, "N32.cold", arm=arm)
    judgement = run.judge(tmp_path / "a")
    assert b.codes(judgement, PAIRED) == []
    assert b.codes(judgement, RELOAD) == ["not_repeatable", "control_not_repeatable"]
    assert judgement.verdict is Verdict.UNKNOWN


def test_under_a_control_that_differs_from_itself_no_difference_is_laid_to_reuse(tmp_path: Path) -> None:
    """The noise floor is the engine's: a wrong reload of another case cannot be told from it."""
    run = b.build()
    spoil(run, "N32.reload", at=5, arm="control")
    spoil(run, "N33.reload", at=2)
    judgement = run.judge(tmp_path / "a")
    assert (judgement.verdict, b.failing(judgement)) == (Verdict.UNKNOWN, set())
    assert b.codes(judgement, PAIRED) == ["not_repeatable"] * 2
    assert b.codes(judgement, RELOAD) == ["not_repeatable", "control_not_repeatable"]
    said = {finding.place.op: finding.message for finding in b.result(judgement, PAIRED).findings}
    assert said["N33.reload"] == (
        "candidate N33.reload differs from control N33.reload from token 2 on, not repeatable: "
        "control N32.reload is a second cold run and differs too"
    )


def test_a_control_that_reused_is_no_second_cold_run(tmp_path: Path) -> None:
    """It hit a prefix and went wrong: that is no noise, and takes nothing from the candidate's own failure."""
    run = b.build()
    spoil(run, "N32.reload", at=5, arm="control")
    b.edit_rows(run, "N32.reload", lambda rows: rows[1:], arm="control")
    spoil(run, "N33.reload", at=2)
    judgement = run.judge(tmp_path / "a")
    assert b.codes(judgement, RELOAD) == ["tokens_differ", "control_not_repeatable"]
    assert RELOAD in b.failing(judgement)


def with_reference(tmp_path: Path, spoiled: bool) -> b.Run:
    reference = b.build()
    if spoiled:
        spoil(reference, "N32.cold", arm="control")
    return b.imported(b.build(), reference=reference.write(tmp_path / "reference"))


def test_controls_are_not_compared_without_a_reference(tmp_path: Path) -> None:
    judgement = b.build().judge(tmp_path / "a")
    assert b.result(judgement, CONTROLS).verdict is Verdict.NOT_EXERCISED
    assert CONTROLS not in judgement.required


def test_equal_controls_pass(tmp_path: Path) -> None:
    judgement = with_reference(tmp_path, spoiled=False).judge(tmp_path / "a")
    assert b.result(judgement, CONTROLS).summary == "12/12 control generations equal to the reference"
    assert CONTROLS in judgement.required
    assert judgement.verdict is Verdict.PASS


def test_unequal_controls_fail_the_run(tmp_path: Path) -> None:
    judgement = with_reference(tmp_path, spoiled=True).judge(tmp_path / "a")
    assert (judgement.verdict, b.failing(judgement)) == (Verdict.FAIL, {CONTROLS})


def test_two_copies_of_one_control_show_nothing(tmp_path: Path) -> None:
    source = b.build().write(tmp_path / "source")
    judgement = b.imported(b.build(arms=("candidate",)), control=source, reference=source).judge(tmp_path / "a")
    assert b.only(judgement, CONTROLS).code == "same_source"
    assert judgement.verdict is Verdict.UNKNOWN


@pytest.mark.parametrize("check", [PAIRED, RELOAD])
def test_without_a_candidate_nothing_is_equal(tmp_path: Path, check: str) -> None:
    judgement = b.build(arms=("control",)).judge(tmp_path / "a")
    assert (b.only(judgement, check).code, judgement.verdict) == ("missing_arm", Verdict.UNKNOWN)
