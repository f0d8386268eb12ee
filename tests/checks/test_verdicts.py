"""The algebra: a run passes only when every required check passed over something."""

from __future__ import annotations

from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from samestate.checks.base import CheckResult, Verdict
from samestate.checks.history import History, MissingEvidence
from samestate.checks.verdicts import conclude, fail, run_check, run_verdict, unknown

verdicts = st.sampled_from(list(Verdict))
NO_HISTORY = cast(History, None)


def result(check: str, verdict: Verdict, examined: int = 1) -> CheckResult:
    return CheckResult(check=check, verdict=verdict, summary="", unit="things", examined=examined)


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[str], list[CheckResult]]:
    ids = ["a", "b", "c", "d"]
    required = draw(st.lists(st.sampled_from(ids), unique=True))
    done = draw(st.lists(st.sampled_from(ids), unique=True))
    return required, [result(check, draw(verdicts)) for check in done]


@given(runs())
def test_any_required_fail_fails_the_run_and_nothing_else_does(run: tuple[list[str], list[CheckResult]]) -> None:
    required, results = run
    failed = any(one.verdict is Verdict.FAIL for one in results if one.check in required)
    assert (run_verdict(required, results) is Verdict.FAIL) == failed


@given(runs())
def test_a_run_passes_only_when_every_required_check_passed(run: tuple[list[str], list[CheckResult]]) -> None:
    required, results = run
    passed = {one.check for one in results if one.verdict is Verdict.PASS}
    assert (run_verdict(required, results) is Verdict.PASS) == (bool(required) and set(required) <= passed)


@given(runs())
def test_a_run_is_pass_fail_or_unknown(run: tuple[list[str], list[CheckResult]]) -> None:
    assert run_verdict(*run) in {Verdict.PASS, Verdict.FAIL, Verdict.UNKNOWN}


@given(runs(), verdicts)
def test_checks_that_are_not_required_change_nothing(
    run: tuple[list[str], list[CheckResult]], verdict: Verdict
) -> None:
    required, results = run
    assert run_verdict(required, [*results, result("other", verdict)]) is run_verdict(required, results)


@given(runs())
def test_order_changes_nothing(run: tuple[list[str], list[CheckResult]]) -> None:
    required, results = run
    assert run_verdict(required[::-1], results[::-1]) is run_verdict(required, results)


def test_all_excluded_is_unknown() -> None:
    assert run_verdict(["a"], [result("a", Verdict.EXCLUDED)]) is Verdict.UNKNOWN


@given(verdicts, st.integers(-1, 3))
def test_a_pass_over_nothing_is_unknown(verdict: Verdict, examined: int) -> None:
    ran = run_check("a", lambda _: result("a", verdict, examined), NO_HISTORY)
    vacuous = verdict is Verdict.PASS and examined <= 0
    assert ran.verdict is (Verdict.UNKNOWN if vacuous else verdict)
    assert [finding.code for finding in ran.findings] == (["nothing_examined"] if vacuous else [])


def test_a_crash_is_unknown_and_says_what_crashed() -> None:
    def broken(_: History) -> CheckResult:
        raise ZeroDivisionError("twice\nover")

    ran = run_check("a", broken, NO_HISTORY)
    assert (ran.check, ran.verdict, ran.findings[0].code) == ("a", Verdict.UNKNOWN, "checker_crashed")
    assert ran.findings[0].message == "a crashed: ZeroDivisionError: twice over"


def test_missing_evidence_is_unknown_under_its_own_code() -> None:
    def blind(_: History) -> CheckResult:
        raise MissingEvidence("missing_arm", "no arm")

    assert run_check("a", blind, NO_HISTORY).findings[0].code == "missing_arm"


def test_an_answer_under_another_name_is_unknown() -> None:
    assert run_check("a", lambda _: result("b", Verdict.PASS), NO_HISTORY).verdict is Verdict.UNKNOWN


def test_the_worst_finding_decides_a_check() -> None:
    both = [unknown("x", "x"), fail("y", "y")]
    for findings, verdict in ((both, Verdict.FAIL), (both[:1], Verdict.UNKNOWN), ([], Verdict.PASS)):
        assert conclude("a", findings, unit="things", examined=1, summary="").verdict is verdict
