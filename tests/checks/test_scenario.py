"""Scenarios as a whole, their table, and every generation against cold."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestate.checks.analyzers import judge
from samestate.checks.base import Verdict
from samestate.evidence import records as r
from samestate.plans.load import load

from . import builder as b
from . import scenarios as s

CHECK = "cold-equality"


@pytest.fixture
def run(tmp_path: Path) -> b.Run:
    return s.recorded(s.small(), tmp_path)


@pytest.mark.parametrize("name", ["shared-prefix", "shared-prefix-steps"])
def test_the_shipped_plans_pass_on_the_simulated_engine(tmp_path: Path, name: str) -> None:
    judgement = judge(s.sealed(load(name), tmp_path))
    assert (judgement.verdict, judgement.comparison_kind) == (Verdict.PASS, "paired_live")
    assert set(judgement.required) == {*load(name).required_checks, "cacheability", "resets", "controls", "topology"}
    assert {row.path for row in judgement.table} == {"cold", "local", "external", "mixed"}
    assert all(row.content_boundary == row.credited for row in judgement.table if row.external)
    assert [row.case for row in judgement.table if row.together] == ["branch", "two", "one", "short"]


@pytest.mark.parametrize("name", ["shared-prefix", "shared-prefix-steps"])
def test_a_lookup_over_the_full_prompt_fails_where_its_end_was_stored(tmp_path: Path, name: str) -> None:
    judgement = judge(s.sealed(load(name), tmp_path, fault="full-lookup"))
    assert judgement.verdict is Verdict.FAIL
    assert b.failing(judgement) == {CHECK, "provenance", "paths", "prefix-identity"}
    assert set(b.codes(judgement, "provenance")) == {"state_never_computed", "retained_lookup_boundary"}
    assert b.result(judgement, CHECK).summary.endswith("first wrong: exact.1 (N=3584) at token 0")
    (row,) = [row for row in judgement.table if row.verdict is not Verdict.PASS]
    assert (row.op, row.boundary, row.credited, row.content_boundary) == ("exact.1", 3584, 3583, 3584)
    assert (row.first_difference, row.verdict) == (0, Verdict.FAIL)


def test_a_tier_that_dies_with_its_engine_is_unknown_after_it(tmp_path: Path) -> None:
    judgement = judge(s.sealed(load("shared-prefix-restart"), tmp_path))
    assert judgement.verdict is Verdict.UNKNOWN
    assert b.failing(judgement) == set()
    assert set(b.codes(judgement, "paths")) == {"path_not_taken"}
    assert b.only(judgement, "non-vacuity").place.arm == "candidate-2"


def test_a_tier_that_outlives_its_engine_passes(tmp_path: Path) -> None:
    engine = type("Kept", (s.Outliving,), {})
    judgement = judge(s.sealed(load("shared-prefix-restart"), tmp_path, engine))
    assert judgement.verdict is Verdict.PASS
    assert [(row.arm, row.op) for row in judgement.table][3:5] == [
        ("candidate-2", "trunk.3"),
        ("candidate-2", "two.1"),
    ]


def test_a_clean_tour_passes_and_shows_every_generation(run: b.Run, tmp_path: Path) -> None:
    judgement = run.judge(tmp_path / "a")
    assert judgement.verdict is Verdict.PASS
    assert b.result(judgement, CHECK).summary == "10/10 generations equal to cold"
    rows = [(row.op, row.path, row.local, row.external, row.credited, row.boundary) for row in judgement.table]
    top = 3 * s.C
    assert rows == [
        ("trunk.1", "cold", 0, 0, 0, None),
        ("trunk.2", "external", 0, top, top, top),
        ("trunk.3", "local", top, 0, top, None),
        ("one.1", "cold", 0, 0, 0, None),
        ("one.2", "external", 0, s.C, s.C, s.C),
        ("trunk.4", "mixed", s.C, top - s.C, top, top),
        ("trunk.5", "cold", 0, 0, 0, None),
        ("trunk.6", "external", 0, top, top, top),
        ("trunk.7", "external", 0, top, top, top),
        ("one.3", "external", 0, s.C, s.C, s.C),
    ]
    assert [row.op for row in judgement.table if row.salted] == ["trunk.5", "trunk.6"]


def test_another_answer_after_the_same_steps_fails(run: b.Run, tmp_path: Path) -> None:
    s.spoil(run, "trunk.2")
    judgement = run.judge(tmp_path / "a")
    finding = b.only(judgement, CHECK)
    assert (finding.code, finding.verdict, finding.place.op) == ("tokens_differ", Verdict.FAIL, "trunk.2")
    assert f"trunk.2 (N={s.TRUNK}, {3 * s.C} tokens reused) differs from trunk.cold from token 3 on" in finding.message
    assert [row.op for row in judgement.table if row.verdict is Verdict.FAIL] == ["trunk.2"]


def test_a_difference_after_other_steps_is_not_laid_to_reuse(run: b.Run, tmp_path: Path) -> None:
    s.spoil(run, "trunk.2")
    s.prefill(run, "trunk.2", [3 * s.C, 3 * s.C + 2, s.TRUNK])
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict) == ("geometry_mismatch", Verdict.UNKNOWN)


def test_but_it_is_where_the_state_cannot_be_right(run: b.Run, tmp_path: Path) -> None:
    """Whatever the steps were after it."""
    s.spoil(run, "trunk.2", 0)
    s.prefill(run, "trunk.2", [3 * s.C, 3 * s.C + 2, s.TRUNK])
    s.prefill(run, "trunk.1", [0, 3 * s.C - 5, s.TRUNK])
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict) == ("tokens_differ", Verdict.FAIL)
    assert finding.message.endswith("what was reused cannot be its state")


@pytest.mark.parametrize(("merged", "code"), [(False, "tokens_differ"), (True, "geometry_mismatch")])
def test_a_difference_in_company_is_not_laid_to_reuse(run: b.Run, tmp_path: Path, merged: bool, code: str) -> None:
    s.spoil(run, "trunk.7")
    if merged:
        s.merge(run, "trunk.7", "one.3")
    judgement = run.judge(tmp_path / "a")
    finding = b.only(judgement, CHECK)
    assert finding.code == code
    assert ("it ran in steps with one.3" in finding.message) == merged
    assert any("Up to 2 requests were in one step" in line for line in judgement.limitations) == merged
    assert any("No two requests were ever" in line for line in judgement.limitations) != merged


@pytest.mark.parametrize(("arm", "op"), [("candidate", "one.2"), ("control", "one.cold")])
def test_a_missing_output_is_unknown(run: b.Run, tmp_path: Path, arm: str, op: str) -> None:
    b.drop(run.client(arm), r.OperationOutput, op=op)
    judgement = run.judge(tmp_path / "a")
    assert b.result(judgement, CHECK).verdict is Verdict.UNKNOWN
    assert judgement.verdict is Verdict.UNKNOWN
    assert any(row.verdict is Verdict.UNKNOWN for row in judgement.table if row.case == "one")


def test_an_answer_of_another_length_fails(run: b.Run, tmp_path: Path) -> None:
    (output,) = [rec for rec in run.client() if isinstance(rec, r.OperationOutput) and rec.op == "one.2"]
    b.edit(run.client(), r.OperationOutput, {"token_ids": output.token_ids[:5]}, op="one.2")
    assert "wrong_length" in b.codes(run.judge(tmp_path / "a"), CHECK)


def test_a_plan_without_a_scenario_cannot_pass_its_analyzer(tmp_path: Path) -> None:
    judgement = judge(b.build().write(tmp_path / "a"), "shared-prefix-v1")
    assert judgement.verdict is Verdict.UNKNOWN
    for check in (CHECK, "provenance", "paths", "non-vacuity"):
        assert b.codes(judgement, check) == ["no_scenario"]


def test_preemptions_are_counted_and_not_judged(run: b.Run, tmp_path: Path) -> None:
    steps = [rec for rec in run.scheduler() if isinstance(rec, r.BatchScheduled)]
    b.edit(run.scheduler(), r.BatchScheduled, {"preempted": [s.request(run, "one.1")]}, rows=steps[-1].rows)
    result = b.result(run.judge(tmp_path / "a"), "preemptions")
    assert result.verdict is Verdict.PASS
    assert result.summary.endswith("1 preempted (counted, not judged)")
    for counter in [rec for rec in run.client() if isinstance(rec, r.CountersRead) and rec.op == "one.1"]:
        values = {name: value for name, value in counter.values.items() if name != r.PREEMPTIONS}
        b.edit(
            run.client(), r.CountersRead, {"values": values, "missing": [r.PREEMPTIONS]}, op="one.1", when=counter.when
        )
    assert b.only(run.judge(tmp_path / "b"), "preemptions").code == "counter_unreadable"


@pytest.mark.slow
def test_no_tour_passes_without_any_one_of_its_lines(tmp_path: Path) -> None:
    """Even with a fresh seal over it."""
    scenario = [s.step("trunk", path="cold"), s.RESET, s.step("trunk", "one", path="external")]
    plan = s.small(scenario, max_num_batched_tokens=s.C).model_copy(update={"output_tokens": 5})
    whole = s.recorded(plan, tmp_path)
    assert whole.judge(tmp_path / "whole").verdict is Verdict.PASS
    passed = []
    for (arm, process), records in whole.streams.items():
        for index, gone in enumerate(records):
            # No mark is written, a control keeps no state for anyone, and whom a block went to decides only who waits.
            if type(gone) in (b.Mark, r.BlocksAssigned):
                continue
            streams = {**whole.streams, (arm, process): [*records[:index], *records[index + 1 :]]}
            run = b.Run(whole.plan, whole.resolved, whole.inputs, whole.attempts, streams)
            if run.judge(tmp_path / f"{arm}-{process}-{index}").verdict is Verdict.PASS:
                passed.append((arm, process, type(gone).__name__, getattr(gone, "op", "")))
    assert passed == []
