"""Runs on the simulated engine, from a plan to a sealed archive or an honest wreck."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, ClassVar

import pytest

from samestate.checks.analyzers import judge, source_sha256
from samestate.checks.base import Verdict
from samestate.engines import modules
from samestate.engines.base import Ask, EngineError, EngineSpec, Generation
from samestate.engines.sim import Conduct, SimEngine
from samestate.evidence import records as r
from samestate.evidence.archive import Archive
from samestate.evidence.canonical import sha256_hex
from samestate.lab.run import REFERENCE_ARM, RunError, RunRequest, run_plan
from samestate.plans.load import freeze, load
from samestate.plans.model import Plan, ResolvedPlan

from .conftest import QuietProgress

Requests = Callable[..., RunRequest]


def client(archive: Archive, arm: str) -> list[r.AnyRecord]:
    return [line.rec for line in archive.records(arm, "client")]


def outputs(archive: Archive, arm: str) -> dict[str, list[int]]:
    return {rec.op: rec.token_ids for rec in client(archive, arm) if isinstance(rec, r.OperationOutput)}


def attempt(archive: Archive) -> list[r.AnyRecord]:
    return [line.rec for line in archive.attempts()][1:]


def outcome(archive: Archive) -> r.AttemptEnded:
    (ended,) = [rec for rec in attempt(archive) if isinstance(rec, r.AttemptEnded)]
    return ended


def differing_cases(archive: Archive, first: str = "candidate") -> list[str]:
    """Cases whose reload continues otherwise than their cold run."""
    answers = outputs(archive, first)
    cases = dict.fromkeys(op.partition(".")[0] for op in answers)
    return [case for case in cases if answers[f"{case}.cold"] != answers[f"{case}.reload"]]


def breaks_at(count: int, error: BaseException, arm: str = "candidate") -> type[SimEngine]:
    """An engine whose `count`-th generation, from 0, of one arm raises `error`."""

    class Breaks(SimEngine):
        generations = 0

        def generate(self, *args: Any) -> list[Generation]:
            if self._spec.arm == arm and self.generations == count:
                raise error
            self.generations += 1
            return super().generate(*args)

    return Breaks


def test_a_clean_run_is_sealed_whole_and_passes(small: Plan, request_for: Requests, progress: QuietProgress) -> None:
    result = run_plan(request_for(small), progress)

    archive = Archive.open(result.archive)
    assert archive.verify() == []
    assert archive.seal_sha256 == result.seal_sha256
    assert archive.arms == ["candidate", "control"]
    assert outputs(archive, "control") == outputs(archive, "candidate")
    assert differing_cases(archive) == []
    assert judge(archive).verdict is Verdict.PASS
    assert progress.operations == [
        (arm, done, 15, op)
        for arm in ("control", "candidate")
        for done, op in enumerate(ResolvedPlan.model_validate_json(archive.resolved_json or b"").operations, 1)
    ]
    assert list(result.stages) == progress.stages
    assert progress.stages[:4] == ["identify", "control: start", "control: operations", "control: stop"]


def test_the_attempt_is_logged_before_contact_and_the_first_request_after_resolution(
    small: Plan, request_for: Requests, progress: QuietProgress
) -> None:
    archive = Archive.open(run_plan(request_for(small), progress).archive)
    assert [type(rec) for rec in attempt(archive)] == [
        r.AttemptStarted,
        r.ContactReached,
        r.ContactReached,
        r.ContactReached,
        r.AttemptEnded,
        r.StreamClosed,
    ]
    levels = [rec.level for rec in attempt(archive) if isinstance(rec, r.ContactReached)]
    assert levels == [r.ContactLevel.HOST, r.ContactLevel.MODEL, r.ContactLevel.REQUEST]
    for arm in archive.arms:
        records = client(archive, arm)
        assert records[1] == r.PlanResolved(resolved_sha256=sha256_hex(archive.resolved_json or b""))
        assert [type(rec) for rec in records[2:12]] == [
            r.CountersRead,
            r.OperationStarted,
            r.OperationOutput,
            r.OperationEnded,
            r.CountersRead,
        ] * 2
        reset = next(rec for rec in records if isinstance(rec, r.CacheReset))
        assert (reset.local_reset, reset.external_kept) == (True, True)


def test_the_boundary_plan_has_45_operations_and_27_inputs_an_arm(
    boundary: Plan, request_for: Requests, progress: QuietProgress
) -> None:
    result = run_plan(request_for(boundary), progress)
    archive = Archive.open(result.archive)
    assert archive.verify() == []
    for arm in archive.arms:
        started = [rec for rec in client(archive, arm) if isinstance(rec, r.OperationStarted)]
        counts = Counter(rec.name for rec in started)
        assert len(started) == 45
        assert counts == {"cold": 9, "interposer": 18, "reset": 9, "reload": 9}
        assert len({rec.prompt_sha256 for rec in started} - {None}) == 27
    assert len({tuple(ids[:16]) for ids in archive.inputs.values()}) == 27
    assert outputs(archive, "control") == outputs(archive, "candidate")
    assert differing_cases(archive) == []
    assert judge(archive).verdict is Verdict.PASS


def test_full_lookup_differs_exactly_on_the_boundaries_and_is_named(
    boundary: Plan, request_for: Requests, progress: QuietProgress
) -> None:
    clean = run_plan(request_for(boundary, "clean"), progress).archive
    faulty = run_plan(request_for(boundary, "faulty", fault="full-lookup", control=clean), progress).archive
    archive = Archive.open(faulty)
    assert archive.verify() == []
    assert differing_cases(archive) == ["N3584", "N5376"]
    assert outputs(archive, "control") == outputs(Archive.open(clean), "control")
    judgement = judge(archive)
    assert judgement.verdict is Verdict.FAIL
    assert judgement.fault == "full-lookup"
    codes = {(f.code, f.place.case) for result in judgement.results for f in result.findings}
    assert {case for code, case in codes if code == "retained_lookup_boundary"} == {"N3584", "N5376"}


def test_two_ranks_each_load_and_one_rank_that_does_not_is_seen(
    small: Plan, request_for: Requests, progress: QuietProgress
) -> None:
    class DropsRankLoad(Conduct):
        def arrives(self, rank: int, group: int, page: bytes) -> bytes | None:
            return None if rank == 1 else page

    class Faulty(SimEngine):
        conducts: ClassVar = {"drop-rank-load": DropsRankLoad}

    engine = small.engine.model_copy(update={"settings": {**small.engine.settings, "tensor_parallel_size": 2}})
    plan = small.model_copy(update={"engine": engine})
    clean = Archive.open(run_plan(request_for(plan, "clean"), progress).archive)
    assert clean.streams("candidate") == ["client", "scheduler", "worker-0", "worker-1"]
    assert judge(clean).verdict is Verdict.PASS
    request = request_for(plan, "faulty", make_engine=Faulty, fault="drop-rank-load")
    faulty = Archive.open(run_plan(request, progress).archive)
    assert differing_cases(faulty) == ["N959", "N960", "N961"]
    assert judge(faulty).verdict is Verdict.FAIL


def test_a_later_engine_with_another_interval_still_runs(
    small: Plan, request_for: Requests, progress: QuietProgress
) -> None:
    def make(spec: EngineSpec) -> SimEngine:
        return SimEngine(spec._replace(serve_args=["--block-size", "32"]) if spec.arm == "candidate" else spec)

    archive = Archive.open(run_plan(request_for(small, make_engine=make), progress).archive)
    assert archive.verify() == []
    assert judge(archive).verdict is Verdict.FAIL


# --- stopped half-way -------------------------------------------------------------------------


@pytest.mark.parametrize(("arm", "count"), [("control", 0), ("control", 7), ("candidate", 5), ("candidate", 11)])
def test_an_interruption_leaves_an_unsealed_archive_that_says_so(
    small: Plan, request_for: Requests, progress: QuietProgress, arm: str, count: int
) -> None:
    request = request_for(small, make_engine=breaks_at(count, KeyboardInterrupt(), arm))
    with pytest.raises(KeyboardInterrupt):
        run_plan(request, progress)
    archive = Archive.open(request.out)
    assert archive.seal_sha256 is None
    assert outcome(archive) == r.AttemptEnded(outcome=r.Outcome.INTERRUPTED, reason="stopped by the user")
    assert len(outputs(archive, arm)) == count
    assert judge(archive).verdict is Verdict.UNKNOWN
    engine_streams = [line.rec for line in archive.records(arm, "scheduler")]
    assert isinstance(engine_streams[-1], r.StreamClosed)


def test_an_engine_that_dies_ends_the_attempt_and_hands_its_log_on(
    small: Plan, request_for: Requests, progress: QuietProgress
) -> None:
    request = request_for(small, make_engine=breaks_at(3, EngineError("the engine died (exit code -9)", "last words")))
    with pytest.raises(RunError, match="exit code -9") as caught:
        run_plan(request, progress)
    assert caught.value.log_tail == "last words"
    archive = Archive.open(request.out)
    assert archive.seal_sha256 is None
    assert outcome(archive) == r.AttemptEnded(outcome=r.Outcome.FAILED, reason="the engine died (exit code -9)")
    ended = [rec for rec in client(archive, "candidate") if isinstance(rec, r.OperationEnded)]
    assert [rec.ok for rec in ended] == [True] * 4 + [False]
    assert judge(archive).verdict is Verdict.UNKNOWN


def test_an_engine_that_does_not_start_reaches_no_request(
    small: Plan, request_for: Requests, progress: QuietProgress
) -> None:
    class NeverStarts(SimEngine):
        def start(self) -> r.EngineStarted:
            raise EngineError("out of memory: lower max_model_len")

    request = request_for(small, make_engine=NeverStarts)
    with pytest.raises(RunError, match="out of memory"):
        run_plan(request, progress)
    archive = Archive.open(request.out)
    assert [rec.level for rec in attempt(archive) if isinstance(rec, r.ContactReached)] == [r.ContactLevel.HOST]
    assert archive.resolved_json is None


def test_every_engine_is_closed_whatever_happens(small: Plan, request_for: Requests, progress: QuietProgress) -> None:
    closed: list[str] = []

    class Watched(SimEngine):
        def prepare(self) -> None:
            closed.append(f"prepare {self._spec.arm}")

        def close(self) -> None:
            closed.append(f"close {self._spec.arm}")
            super().close()
            raise EngineError("would not go")

        def generate(self, asks: Sequence[Ask], output_tokens: int, seed: int, ignore_eos: bool) -> list[Generation]:
            raise ZeroDivisionError("a bug")

    request = request_for(small, make_engine=Watched)
    with pytest.raises(ZeroDivisionError):
        run_plan(request, progress)
    assert closed == ["prepare candidate", "close candidate", "close control"]
    assert outcome(Archive.open(request.out)).reason == "ZeroDivisionError: a bug"


def test_a_full_disk_names_the_folder_and_the_space(
    small: Plan, request_for: Requests, progress: QuietProgress, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_for(small)
    pwrite = os.pwrite

    def full(fd: int, data: Any, offset: int) -> int:
        if progress.operations:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(RunError, match=rf"{request.out}: No space left on device; the archive needs about \d+ MB"):
        run_plan(request, progress)
    archive = Archive.open(request.out)
    assert archive.seal_sha256 is None
    assert judge(archive).verdict is Verdict.UNKNOWN


# --- refusals ---------------------------------------------------------------------------------


def refused(request: RunRequest, progress: QuietProgress) -> str:
    with pytest.raises(RunError) as caught:
        run_plan(request, progress)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_prompt_longer_than_the_context_is_named_with_c(
    small: Plan, request_for: Requests, progress: QuietProgress
) -> None:
    engine = small.engine.model_copy(update={"settings": {"block_size": 16, "max_model_len": 963}})
    message = refused(request_for(small.model_copy(update={"engine": engine})), progress)
    assert "'60C' is 960 tokens at C=16" in message
    assert "max_model_len to 964" in message


def test_a_refusal_before_the_first_request_excludes_the_attempt(
    small: Plan, request_for: Requests, progress: QuietProgress
) -> None:
    request = request_for(small.model_copy(update={"lengths": ["2C"]}))
    assert "too short" in refused(request, progress)
    archive = Archive.open(request.out)
    assert archive.seal_sha256 is None
    assert outcome(archive).outcome is r.Outcome.EXCLUDED
    assert r.ContactReached(level=r.ContactLevel.REQUEST) not in attempt(archive)


def test_what_cannot_run_is_refused_before_anything_is_written(
    small: Plan, request_for: Requests, progress: QuietProgress, tmp_path: Path
) -> None:
    unfrozen = small.model_copy(update={"analyzer": small.analyzer.model_copy(update={"source_sha256": None})})
    for request, words in (
        (request_for(unfrozen), "not frozen"),
        (request_for(small, model=tmp_path / "nowhere"), "no such model folder"),
        (request_for(small, serve_args=["--seed", "1"]), "serve_args"),
        (request_for(small, control=tmp_path, reference=tmp_path), "--control and --reference"),
        (request_for(small, control=tmp_path / "nowhere"), "no such folder"),
    ):
        assert words in refused(request, progress)
        assert not request.out.exists()


@pytest.mark.regression
@pytest.mark.parametrize("engine", ["vllm", "transformers", None])
@pytest.mark.parametrize("there", [True, False])
def test_a_module_that_the_models_class_needs_is_looked_for_before_anything_is_written(
    small: Plan,
    request_for: Requests,
    progress: QuietProgress,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str | None,
    there: bool,
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"architectures": ["Qwen3_5ForCausalLM"]}')
    monkeypatch.setattr(modules, "find_spec", lambda name: ModuleSpec(name, None) if there else None)
    request = request_for(small, model=tmp_path / "m")._replace(engine=engine)
    if engine == "vllm" and not there:
        told = refused(request, progress)
        assert told.startswith(
            f"{tmp_path / 'm'}: vLLM's Qwen3_5ForCausalLM imports torchvision, which is not installed"
        )
        assert "pip install torchvision" in told and "\n" not in told and not request.out.exists()
    else:
        assert run_plan(request, progress).seal_sha256


@pytest.mark.parametrize(
    "content", ['{"architectures": ["LlamaForCausalLM"]}', "{}", "[]", "x", '{"architectures": 3}']
)
def test_other_configs_need_no_module_that_is_known(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert modules.missing_module(tmp_path) is None and modules.missing_module(tmp_path / "nowhere") is None


def test_a_folder_in_use_and_an_unknown_template_are_refused(
    small: Plan, request_for: Requests, progress: QuietProgress, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("keep me")
    assert str(tmp_path / "full") in refused(request_for(small, "full"), progress)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.txt"]
    assert "no template 'sonnet'" in refused(request_for(small.model_copy(update={"template": "sonnet"})), progress)


# --- controls of other archives ---------------------------------------------------------------


def test_a_lent_control_runs_only_the_candidate_on_the_same_inputs(
    small: Plan, request_for: Requests, progress: QuietProgress
) -> None:
    first = run_plan(request_for(small, "first"), progress)
    progress.operations.clear()
    archive = Archive.open(run_plan(request_for(small, "second", control=first.archive), progress).archive)
    lender = Archive.open(first.archive)
    assert {arm for arm, *_ in progress.operations} == {"candidate"}
    assert archive.verify() == []
    assert archive.imported_from("control") == first.seal_sha256
    assert (archive.resolved_json, archive.inputs) == (lender.resolved_json, lender.inputs)
    started = attempt(archive)[0]
    assert isinstance(started, r.AttemptStarted)
    assert (started.arms, started.control_seal_sha256) == (["candidate"], first.seal_sha256)
    judgement = judge(archive)
    assert (judgement.verdict, judgement.comparison_kind) == (Verdict.PASS, "candidate_vs_archived")


def test_a_reference_control_stands_beside_a_live_one(
    small: Plan, request_for: Requests, progress: QuietProgress
) -> None:
    first = run_plan(request_for(small, "first"), progress)
    archive = Archive.open(run_plan(request_for(small, "second", reference=first.archive), progress).archive)
    assert archive.arms == ["candidate", "control", REFERENCE_ARM]
    assert archive.imported_from(REFERENCE_ARM) == first.seal_sha256
    assert archive.imported_from("control") is None
    assert outputs(archive, REFERENCE_ARM) == outputs(archive, "control")
    started = attempt(archive)[0]
    assert isinstance(started, r.AttemptStarted)
    assert (started.control_seal_sha256, started.reference_seal_sha256) == (None, first.seal_sha256)
    assert judge(archive).verdict is Verdict.PASS


def test_a_control_of_another_plan_an_unsealed_a_damaged_and_a_borrowed_one_are_refused(
    small: Plan, request_for: Requests, progress: QuietProgress
) -> None:
    first = run_plan(request_for(small, "first"), progress).archive
    other_plan = small.model_copy(update={"seed": 43})
    assert "differs from plan boundary in seed" in refused(request_for(other_plan, control=first), progress)

    second = run_plan(request_for(small, "second", control=first), progress).archive
    assert "of its own" in refused(request_for(small, control=second), progress)

    request = request_for(small, "third", make_engine=breaks_at(0, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        run_plan(request, progress)
    assert "no seal" in refused(request_for(small, control=request.out), progress)

    log = first / "arms" / "control" / "engine.log"
    log.write_bytes(log.read_bytes() + b"x")
    assert "damaged" in refused(request_for(small, reference=first), progress)
    assert not request_for(small).out.exists()


def test_a_control_of_another_model_excludes_the_attempt(
    small: Plan, request_for: Requests, progress: QuietProgress, model: Path
) -> None:
    first = run_plan(request_for(small, "first"), progress).archive
    (model / "config.json").write_text('{"changed": true}')
    request = request_for(small, control=first)
    assert "another model" in refused(request, progress)
    archive = Archive.open(request.out)
    assert outcome(archive).outcome is r.Outcome.EXCLUDED
    assert not [rec for rec in attempt(archive) if isinstance(rec, r.ContactReached)]


def test_repeats_in_one_arm_are_run_and_judged(request_for: Requests) -> None:
    plan = load("local-hit")
    request = request_for(freeze(plan, source_sha256(plan.analyzer.id)))
    judgement = judge(Archive.open(run_plan(request, QuietProgress()).archive))
    assert (judgement.verdict, judgement.comparison_kind) == (Verdict.PASS, "within_one_arm")
    assert len(judgement.table) == 2 * len(plan.lengths)


def test_a_fault_without_a_connector_to_act_on_is_refused(request_for: Requests) -> None:
    plan = load("local-hit")
    request = request_for(freeze(plan, source_sha256(plan.analyzer.id)), fault="full-lookup")
    with pytest.raises(RunError, match=r"^--fault: plan local-hit has no arm with a connector"):
        run_plan(request, QuietProgress())
    assert not request.out.exists()


@pytest.mark.parametrize("role", ["control", "reference"])
def test_a_control_from_another_engine_is_refused_before_anything_is_written(
    small: Plan, request_for: Requests, progress: QuietProgress, role: str
) -> None:
    first = run_plan(request_for(small, "first", engine="sim"), progress).archive
    said = refused(request_for(small, "second", engine="vllm", **{role: first}), progress)
    assert said == f"{first}: its control arm ran on engine sim, this run is on vllm; name one that ran on it"
    assert not request_for(small, "second").out.exists()
    run_plan(request_for(small, "second", engine="sim", **{role: first}), progress)


@pytest.mark.parametrize("place", ["", "new", "arms/new", ".."])
def test_a_run_is_not_written_into_or_around_the_archive_that_lends(
    small: Plan, request_for: Requests, progress: QuietProgress, place: str
) -> None:
    first = run_plan(request_for(small, "lender/first"), progress).archive
    before = sorted(first.rglob("*"))
    request = request_for(small, control=first)._replace(out=first / place)
    assert "lie in each other" in refused(request, progress)
    assert sorted(first.rglob("*")) == before


def test_an_interruption_while_sealing_says_so_and_leaves_no_seal(
    small: Plan, request_for: Requests, progress: QuietProgress, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("samestate.evidence.archive.ArchiveWriter.seal", interrupted)
    request = request_for(small)
    with pytest.raises(KeyboardInterrupt, match="while sealing"):
        run_plan(request, progress)
    assert judge(Archive.open(request.out)).verdict is Verdict.UNKNOWN
