"""What lies upon vLLM: declared by the plan, and attested by every rank in its own stream."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from samestate.checks.base import Verdict
from samestate.evidence import marker_records as m
from samestate.evidence import probe_records as p
from samestate.evidence import records as r
from samestate.plans.model import Plan

from . import builder as b
from . import marker_run as k

GUARD, REPAIR = "split-top-p", "cpu-draft-rows"
UNKNOWN, FAIL = Verdict.UNKNOWN, Verdict.FAIL


def guarded() -> Plan:
    plan = k.plan([k.study_b_shape()])
    assert plan.markers is not None
    return plan.model_copy(update={"markers": plan.markers.model_copy(update={"guard": GUARD, "repairs": [REPAIR]})})


def applied(name: str = GUARD, function: m.PatchedFunction = k.PATCHED) -> r.InterventionApplied:
    return r.InterventionApplied(name=name, functions=[function])


def lost_on(*ranks: int) -> Callable[[b.Run], None]:
    def spoil(run: b.Run) -> None:
        for rank in ranks:
            b.drop(k.trace(run, rank), r.InterventionApplied, name=GUARD)

    return spoil


def elsewhere(run: b.Run) -> None:
    """A rank's word stands in the stream of another process."""
    b.drop(k.trace(run, 1), r.InterventionApplied, name=GUARD)
    k.scheduler(run).insert(1, applied())


def late(run: b.Run) -> None:
    records = k.trace(run, 1)
    b.drop(records, r.InterventionApplied, name=GUARD)
    records.insert(6, applied())


def other_source(run: b.Run) -> None:
    functions = [msgspec.structs.replace(k.PATCHED, source_sha256="f" * 64)]
    b.edit(k.trace(run, 1), r.InterventionApplied, {"functions": functions}, name=REPAIR)


def more_than_declared(run: b.Run) -> None:
    both = {"functions": [k.PATCHED, k.SOURCE]}
    k.everywhere(run, lambda records: b.edit(records, r.InterventionApplied, both, name=REPAIR))


def not_planned(run: b.Run) -> None:
    k.trace(run, 0).insert(1, applied("strict-prefix"))


def recorder_more(run: b.Run) -> None:
    """A trace whose recorder wraps what no recorder does."""
    k.everywhere(run, lambda records: b.edit(records, m.RecorderStarted, {"functions": [k.SOURCE, k.PATCHED]}))


def recorder_of_another_runner(run: b.Run) -> None:
    """It lists the newer runner's functions and says that it watches the older."""
    k.everywhere(run, lambda records: b.edit(records, m.RecorderStarted, {"runner": "v1"}))
    b.edit(k.scheduler(run), m.RecorderStarted, {"runner": "v1"})


def scheduler_more(run: b.Run) -> None:
    b.edit(k.scheduler(run), m.RecorderStarted, {"functions": [k.SCHEDULER_SOURCE, k.SOURCE]})


@pytest.mark.parametrize(
    ("spoil", "code", "verdict", "words"),
    [
        (lost_on(0, 1), "not_attested", UNKNOWN, "rank 0 does not say that split-top-p was put on, as the plan has it"),
        (lost_on(1), "not_attested", UNKNOWN, "rank 1 does not say"),
        (elsewhere, "not_attested", UNKNOWN, "rank 1 does not say"),
        (late, "attested_late", UNKNOWN, "rank 1 put split-top-p on after its first step"),
        (other_source, "interventions_differ", UNKNOWN, "rank 1 than on rank 0: vllm.utils.cpu_triton_utils._expand_"),
        (more_than_declared, "undeclared_function", FAIL, "cpu-draft-rows replaced vllm.v1.worker.gpu.sample."),
        (not_planned, "unplanned_intervention", FAIL, "strict-prefix was put on vLLM, planned split-top-p, cpu-draft"),
        (recorder_more, "undeclared_function", FAIL, "the recorder replaced vllm.utils.cpu_triton_utils."),
        (recorder_of_another_runner, "undeclared_function", FAIL, "the recorder replaced vllm.v1.worker.gpu.sample."),
        (scheduler_more, "undeclared_function", FAIL, "the recorder replaced vllm.v1.worker.gpu.sample."),
    ],
)
def test_it_fires(tmp_path: Path, spoil: Callable[[b.Run], None], code: str, verdict: Verdict, words: str) -> None:
    run = k.build(the_plan=guarded())
    spoil(run)
    k.recount(run)
    judgement = run.judge(tmp_path / "a")
    found = {one.code: one for one in reversed(b.result(judgement, "identity").findings)}
    assert found.keys() == {code}
    assert words in found[code].message
    assert (b.result(judgement, "identity").verdict, judgement.verdict) == (verdict, verdict)


def test_a_gate_that_ran_on_another_source_than_the_guard_met_in_the_engine_is_unknown(tmp_path: Path) -> None:
    run = k.build(the_plan=guarded())
    other = msgspec.structs.replace(k.PATCHED, source_sha256="f" * 64)
    b.edit(k.client(run), p.GateReceipt, {"functions": [k.SOURCE, other]}, gate="selftest")
    judgement = run.judge(tmp_path / "a")
    assert b.codes(judgement, "gates") == ["gate_sources"]
    b.edit(k.client(run), p.GateReceipt, {"functions": [k.SOURCE, k.PATCHED]}, gate="selftest")
    assert run.judge(tmp_path / "b").verdict is Verdict.PASS


def test_what_every_rank_attests_passes(tmp_path: Path) -> None:
    judgement = k.build(the_plan=guarded()).judge(tmp_path / "a")
    assert b.result(judgement, "identity").verdict is Verdict.PASS
    assert judgement.verdict is Verdict.PASS, [one for one in judgement.results if one.findings]


def test_a_guard_that_had_nothing_to_mend_is_attested_without_a_function(tmp_path: Path) -> None:
    run = k.build(the_plan=guarded())
    k.everywhere(run, lambda records: b.edit(records, r.InterventionApplied, {"functions": []}, name=GUARD))
    assert run.judge(tmp_path / "a").verdict is Verdict.PASS


def test_an_attestation_that_is_gone_and_still_counted_is_a_lost_record(tmp_path: Path) -> None:
    run = k.build(the_plan=guarded())
    b.drop(k.trace(run, 0), r.InterventionApplied, name=REPAIR)
    judgement = run.judge(tmp_path / "a")
    assert "records_lost" in b.codes(judgement, "trace-whole")
