"""Where reused prefixes were computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from samestate.checks.base import Finding, Verdict
from samestate.evidence import records as r

from . import builder as b
from . import scenarios as s

CHECK = "provenance"
TOP = 3 * s.C


@pytest.fixture
def run(tmp_path: Path) -> b.Run:
    return s.recorded(s.small(), tmp_path)


def found(run: b.Run, folder: Path, op: str | None = None) -> list[Finding]:
    findings = b.result(run.judge(folder), CHECK).findings
    return [finding for finding in findings if op in (None, finding.place.op)]


def hit(run: b.Run, op: str, ends: list[int]) -> None:
    """Let `op` find the first tokens in the local cache, which it did not."""
    s.prefill(run, op, ends)
    b.edit(run.scheduler(), r.Lookup, {"local_tokens": ends[0]}, request=s.request(run, op))


def test_silent_on_a_clean_tour(run: b.Run, tmp_path: Path) -> None:
    result = b.result(run.judge(tmp_path / "a"), CHECK)
    assert (result.verdict, result.findings, result.examined) == (Verdict.PASS, [], 10)
    assert result.summary.startswith("7/7 reused prefixes")


def test_a_state_that_no_step_ended_at_fails_and_names_the_nearest(run: b.Run, tmp_path: Path) -> None:
    s.prefill(run, "trunk.1", [0, TOP - 5, s.TRUNK])
    first, *others = found(run, tmp_path / "a")
    assert (first.code, first.verdict, first.place.op) == ("state_never_computed", Verdict.FAIL, "trunk.2")
    assert (first.place.boundary, first.place.request) == (TOP, s.request(run, "trunk.2"))
    assert f"reuses the state of [0, {TOP})" in first.message
    assert f"(nearest step ends: {TOP - 5} and {s.TRUNK})" in first.message
    assert {finding.place.op for finding in others} == {"trunk.3", "trunk.4", "trunk.7"}, (
        "the salted ones have their own"
    )


def test_a_hit_inside_a_prompt_that_was_stored_in_one_step_fails(run: b.Run, tmp_path: Path) -> None:
    """What the connector found is a page of tokens; no state was ever computed at C."""
    hit(run, "one.1", [s.C, s.ONE])
    (finding,) = found(run, tmp_path / "a", "one.1")
    assert (finding.code, finding.verdict, finding.place.boundary) == ("state_never_computed", Verdict.FAIL, s.C)
    assert f"(nearest step ends: {TOP})" in finding.message


def test_a_kernel_that_saves_within_steps_is_not_held_to_step_ends(run: b.Run, tmp_path: Path) -> None:
    hit(run, "one.1", [s.C, s.ONE])
    b.edit(run.scheduler(), r.SchedulerConfigured, {"saves_within_steps": True})
    assert found(run, tmp_path / "a") == []


def test_a_prefix_that_nobody_computed_fails(run: b.Run, tmp_path: Path) -> None:
    hit(run, "trunk.1", [s.C, s.TRUNK])
    (finding,) = found(run, tmp_path / "a", "trunk.1")
    assert (finding.code, finding.verdict) == ("never_computed", Verdict.FAIL)
    assert f"{s.C} tokens reused, and no earlier request that begins so computed them" in finding.message


def test_a_prefix_of_another_salt_fails(run: b.Run, tmp_path: Path) -> None:
    b.edit(run.client(), r.OperationStarted, {"salt": "0" * 64}, op="trunk.5")
    (finding,) = found(run, tmp_path / "a")
    assert (finding.code, finding.verdict, finding.place.op) == ("foreign_salt", Verdict.FAIL, "trunk.6")
    assert "computed by trunk.1 under another cache salt alone" in finding.message


@pytest.mark.parametrize("kind", ["output", "steps", "one step", "seal"])
def test_what_is_not_recorded_is_unknown(run: b.Run, tmp_path: Path, kind: str) -> None:
    s.prefill(run, "trunk.1", [0, TOP - 5, s.TRUNK])
    name = s.request(run, "trunk.1")
    rows = [rec for rec in run.scheduler() if isinstance(rec, r.BatchScheduled) and rec.rows[0].request == name]
    match kind:
        case "output":
            b.drop(run.client(), r.OperationOutput, op="trunk.1")
        case "steps":
            for rec in rows:
                run.scheduler().remove(rec)
        case "one step":
            for rec in [rec for rec in rows if rec.rows[0].start == s.TRUNK]:
                run.scheduler().remove(rec)
        case _:
            run.sealed = False
    findings = found(run, tmp_path / "a")
    assert findings and {finding.verdict for finding in findings} == {Verdict.UNKNOWN}


def test_steps_with_drafts_say_nothing_certain_of_where_they_ended(run: b.Run, tmp_path: Path) -> None:
    hit(run, "one.1", [s.C, s.ONE])
    b.edit(run.scheduler(), r.BatchScheduled, {"rows": drafted(run, "trunk.1")}, rows=drafted(run, "trunk.1", 0))
    assert {finding.verdict for finding in found(run, tmp_path / "a", "one.1")} == {Verdict.UNKNOWN}


def drafted(run: b.Run, op: str, drafts: int = 1) -> list[r.BatchRow]:
    """The last step of an operation, with drafts."""
    name = s.request(run, op)
    last = [rec for rec in run.scheduler() if isinstance(rec, r.BatchScheduled) and rec.rows[0].request == name][-1]
    return [msgspec.structs.replace(last.rows[0], drafted=drafts)]


def test_without_the_schedulers_sizes_nothing_passes(run: b.Run, tmp_path: Path) -> None:
    b.drop(run.scheduler(), r.SchedulerConfigured)
    assert [finding.code for finding in found(run, tmp_path / "a")] == ["not_recorded"]


@pytest.mark.parametrize(
    ("boundary", "code"), [(s.TRUNK, "retained_lookup_boundary"), (2 * s.C, "boundary_not_credited")]
)
def test_a_load_of_another_boundary_than_was_credited_fails(
    run: b.Run, tmp_path: Path, boundary: int, code: str
) -> None:
    b.edit(run.worker(), r.LoadSubmitted, {"boundary": boundary}, request=s.request(run, "trunk.2"))
    (finding,) = found(run, tmp_path / "a")
    assert (finding.code, finding.verdict, finding.place.boundary) == (code, Verdict.FAIL, boundary)
    assert (finding.place.op, finding.place.rank) == ("trunk.2", 0)


def test_a_load_that_reports_no_boundary_is_no_finding_here(run: b.Run, tmp_path: Path) -> None:
    b.edit(run.worker(), r.LoadSubmitted, {"boundary": None}, request=s.request(run, "trunk.2"))
    judgement = run.judge(tmp_path / "a")
    assert b.codes(judgement, CHECK) == []
    assert not next(row for row in judgement.table if row.op == "trunk.2").boundary_reported


def test_a_load_that_is_not_recorded_is_unknown(run: b.Run, tmp_path: Path) -> None:
    b.drop(run.worker(), r.LoadSubmitted, request=s.request(run, "trunk.2"))
    assert "missing_rank" in [finding.code for finding in found(run, tmp_path / "a")]


def test_a_load_that_was_not_completed_is_unknown(run: b.Run, tmp_path: Path) -> None:
    (job,) = [
        rec.job for rec in run.worker() if isinstance(rec, r.LoadSubmitted) and rec.request == s.request(run, "trunk.2")
    ]
    b.drop(run.worker(), r.LoadCompleted, job=job)
    assert [finding.code for finding in found(run, tmp_path / "a")] == ["load_not_completed"]


@pytest.mark.parametrize(("merged", "codes"), [(False, []), (True, ["state_never_computed"])])
def test_members_of_a_batch_reuse_each_other_one_step_later(tmp_path: Path, merged: bool, codes: list[str]) -> None:
    """A state is there once its step is over: a request in that same step cannot have begun with it."""
    scenario = [s.step("trunk", "one"), s.RESET, s.step("trunk", path="external")]
    run = s.recorded(s.small(scenario, max_num_batched_tokens=s.C), tmp_path)
    if merged:
        s.merge(run, "trunk.1", "one.1")
    assert [finding.code for finding in found(run, tmp_path / "a", "one.1")] == codes


def test_an_arm_that_follows_knows_what_was_computed_before_it(tmp_path: Path) -> None:
    engine = type("Kept", (s.Outliving,), {})
    judgement = s.recorded(s.relay(), tmp_path, engine).judge(tmp_path / "a")
    assert (judgement.verdict, b.codes(judgement, CHECK)) == (Verdict.PASS, [])
    assert b.result(judgement, CHECK).summary.startswith("4/4 reused prefixes")


def test_one_that_follows_nobody_reuses_what_was_never_computed_for_it(tmp_path: Path) -> None:
    engine = type("KeptToo", (s.Outliving,), {})
    run = s.recorded(s.relay(follows=False), tmp_path, engine)
    findings = found(run, tmp_path / "a")
    assert {finding.code for finding in findings} == {"never_computed"}
    assert {finding.place.arm for finding in findings} == {"candidate-2", "candidate-3"}


def test_scheduler_and_connector_must_agree(run: b.Run, tmp_path: Path) -> None:
    name, records = s.request(run, "trunk.1"), run.scheduler()
    index = next(
        i
        for i, rec in enumerate(records)
        if isinstance(rec, r.BatchScheduled) and rec.source is r.BatchSource.CONNECTOR and rec.rows[0].request == name
    )
    rec = records[index]
    assert isinstance(rec, r.BatchScheduled)
    records[index] = msgspec.structs.replace(rec, rows=[msgspec.structs.replace(rec.rows[0], scheduled=5)])
    assert [finding.code for finding in found(run, tmp_path / "a")] == ["sources_disagree"]


def without_groups(run: b.Run) -> None:
    b.edit(run.scheduler(), r.SchedulerConfigured, {"engine_groups": []})


def without_mode(run: b.Run) -> None:
    for arm in ("control", "candidate"):
        (engine,) = [rec for rec in run.scheduler(arm) if isinstance(rec, r.EngineStarted)]
        settings = {name: value for name, value in engine.settings.items() if not name.endswith("mamba_cache_mode")}
        b.edit(run.scheduler(arm), r.EngineStarted, {"settings": settings})


@pytest.mark.parametrize(("lose", "code"), [(without_groups, "groups_disagree"), (without_mode, "not_recorded")])
def test_where_states_are_kept_must_be_known(
    run: b.Run, tmp_path: Path, lose: Callable[[b.Run], None], code: str
) -> None:
    """A state that no step ended at must not pass because a record of groups or of the cache mode is missing."""
    s.prefill(run, "trunk.1", [0, TOP - 5, s.TRUNK])
    lose(run)
    judgement = run.judge(tmp_path / "a")
    assert b.only(judgement, CHECK).code == code
    assert judgement.verdict is Verdict.UNKNOWN
