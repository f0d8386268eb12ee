from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Command = Callable[..., Result]


def claims(folder: Path, seal: str, text: str) -> Path:
    one = {"id": "equal", "kind": "equality", "text": text, "archive": seal[:12], "checks": ["paired-equality"]}
    (folder / "claims.yaml").write_text(json.dumps({"claims": [one]}))
    return folder / "claims.yaml"


def test_claims_against_an_archive(samestate: Command, clean: Path, tmp_path: Path) -> None:
    judged = json.loads(samestate("check", clean, "--json").stdout)
    assert {basis["independence"] for basis in judged["bases"]} == {"recomputed"}
    honest = samestate("claims", "lint", claims(tmp_path, judged["seal_sha256"], "36 comparisons"), "--archive", clean)
    assert (honest.exit_code, honest.stdout) == (0, "none of 1 refused\n")
    wrong = samestate("claims", "lint", claims(tmp_path, judged["seal_sha256"], "36 tasks"), "--archive", clean)
    assert wrong.exit_code == 1
    assert wrong.stdout.startswith("equal: [unit] calls 36 ")


@pytest.mark.parametrize("content", ["", "claims: []", "claims: [{id: a}]"])
def test_a_file_that_is_none(samestate: Command, clean: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "claims.yaml").write_text(content)
    result = samestate("claims", "lint", tmp_path / "claims.yaml", "--archive", clean)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)


def test_a_line_number_that_no_file_has(samestate: Command, clean: Path, tmp_path: Path) -> None:
    judged = json.loads(samestate("check", clean, "--json").stdout)
    where = f"arms/candidate/client.jsonl:{'9' * 5000}"
    one = {"id": "a", "kind": "equality", "text": "Equal", "archive": judged["seal_sha256"][:12], "records": [where]}
    (tmp_path / "claims.yaml").write_text(json.dumps({"claims": [one]}))
    result = samestate("claims", "lint", tmp_path / "claims.yaml", "--archive", clean)
    assert result.exit_code == 1
    said = [line for line in result.stdout.splitlines() if "[no-such-record]" in line]
    assert len(said) == 1 and len(said[0]) < 200
    assert said[0].endswith("name it as arms/ARM/PROCESS.jsonl:LINE, lines from 1")
