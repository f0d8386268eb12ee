from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from samestate.checks.base import Verdict
from samestate.evidence import records as r

from . import builder as b

EOS, VACUITY = "eos-absent", "non-vacuity"
ARMS = ("control", "candidate")


def answer(run: b.Run, token_ids: list[int], **match: object) -> None:
    """The same answer in both arms, so that only its content is in question."""
    for arm in ARMS:
        b.edit(run.client(arm), r.OperationOutput, {"token_ids": token_ids}, **match)


def test_silent_on_varied_outputs_without_eos(tmp_path: Path) -> None:
    judgement = b.build().judge(tmp_path / "a")
    for check in (EOS, VACUITY):
        assert (b.result(judgement, check).verdict, b.result(judgement, check).findings) == (Verdict.PASS, [])
        assert b.result(judgement, check).examined == 24


def test_an_eos_id_fails(tmp_path: Path) -> None:
    run = b.build()
    answer(run, [11, 12, b.EOS, 13, 14, 15, 16, 17], op="N32.interposer-1")
    judgement = run.judge(tmp_path / "a")
    assert (judgement.verdict, b.failing(judgement)) == (Verdict.FAIL, {EOS})
    assert b.result(judgement, EOS).findings[-1].message == (
        "arm control: N32.interposer-1 holds an end-of-sequence id at token 2"
    )


def test_no_known_eos_id_is_unknown(tmp_path: Path) -> None:
    run = b.build()
    for arm in ARMS:
        b.edit(run.client(arm), r.EngineStarted, {"eos_token_ids": []})
    judgement = run.judge(tmp_path / "a")
    assert (judgement.verdict, b.codes(judgement, EOS)) == (Verdict.UNKNOWN, ["no_eos_known"] * 2)


@pytest.mark.parametrize(("ids", "fires"), [([11, 12, 13] * 3, True), ([11, 12, 13, 14] * 2, False)])
def test_a_degenerate_output_is_vacuous(tmp_path: Path, ids: list[int], fires: bool) -> None:
    run = b.build()
    answer(run, ids[:8], op="N32.interposer-1")
    judgement = run.judge(tmp_path / "a")
    assert b.codes(judgement, VACUITY) == (["vacuous"] * 2 if fires else [])


def test_one_answer_to_every_input_is_vacuous(tmp_path: Path) -> None:
    run = b.build()
    answer(run, list(range(11, 19)))
    judgement = run.judge(tmp_path / "a")
    assert b.result(judgement, "paired-equality").verdict is Verdict.PASS
    assert (judgement.verdict, b.codes(judgement, VACUITY)) == (Verdict.UNKNOWN, ["vacuous"] * 2)


def test_a_candidate_that_loaded_nothing_is_vacuous(tmp_path: Path) -> None:
    run = b.build()
    b.drop(run.worker(), r.LoadSubmitted)
    b.drop(run.worker(), r.LoadCompleted)
    judgement = run.judge(tmp_path / "a")
    assert (judgement.verdict, b.only(judgement, VACUITY).place.arm) == (Verdict.UNKNOWN, "candidate")


def test_a_control_that_loaded_is_vacuous(tmp_path: Path) -> None:
    run = b.build()
    loads = [rec for rec in run.worker() if isinstance(rec, r.LoadSubmitted | r.LoadCompleted)]
    run.streams["control", "worker-0"] = loads[:2]
    assert b.only(run.judge(tmp_path / "a"), VACUITY).place.arm == "control"


def test_a_control_that_counts_external_hits_is_vacuous(tmp_path: Path) -> None:
    run = b.build()
    for index, rec in enumerate(run.client("control")):
        if isinstance(rec, r.CountersRead) and rec.op == "N32.reload":
            hits = 16.0 if rec.when == "after" else 0.0
            values = {**rec.values, r.EXTERNAL_HITS: hits}
            run.client("control")[index] = msgspec.structs.replace(rec, values=values, missing=[])
    assert b.only(run.judge(tmp_path / "a"), VACUITY).place.op == "N32.reload"
