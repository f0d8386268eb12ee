"""What the counts of a gate mean."""

from __future__ import annotations

import msgspec
import pytest

from samestate.evidence.gate_report import GateGroup
from samestate.instruments.gate_verdicts import BATCHES, sampling_verdict, selftest_verdict

RIGHT = [
    GateGroup(
        temperature=0.6,
        top_p=0.95,
        forced_rows=4,
        forced_right=4,
        forced_empty=0,
        ordinary_rows=136,
        ordinary_same=136,
    )
] * 2


def other(**changes: int) -> list[GateGroup]:
    return [RIGHT[0], msgspec.structs.replace(RIGHT[1], **changes)]


def said(groups: list[GateGroup], calls: int = 2 * BATCHES, first: int | None = None) -> tuple[str, str | None]:
    return sampling_verdict(groups, split_calls=calls, first_other=first, compared="the guard")


def test_all_rows_right_pass() -> None:
    assert said(RIGHT) == ("pass", None)
    assert selftest_verdict(RIGHT, hint="hint") == ("pass", None)


def test_forced_rows_that_keep_nothing_fail_in_these_words() -> None:
    verdict, reason = said(other(forced_right=0, forced_empty=4))
    assert verdict == "fail"
    assert reason is not None
    assert reason.startswith(
        "4/8 forced rows choose the end id, 4 keep no token: the split-row cut-off log(pivot)+log(Z)"
    )
    assert "run with --guard" in reason


def test_forced_rows_that_choose_another_token_fail() -> None:
    assert said(other(forced_right=3)) == ("fail", "7/8 forced rows choose the end id")


def test_an_ordinary_row_that_changed_fails_and_is_named() -> None:
    verdict, reason = said(other(ordinary_same=135), first=41)
    assert verdict == "fail"
    assert reason == (
        "271/272 ordinary rows are bitwise the same with and without the guard; the first that is not: row 41"
    )


@pytest.mark.parametrize("groups", [[], RIGHT[:1], other(forced_rows=5, forced_right=5), other(ordinary_rows=135)])
def test_other_rows_than_the_gate_has_are_unknown(groups: list[GateGroup]) -> None:
    verdict, reason = said(groups)
    assert verdict == "unknown"
    assert reason is not None
    assert "not 8 and 272" in reason


@pytest.mark.parametrize("calls", [0, BATCHES, 2 * BATCHES + 1])
def test_another_path_of_vllm_is_unknown(calls: int) -> None:
    verdict, reason = said(RIGHT, calls)
    assert (verdict, reason) == ("unknown", f"vLLM took its split-row path {calls} times, not 16")


@pytest.mark.parametrize("groups", [other(forced_right=3), other(ordinary_same=1)])
def test_a_self_test_with_a_wrong_row_fails_with_its_hint(groups: list[GateGroup]) -> None:
    verdict, reason = selftest_verdict(groups, hint="try this")
    assert verdict == "fail"
    assert reason is not None
    assert reason.startswith("at temperature 0.6 and top-p 0.95")
    assert reason.endswith("; try this")


@pytest.mark.parametrize("groups", [[], other(forced_rows=0, forced_right=0), other(ordinary_rows=0, ordinary_same=0)])
def test_a_self_test_of_nothing_is_unknown(groups: list[GateGroup]) -> None:
    assert selftest_verdict(groups, hint="") == ("unknown", "the self-test ran no rows")
