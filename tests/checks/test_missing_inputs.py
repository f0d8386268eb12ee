"""A prompt whose tokens are not recorded makes nothing a fail: what it begins as is not known."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestate.checks.base import Verdict
from samestate.evidence import records as r

from . import builder as b
from . import scenarios as s


@pytest.mark.regression
@pytest.mark.parametrize("op", ["trunk.1", "one.1"])
def test_a_prompt_that_is_gone_is_unknown(tmp_path: Path, op: str) -> None:
    run = s.recorded(s.small(), tmp_path)
    (digest,) = {rec.prompt_sha256 for rec in run.client() if isinstance(rec, r.OperationStarted) and rec.op == op}
    del run.inputs[digest or ""]
    judgement = run.judge(tmp_path / "a")
    assert b.failing(judgement) == set()
    assert judgement.verdict is Verdict.UNKNOWN
    assert "missing_input" in b.codes(judgement, "plan-identity")
