from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from click.testing import Result

import samestate as package
from samestate.evidence.archive import Archive

Command = Callable[..., Result]

WITHOUT = """
import sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None
from samestate.cli.main import main
main(sys.argv[2:])
"""


@pytest.fixture
def archive(clean: Path, tmp_path: Path) -> Path:
    return shutil.copytree(clean, tmp_path / "archive")


def without(modules: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The command in a process that cannot import `modules`."""
    environment = os.environ | {"PYTHONPATH": str(Path(package.__file__).parent.parent)}
    command = [sys.executable, "-c", WITHOUT, modules, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_without_an_option_it_is_the_terminal_report(samestate: Command, clean: Path) -> None:
    result = samestate("report", clean)
    assert result.exit_code == 0
    assert result.stdout == samestate("check", clean).stdout


def test_all_reports_at_once_and_the_exit_code_of_check(samestate: Command, faulty: Path, tmp_path: Path) -> None:
    names = {"--html": "r.html", "--junit": "r.xml", "--markdown": "r.md", "--prometheus": "r.prom"}
    files = {option: tmp_path / name for option, name in names.items()}
    result = samestate("report", faulty, *(word for pair in files.items() for word in pair))
    assert (result.exit_code, result.stderr) == (1, "")
    assert result.stdout.splitlines() == [str(file) for file in files.values()]
    assert files["--html"].read_text().startswith("<!doctype html>")
    assert ET.fromstring(files["--junit"].read_bytes()).get("name") == "samestate boundary"
    assert files["--markdown"].read_text().startswith("## ❌ fail: boundary")
    assert 'samestate_run_verdict{plan="boundary",state="fail"} 1' in files["--prometheus"].read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names.values())


def test_a_report_leaves_the_archive_as_sealed(samestate: Command, archive: Path, tmp_path: Path) -> None:
    assert samestate("report", archive, "--html", tmp_path / "page.html").exit_code == 0
    assert Archive.open(archive).defects == []


def test_a_report_of_a_damaged_archive_is_unknown(samestate: Command, archive: Path, tmp_path: Path) -> None:
    (archive / "seal.json").unlink()
    result = samestate("report", archive, "--junit", tmp_path / "r.xml", "--html", tmp_path / "r.html")
    assert result.exit_code == 3
    root = ET.fromstring((tmp_path / "r.xml").read_bytes())
    assert int(root.get("errors", "0")) >= 2


def test_markdown_on_standard_output_alone(samestate: Command, clean: Path) -> None:
    result = samestate("report", clean, "--markdown", "-")
    assert result.exit_code == 0
    assert result.stdout.startswith("## ✅ pass: boundary")


def test_an_old_report_is_replaced_as_a_whole(samestate: Command, clean: Path, tmp_path: Path) -> None:
    target = tmp_path / "samestate.prom"
    target.write_text("old\n" * 100_000)
    assert samestate("report", clean, "--prometheus", target).exit_code == 0
    assert target.read_text().startswith("# HELP samestate_run_info")
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(target.stat().st_mode) == 0o666 & ~mask
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--html", "{archive}/page.html"], "--html: {archive}/page.html lies in the archive, which no file may join"),
        (["--junit", "{archive}/verdicts/r.xml"], "--junit: {archive}/verdicts/r.xml lies in the archive"),
        (["--html", "{tmp}"], "--html: {tmp} is a folder; name a file"),
        (["--junit", "{tmp}/no/r.xml"], "--junit: {tmp}/no is no folder; make it, or name another place"),
        (["--html", "-", "--junit", "-"], "--junit: - is where --html goes; name another file"),
        (["--html", "{tmp}/x", "--junit", "{tmp}/./x"], "--junit: {tmp}/x is where --html goes; name another file"),
        (["--analyzer", "boundary"], "--analyzer: no analyzer 'boundary'; did you mean 'boundary-v1'?"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    samestate: Command, archive: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    places = {"archive": archive, "tmp": tmp_path}
    result = samestate("report", archive, *(argument.format(**places) for argument in arguments))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"samestate: {message.format(**places)}")
    assert len(result.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == [archive]
    assert Archive.open(archive).defects == []


def test_an_archive_that_is_not_there(samestate: Command, tmp_path: Path) -> None:
    result = samestate("report", tmp_path / "nosuch", "--html", tmp_path / "page.html")
    assert result.exit_code == 2
    assert "does not exist" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_reports_need_no_engine(clean: Path, tmp_path: Path) -> None:
    done = without("torch,vllm,transformers", "report", clean, "--html", tmp_path / "page.html")
    assert done.stderr == ""
    assert (tmp_path / "page.html").exists()


def test_without_jinja2_the_other_reports_work_and_html_names_the_remedy(clean: Path, tmp_path: Path) -> None:
    told = without("jinja2", "report", clean, "--junit", tmp_path / "r.xml", "--markdown", "-").stderr
    assert told == f"{tmp_path / 'r.xml'}\n"
    assert (tmp_path / "r.xml").exists()
    done = without("jinja2", "report", clean, "--html", tmp_path / "page.html")
    assert done.returncode == 2
    assert done.stderr == "samestate: --html: jinja2 is not installed; pip install 'samestate[report]'\n"
    assert not (tmp_path / "page.html").exists()


def test_the_verdict_is_kept_as_check_keeps_it(samestate: Command, archive: Path, tmp_path: Path) -> None:
    shutil.rmtree(archive / "verdicts")
    assert samestate("report", archive, "--markdown", tmp_path / "r.md").exit_code == 0
    assert json.loads((archive / "verdicts/boundary-v1.json").read_bytes())["verdict"] == "pass"
