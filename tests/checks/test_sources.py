"""Reused prefixes and the steps that computed them: where these are not the control's, nothing is laid to reuse."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from samestate.checks.base import Finding, Verdict
from samestate.evidence import records as r
from samestate.plans.model import Plan, PromptPlan, StepPlan

from . import builder as b
from . import scenarios as s
from . import zoo

CHECK = "cold-equality"
EXACT = [s.step("trunk", path="cold"), s.RESET, s.step("one"), s.RESET, s.step("exact", path="external")]
"""As on an H200: the state at C is from a step of C tokens, the attention page of [0, C) from one of 3C."""
ALONE = [s.RESET, s.step("one", salt="alone", path="cold")]
"""The same tokens once more, in the steps of the cold run, and saved under a name of their own."""


def with_exact(more: list[StepPlan] | None = None, **settings: object) -> Plan:
    plan = s.small([*EXACT, *(more or [])], **settings)
    exact = PromptPlan(name="exact", tokens="2C", shares="trunk", shared="2C")
    return plan.model_copy(update={"prompts": [*plan.prompts, exact]})


def found(run: b.Run, folder: Path, op: str) -> Finding:
    """What the check says of one generation."""
    (finding,) = [one for one in b.result(run.judge(folder / "judged"), CHECK).findings if one.place.op == op]
    return finding


def digest_again(run: b.Run, op: str, digest: str) -> None:
    """Let the saves of an operation have read other attention pages."""
    (rank,) = [rec for rec in run.worker() if isinstance(rec, r.RankRegistered)]
    attention = {entry.entry for entry in rank.entries if entry.kind is r.EntryKind.ATTENTION}
    name = s.request(run, op)

    def other(row: r.PageRow) -> r.PageRow:
        return msgspec.structs.replace(row, digest=digest)

    b.edit_pages(run, lambda row: other(row) if row.entry in attention else row, request=name)


def lose_a_save(run: b.Run, op: str) -> None:
    """Let a save be completed that nothing says was submitted: then whoever had computed a block may have stored it."""
    b.drop(run.worker(), r.SaveSubmitted, request=s.request(run, op))


def test_pages_of_other_steps_make_a_difference_unknown(tmp_path: Path) -> None:
    run = s.recorded(with_exact(), tmp_path)
    s.spoil(run, "exact.1")
    finding = found(run, tmp_path, "exact.1")
    assert (finding.code, finding.verdict) == ("geometry_mismatch", Verdict.UNKNOWN)
    assert finding.message == (
        f"arm candidate: exact.1 (N={2 * s.C}, {s.C} tokens reused) differs from exact.cold from token 3 on, and "
        f"cannot be attributed: its tokens [0, {s.C}) may come from trunk.1, which computed them in a step "
        f"[0, {3 * s.C}), exact.cold in [0, {s.C})"
    )
    assert [where.split("/")[1] for where in finding.evidence] == ["control", "candidate", "candidate", "control"]


def test_equal_answers_pass_whatever_computed_the_pages(tmp_path: Path) -> None:
    run = s.recorded(with_exact(), tmp_path)
    assert run.judge(tmp_path / "a").verdict is Verdict.PASS


@pytest.mark.parametrize("known", [True, False])
def test_pages_of_the_same_steps_leave_it_a_fail(tmp_path: Path, known: bool) -> None:
    """Steps no longer than C: every block of every prompt is computed as the control computes it."""
    run = s.recorded(with_exact(max_num_batched_tokens=s.C), tmp_path)
    s.spoil(run, "exact.1")
    if not known:
        lose_a_save(run, "trunk.1")
    finding = found(run, tmp_path, "exact.1")
    assert (finding.code, finding.verdict) == ("tokens_differ", Verdict.FAIL)


@pytest.mark.parametrize("op", ["trunk.2", "trunk.3", "trunk.4", "trunk.6"])
def test_a_source_is_who_saved_the_page_and_not_who_computed_it_again(tmp_path: Path, op: str) -> None:
    """From outside, local, mixed after `one.2` had loaded its page of the trunk's, and under another salt."""
    run = s.recorded(s.small(), tmp_path)
    s.spoil(run, op)
    finding = found(run, tmp_path, op)
    assert (finding.code, finding.verdict) == ("tokens_differ", Verdict.FAIL)


def test_who_computed_it_again_is_a_source_where_not_every_save_is_recorded(tmp_path: Path) -> None:
    run = s.recorded(s.small(), tmp_path)
    s.spoil(run, "trunk.7")
    assert found(run, tmp_path / "a", "trunk.7").code == "tokens_differ"
    lose_a_save(run, "trunk.5")
    finding = found(run, tmp_path / "b", "trunk.7")
    assert (finding.code, finding.verdict) == ("geometry_mismatch", Verdict.UNKNOWN)
    assert f"may come from one.1, which computed them in a step [0, {s.C})" in finding.message


def test_a_chain_is_followed_to_the_one_that_computed_the_beginning(tmp_path: Path) -> None:
    """`exact.1` went on from the trunk's page, and `exact.2` finds locally what both had computed."""
    run = s.recorded(with_exact([s.step("exact", path="local")]), tmp_path)
    s.spoil(run, "exact.2")
    finding = found(run, tmp_path, "exact.2")
    assert (finding.code, finding.verdict) == ("geometry_mismatch", Verdict.UNKNOWN)
    assert f"its tokens [0, {s.C}) may come from trunk.1" in finding.message


def test_a_source_in_company_makes_it_unknown(tmp_path: Path) -> None:
    run = s.recorded(s.small(), tmp_path)
    s.spoil(run, "trunk.2")
    s.merge(run, "trunk.1", "trunk.5")
    finding = found(run, tmp_path, "trunk.2")
    assert (finding.code, finding.verdict) == ("geometry_mismatch", Verdict.UNKNOWN)
    assert f"in a step [0, {3 * s.C}) with trunk.5, trunk.cold in [0, {3 * s.C})" in finding.message


# --- where the run shows that the steps give the same bytes ------------------------------------------


def test_equal_pages_of_both_steps_lay_it_to_reuse(tmp_path: Path) -> None:
    run = s.recorded(with_exact(ALONE), tmp_path)
    s.spoil(run, "exact.1")
    finding = found(run, tmp_path, "exact.1")
    assert (finding.code, finding.verdict) == ("tokens_differ", Verdict.FAIL)


def test_unequal_pages_of_both_steps_do_not(tmp_path: Path) -> None:
    run = s.recorded(with_exact(ALONE), tmp_path)
    s.spoil(run, "exact.1")
    digest_again(run, "one.2", "f" * 32)
    assert found(run, tmp_path, "exact.1").code == "geometry_mismatch"


def test_pages_that_no_save_read_show_nothing(tmp_path: Path) -> None:
    run = s.recorded(with_exact(ALONE), tmp_path)
    s.spoil(run, "exact.1")
    b.drop(run.worker(), r.PagesDigested, request=s.request(run, "one.2"))
    assert found(run, tmp_path, "exact.1").code == "geometry_mismatch"


def test_a_fault_in_company_is_laid_to_reuse_by_who_was_in_the_same_step(tmp_path: Path) -> None:
    """`left` was in the step with `right`, and its pages are those that it has alone: only `right` is wrong."""
    run = zoo.run("shared prefixes", tmp_path, "wrong-grid")
    finding = found(run, tmp_path / "a", "right.2")
    assert (finding.code, finding.verdict) == ("tokens_differ", Verdict.FAIL)
    alone = s.request(run, "left.3")
    for rank in (0, 1):
        b.drop(run.worker(rank), r.PagesDigested, request=alone)
    finding = found(run, tmp_path / "b", "right.2")
    assert (finding.code, finding.verdict) == ("geometry_mismatch", Verdict.UNKNOWN)
    assert "may come from right.1, which computed them in a step [0, 512) with left.1" in finding.message


@pytest.mark.parametrize("kept", [True, False])
def test_a_source_of_which_no_step_is_recorded_keeps_it_unknown(tmp_path: Path, kept: bool) -> None:
    """A lost record makes no fail of what was unknown."""
    run = s.recorded(with_exact(), tmp_path / "run")
    s.spoil(run, "exact.1")
    trunk = s.request(run, "trunk.1")
    if not kept:
        steps = [one for one in run.scheduler() if isinstance(one, r.BatchScheduled) and one.rows[0].request == trunk]
        run.scheduler()[:] = [one for one in run.scheduler() if not any(one is step for step in steps)]
    finding = found(run, tmp_path / "a", "exact.1")
    assert (finding.verdict, finding.code) == (Verdict.UNKNOWN, "geometry_mismatch")
    assert ("of which no step is recorded" in finding.message) is not kept
