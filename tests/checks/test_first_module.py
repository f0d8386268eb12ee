"""Where cold runs differ, the first module whose output differs is named, or why none is."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestate.checks.base import Finding, Verdict
from samestate.evidence import records as r
from samestate.evidence.ground_records import TRACE_DIGITS

from . import builder as b
from .test_equality import PAIRED, RELOAD, spoil
from .test_geometry import split

NAMES = ["model.layers.0.mlp", "model.layers.0", "model.layers.1.indexer", "model.layers.1"]
COLD, AGAIN = "N32.cold", "N32.reload"


def traced(
    run: b.Run,
    arm: str,
    op: str,
    *,
    changed: int | None = None,
    step: int = 0,
    rank: int = 0,
    names: list[str] = NAMES,
    tokens: int = b.C,
) -> None:
    """One traced step of an operation; the outputs from `changed` on are other ones than usual."""
    listing = sum(isinstance(rec, r.ModulesListed) for rec in run.scheduler(arm))
    digests = [
        f"{index + (100 if changed is not None and index >= changed else 0):0{TRACE_DIGITS}x}" for index in range(4)
    ]
    run.scheduler(arm).append(r.ModulesListed(rank=rank, listing=listing, outputs=names))
    run.scheduler(arm).append(
        r.StepTraced(
            rank=rank, op=op, step=step, at_ns=0, tokens=tokens, listing=listing, digests="".join(digests[: len(names)])
        )
    )


def cold_differs(ranks: int = 1) -> b.Run:
    """Control and candidate part in a cold run."""
    run = b.build(ranks=ranks)
    spoil(run, COLD)
    spoil(run, AGAIN)
    return run


def found(run: b.Run, root: Path, check: str, op: str = COLD) -> Finding:
    judgement = run.judge(root)
    assert judgement.verdict is Verdict.UNKNOWN
    (one,) = [finding for finding in b.result(judgement, check).findings if finding.place.op == op]
    return one


def test_the_first_module_of_two_engines_is_named(tmp_path: Path) -> None:
    run = cold_differs()
    traced(run, "control", COLD)
    traced(run, "candidate", COLD, changed=2)
    one = found(run, tmp_path / "a", PAIRED)
    assert (one.code, one.place.layer, one.place.rank) == ("cold_differs", NAMES[2], 0)
    assert "not repeatable" in one.message
    assert one.message.endswith(
        "; the first module output that differs is model.layers.1.indexer (step 0, rank 0, 2 outputs before it agree)"
    )
    assert [where.split(":")[0] for where in one.evidence[2:]] == [
        "arms/control/scheduler.jsonl",
        "arms/candidate/scheduler.jsonl",
    ]


def test_the_first_module_of_a_control_that_does_not_repeat_itself_is_named(tmp_path: Path) -> None:
    run = b.build()
    spoil(run, AGAIN, arm="control")
    traced(run, "control", COLD)
    traced(run, "control", AGAIN, changed=1)
    one = found(run, tmp_path / "a", RELOAD, AGAIN)
    assert (one.code, one.place.layer) == ("control_not_repeatable", NAMES[1])
    assert "not repeatable; the first module output that differs is model.layers.0 (" in one.message


def test_the_earliest_step_decides_whatever_the_rank(tmp_path: Path) -> None:
    run = cold_differs(ranks=2)
    for rank, step, changed in ((0, 0, None), (1, 0, 3), (0, 1, 0), (1, 1, 0)):
        traced(run, "control", COLD, rank=rank, step=step)
        traced(run, "candidate", COLD, rank=rank, step=step, changed=changed)
    one = found(run, tmp_path / "a", PAIRED)
    assert (one.place.layer, one.place.rank) == (NAMES[3], 1)
    assert "(step 0, rank 1, 7 outputs before it agree)" in one.message


def test_without_records_the_finding_says_how_they_are_made(tmp_path: Path) -> None:
    one = found(cold_differs(), tmp_path / "a", PAIRED)
    assert one.place.layer is None
    assert one.message.endswith(
        "; no module outputs were recorded of control N32.cold (samestate run --trace-modules records them)"
    )


def test_an_operation_beyond_the_limit_says_what_bounds_the_trace(tmp_path: Path) -> None:
    run = cold_differs()
    traced(run, "control", "N31.cold")
    assert found(run, tmp_path / "a", PAIRED).message.endswith(
        "; no module outputs were recorded of control N32.cold (SAMESTATE_CAPTURE_LIMIT bounds them)"
    )


def test_outputs_that_agree_name_none(tmp_path: Path) -> None:
    run = cold_differs()
    for arm in ("control", "candidate"):
        traced(run, arm, COLD)
    one = found(run, tmp_path / "a", PAIRED)
    assert one.place.layer is None
    assert one.message.endswith("; the 4 module outputs recorded of their first 1 steps agree")


def test_unequal_steps_name_none(tmp_path: Path) -> None:
    run, op = b.build(), "N32.interposer-1"
    spoil(run, op)
    b.edit_rows(run, op, split)
    for arm, changed in (("control", None), ("candidate", 0)):
        traced(run, arm, op, changed=changed)
    one = found(run, tmp_path / "a", PAIRED, op)
    assert (one.code, one.place.layer) == ("geometry_mismatch", None)
    assert "; their steps are unequal (step " in one.message and one.message.endswith("so no module is named")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"names": NAMES[::-1]}, "their modules ran otherwise in step 0 on rank 0, so none is named"),
        ({"names": NAMES[:3]}, "their modules ran otherwise in step 0 on rank 0, so none is named"),
        ({"tokens": 5}, "their modules ran otherwise in step 0 on rank 0, so none is named"),
        ({"rank": 1}, "not the same ranks recorded module outputs, so no module is named"),
        ({"step": 1}, "no module output was recorded of the same step of both"),
    ],
)
def test_traces_of_other_make_name_none(tmp_path: Path, change: dict[str, object], said: str) -> None:
    run = cold_differs()
    traced(run, "control", COLD)
    traced(run, "candidate", COLD, changed=0, **change)  # type: ignore[arg-type]
    one = found(run, tmp_path / "a", PAIRED)
    assert (one.code, one.place.layer) == ("cold_differs", None)
    assert said in one.message


def test_a_listing_that_is_missing_names_none(tmp_path: Path) -> None:
    run = cold_differs()
    traced(run, "control", COLD)
    traced(run, "candidate", COLD, changed=0)
    b.drop(run.scheduler(), r.ModulesListed)
    assert "so none is named" in found(run, tmp_path / "a", PAIRED).message


def test_equal_outputs_pass_whatever_was_traced(tmp_path: Path) -> None:
    """A module that differs decides nothing: tokens do."""
    run = b.build()
    traced(run, "control", COLD)
    traced(run, "candidate", COLD, changed=2)
    judgement = run.judge(tmp_path / "a")
    assert judgement.verdict is Verdict.PASS
    assert b.codes(judgement, PAIRED) == []


def test_a_control_whose_modules_compute_otherwise_takes_the_ground_from_the_candidates_difference(
    tmp_path: Path,
) -> None:
    """Its answers agree by luck. Without the trace the same reload fails."""
    run = b.build()
    spoil(run, AGAIN)
    assert RELOAD in b.failing(run.judge(tmp_path / "untraced"))
    traced(run, "control", COLD)
    traced(run, "control", AGAIN, changed=2)
    judgement = run.judge(tmp_path / "traced")
    assert b.failing(judgement) == set()
    (one,) = b.result(judgement, RELOAD).findings
    assert (one.code, one.verdict) == ("not_repeatable", Verdict.UNKNOWN)
    assert one.message.endswith(
        "control N32.reload is a second cold run and computes otherwise: the first module output that differs is "
        "model.layers.1.indexer (step 0, rank 0, 2 outputs before it agree)"
    )


@pytest.mark.parametrize("other", [{}, {"changed": 2, "tokens": b.C + 1}, {"changed": 2, "rank": 1}])
def test_a_control_whose_traces_agree_or_cannot_be_compared_leaves_the_failure(
    tmp_path: Path, other: dict[str, int]
) -> None:
    run = b.build()
    spoil(run, AGAIN)
    traced(run, "control", COLD)
    traced(run, "control", AGAIN, **other)  # type: ignore[arg-type]
    assert RELOAD in b.failing(run.judge(tmp_path / "a"))


@pytest.mark.parametrize("both", [{"tokens": 0}, {"rank": 7}])
def test_traces_that_nothing_supports_leave_the_failure(tmp_path: Path, both: dict[str, int]) -> None:
    """Rows of no step, and a rank that the engine does not have."""
    run = b.build()
    spoil(run, AGAIN)
    traced(run, "control", COLD, **both)  # type: ignore[arg-type]
    traced(run, "control", AGAIN, changed=2, **both)  # type: ignore[arg-type]
    assert RELOAD in b.failing(run.judge(tmp_path / "a"))


@pytest.mark.parametrize("digits", ["f" * TRACE_DIGITS, "z" * TRACE_DIGITS])
def test_an_output_that_nothing_later_shows_leaves_the_failure(tmp_path: Path, digits: str) -> None:
    """A scratch buffer, or what is no digest: the step's last output is what it was."""
    run = b.build()
    spoil(run, AGAIN)
    traced(run, "control", COLD)
    traced(run, "control", AGAIN)
    (step,) = [one for one in run.scheduler("control") if isinstance(one, r.StepTraced) and one.op == AGAIN]
    b.edit(
        run.scheduler("control"),
        r.StepTraced,
        {"digests": step.digests[:TRACE_DIGITS] + digits + step.digests[2 * TRACE_DIGITS :]},
        op=AGAIN,
    )
    assert RELOAD in b.failing(run.judge(tmp_path / "a"))


def test_a_trace_is_no_answer(tmp_path: Path) -> None:
    """Of an operation that is not planned, a warm-up's say: both verifiers pass."""
    run = b.build()
    traced(run, "control", "warm-up")
    assert run.judge(tmp_path / "a").verdict is Verdict.PASS
