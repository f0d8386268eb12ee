"""Amendments and signatures as results: a pass needs them whole, a fail stays a fail."""

from __future__ import annotations

import pytest

from samestate.checks.analyzers import Judgement
from samestate.checks.base import Verdict
from samestate.checks.remarks import with_amendments, with_signatures
from samestate.evidence.amendments import Amendment, Amendments, Withdrawal
from samestate.evidence.signature import Signatures, Signed
from samestate.evidence.stream import Defect

from .builder import build, only, result


@pytest.fixture(scope="module")
def passing(tmp_path_factory: pytest.TempPathFactory) -> Judgement:
    judgement = build().judge(tmp_path_factory.mktemp("remarks") / "a")
    assert judgement.verdict is Verdict.PASS
    return judgement


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Judgement:
    return build(fault="full-lookup").judge(tmp_path_factory.mktemp("remarks") / "b")


def amendment(number: int = 1, withdraws: str | None = None) -> Amendment:
    away = None
    if withdraws:
        file = f"verdicts/{withdraws}.json"
        away = Withdrawal(file=file, sha256="0" * 64, analyzer=withdraws, verdict="pass", reason="wrong image")
    return Amendment(
        format=1,
        number=number,
        prev="0" * 64,
        seal_sha256="0" * 64,
        wall_time="2026-01-01T00:00:00.000Z",
        by="me",
        text="look again",
        finding=None,
        withdraws=away,
    )


NONE = Amendments([], [], [])
SIGNED = Signed("signatures/a.dsse.json", "a" * 64, [])


def test_no_amendment_changes_nothing(passing: Judgement) -> None:
    assert with_amendments(passing, NONE) == passing


def test_a_remark_is_shown_and_decides_nothing(passing: Judgement) -> None:
    judgement = with_amendments(passing, Amendments([amendment()], ["1" * 64], []))
    assert judgement.verdict is Verdict.PASS
    assert only(judgement, "amendments").message == "amendment 1, 2026-01-01 by me: look again"


def test_a_withdrawn_pass_is_unknown(passing: Judgement) -> None:
    judgement = with_amendments(passing, Amendments([amendment(withdraws="boundary-v1")], ["1" * 64], []))
    assert judgement.verdict is Verdict.UNKNOWN
    assert only(judgement, "amendments").code == "verdict_withdrawn"
    assert "amendments" in judgement.required


def test_the_withdrawal_of_another_analyzer_s_verdict_is_shown_only(passing: Judgement) -> None:
    judgement = with_amendments(passing, Amendments([amendment(withdraws="local-hit-v1")], ["1" * 64], []))
    assert judgement.verdict is Verdict.PASS
    assert "withdraws the pass of local-hit-v1" in only(judgement, "amendments").message


def test_damaged_amendments_are_unknown(passing: Judgement) -> None:
    damaged = Amendments([], [], [Defect("amendments/0002.json", "is number 2 where 1 was due")])
    judgement = with_amendments(passing, damaged)
    assert judgement.verdict is Verdict.UNKNOWN
    assert only(judgement, "amendments").code == "amendment_damaged"


def test_a_fail_stays_a_fail(failing: Judgement) -> None:
    withdrawn = with_amendments(failing, Amendments([amendment(withdraws="boundary-v1")], ["1" * 64], []))
    assert withdrawn.verdict is Verdict.FAIL
    assert with_signatures(failing, Signatures([], [], 0), NONE).verdict is Verdict.FAIL


def test_a_signature_by_a_trusted_key_passes(passing: Judgement) -> None:
    judgement = with_signatures(passing, Signatures([SIGNED], [], 0), NONE)
    assert judgement.verdict is Verdict.PASS
    assert result(judgement, "signature").summary == "signed by aaaaaaaaaaaa"


@pytest.mark.parametrize(
    ("signatures", "code"),
    [
        (Signatures([], [], 0), "not_signed_by_trusted"),
        (Signatures([], [], 2), "not_signed_by_trusted"),
        (Signatures([], [Defect("signatures/x", "signs another seal")], 0), "signature_invalid"),
    ],
)
def test_without_one_it_is_unknown(passing: Judgement, signatures: Signatures, code: str) -> None:
    judgement = with_signatures(passing, signatures, NONE)
    assert judgement.verdict is Verdict.UNKNOWN
    assert code in [finding.code for finding in result(judgement, "signature").findings]


def test_a_forged_envelope_beside_a_valid_one_is_named(passing: Judgement) -> None:
    judgement = with_signatures(passing, Signatures([SIGNED], [Defect("signatures/x", "forged")], 0), NONE)
    assert judgement.verdict is Verdict.PASS
    assert result(judgement, "signature").summary == "signed by aaaaaaaaaaaa; 1 beside it invalid"


def test_an_amendment_that_was_signed_and_is_gone_shows(passing: Judgement) -> None:
    signed = SIGNED._replace(amendments=["1" * 64, "2" * 64])
    judgement = with_signatures(passing, Signatures([signed], [], 0), Amendments([amendment()], ["1" * 64], []))
    assert judgement.verdict is Verdict.UNKNOWN
    assert only(judgement, "signature").code == "amendments_lost"


def test_a_later_amendment_is_said_to_be_unsigned(passing: Judgement) -> None:
    judgement = with_signatures(passing, Signatures([SIGNED], [], 0), Amendments([amendment()], ["1" * 64], []))
    assert judgement.verdict is Verdict.PASS
    assert result(judgement, "signature").summary.endswith("; 1 amendment not signed")
