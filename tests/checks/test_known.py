"""Accepted findings: what is meant is accepted until its date, and nothing else is."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from samestate.checks.analyzers import Judgement
from samestate.checks.base import CheckResult, Finding, Place, Verdict
from samestate.checks.known import NEVER, Entry, Running, accept, read_known
from samestate.checks.written import WrittenError

from .builder import build, result

TODAY = date(2026, 6, 1)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Judgement:
    """Fails at N = 2C in three checks, and `geometry` is unknown there."""
    judgement = build(fault="full-lookup").judge(tmp_path_factory.mktemp("known") / "a")
    assert judgement.verdict is Verdict.FAIL
    return judgement


def entry(check: str, code: str, **fields: object) -> Entry:
    given = {"reason": "issue 7", "by": "the cache team", "expires": date(2026, 12, 31)} | fields
    return Entry(check=check, code=code, **given)  # type: ignore[arg-type]


def every(judgement: Judgement, **fields: object) -> list[Entry]:
    """An entry for every finding against the run."""
    pairs = {
        (one.check, finding.code)
        for one in judgement.results
        for finding in one.findings
        if finding.verdict in (Verdict.FAIL, Verdict.UNKNOWN)
    }
    return [entry(check, code, **fields) for check, code in sorted(pairs)]


def test_when_every_failure_is_accepted_the_run_passes_and_says_so(faulty: Judgement) -> None:
    accepted = accept(faulty, every(faulty), TODAY)
    assert accepted.verdict is Verdict.PASS
    count = len(every(faulty))
    assert accepted.limitations[0] == f"Pass with {count} findings accepted; without acceptance the verdict is fail."
    assert result(accepted, "known").examined == count
    (finding,) = result(accepted, "paired-equality").findings
    assert finding.message.startswith("accepted until 2026-12-31 by the cache team (issue 7): ")
    assert finding.verdict is Verdict.FAIL


def test_what_is_known_of_one_version_is_not_accepted_of_another(faulty: Judgement) -> None:
    known = every(faulty, versions={"vllm": "0.32.0"})
    both: dict[str, dict[str, str]] = {"control": {"vllm": "0.32.0", "torch": "2"}, "candidate": {"vllm": "0.32.0"}}
    assert accept(faulty, known, TODAY, Running(both)).verdict is Verdict.PASS
    for running in ({}, {"control": {}, "candidate": {"vllm": "0.32.0"}}, both | {"candidate": {"vllm": "0.33.0"}}):
        judged = accept(faulty, known, TODAY, Running(running))
        assert judged.verdict is Verdict.FAIL
        assert judged.limitations[0].endswith("accepts nothing: it is one of vllm 0.32.0, which did not run here.")
    one_arm = every(faulty, versions={"vllm": "0.32.0"}, arm="candidate")
    running = Running({"control": {}, "candidate": {"vllm": "0.32.0"}})
    assert accept(faulty, one_arm, TODAY, running).verdict is Verdict.PASS


def test_what_is_known_of_an_engine_a_plan_or_without_a_repair_is_not_accepted_elsewhere(faulty: Judgement) -> None:
    known = every(faulty, engine="vllm", plan="budget-grid", repairs=[])
    ran = Running({"control": {}, "candidate": {}}, {"control": "vllm", "candidate": "vllm"}, "budget-grid", repairs=())
    assert accept(faulty, known, TODAY, ran).verdict is Verdict.PASS
    for other in (
        ran._replace(engines={"control": "vllm", "candidate": "sim"}),
        ran._replace(engines={}),
        ran._replace(plan="budget-sampled"),
        ran._replace(plan=None),
        ran._replace(repairs=("cpu-draft-rows",)),
        ran._replace(repairs=None),
    ):
        judged = accept(faulty, known, TODAY, other)
        assert judged.verdict is Verdict.FAIL
        said = "it is one of engine vllm, plan budget-grid, repairs none, which did not run"
        if other.plan != ran.plan:
            said = "Known findings of other plans accept nothing here: budget-grid."
        assert said in judged.limitations[0]


def test_nothing_is_accepted_of_a_run_with_a_fault(faulty: Judgement) -> None:
    assert accept(faulty, every(faulty), TODAY, Running()).verdict is Verdict.PASS
    judged = accept(faulty, every(faulty), TODAY, Running(fault="full-lookup"))
    assert judged.verdict is Verdict.FAIL
    assert judged.limitations[0].startswith("Nothing is accepted of a run with a fault: full-lookup was declared")


def test_one_finding_that_is_not_accepted_still_counts(faulty: Judgement) -> None:
    for left_out in every(faulty):
        others = [one for one in every(faulty) if one != left_out]
        wanted = Verdict.UNKNOWN if left_out.check == "geometry" else Verdict.FAIL
        assert accept(faulty, others, TODAY).verdict is wanted


@pytest.mark.parametrize("change", [{"evidence": []}, {"place": Place(arm="candidate", op="N31.reload")}])
def test_another_schedule_is_accepted_only_as_the_shadow_of_a_failure(
    faulty: Judgement, change: dict[str, object]
) -> None:
    (finding,) = result(faulty, "geometry").findings
    results = [
        one.model_copy(update={"findings": [finding.model_copy(update=change)]}) if one.check == "geometry" else one
        for one in faulty.results
    ]
    judgement = faulty.model_copy(update={"results": results})
    assert accept(judgement, every(faulty), TODAY).verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(
    "fields",
    [
        {"case": "N31"},
        {"op": "N32.cold"},
        {"arm": "control"},
        {"rank": 3},
        {"code": "tokens_diffe"},
        {"check": "reload-equality"},
    ],
)
def test_an_entry_for_another_place_accepts_nothing_and_is_named(faulty: Judgement, fields: dict[str, object]) -> None:
    given = {"check": "paired-equality", "code": "tokens_differ"} | fields
    one = entry(**given)  # type: ignore[arg-type]
    accepted = accept(faulty, [one, *(other for other in every(faulty) if other.check != "paired-equality")], TODAY)
    assert accepted.verdict is Verdict.FAIL
    met = given["check"] == "reload-equality"
    assert any(f"Known finding {one} met nothing" in line for line in accepted.limitations) is not met


def test_the_last_day_counts_and_the_next_does_not(faulty: Judgement) -> None:
    entries = every(faulty, expires=TODAY)
    assert accept(faulty, entries, TODAY).verdict is Verdict.PASS
    later = accept(faulty, entries, date(2026, 6, 2))
    assert later.verdict is Verdict.FAIL
    assert len([line for line in later.limitations if "expired on 2026-06-01" in line]) == len(entries)


def test_what_is_missing_beside_an_accepted_failure_is_still_unknown(faulty: Judgement) -> None:
    gap = Finding(code="gap", verdict=Verdict.UNKNOWN, message="gap", place=Place())
    results = [
        one.model_copy(update={"findings": [*one.findings, gap]}) if one.check == "boundary" else one
        for one in faulty.results
    ]
    spoiled = faulty.model_copy(update={"results": results})
    accepted = accept(spoiled, [*every(faulty), entry("boundary", "gap")], TODAY)
    assert accepted.verdict is Verdict.UNKNOWN
    assert any("only a fail can be accepted" in line for line in accepted.limitations)


def test_a_run_that_is_unknown_or_passes_is_left_as_it_is(tmp_path: Path) -> None:
    run = build()
    run.sealed = False
    judgement = run.judge(tmp_path / "a")
    assert judgement.verdict is Verdict.UNKNOWN
    entries = [entry("integrity", "defect"), entry("paired-equality", "tokens_differ")]
    assert accept(judgement, entries, TODAY).results == judgement.results


def test_a_fail_without_a_finding_and_one_over_nothing_are_not_accepted(faulty: Judgement) -> None:
    bare = CheckResult(check="paired-equality", verdict=Verdict.FAIL, summary="", unit="x", examined=1)
    found = Finding(code="c", verdict=Verdict.FAIL, message="m")
    empty = CheckResult(check="boundary", verdict=Verdict.FAIL, summary="", unit="x", examined=0, findings=[found])
    for one in (bare, empty):
        judgement = faulty.model_copy(update={"results": [one], "required": [one.check]})
        assert accept(judgement, [entry(one.check, "c")], TODAY).verdict is not Verdict.PASS


@pytest.mark.parametrize("check", NEVER)
def test_what_makes_evidence_evidence_is_never_accepted(faulty: Judgement, check: str, tmp_path: Path) -> None:
    found = Finding(code="wrong_plan", verdict=Verdict.FAIL, message="m")
    one = CheckResult(check=check, verdict=Verdict.FAIL, summary="", unit="x", examined=1, findings=[found])
    judgement = faulty.model_copy(update={"results": [one], "required": [check]})
    assert accept(judgement, [entry(check, "wrong_plan")], TODAY).verdict is Verdict.FAIL
    with pytest.raises(WrittenError, match=r"known\[0\].check: findings of .* are never accepted"):
        read_known(written(tmp_path, f"check: {check}"))


def written(folder: Path, *lines: str) -> Path:
    fields = {"check": "boundary", "code": "c", "reason": "r", "by": "b", "expires": "2026-12-31"}
    fields |= dict(line.split(": ", 1) for line in lines if line)
    text = "known:\n  - " + "\n    ".join(f"{name}: {value}" for name, value in fields.items() if value != "-") + "\n"
    (folder / "known.yaml").write_text(text)
    return folder / "known.yaml"


def test_a_file_is_read(tmp_path: Path) -> None:
    (one,) = read_known(written(tmp_path, "boundary: 32", "op: N32.reload"))
    assert (one.boundary, one.op, one.expires) == (32, "N32.reload", date(2026, 12, 31))


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("expires: -", "known[0].expires: is missing; add it"),
        ("reason: -", "known[0].reason: is missing; add it"),
        ("by: '  '", "known[0].by: is blank; say it"),
        ("expires: soon", "known[0].expires"),
        ("expires: 20261231", "known[0].expires"),
        ("check: bondary", "known[0].check: no check 'bondary'; did you mean 'boundary'?"),
        ("operation: x", "known[0].operation: is no field here; remove it"),
        ("rank: x", "known[0].rank"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_field(tmp_path: Path, line: str, word: str) -> None:
    with pytest.raises(WrittenError) as raised:
        read_known(written(tmp_path, line))
    assert word in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    for content in (b"", b"known: 1", b"known: [", b"\xff"):
        (tmp_path / "known.yaml").write_bytes(content)
        with pytest.raises(WrittenError, match=r"known\.yaml"):
            read_known(tmp_path / "known.yaml")
    with pytest.raises(WrittenError, match="cannot be read"):
        read_known(tmp_path / "nosuch")
