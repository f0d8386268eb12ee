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
