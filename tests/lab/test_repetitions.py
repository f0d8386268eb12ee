"""Repetitions on the simulated engine: each by itself, in fresh engines, in the planned order; nothing pooled."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest

from checks.tampering import RESEALED, Files, read, records, sealed, stream, write
from samestate.checks.analyzers import AnalyzerError, Judgement, judge
from samestate.checks.base import CheckResult, Finding, Verdict
from samestate.engines.base import EngineSpec
from samestate.engines.sim import SimEngine
from samestate.evidence import records as r
from samestate.evidence.archive import Archive
from samestate.lab.matrix import run_releases
from samestate.lab.run import RunError, RunRequest, run_plan
from samestate.plans.model import Order, Plan

from .conftest import QuietProgress

Requests = Callable[..., RunRequest]
ARMS = ["control", "candidate", "control-2", "candidate-2"]


def twice(small: Plan, *orders: Order) -> Plan:
    return small.model_copy(update={"repetitions": list(orders or ("forward", "forward")), "lengths": ["60C-1", "60C"]})


@pytest.fixture
def passed(small: Plan, request_for: Requests, progress: QuietProgress) -> Path:
    return run_plan(request_for(twice(small)), progress).archive


def result(judgement: Judgement, check: str) -> CheckResult:
    return next(one for one in judgement.results if one.check == check)


def found(judgement: Judgement, check: str) -> list[Finding]:
    return result(judgement, check).findings


def codes(judgement: Judgement, check: str) -> set[str]:
    return {finding.code for finding in found(judgement, check)}


def resealed(root: Path, change: Callable[[Files], None]) -> Judgement:
    """The judgement of the archive after an edit and under a fresh seal."""
    before = read(root)
    after = dict(before)
    change(after)
    write(root, before, sealed(after))
    return judge(Archive.open(root))


def edited(files: Files, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the records of a stream one by one, and chain it anew."""
    lines = records(files[name])
    for line in lines:
        change(line["rec"])
    files[name] = stream(lines)


def moved(files: Files, arm: str, by_ns: int) -> None:
    """Date everything of an arm earlier."""
    for name in [name for name in files if name.startswith(f"arms/{arm}/") and name.endswith(".jsonl")]:
        lines = records(files[name])
        for line in lines:
            line["t_ns"] -= by_ns
        files[name] = stream(lines)


def renamed(files: Files, arm: str, new: str) -> None:
    """Put a copy of an arm into another one's place."""
    for name in [name for name in files if name.startswith(f"arms/{new}/")]:
        del files[name]
    for name in [name for name in files if name.startswith(f"arms/{arm}/")]:
        target = name.replace(f"arms/{arm}/", f"arms/{new}/")
        files[target] = files[name]
        if name.endswith(".jsonl"):
            edited(files, target, lambda rec: rec.update(arm=new) if rec["kind"] == "stream_opened" else None)


# --- what is run ------------------------------------------------------------------------------------


def test_two_repetitions_pass_each_by_itself(passed: Path, progress: QuietProgress) -> None:
    archive = Archive.open(passed)
    judgement = judge(archive)
    assert judgement.verdict is Verdict.PASS
    assert archive.arms == sorted(ARMS)
    assert [stage for stage in progress.stages if stage.endswith(": start")] == [f"{arm}: start" for arm in ARMS]
    assert [(one.repetition, one.order, one.arms, one.verdict, one.against) for one in judgement.repetitions] == [
        (1, "forward", ARMS[:2], Verdict.PASS, []),
        (2, "forward", ARMS[2:], Verdict.PASS, []),
    ]
    assert {"repetitions", "repetition-equality"} <= set(judgement.required)


def test_nothing_is_pooled(passed: Path) -> None:
    """Eight comparisons in each of two repetitions are eight, and pairs over repetitions are among none of them."""
    judgement = judge(Archive.open(passed))
    examined = {one.check: (one.examined, one.unit) for one in judgement.results}
    assert examined["paired-equality"] == (8, "comparisons")
    assert examined["reload-equality"] == (2, "comparisons")
    assert examined["boundary"] == (2, "reloads")
    assert examined["repetition-equality"] == (6, "inputs")
    assert examined["repetitions"] == (4, "arms")
    assert result(judgement, "paired-equality").summary == "in each of 2 repetitions: 8/8 generations equal"
    assert [(row.repetition, row.case) for row in judgement.table] == [
        (number, case) for number in (1, 2) for case in ("N959", "N960")
    ]


def test_one_repetition_exercises_neither_check(small: Plan, request_for: Requests, progress: QuietProgress) -> None:
    judgement = judge(Archive.open(run_plan(request_for(small), progress).archive))
    for check in ("repetitions", "repetition-equality"):
        assert result(judgement, check).verdict is Verdict.NOT_EXERCISED
        assert check not in judgement.required
    assert judgement.repetitions == [] and judgement.verdict is Verdict.PASS


def test_opposite_orders_run_as_planned(small: Plan, request_for: Requests, progress: QuietProgress) -> None:
    archive = Archive.open(run_plan(request_for(twice(small, "forward", "reverse")), progress).archive)
    order = ["control", "candidate", "candidate-2", "control-2"]
    assert [stage for stage in progress.stages if stage.endswith(": start")] == [f"{arm}: start" for arm in order]
    (started,) = [line.rec for line in archive.attempts() if isinstance(line.rec, r.AttemptStarted)]
    assert started.arms == order
    judgement = judge(archive)
    assert judgement.verdict is Verdict.PASS
    assert judgement.repetitions[1].arms == order[2:]


def test_a_single_reversed_run_has_its_order_held_to_the_plan(
    small: Plan, request_for: Requests, progress: QuietProgress
) -> None:
    archive = run_plan(request_for(twice(small, "reverse")), progress).archive
    judgement = judge(Archive.open(archive))
    assert judgement.verdict is Verdict.PASS
    assert result(judgement, "repetitions").verdict is Verdict.PASS
    assert result(judgement, "repetition-equality").verdict is Verdict.NOT_EXERCISED
    judgement = resealed(archive, lambda files: moved(files, "control", 10**12))
    assert codes(judgement, "repetitions") == {"wrong_order"}


@pytest.mark.parametrize("option", ["control", "reference"])
def test_an_archived_control_stands_in_for_no_repetition(
    small: Plan, request_for: Requests, progress: QuietProgress, option: str
) -> None:
    clean = run_plan(request_for(small, "clean"), progress).archive
    with pytest.raises(RunError, match=rf"^--{option}: plan boundary runs its own control in each of 2 repetitions"):
        run_plan(request_for(twice(small), **{option: clean}), progress)


def test_releases_of_a_repeated_plan_each_run_their_own_controls(
    small: Plan, request_for: Requests, progress: QuietProgress
) -> None:
    done = run_releases([request_for(twice(small), "a"), request_for(twice(small), "b")], progress)
    assert [judge(Archive.open(one.archive)).verdict for one in done if not isinstance(one, RunError)] == [
        Verdict.PASS,
        Verdict.PASS,
    ]


# --- what is found ----------------------------------------------------------------------------------


class OnlyLater(SimEngine):
    """Looks the whole prompt up, in the second repetition alone."""

    conducts: ClassVar = {**SimEngine.conducts}

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec._replace(fault="full-lookup") if spec.arm == "candidate-2" else spec)


def test_a_fault_in_the_second_repetition_is_found_there(
    small: Plan, request_for: Requests, progress: QuietProgress
) -> None:
    archive = run_plan(request_for(twice(small), make_engine=OnlyLater), progress).archive
    judgement = judge(Archive.open(archive))
    assert judgement.verdict is Verdict.FAIL
    assert [one.verdict for one in judgement.repetitions] == [Verdict.PASS, Verdict.FAIL]
    assert "boundary" in judgement.repetitions[1].against
    (named,) = [one for one in found(judgement, "boundary") if one.code == "retained_lookup_boundary"]
    assert (named.place.repetition, named.place.arm, named.place.op) == (2, "candidate-2", "N960.reload")
    assert named.message.startswith("repetition 2: ")
    assert all(where.startswith("arms/candidate-2/") for where in named.evidence)
    assert [(row.repetition, row.case) for row in judgement.table if row.verdict is Verdict.FAIL] == [(2, "N960")]
    again = found(judgement, "repetition-equality")
    assert [(one.code, one.place.repetition, one.place.op) for one in again] == [("tokens_differ", 2, "N960.reload")]


class Forgetful(SimEngine):
    """Continues otherwise in a later control: nothing is reused there."""

    def generate(self, *args: Any) -> Any:
        answers = super().generate(*args)
        if self._spec.arm != "control-2":
            return answers
        return [one._replace(token_ids=[one.token_ids[0] ^ 1, *one.token_ids[1:]]) for one in answers]


def test_a_control_that_does_not_repeat_itself_is_named(
    small: Plan, request_for: Requests, progress: QuietProgress
) -> None:
    judgement = judge(Archive.open(run_plan(request_for(twice(small), make_engine=Forgetful), progress).archive))
    assert {one.place.arm for one in found(judgement, "repetition-equality")} == {"control-2"}
    assert result(judgement, "repetition-equality").verdict is Verdict.FAIL


def test_the_same_process_twice_is_no_repetition(small: Plan, request_for: Requests, progress: QuietProgress) -> None:
    class Lingers(SimEngine):
        def __init__(self, spec: EngineSpec) -> None:
            super().__init__(spec)
            self._process = f"of-{spec.arm.removesuffix('-2')}"

    judgement = judge(Archive.open(run_plan(request_for(twice(small), make_engine=Lingers), progress).archive))
    same = [(one.code, one.place.arm, one.place.repetition) for one in found(judgement, "repetitions")]
    assert same == [("same_process", "control-2", 2), ("same_process", "candidate-2", 2)]
    assert judgement.verdict is Verdict.FAIL
    assert [one.verdict for one in judgement.repetitions] == [Verdict.PASS, Verdict.FAIL]


def test_a_repetition_on_another_engine_is_none(small: Plan, request_for: Requests, progress: QuietProgress) -> None:
    def make(spec: EngineSpec) -> SimEngine:
        later = ["--max-num-batched-tokens", "4096"] if spec.arm.endswith("-2") else []
        return SimEngine(spec._replace(serve_args=[*spec.serve_args, *later]))

    judgement = judge(Archive.open(run_plan(request_for(twice(small), make_engine=make), progress).archive))
    assert result(judgement, "settings").verdict is Verdict.PASS, "alike within each repetition"
    assert codes(judgement, "repetitions") == {"repetition_differs"}
    assert judgement.verdict is Verdict.FAIL


def test_a_run_killed_between_repetitions_is_incomplete(
    small: Plan, request_for: Requests, progress: QuietProgress
) -> None:
    class Stops(SimEngine):
        def start(self) -> r.EngineStarted:
            if self._spec.arm == "control-2":
                raise KeyboardInterrupt
            return super().start()

    request = request_for(twice(small), make_engine=Stops)
    with pytest.raises(KeyboardInterrupt):
        run_plan(request, progress)
    judgement = judge(Archive.open(request.out))
    assert judgement.seal_sha256 is None
    assert judgement.verdict is Verdict.UNKNOWN
    assert [one.verdict for one in judgement.repetitions] == [Verdict.UNKNOWN, Verdict.UNKNOWN]
    missing = [one for one in found(judgement, "coverage") if one.place.repetition == 2]
    assert {one.place.arm for one in missing} == {"control-2", "candidate-2"}


# --- sealed again after an edit ---------------------------------------------------------------------


def gone(files: Files, *arms: str) -> None:
    for name in [name for name in files if name.split("/")[:2] in [["arms", arm] for arm in arms]]:
        del files[name]


@pytest.mark.parametrize("arms", [("candidate-2",), ("control-2", "candidate-2"), ("control", "candidate")])
def test_a_repetition_that_is_missing_never_passes(passed: Path, arms: tuple[str, ...]) -> None:
    judgement = resealed(passed, lambda files: gone(files, *arms))
    assert judgement.verdict is Verdict.UNKNOWN
    assert {one.place.arm for one in found(judgement, "repetitions")} == set(arms)
    number = 2 if arms[0].endswith("-2") else 1
    assert {one.place.repetition for one in found(judgement, "coverage")} == {number}


def test_a_missing_repetition_that_the_attempt_does_not_name_either(passed: Path) -> None:
    def change(files: Files) -> None:
        gone(files, "control-2", "candidate-2")
        edited(files, "attempts.jsonl", lambda rec: rec.update(arms=ARMS[:2]) if "arms" in rec else None)

    assert resealed(passed, change).verdict is Verdict.UNKNOWN


def test_an_order_that_the_attempt_did_not_plan(passed: Path) -> None:
    other = ["candidate", "control", *ARMS[2:]]
    judgement = resealed(
        passed,
        lambda files: edited(files, "attempts.jsonl", lambda rec: rec.update(arms=other) if "arms" in rec else None),
    )
    assert codes(judgement, "repetitions") == {"wrong_order"}
    assert judgement.verdict is Verdict.FAIL


@pytest.mark.parametrize("arm", ["candidate", "control-2", "candidate-2"])
def test_an_arm_that_began_before_the_one_it_comes_after(passed: Path, arm: str) -> None:
    judgement = resealed(passed, lambda files: moved(files, arm, 10**12))
    assert codes(judgement, "repetitions") == {"wrong_order"}
    assert judgement.verdict is Verdict.FAIL


def test_a_copy_of_the_first_repetition_is_no_second(passed: Path) -> None:
    def change(files: Files) -> None:
        renamed(files, "control", "control-2")
        renamed(files, "candidate", "candidate-2")

    judgement = resealed(passed, change)
    assert {"same_process", "wrong_order"} <= codes(judgement, "repetitions")
    assert judgement.verdict is Verdict.FAIL


@pytest.mark.parametrize("kind", ["engine_started", "engine_stopped", "operation_ended", "stream"])
def test_a_repetition_whose_start_or_end_is_lost(passed: Path, kind: str) -> None:
    def change(files: Files) -> None:
        if kind == "stream":
            del files["arms/candidate-2/worker-0.jsonl"]
            return
        for name in ("arms/control-2/scheduler.jsonl", "arms/control-2/client.jsonl"):
            files[name] = stream([line for line in records(files[name]) if line["rec"]["kind"] != kind])

    assert resealed(passed, change).verdict is Verdict.UNKNOWN


def test_a_process_without_a_name(passed: Path) -> None:
    judgement = resealed(
        passed,
        lambda files: edited(
            files, "arms/candidate-2/scheduler.jsonl", lambda rec: rec.update(process="") if "engine" in rec else None
        ),
    )
    assert codes(judgement, "repetitions") == {"unnamed_process"}
    assert judgement.verdict is Verdict.UNKNOWN


def test_another_prompt_in_a_later_repetition_says_nothing(passed: Path) -> None:
    """Tokens that agree, of operations that were asked something else."""

    def change(files: Files) -> None:
        digests = sorted(json.loads(files["inputs.json"]))

        def other(rec: dict[str, Any]) -> None:
            if rec["kind"] == "operation_started" and rec["prompt_sha256"] is not None:
                rec["prompt_sha256"] = digests[digests.index(rec["prompt_sha256"]) - 1]

        edited(files, "arms/control-2/client.jsonl", other)

    judgement = resealed(passed, change)
    assert codes(judgement, "repetition-equality") == {"other_prompt"}
    assert judgement.verdict is Verdict.FAIL, "coverage holds every prompt to resolved.json"


def test_outputs_that_do_not_depend_on_their_prompts_show_no_repetition(passed: Path) -> None:
    def change(files: Files) -> None:
        for arm in ARMS:
            edited(
                files,
                f"arms/{arm}/client.jsonl",
                lambda rec: rec.update(token_ids=[11, 12, 13, 14]) if rec["kind"] == "operation_output" else None,
            )

    judgement = resealed(passed, change)
    assert codes(judgement, "repetition-equality") == {"vacuous"}
    assert judgement.verdict is Verdict.UNKNOWN


@pytest.mark.tamper
def test_no_later_repetition_passes_without_one_record_of_any_kind(passed: Path) -> None:
    files = read(passed)
    passing = []
    for name in sorted(name for name in files if name.startswith(("arms/control-2/", "arms/candidate-2/"))):
        if not name.endswith(".jsonl"):
            continue
        lines = records(files[name])
        for kind in dict.fromkeys(line["rec"]["kind"] for line in lines):
            at = next(at for at, line in enumerate(lines) if line["rec"]["kind"] == kind)
            after = sealed({**files, name: stream(lines[:at] + lines[at + 1 :])})
            write(passed, files, after)
            if judge(Archive.open(passed)).verdict is Verdict.PASS:
                passing.append((name, kind))
            write(passed, after, files)
    assert passing == []


@pytest.mark.tamper
def test_both_verifiers_say_the_same_of_random_edits(passed: Path) -> None:
    """`second_opinion` compares them; an analyzer that no version knows is the one thing that judges nothing."""
    files, chance, judged = read(passed), Random(20), 0
    for _ in range(40):
        after = dict(files)
        chance.choice(RESEALED)(chance, after)
        after = sealed(after)
        write(passed, files, after)
        with suppress(AnalyzerError):
            judge(Archive.open(passed))
            judged += 1
        write(passed, after, files)
    assert judged > 35
