"""Two arms on a real vLLM that differ in one thing: `explain`, `diff` and the checks name it, and it alone.

Each run lends the control of the first one, so that one engine starts a case.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from conftest import frozen
from quiet import Silent
from samestate.checks.analyzers import source_sha256
from samestate.cli.commands import samestate
from samestate.engines.base import EngineError, EngineSpec
from samestate.engines.vllm import VllmEngine
from samestate.evidence import records as r
from samestate.evidence.controls import (
    COLD_SPLIT,
    MATCHED_SCHEDULE,
    PROFILE_VARIABLE,
    SCHEDULE_VARIABLE,
    STORAGES_VARIABLE,
    TUNER_PROFILE,
)
from samestate.evidence.tuner_profile import installed, make, write
from samestate.lab.run import RunRequest, run_plan
from samestate.plans.load import freeze
from samestate.plans.model import Plan

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.deep]
C = 256
Change = Callable[[EngineSpec], EngineSpec]
OBSERVED = {STORAGES_VARIABLE: "1"}


def small() -> Plan:
    """The boundary plan at two lengths, C = 256, 16 tokens an answer."""
    plan = frozen("boundary")
    settings = {**plan.engine.settings, "block_size": C, "max_model_len": 2048, "max_num_batched_tokens": 2048}
    engine = plan.engine.model_copy(update={"settings": settings | {"num_gpu_blocks_override": 32}})
    plan = plan.model_copy(update={"engine": engine, "lengths": ["3C", "4C-24"], "output_tokens": 16})
    return freeze(plan, source_sha256(plan.analyzer.id))


def ran(out: Path, model: Path, change: Change, control: Path | None = None, fault: str | None = None) -> Path:
    """A run whose candidate's engine is started as `change` says; all ranks digest their parameters."""

    def engine(spec: EngineSpec) -> VllmEngine:
        spec = spec._replace(environment={**spec.environment, **OBSERVED})
        return VllmEngine(change(spec) if spec.arm == "candidate" else spec)

    request = RunRequest(
        plan=small(),
        model=model,
        out=out,
        make_engine=engine,
        fault=fault,
        control=control,
        reference=None,
        serve_args=[],
    )
    return run_plan(request, Silent()).archive


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    return ran(tmp_path_factory.mktemp("explained") / "alike", tiny_model, lambda spec: spec)


def asked(*arguments: object) -> tuple[int, Any]:
    result = CliRunner().invoke(samestate, [*map(str, arguments), "--json"])
    return result.exit_code, json.loads(result.stdout)


def causes(archive: Path) -> set[str]:
    code, said = asked("explain", archive)
    assert (code, said["damage"], said["unseen"]) == (1, None, [])
    return {row["cause"] for row in said["explained"]}


def why(archive: Path, cause: str) -> str:
    _, said = asked("explain", archive)
    return next(str(step["said"]) for step in said["explained"][0]["steps"] if step["cause"] == cause)


def test_two_arms_that_are_alike_have_nothing_to_explain(alike: Path) -> None:
    code, said = asked("explain", alike)
    assert (code, said["explained"], said["compared"]) == (0, [], 10)
    assert asked("diff", "schedule", f"{alike}:control", alike)[0] == 0
    assert asked("check", alike)[0] == 0


def test_another_prefill_split_is_geometry_and_the_first_step_is_named(
    alike: Path, tiny_model: Path, tmp_path: Path
) -> None:
    def shorter(spec: EngineSpec) -> EngineSpec:
        return spec._replace(settings={**spec.settings, "max_num_batched_tokens": 512})

    archive = ran(tmp_path / "split", tiny_model, shorter, control=alike)
    code, said = asked("diff", "schedule", f"{archive}:control", archive)
    assert code == 1
    assert said["parted"][0]["message"].startswith("step 0: [0, ")
    assert said["parted"][0]["message"].endswith("against [0, 512)")
    _, judged = asked("check", archive)
    (geometry,) = [one for one in judged["results"] if one["check"] == "geometry"]
    assert geometry["verdict"] == "unknown"
    assert {one["code"] for one in geometry["findings"]} == {"geometry_mismatch"}
    assert said["parted"][0]["message"] in geometry["findings"][0]["message"]


def test_a_changed_weight_and_a_changed_buffer_are_named(alike: Path, tiny_model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][:16] += 40
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 100
    (model / "config.json").write_text(json.dumps(config))
    archive = ran(tmp_path / "edited", tiny_model, lambda spec: spec._replace(model=model), control=alike)
    assert causes(archive) == {"storage"}
    said = why(archive, "storage")
    assert "2 parameters and buffers differ between the arms, the first is model." in said, said
    _, judged = asked("check", archive)
    (storages,) = [one for one in judged["results"] if one["check"] == "storages"]
    named = " ".join(one["message"] for one in storages["findings"])
    assert storages["verdict"] == "fail" and "model.norm.weight" in named and "cos_sin_cache" in named


def test_a_changed_variable_comes_before_the_state(alike: Path, tiny_model: Path, tmp_path: Path) -> None:
    """The loads are wrong too: as long as the arms stand on other ground, nothing is laid to them."""

    def elsewhere(spec: EngineSpec) -> EngineSpec:
        return spec._replace(environment={**spec.environment, "NCCL_ALGO": "Ring"})

    archive = ran(tmp_path / "variable", tiny_model, elsewhere, control=alike, fault="full-lookup")
    assert causes(archive) == {"kernel"}
    assert why(archive, "kernel") == "rank 0: variables.NCCL_ALGO is absent and Ring"
    code, said = asked("diff", "env", f"{archive}:control", archive)
    named = {one["name"]: (one["a"], one["b"]) for one in said["differing"]}
    assert code == 1 and named["rank 0: variables.NCCL_ALGO"] == ("absent", "Ring")

    wrong = ran(tmp_path / "state", tiny_model, lambda spec: spec, control=alike, fault="full-lookup")
    assert causes(wrong) == {"state"}
    assert why(wrong, "storage").endswith("parameters and buffers with equal digests")


def alone(model: Path, folder: Path, environment: dict[str, str], core: str = "here", **more: r.Scalar) -> EngineSpec:
    folder.mkdir()
    settings = {"block_size": C, "max_model_len": 2048, "max_num_batched_tokens": 2048, "num_gpu_blocks_override": 32}
    return EngineSpec(
        arm="control",
        model=model,
        settings={**settings, "enforce_eager": True, **more},
        serve_args=[],
        connector="none",
        external_cache_bytes=0,
        audit_level="off",
        save_delay_ms=0,
        fault=None,
        stream_dir=folder,
        log_path=folder / "engine.log",
        core=core,
        environment=environment,
    )


def test_what_a_core_elsewhere_would_never_hear_of_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    engine = VllmEngine(alone(tiny_model, tmp_path / "streams", OBSERVED, core="own-process"))
    try:
        with pytest.raises(EngineError, match="SAMESTATE_STORAGES: needs the core in this process"):
            engine.start()
    finally:
        engine.close()


def test_every_rank_reads_back_its_tuners_and_a_cold_prompt_is_split_at_b(tiny_model: Path, tmp_path: Path) -> None:
    """On CPUs no Triton kernel runs: each of two ranks says so, under the profile."""
    choices = [r.KernelSelection(kernel="no.such.kernel", key=["64"], config={"BLOCK": 64})]
    sha256 = write(tmp_path / "profile.json", make("cpu", installed(), {0: choices, 1: choices}))
    held = {PROFILE_VARIABLE: str(tmp_path / "profile.json"), SCHEDULE_VARIABLE: COLD_SPLIT}
    engine = VllmEngine(alone(tiny_model, tmp_path / "streams", held, tensor_parallel_size=2))
    try:
        started = engine.start()
        prompt = (engine.encode("a b c d e f g " * 400))[:1000]
        for name, tokens in (("one", 1000), ("two", 3 * C)):
            engine.generate_one(name, prompt[:tokens], 2, 42, True)
    finally:
        engine.close()
    lines = (tmp_path / "streams" / "scheduler.jsonl").read_bytes().splitlines()
    told = [msgspec.json.decode(line, type=r.Line).rec for line in lines]
    on = {control.name: control.sha256 for control in started.controls or [] if control.on}
    assert on.keys() == {TUNER_PROFILE, MATCHED_SCHEDULE}
    read_back = [rec for rec in told if isinstance(rec, r.KernelsSelected)]
    assert [(one.rank, one.mode, one.profile_sha256, one.selections) for one in read_back] == [
        (0, "pin", sha256, []),
        (1, "pin", sha256, []),
    ]
    steps = [(row.start, row.scheduled) for rec in told if isinstance(rec, r.BatchScheduled) for row in rec.rows]
    assert (0, 3 * C) in steps and (3 * C, 1000 - 3 * C) in steps
    assert (0, 2 * C) in steps or (C, C) in steps
