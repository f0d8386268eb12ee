"""``samestate run boundary --engine transformers``: what it takes, what it refuses, and a run in own processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import Result

from samestate.cli import snapshots
from samestate.evidence.records import OperationName
from samestate.plans.load import load

Command = Callable[..., Result]
GLM = ("--engine", "transformers", "--model", "glm5-next-tiny")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("shared-prefix", *GLM), "--engine: transformers runs plans of analyzer boundary-snapshot-v1 alone"),
        (("boundary", *GLM, "--connector", "dictionary"), "--connector: --engine transformers has no connectors"),
        (("boundary", *GLM, "--delay-saves", "5ms"), "instruments: --engine transformers makes restored tensors anew"),
        (("boundary", *GLM, "--serve-args", "--block-sise 64"), "has no --block-sise; did you mean '--block-size'"),
        (
            ("boundary", *GLM, "--serve-args", "--enforce-eager"),
            "--serve-args: --engine transformers has no --enforce-e",
        ),
        (
            ("boundary", *GLM, "--fault", "short-copy"),
            "--fault: --engine transformers has only full-lookup, stale-page",
        ),
        (("boundary", *GLM, "--fault", "tail"), "--fault: no fault 'tail'"),
        (("boundary", "--fault", "tail-not-restored"), "--fault: tail-not-restored acts on transformers' cache"),
        (("boundary", "--engine", "transformers", "--model", "glm5-tiny"), "--model: no folder glm5-tiny"),
        (
            ("boundary", "--engine", "transformers", "--model", "glm5-next-small"),
            "--model: glm5-next-small holds a recipe in place of weights, which vLLM's load format samestate alone "
            "follows; use glm5-next-tiny",
        ),
        (
            ("boundary-snapshot",),
            "--engine: plan boundary-snapshot is for transformers' cache; add --engine transformers",
        ),
    ],
)
def test_what_it_cannot_run_is_one_line(samestate: Command, arguments: tuple[str, ...], message: str) -> None:
    result = samestate("run", *arguments)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()[-1:]
    assert message in line
    assert not Path("samestate-runs").exists()


def test_weights_that_only_vllm_makes_are_refused_wherever_they_are_named(samestate: Command, tmp_path: Path) -> None:
    plan = load("boundary-snapshot")
    plan = plan.model_copy(update={"engine": plan.engine.model_copy(update={"model": "qwen3-next-small"})})
    file, mine, out = tmp_path / "mine.yaml", tmp_path / "mine", tmp_path / "a"
    file.write_text(yaml.safe_dump(plan.model_dump(mode="json")))
    mine.mkdir()
    for name in ("config.json", "weights.json"):
        (mine / name).write_text("{}")
    for arguments, named in (((file,), "qwen3-next-small"), (("boundary", "--model", mine), str(mine))):
        result = samestate("run", *arguments, "--engine", "transformers", "--out", out)
        assert (result.exit_code, len(result.stderr.splitlines()), out.exists()) == (2, 1, False), result.stderr
        assert f"--model: {named} holds a recipe in place of weights" in result.stderr
    cell = samestate("matrix", "--engine", "transformers", "--model", "glm5-next-small", "--out", tmp_path / "m")
    assert cell.exit_code == 2
    assert "glm5-next-small holds a recipe in place of weights" in cell.output + cell.stderr


def test_weights_that_are_files_are_no_recipe(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    plan = load("boundary-snapshot")
    for name, model, engine in (
        ("external", tmp_path, "transformers"),
        ("glm5-next-tiny", Path("glm5-next-tiny"), "transformers"),
        ("glm5-next-small", Path("glm5-next-small"), "vllm"),
        ("glm5-next-small", None, "sim"),
    ):
        chosen = plan.model_copy(update={"engine": plan.engine.model_copy(update={"model": name})})
        snapshots.require_weights(chosen, model, engine)


def test_without_transformers_it_says_what_to_install(
    samestate: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(snapshots.transformers, "available", lambda: False)
    result = samestate("run", "boundary", *GLM, "--out", tmp_path / "a")
    assert (result.exit_code, (tmp_path / "a").exists()) == (2, False)
    assert "torch and transformers from 5.19 on are not installed; pip install" in result.stderr


def test_the_plan_for_this_engine_asks_the_same_matrix_of_it() -> None:
    ours, vllms = load("boundary-snapshot"), load("boundary")
    assert (ours.lengths, ours.operations, ours.template) == (vllms.lengths, vllms.operations, vllms.template)
    assert set(vllms.required_checks) < set(ours.required_checks)


def test_the_catalogue_of_simulated_faults_says_where_the_others_are(samestate: Command) -> None:
    result = samestate("faults", "--only", "tail-not-restored")
    assert result.exit_code == 2
    assert "use `samestate run boundary --engine transformers --model glm5-next-tiny --fault tail-" in result.stderr


@pytest.mark.slow
def test_a_run_in_processes_of_its_own_passes_and_a_fault_does_not(samestate: Command, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    plan = load("boundary-snapshot").model_copy(
        update={
            "lengths": ["2C"],
            "output_tokens": 4,
            "operations": list(map(OperationName, ("cold", "reset", "reload"))),
        }
    )
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(plan.model_dump(mode="json")))
    clean = samestate("run", file, *GLM, "--out", tmp_path / "clean", "--json")
    assert clean.exit_code == 0, clean.output
    told = json.loads(clean.stdout)
    assert told["verdict"] == "pass"
    assert "glm5-next-tiny" in told["scope"]
    control = ("--control", tmp_path / "clean")
    faulty = samestate("run", file, *GLM, "--fault", "tail-not-restored", *control, "--out", tmp_path / "faulty")
    assert faulty.exit_code == 1, faulty.output
    assert "(tail of layers.3.tail), [0, 196): other bytes" in faulty.output
