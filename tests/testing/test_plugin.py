"""The pytest plugin, in a project of its own: silent on a right engine, fires on a fault, says what it cannot run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from samestate.checks.analyzers import Judgement, judge
from samestate.checks.base import CheckResult, Verdict
from samestate.evidence.archive import Archive
from samestate.testing.session import Judged, Reloads, Wanted, live
from samestate.testing.verdict import ColdReload

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/pytest-project"
Done = subprocess.CompletedProcess[str]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    copy = tmp_path / "project"
    shutil.copytree(EXAMPLE, copy)
    return copy


def run_pytest(project: Path, *arguments: str) -> Done:
    """The project's own pytest, with our plugin and no other."""
    words = [sys.executable, "-m", "pytest", "-p", "samestate.testing.plugin", "-p", "no:cacheprovider", "-v"]
    return subprocess.run(
        [*words, "--basetemp", str(project.parent / "tmp"), *arguments],
        cwd=project,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def archive_of(project: Path) -> Path:
    (archive,) = (project.parent / "tmp").glob("samestate0/archive")
    return archive


def test_the_plugin_is_declared() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    assert all(hasattr(import_module(module), "pytest_addoption") for module in declared.values())


def test_the_example_passes_on_a_right_engine(project: Path) -> None:
    done = run_pytest(project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout
    assert "test_a_reload_continues_as_cold[2C-1] PASSED" in done.stdout
    judgement = judge(Archive.open(archive_of(project)))
    assert judgement.verdict is Verdict.PASS
    assert [row.case for row in judgement.table] == ["N3583", "N3584", "N3585"], "one run for all of them"


def test_the_example_fails_with_the_finding_at_the_length_that_is_wrong(project: Path) -> None:
    done = run_pytest(project, "--samestate-fault", "full-lookup")
    assert done.returncode == 1
    assert "1 failed, 3 passed" in done.stdout
    assert "test_a_reload_continues_as_cold[2C] FAILED" in done.stdout
    assert "boundary: fail: N3584.reload: checkpoint of [0, 3584) restored, 3583 tokens credited" in done.stdout
    assert "[retained_lookup_boundary at arms/candidate/worker-0.jsonl:" in done.stdout
    assert "Traceback" not in done.stdout


def test_a_fault_at_all_lengths_fails_all_tests(project: Path) -> None:
    done = run_pytest(project, "--samestate-fault", "zero-page", "test_my_model.py")
    assert done.returncode == 1
    assert "3 failed" in done.stdout


def test_only_what_is_selected_runs(project: Path) -> None:
    done = run_pytest(project, "-k", "2C+1")
    assert "1 passed" in done.stdout
    assert [row.case for row in judge(Archive.open(archive_of(project))).table] == ["N3585"]


def test_without_a_test_of_ours_nothing_runs(project: Path) -> None:
    (project / "test_other.py").write_text("def test_other(): pass\n")
    done = run_pytest(project, "test_other.py")
    assert done.returncode == 0
    assert not list((project.parent / "tmp").glob("samestate*"))


def test_a_mark_without_lengths_means_those_of_the_plan(project: Path) -> None:
    (project / "test_all.py").write_text(
        "import pytest\n@pytest.mark.boundary\ndef test_all(cold_reload):\n    cold_reload()\n"
    )
    assert "9 passed" in run_pytest(project, "test_all.py").stdout


RIGHT = Wanted(engine="sim", model=None, connector=None, serve_args="", out=None, fault=None)


@pytest.mark.parametrize(
    ("wanted", "line"),
    [
        (RIGHT._replace(engine="llama"), "--samestate-engine: 'llama' is none; use one of vllm, sim"),
        (RIGHT._replace(connector="redis"), "--samestate-connector: 'redis' is none; use one of"),
        (RIGHT._replace(serve_args="--block-size '"), "--samestate-serve-args: No closing quotation"),
        (RIGHT._replace(serve_args="--nothing 1"), "--serve-args: the simulated engine has no --nothing"),
        (RIGHT._replace(model=Path("nowhere")), "--model: no folder nowhere"),
        (RIGHT._replace(fault="nothing"), "fault 'nothing': the simulated engine has only"),
        (RIGHT._replace(out=ROOT), f"--out: {ROOT} is not empty"),
    ],
)
def test_what_cannot_run_is_one_line_and_no_pass(tmp_path: Path, wanted: Wanted, line: str) -> None:
    reloads = Reloads(wanted, ["2C"])
    for _ in range(2):  # the second test of a session says the same
        with pytest.raises(pytest.fail.Exception) as failed:
            reloads.run(tmp_path)
        assert f"samestate could not run: {line}" in str(failed.value) or line in str(failed.value)
        assert len(str(failed.value).splitlines()) < 4
    assert reloads.summary == ""


def test_an_engine_that_cannot_start_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"could not start the engine: .*nothing"):
        live(RIGHT._replace(fault="nothing"), tmp_path).__enter__()


def test_two_lengths_that_are_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="'3584' is 3584 tokens at C=1792, as another length is"):
        Reloads(RIGHT, ["2C", "3584"]).run(tmp_path)


def test_options_of_the_command_line_win_over_the_file(project: Path) -> None:
    done = run_pytest(project, "--samestate-engine", "llama", "test_my_model.py")
    assert done.returncode == 1
    assert "--samestate-engine: 'llama' is none" in done.stdout
    assert "passed" not in done.stdout


def test_wrong_marks_are_refused_at_collection(project: Path) -> None:
    marks = {
        "@pytest.mark.slow": "cold_reload needs @pytest.mark.boundary(",
        "@pytest.mark.boundary('2B')": "'2B' is no prompt length",
        "@pytest.mark.boundary(n=1)": "lengths only, not n=",
    }
    for number, mark in enumerate(marks):
        text = f"import pytest\n{mark}\ndef test_it(cold_reload): cold_reload()\n"
        (project / f"test_wrong_{number}.py").write_text(text)
    done = run_pytest(project)
    assert done.returncode not in (0, 1)
    assert [line for line in marks.values() if line not in done.stdout + done.stderr] == []


# --- what a test makes of a judgement -------------------------------------------------------------


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Judged:
    project = tmp_path_factory.mktemp("judged") / "project"
    shutil.copytree(EXAMPLE, project)
    assert run_pytest(project, "test_my_model.py").returncode == 0
    archive = archive_of(project)
    return Judged(archive, judge(Archive.open(archive)), 1792)


def changed(judged: Judged, check: str, **update: object) -> Judged:
    def put(result: CheckResult) -> CheckResult:
        return result.model_copy(update=update) if result.check == check else result

    results = [put(result) for result in judged.judgement.results]
    return judged._replace(judgement=judged.judgement.model_copy(update={"results": results}))


def refused(judged: Judged) -> str:
    with pytest.raises(pytest.fail.Exception) as failed:
        ColdReload(judged, "2C")()
    return str(failed.value)


def test_the_row_of_the_length_is_returned(judged: Judged) -> None:
    row = ColdReload(judged, "2C")()
    assert (row.tokens, row.boundary, row.credited, row.scheduled) == (3584, 1792, 1792, 1792)


def test_a_required_check_that_was_not_exercised_is_no_pass(judged: Judged) -> None:
    spoiled = changed(judged, "transfers", verdict=Verdict.NOT_EXERCISED, summary="nothing moved")
    assert "transfers: not exercised: nothing moved" in refused(spoiled)


def test_a_required_check_that_is_not_there_is_no_pass(judged: Judged) -> None:
    kept = [result for result in judged.judgement.results if result.check != "boundary"]
    spoiled: Judgement = judged.judgement.model_copy(update={"results": kept})
    assert "boundary: unknown: it did not run" in refused(judged._replace(judgement=spoiled))


def test_a_length_without_a_row_is_no_pass(judged: Judged) -> None:
    spoiled = judged.judgement.model_copy(update={"table": []})
    assert "no row in the table" in refused(judged._replace(judgement=spoiled))
