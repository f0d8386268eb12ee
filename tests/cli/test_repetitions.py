"""A repeated plan from `samestate run` to its export, on the simulated engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result

from samestate.engines.base import EngineSpec
from samestate.engines.sim import SimEngine

Command = Callable[..., Result]


@pytest.fixture(scope="module")
def extension(samestate: Command, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The archive of `continuation`, and what its run printed."""
    archive = tmp_path_factory.mktemp("repeated") / "extension"
    result = samestate("run", "continuation", "--engine", "sim", "--model", checkpoint, "--out", archive)
    assert result.exit_code == 0, result.output
    return archive, result.stdout


def test_the_extension_runs_twice_and_says_so(extension: tuple[Path, str]) -> None:
    archive, said = extension
    for line in (
        "repetition 1: pass (forward: control, candidate)",
        "repetition 2: pass (forward: control-2, candidate-2)",
        "verdict pass: all required checks pass",
    ):
        assert line in said.splitlines()
    assert said.count("ledger-N3583 ") == said.count("python-N5376 ") == 2
    assert len(json.loads((archive / "resolved.json").read_bytes())["inputs"]) == 30


def test_json_has_each_repetition_apart(samestate: Command, extension: tuple[Path, str]) -> None:
    told = json.loads(samestate("check", extension[0], "--json").stdout)
    assert [one["verdict"] for one in told["repetitions"]] == ["pass", "pass"]
    assert {row["repetition"] for row in told["table"]} == {1, 2} and len(told["table"]) == 20
    examined = {result["check"]: (result["examined"], result["unit"]) for result in told["results"]}
    assert examined["paired-equality"] == (40, "comparisons")
    assert examined["repetition-equality"] == (30, "inputs")
    summaries = {result["check"]: result["summary"] for result in told["results"]}
    assert summaries["paired-equality"] == "in each of 2 repetitions: 40/40 generations equal"


def test_both_repetitions_leave_as_many_files_and_all_are_hashed_again(
    samestate: Command, extension: tuple[Path, str], tmp_path: Path
) -> None:
    assert samestate("archive", "export", extension[0], "--out", tmp_path / "e.tar").exit_code == 0
    told = json.loads(samestate("archive", "verify", tmp_path / "e.tar", "--json").stdout)
    arms = told["by_arm"]
    assert (arms["control-2"], arms["candidate-2"]) == (arms["control"], arms["candidate"]) == (3, 4)
    assert told["files"] == len((extension[0] / "SHA256SUMS").read_text().splitlines()) == sum(arms.values()) + 5


@pytest.mark.parametrize("option", ["--html", "--junit", "--markdown", "--prometheus"])
def test_reports_tell_the_repetitions_apart(
    samestate: Command, extension: tuple[Path, str], tmp_path: Path, option: str
) -> None:
    result = samestate("report", extension[0], option, tmp_path / "report")
    assert result.exit_code == 0, result.output
    text = (tmp_path / "report").read_text()
    for word in {
        "--html": ["cases of repetition 1", "cases of repetition 2", "control-2, candidate-2"],
        "--junit": ['name="ledger-N3583 (repetition 1)"', 'name="ledger-N3583 (repetition 2)"'],
        "--markdown": ["repetition 2 pass"],
        "--prometheus": ['repetition="1",verdict="pass"} 10', 'repetition="2",verdict="pass"} 10'],
    }[option]:
        assert word in text


@pytest.fixture
def later_fault(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The second repetition's candidate looks the whole prompt up."""
    made = SimEngine.__init__

    def make(self: SimEngine, spec: EngineSpec) -> None:
        made(self, spec._replace(fault="full-lookup") if spec.arm == "candidate-2" else spec)

    monkeypatch.setattr(SimEngine, "__init__", make)
    yield


@pytest.mark.usefixtures("later_fault")
def test_a_fault_in_the_second_repetition_alone(samestate: Command, checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["run", "continuation", "--engine", "sim", "--model", checkpoint, "--out", tmp_path / "a"]
    result = samestate(*arguments)
    assert result.exit_code == 1, result.output
    said = " ".join(result.stdout.split())
    assert "repetition 1: pass (forward: control, candidate)" in said
    assert "repetition 2: ledger-N3584.reload: checkpoint of [0, 3584) restored, 3583 tokens credited" in said
    told = json.loads(samestate("check", tmp_path / "a", "--json").stdout)["repetitions"]
    assert [one["verdict"] for one in told] == ["pass", "fail"]
    assert {"paired-equality", "reload-equality", "boundary"} <= set(told[1]["against"])
    # The bundle of the failing request is of its own repetition, control included.
    case = samestate("case", "export", tmp_path / "a", "ledger-N3584.reload", "--out", tmp_path / "case")
    assert case.exit_code == 0, case.output
    about = json.loads((tmp_path / "case" / "case.json").read_bytes())
    assert about["arms"].keys() == {"candidate-2", "control-2"}
    assert [about["arms"][arm]["connector"] for arm in ("candidate-2", "control-2")] == ["native", "none"]


def test_an_archived_control_is_refused_in_one_line(
    samestate: Command, checkpoint: Path, extension: tuple[Path, str], tmp_path: Path
) -> None:
    for option in ("--control", "--reference"):
        arguments = ["run", "continuation", "--engine", "sim", "--model", checkpoint, option, extension[0]]
        result = samestate(*arguments, "--out", tmp_path / "a")
        assert result.exit_code == 2
        said = f"{option}: plan continuation runs its own control in each of 2 repetitions; leave it out"
        assert result.stderr.splitlines() == [f"samestate: {said}"]
        assert not (tmp_path / "a").exists()
