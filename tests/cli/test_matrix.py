"""Plans over releases: the table, its JSON and its exit code, on the simulated engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from samestate.cli.connectors import Beside
from samestate.engines.base import EngineError, EngineSpec
from samestate.engines.sim import SimEngine
from samestate.evidence.records import EngineStarted
from samestate.plans.model import Plan

from .test_run import line

Command = Callable[..., Result]
FAULTY, BROKEN = "0.5.5", "0.4.0"


class Release(SimEngine):
    """A simulated engine that knows which release it plays."""

    def __init__(self, spec: EngineSpec) -> None:
        self._release = str(spec.packages)
        fault = "full-lookup" if self._release == FAULTY else None
        super().__init__(spec._replace(connector="none" if spec.connector == "none" else "native", fault=fault))

    def start(self) -> EngineStarted:
        if self._release == BROKEN:
            raise EngineError("arm candidate: this release does not start")
        return super().start()


@pytest.fixture
def matrix(samestate: Command, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    def release(plan: Plan, engine: str) -> Beside:
        return Beside(Path(str(plan.arms[-1].release)), lambda spec: None)

    monkeypatch.setattr("samestate.cli.matrix.ENGINE", "sim")
    monkeypatch.setattr("samestate.cli.run.beside", release)
    monkeypatch.setattr("samestate.cli.run.engine_maker", lambda name, plan: Release)
    monkeypatch.setattr("samestate.cli.run.model_folder", lambda plan, model: checkpoint)
    return lambda *arguments: samestate("matrix", *arguments)


def rows(result: Result) -> dict[str, dict[str, object]]:
    return {row["release"]: row for row in json.loads(result.stdout)}


def test_a_release_that_fails_is_named_with_its_first_boundary(matrix: Command, tmp_path: Path) -> None:
    result = matrix("lmcache", FAULTY, "0.5.6", "--json", "--out", tmp_path / "m")
    found = rows(result)
    assert found[FAULTY]["verdict"] == "fail", result.output
    assert found[FAULTY]["equal"] == "34/36"
    assert found[FAULTY]["first_failing"] == {"N": 3584, "B": 3584, "p": 3583}
    assert (found["0.5.6"]["equal"], found["0.5.6"]["first_failing"]) == ("36/36", None)
    assert result.exit_code == 1
    assert (tmp_path / "m" / "0.5.6-boundary" / "arms" / "control" / "source-seal.json").is_file()


def test_the_table_has_a_row_for_each_release_and_says_what_could_not_run(matrix: Command, tmp_path: Path) -> None:
    result = matrix("lmcache", "0.5.6", BROKEN, "--out", tmp_path / "m")
    assert result.exit_code in (2, 3), result.output
    assert "36/36" in result.stdout
    assert "could not run" in result.stdout
    assert f"{BROKEN}, boundary: arm candidate: this release does not start" in result.stdout


def test_bad_input_is_one_line(matrix: Command, tmp_path: Path) -> None:
    assert line(matrix("lmcache")).startswith("Missing argument 'X.Y.Z…'.")
    assert line(matrix("lmcache", "0.5.6", "--plan", "nosuch", "--out", tmp_path / "m")).startswith("no plan 'nosuch'")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert "is not empty" in line(matrix("lmcache", "0.5.6", "--out", tmp_path / "full"))
    assert line(matrix("vllm", "--python", tmp_path / "python")).startswith("Invalid value for '--python'")


def test_an_environment_without_vllm_is_one_line(matrix: Command, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    python.chmod(0o755)
    said = line(matrix("vllm", "--python", python, "--out", tmp_path / "m"))
    assert said.startswith(f"--python: {python} has no samestate with vLLM (ModuleNotFoundError: ")


def test_each_environment_runs_its_own_samestate_and_is_judged_here(
    matrix: Command, clean: Path, faulty: Path, tmp_path: Path
) -> None:
    """Two stand-ins for interpreters: each copies an archive that was run before."""
    pythons = []
    for name, archive in (("one", clean), ("two", faulty)):
        python = tmp_path / name
        python.write_text(
            '#!/bin/sh\nif [ "$1" = -c ]; then echo "vllm 0.0"; exit; fi\n'
            f'for last; do :; done\ncp -r {archive} "$last"\n'
        )
        python.chmod(0o755)
        pythons += ["--python", python]
    result = matrix("vllm", *pythons, "--json", "--out", tmp_path / "m")
    assert [(row["release"], row["verdict"], row["equal"]) for row in json.loads(result.stdout)] == [
        ("vllm 0.0", "pass", "36/36"),
        ("vllm 0.0", "fail", "34/36"),
    ]
    assert result.exit_code == 1
