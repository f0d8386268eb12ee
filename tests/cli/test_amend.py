"""`samestate amend`: an earlier success, retained as a failure of observation."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Command = Callable[..., Result]


@pytest.fixture
def archive(clean: Path, tmp_path: Path) -> Path:
    return shutil.copytree(clean, tmp_path / "archive")


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_remark_is_added_shown_and_changes_no_verdict(samestate: Command, archive: Path) -> None:
    before = tree(archive)
    result = samestate("amend", archive, "--text", "the host was shared", "--by", "me")
    assert result.exit_code == 0
    assert result.stdout.strip().endswith("amendments/0001.json")
    assert tree(archive).items() >= before.items()
    checked = samestate("check", archive)
    assert checked.exit_code == 0
    assert "by me: the host was shared" in checked.stdout


def test_a_withdrawn_pass_is_unknown_in_check_and_report(samestate: Command, archive: Path) -> None:
    verdict = archive / "verdicts" / "boundary-v1.json"
    kept = verdict.read_bytes()
    result = samestate("amend", archive, "--withdraw", verdict, "--reason", "the control ran another image")
    assert result.exit_code == 0, result.output
    for command in (["check", archive], ["report", archive], ["report", archive, "--markdown", "-"]):
        shown = samestate(*command)
        assert shown.exit_code == 3
        assert "the control ran another image" in " ".join(shown.stdout.split())
    assert verdict.read_bytes() == kept
    assert len(list(verdict.parent.iterdir())) == 1


@pytest.mark.tamper
def test_an_amendment_lost_before_the_end_is_unknown(samestate: Command, archive: Path) -> None:
    for text in ("one", "two"):
        samestate("amend", archive, "--text", text)
    (archive / "amendments" / "0001.json").unlink()
    result = samestate("check", archive)
    assert result.exit_code == 3
    assert "amendments were lost" in " ".join(result.stdout.split())


def test_a_withdrawn_fail_still_fails(samestate: Command, faulty: Path, tmp_path: Path) -> None:
    archive = shutil.copytree(faulty, tmp_path / "archive")
    samestate("amend", archive, "--withdraw", "boundary-v1.json", "--reason", "x", "--finding", "tokens_differ")
    assert samestate("check", archive).exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "--text: is empty"),
        (["--text", "x", "--finding", "tokens_differs"], "--finding: no finding 'tokens_differs'"),
        (["--withdraw", "boundary-v1.json"], "--withdraw and --reason belong together"),
        (["--reason", "x"], "--withdraw and --reason belong together"),
        (["--withdraw", "boundary-v1.json", "--reason", " "], "--withdraw and --reason belong together"),
        (["--withdraw", "boundary.json", "--reason", "x"], "did you mean 'boundary-v1.json'?"),
    ],
)
def test_bad_input_is_one_line(samestate: Command, archive: Path, arguments: list[str], word: str) -> None:
    result = samestate("amend", archive, *arguments)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert word in result.stderr
    assert not (archive / "amendments").exists()


def test_a_decision_is_recorded_shown_and_promotes_nothing(samestate: Command, archive: Path) -> None:
    decided = samestate("amend", archive, "--decision", "held", "--text", "the marker did not recur", "--by", "me")
    assert decided.exit_code == 0, decided.output
    checked = samestate("check", archive)
    assert checked.exit_code == 0
    assert "by me, decision held: the marker did not recur" in " ".join(checked.stdout.split())


def test_a_decision_says_what_it_rests_on(samestate: Command, archive: Path) -> None:
    result = samestate("amend", archive, "--decision", "held")
    assert (result.exit_code, result.stderr.strip()) == (
        2,
        "samestate: --decision: say in --text what it rests on",
    )


def test_nothing_is_accepted_without_a_pass_that_stands(samestate: Command, archive: Path, faulty: Path) -> None:
    accept = ["--decision", "accepted", "--text", "as planned"]
    assert samestate("amend", archive, *accept).exit_code == 0
    samestate("amend", archive, "--withdraw", "boundary-v1.json", "--reason", "another image")
    for root, said in ((archive, "none"), (shutil.copytree(faulty, archive.parent / "faulty"), "fail")):
        result = samestate("amend", root, *accept)
        assert result.exit_code == 2
        assert f"the archive's kept verdicts are: {said}; judge it" in result.stderr
