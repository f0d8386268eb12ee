"""Preemptions, conversations and the sweep of lengths on a real vLLM, through its own offloading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from samestate.checks.analyzers import Judgement, judge
from samestate.checks.base import Verdict
from samestate.evidence.archive import Archive

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.deep]

Judged = Callable[[str], Judgement]


@pytest.fixture
def judged(run_shipped: Callable[[str], Path]) -> Judged:
    return lambda name: judge(Archive.open(run_shipped(name)))


def said(judgement: Judgement) -> list[str]:
    return [found.message for result in judgement.results for found in result.findings]


def summary(judgement: Judgement, check: str) -> str:
    (found,) = [result.summary for result in judgement.results if result.check == check]
    return found


def test_preempted_requests_continue_as_alone(judged: Judged) -> None:
    judgement = judged("pressure")
    assert judgement.verdict is Verdict.PASS, said(judgement)
    assert "candidates: 0 preemptions" not in summary(judgement, "preemptions")
    assert not summary(judgement, "resumptions").startswith("0 ")
    assert {"external", "local", "cold"} <= {row.path for row in judgement.table}


def test_every_length_is_found_up_to_its_boundary(judged: Judged) -> None:
    judgement = judged("cacheability")
    assert judgement.verdict is Verdict.PASS, said(judgement)
    assert summary(judgement, "hit-length").endswith("local 11/11, external 11/11")


def test_turns_reuse_what_decode_computed(judged: Judged) -> None:
    """On another platform its other bits may decide a token: that is unknown, and never a fail."""
    judgement = judged("conversation")
    codes = {found.code for result in judgement.results for found in result.findings}
    assert judgement.verdict is Verdict.PASS or codes <= {"decode_state", "tie"}, said(judgement)
    (turns,) = [result for result in judgement.results if result.check == "turns"]
    assert turns.verdict is Verdict.PASS
