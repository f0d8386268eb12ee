"""The GitHub Action: its script as a runner calls it, and its declaration held against the script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
SCRIPT = ROOT / "scripts/action"


class Step(NamedTuple):
    """What a step left behind."""

    code: int
    summary: str
    outputs: dict[str, str]
    log: str


Steps = Callable[..., Step]


@pytest.fixture
def step(tmp_path: Path) -> Steps:
    """Runs the script in an empty folder as a runner does, with `inputs` as action.yml passes them."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/samestate"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m samestate "$@"\n')
    program.chmod(0o755)
    summary, outputs = tmp_path / "summary.md", tmp_path / "outputs"
    summary.write_text("An earlier line.\n")

    def run(**inputs: str) -> Step:
        done = subprocess.run(
            ["sh", str(SCRIPT)],
            cwd=tmp_path,
            env=os.environ
            | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
            | {"GITHUB_STEP_SUMMARY": str(summary), "GITHUB_OUTPUT": str(outputs)}
            | {"ENGINE": "sim", **inputs},
            capture_output=True,
            text=True,
            check=False,
        )
        said = dict(line.split("=", 1) for line in outputs.read_text().splitlines()) if outputs.exists() else {}
        return Step(done.returncode, summary.read_text(), said, done.stdout + done.stderr)

    return run


def test_a_run_that_passes(step: Steps, tmp_path: Path) -> None:
    done = step(PLAN="boundary", OUT="archive")
    assert done.code == 0, done.log
    assert done.outputs == {"verdict": "pass", "exit-code": "0", "archive": "archive", "junit": "archive.junit.xml"}
    assert done.summary.startswith("An earlier line.\n"), "a summary is appended to"
    assert "## ✅ pass: boundary" in done.summary
    assert "3,584" in done.summary
    assert "<testsuite" in (tmp_path / "archive.junit.xml").read_text()
    assert (tmp_path / "archive/seal.json").is_file()


def stand_in(tmp_path: Path, *, run: int, report: int) -> None:
    """A samestate that seals an archive and answers with these exit codes."""
    (tmp_path / "bin/samestate").write_text(
        f'#!/bin/sh\n[ "$1" = run ] && mkdir archive && touch archive/seal.json && exit {run}\n'
        f"echo '## judged'\nexit {report}\n"
    )


@pytest.mark.parametrize(
    ("run", "report", "code", "verdict"),
    [(3, 3, 3, "unknown"), (0, 1, 2, "none"), (2, 0, 2, "none"), (70, 70, 70, "none")],
)
def test_exit_codes_are_kept_and_contradictions_are_no_pass(
    step: Steps, tmp_path: Path, run: int, report: int, code: int, verdict: str
) -> None:
    stand_in(tmp_path, run=run, report=report)
    done = step(OUT="archive")
    assert (done.code, done.outputs["exit-code"], done.outputs["verdict"]) == (code, str(code), verdict)
    assert "## judged" in done.summary


def test_a_run_that_fails(step: Steps, tmp_path: Path) -> None:
    # The fault belongs to `run` alone; the script itself has no such input.
    (tmp_path / "bin/samestate").write_text(
        f'#!/bin/sh\n[ "$1" = run ] && set -- "$@" --fault full-lookup\nexec "{sys.executable}" -m samestate "$@"\n'
    )
    done = step(PLAN="boundary", OUT="archive")
    assert done.code == 1, done.log
    assert (done.outputs["verdict"], done.outputs["exit-code"]) == ("fail", "1")
    assert "## ❌ fail: boundary" in done.summary
    assert "N3584.reload" in done.summary


@pytest.mark.parametrize(
    ("inputs", "line"),
    [
        ({"PLAN": "nothing"}, "nothing"),
        ({"MODEL": "nowhere"}, "--model: no folder nowhere"),
        ({"KNOWN": "nothing"}, "--known: "),
        ({"ENGINE": "llama"}, "llama"),
    ],
)
def test_what_cannot_run_says_so_in_the_summary(step: Steps, inputs: dict[str, str], line: str) -> None:
    done = step(**inputs)
    assert done.code == 2
    assert done.outputs["verdict"] == "none"
    assert done.outputs["junit"] == ""
    assert "## samestate could not run" in done.summary
    assert line in done.summary.split("```text")[1]


def test_inputs_are_words_and_no_shell(step: Steps, tmp_path: Path) -> None:
    done = step(PLAN='boundary"; touch broken; "$(touch broken)', OUT="a b")
    assert done.code == 2
    assert not (tmp_path / "broken").exists()
    assert step(PLAN="boundary", OUT="a\nverdict=pass").code == 2


def test_without_a_runner_it_runs_too(step: Steps) -> None:
    done = step(PLAN="boundary", OUT="archive", GITHUB_STEP_SUMMARY="", GITHUB_OUTPUT="")
    assert done.code == 0
    assert done.outputs == {}


def test_every_input_reaches_the_script_and_every_output_comes_from_it() -> None:
    install, run = ACTION["runs"]["steps"]
    text = SCRIPT.read_text()
    passed = {**install["env"], **run["env"]}
    used = {name for value in passed.values() for name in re.findall(r"inputs\.([a-z-]+)", value)}
    assert used == set(ACTION["inputs"])
    assert [name for name in run["env"] if f"${name}" not in run["run"] and f"{{{name}:" not in text] == []
    assert set(re.findall(r'echo "([a-z-]+)=', text)) == set(ACTION["outputs"])
    assert all("${{" not in one["run"] for one in (install, run)), "an input in a script's text is a hole"


def test_defaults_are_those_of_the_script() -> None:
    text = SCRIPT.read_text()
    for name in ("plan", "engine", "out"):
        assert f"{name.upper()}:={ACTION['inputs'][name]['default']}" in text


@pytest.mark.parametrize("name", ["action.yml"])
def test_the_declaration_has_what_github_asks_for(name: str) -> None:
    assert {"name", "description", "runs"} <= set(ACTION)
    assert ACTION["runs"]["using"] == "composite"
    assert all("shell" in one for one in ACTION["runs"]["steps"])
    assert all("description" in one for one in [*ACTION["inputs"].values(), *ACTION["outputs"].values()])
