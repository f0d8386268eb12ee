"""What was stored whole, and cannot have been evicted, is served."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestate.checks.base import CheckResult, Verdict
from samestate.checks.cacheability import CHECK, cacheability
from samestate.evidence import records as r
from samestate.lab.exercises import C
from samestate.plans.model import StepPlan

from . import builder as b
from . import zoo


def checked(recorded: b.Run, folder: Path) -> CheckResult:
    return zoo.result(cacheability, CHECK, recorded, folder)


def test_silent_where_everything_stored_is_served(tmp_path: Path) -> None:
    result = checked(zoo.run("shared prefixes", tmp_path), tmp_path / "a")
    assert (result.verdict, result.findings) == (Verdict.PASS, [])
    assert result.examined > 5


@pytest.mark.parametrize(
    ("fault", "op", "boundary"),
    [
        ("boundary-dip", "exact.1", C),
        ("third-sighting", "trunk.2", 4 * C),
        ("stored-never-served", "trunk.2", 4 * C),
        ("orphan-attention", "trunk.4", 4 * C),
    ],
)
def test_a_stored_prefix_that_is_not_found_is_named(tmp_path: Path, fault: str, op: str, boundary: int) -> None:
    finding = zoo.first(checked(zoo.run("shared prefixes", tmp_path, fault), tmp_path / "a"))
    assert (finding.code, finding.verdict) == ("stored_not_served", Verdict.FAIL)
    assert (finding.place.op, finding.place.boundary) == (op, boundary)


def test_fragments_of_the_last_prompt_are_named(tmp_path: Path) -> None:
    finding = zoo.first(checked(zoo.run("a small tier", tmp_path, "fragment-eviction"), tmp_path / "a"))
    assert (finding.code, finding.place.op) == ("stored_not_served", "f.2")


def test_a_prompt_that_had_to_go_is_no_fault(tmp_path: Path) -> None:
    """Of what was stored first nothing is left; too much was stored since to say that it should be."""
    names = ["a", "b", "c", "d", "e", "f"]
    steps = [*(StepPlan(prompts=[name]) for name in names), zoo.RESET, StepPlan(prompts=["a"])]
    plan = zoo.scenario({name: f"3C+{index}" for index, name in enumerate(names)}, steps, tensor_parallel_size=1)
    small = plan.model_copy(update={"engine": plan.engine.model_copy(update={"external_cache_bytes": 20 * C})})
    recorded = zoo.run(small, tmp_path)
    (again,) = [rec for rec in recorded.client() if isinstance(rec, r.OperationOutput) and rec.op == "a.2"]
    assert again.cached_tokens == 0
    result = checked(recorded, tmp_path / "a")
    assert (result.verdict, [finding.code for finding in result.findings]) == (
        Verdict.NOT_EXERCISED,
        ["nothing_stored"],
    )


def test_what_was_never_reported_as_saved_need_not_be_found(tmp_path: Path) -> None:
    recorded = zoo.run("shared prefixes", tmp_path, "stored-never-served")
    for rank in range(2):
        b.drop(recorded.worker(rank), r.SaveCompleted)
    assert checked(recorded, tmp_path / "a").verdict is Verdict.NOT_EXERCISED
