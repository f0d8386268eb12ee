from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Command = Callable[..., Result]


def test_a_failing_request_as_a_folder(samestate: Command, faulty: Path, tmp_path: Path) -> None:
    result = samestate("case", "export", faulty, "N3584.reload", "--out", tmp_path / "case")
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "case").iterdir()} == {
        "README.md",
        "case.json",
        "records.jsonl",
        "tokens.json",
    }
    readme = (tmp_path / "case" / "README.md").read_text()
    assert "samestate run boundary --model CHECKPOINT --engine sim --fault full-lookup" in readme
    assert "The fault `full-lookup` was injected" in readme
    about = json.loads((tmp_path / "case" / "case.json").read_text())
    assert about["operations"]["candidate"] == ["N3584.cold", "N3584.reset", "N3584.reload"]
    everything = "".join(path.read_text() for path in (tmp_path / "case").iterdir())
    assert str(tmp_path) not in everything
    assert str(faulty) not in everything


def test_tokens_can_be_left_out(samestate: Command, faulty: Path, tmp_path: Path) -> None:
    result = samestate("case", "export", faulty, "N3584.reload", "--out", tmp_path / "case", "--redact-tokens")
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "case" / "tokens.json").exists()
    lines = [json.loads(line)["rec"] for line in (tmp_path / "case" / "records.jsonl").read_text().splitlines()]
    outputs = [rec for rec in lines if rec["kind"] == "operation_output"]
    assert {type(rec["token_ids"]) for rec in outputs} == {int}


@pytest.mark.parametrize(
    ("op", "word"),
    [
        ("N3583.reload", "has no failing finding; those that have one: N3584.reload"),
        ("nosuch", "has no failing finding"),
        ("../up", "has no failing finding"),
    ],
)
def test_an_operation_without_a_finding(
    samestate: Command, faulty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str, word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = samestate("case", "export", faulty, op)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert word in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_places_where_no_folder_can_go(samestate: Command, faulty: Path, tmp_path: Path) -> None:
    for place in (tmp_path, faulty / "case", tmp_path / "no" / "case"):
        result = samestate("case", "export", faulty, "N3584.reload", "--out", place)
        assert (result.exit_code, result.stderr.startswith("samestate: --out: ")) == (2, True)
    assert not (faulty / "case").exists()
