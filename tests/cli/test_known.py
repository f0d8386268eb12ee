"""`samestate check --known`: an accepted failure no longer fails the run, and everybody can see that."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from tests.checks import tampering

Command = Callable[..., Result]


@pytest.fixture
def archive(faulty: Path, tmp_path: Path) -> Path:
    """One that fails and declares no fault: of a run with a fault nothing is accepted."""
    root = shutil.copytree(faulty, tmp_path / "archive")
    before = tampering.read(root)
    attempts = tampering.records(before["attempts.jsonl"])
    for line in attempts:
        if "fault" in line["rec"]:
            line["rec"]["fault"] = None
    tampering.write(root, before, tampering.sealed({**before, "attempts.jsonl": tampering.stream(attempts)}))
    return root


def test_nothing_is_accepted_of_a_run_with_a_fault(samestate: Command, archive: Path, faulty: Path) -> None:
    result = samestate("check", faulty, "--known", known(samestate, archive))
    assert result.exit_code == 1
    assert "Nothing is accepted of a run with a fault" in " ".join(result.stdout.split())


def test_a_fault_and_known_findings_exclude_each_other(samestate: Command, archive: Path) -> None:
    file = known(samestate, archive)
    result = samestate("run", "boundary", "--engine", "sim", "--fault", "full-lookup", "--known", file)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert "--fault: nothing is accepted of a run with a fault; leave out --known" in result.stderr


def test_an_empty_name_of_known_findings_is_refused(samestate: Command, clean: Path) -> None:
    result = samestate("check", clean, "--known", "")
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert "--known: is empty" in result.stderr


def known(samestate: Command, archive: Path, expires: str = "2999-12-31") -> Path:
    judged = json.loads(samestate("check", archive, "--json").stdout)
    findings = {
        (result["check"], finding["code"])
        for result in judged["results"]
        for finding in result["findings"]
        if finding["verdict"] in ("fail", "unknown")
    }
    lines = [
        f"  - {{check: {check}, code: {code}, reason: issue 7, by: us, expires: {expires}}}" for check, code in findings
    ]
    path = archive.parent / "known.yaml"
    path.write_text("\n".join(["known:", *lines]) + "\n")
    return path


def test_a_run_whose_failures_are_all_accepted_passes_aloud(samestate: Command, archive: Path) -> None:
    file = known(samestate, archive)
    kept = {path.name: path.read_bytes() for path in (archive / "verdicts").iterdir()}
    result = samestate("check", archive, "--known", file)
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert "findings accepted; without acceptance the verdict is fail" in said
    assert "accepted until 2999-12-31 by us (issue 7)" in said
    assert {path.name: path.read_bytes() for path in (archive / "verdicts").iterdir()} == kept
    assert samestate("check", archive).exit_code == 1


def test_an_expired_acceptance_fails_and_says_so(samestate: Command, archive: Path) -> None:
    result = samestate("check", archive, "--known", known(samestate, archive, "2001-01-01"))
    assert result.exit_code == 1
    assert "expired on 2001-01-01" in result.stdout


def test_an_entry_that_met_nothing_is_named(samestate: Command, clean: Path, archive: Path) -> None:
    result = samestate("check", clean, "--known", known(samestate, archive))
    assert result.exit_code == 0
    assert "met nothing in this archive" in result.stdout


def test_damage_is_never_accepted(samestate: Command, archive: Path) -> None:
    file = known(samestate, archive)
    (archive / "seal.json").unlink()
    assert samestate("check", archive, "--known", file).exit_code == 3
    file.write_text("known: [{check: integrity, code: defect, reason: r, by: us, expires: 2999-12-31}]")
    result = samestate("check", archive, "--known", file)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert "findings of integrity are never accepted" in result.stderr
