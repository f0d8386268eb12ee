"""How much is found, as a function of the prompt's length."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from samestate.checks.analyzers import judge
from samestate.checks.base import CheckResult, Verdict
from samestate.checks.hit_length import CHECK, hit_length
from samestate.evidence import records as r
from samestate.plans.load import load
from samestate.plans.model import Plan, StepPlan

from . import builder as b
from . import scenarios as s
from . import zoo

C = 512
LENGTHS = {"c": "C", "c-plus-1": "C+1", "2c": "2C", "2c-plus-1": "2C+1"}


def plan(lengths: dict[str, str] = LENGTHS) -> Plan:
    """The shipped plan with fewer lengths."""
    shipped = load("cacheability")
    prompts = [prompt for prompt in shipped.prompts if prompt.name in lengths]
    scenario = [step for step in shipped.scenario if step.reset or set(step.prompts) <= set(lengths)]
    return shipped.model_copy(update={"prompts": prompts, "scenario": scenario})


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> b.Run:
    return s.recorded(plan(), tmp_path_factory.mktemp("sweep"))


@pytest.fixture
def run(records: b.Run) -> b.Run:
    """A copy to spoil."""
    streams = {at: list(stream) for at, stream in records.streams.items()}
    return b.Run(records.plan, records.resolved, dict(records.inputs), list(records.attempts), streams)


def checked(run: b.Run, folder: Path) -> CheckResult:
    return zoo.result(hit_length, CHECK, run, folder)


def hit(run: b.Run, op: str, tokens: int) -> None:
    """Let `op` start at `tokens`, and its lookup say so."""
    name = s.request(run, op)
    s.prefill(run, op, [tokens, ends(run, op)])
    for index, rec in enumerate(run.scheduler()):
        if isinstance(rec, r.Lookup) and rec.request == name:
            changed = {"local_tokens": min(rec.local_tokens, tokens), "matched_tokens": 0}
            if not rec.local_tokens:
                changed = {"local_tokens": 0, "matched_tokens": tokens}
            run.scheduler()[index] = msgspec.structs.replace(rec, **changed)


def ends(run: b.Run, op: str) -> int:
    (started,) = [rec for rec in run.client() if isinstance(rec, r.OperationStarted) and rec.op == op]
    return started.prompt_tokens


def test_the_shipped_plan_passes(tmp_path: Path) -> None:
    judgement = judge(s.sealed(load("cacheability"), tmp_path))
    assert judgement.verdict is Verdict.PASS
    assert set(judgement.required) == {*load("cacheability").required_checks, "resets", "controls", "topology"}
    result = b.result(judgement, CHECK)
    assert result.summary == "hits of C·⌊(N−1)/C⌋ at all sightings, by length: local 11/11, external 11/11"
    assert (result.unit, result.examined) == ("sightings", 44)
    hits = {(row.tokens, row.credited) for row in judgement.table if row.op and not row.op.endswith(".1")}
    assert hits == {(n, C * ((n - 1) // C)) for n, _ in hits}


@pytest.mark.parametrize(
    ("fault", "code", "op"),
    [
        ("boundary-dip", "silent_zero", "2c.4"),
        ("third-sighting", "silent_zero", "2c-plus-1.4"),
        ("stored-never-served", "silent_zero", "c-plus-1.4"),
        ("orphan-attention", "silent_zero", "2c.4"),
        ("zero-suffix", "above_boundary", "c.2"),
    ],
)
def test_a_fault_of_the_lookup_is_named(tmp_path: Path, fault: str, code: str, op: str) -> None:
    judgement = judge(s.sealed(plan(), tmp_path, fault=fault))
    finding = next(one for one in b.result(judgement, CHECK).findings if one.verdict is Verdict.FAIL)
    assert (judgement.verdict, finding.code) == (Verdict.FAIL, code)
    assert finding.place.op is not None
    if fault != "zero-suffix":
        assert finding.place.op == op


def test_silent_on_the_records_of_a_run(run: b.Run, tmp_path: Path) -> None:
    result = checked(run, tmp_path / "a")
    assert (result.verdict, result.findings) == (Verdict.PASS, [])
    assert result.examined == 16


@pytest.mark.parametrize("op", ["2c-plus-1.2", "2c-plus-1.5"])
def test_less_than_was_there_is_a_dip(run: b.Run, tmp_path: Path, op: str) -> None:
    """The second time, local, and the last time, external."""
    hit(run, op, C)
    result = checked(run, tmp_path / "a")
    assert result.findings[0].code == "hit_dips"
    assert (result.findings[0].verdict, result.findings[0].place.op) == (Verdict.FAIL, op)
    assert result.findings[0].place.boundary == 2 * C


def test_nothing_found_is_a_silent_zero(run: b.Run, tmp_path: Path) -> None:
    hit(run, "2c.2", 0)
    assert checked(run, tmp_path / "a").findings[0].code == "silent_zero"


def test_more_than_can_be_right(run: b.Run, tmp_path: Path) -> None:
    hit(run, "2c.2", 2 * C - 1)
    finding = checked(run, tmp_path / "a").findings[0]
    assert (finding.code, finding.verdict) == ("above_boundary", Verdict.FAIL)


def test_the_third_time_less_than_the_second(run: b.Run, tmp_path: Path) -> None:
    hit(run, "2c-plus-1.3", C)
    codes = [finding.code for finding in checked(run, tmp_path / "a").findings]
    assert codes == ["hit_dips", "hit_shrinks"]


def test_without_a_seal_a_dip_is_unknown(run: b.Run, tmp_path: Path) -> None:
    hit(run, "2c.2", 0)
    run.sealed = False
    assert checked(run, tmp_path / "a").verdict is Verdict.UNKNOWN


def test_what_was_never_stored_is_no_dip(run: b.Run, tmp_path: Path) -> None:
    """No save of the prompt: that its reload finds nothing is no fault, and no pass."""
    b.drop(run.worker(), r.SaveCompleted, rank=0)
    hit(run, "2c.5", 0)
    found = [one for one in checked(run, tmp_path / "a").findings if one.place.op == "2c.5"]
    assert [(one.code, one.verdict) for one in found][:1] == [("not_kept", Verdict.UNKNOWN)]


def test_what_may_have_been_evicted_is_no_dip(run: b.Run, tmp_path: Path) -> None:
    hit(run, "2c.3", 0)
    b.edit(run.worker(), r.RankRegistered, {"num_blocks": 20}, rank=0)
    found = [one for one in checked(run, tmp_path / "a").findings if one.place.op == "2c.3"]
    assert [one.code for one in found] == ["not_kept", "hit_shrinks"]
    assert {one.verdict for one in found} == {Verdict.UNKNOWN}


def test_a_hit_that_is_not_recorded_is_unknown(run: b.Run, tmp_path: Path) -> None:
    b.drop(run.scheduler(), r.Lookup, request=s.request(run, "2c.2"))
    found = checked(run, tmp_path / "a").findings
    assert [(one.code, one.place.op) for one in found] == [("hit_unknown", "2c.2")]


def test_lengths_without_a_boundary_are_no_sweep(tmp_path: Path) -> None:
    few = {"2c-less-1": "2C-1", "3c-less-1": "3C-1"}
    judgement = judge(s.sealed(plan(few), tmp_path))
    assert b.codes(judgement, CHECK) == ["no_sweep"] * 2
    assert judgement.verdict is Verdict.UNKNOWN


def test_prompts_that_come_once_show_nothing(tmp_path: Path) -> None:
    once = plan().model_copy(update={"scenario": [StepPlan(prompts=[name]) for name in LENGTHS]})
    result = b.result(judge(s.sealed(once, tmp_path)), CHECK)
    assert (result.verdict, result.examined) == (Verdict.UNKNOWN, 0)
