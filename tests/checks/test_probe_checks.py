"""The checks of `probe-v1` on records that are missing, contradict the plan, or are nobody's."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from engines.answering import Conduct, answering
from samestate.checks.analyzers import PROBE_V1, Judgement, judge, source_sha256
from samestate.checks.base import Verdict
from samestate.engines.black_box import BlackBox
from samestate.engines.black_box_budget import Budget
from samestate.evidence.archive import Archive, ArchiveWriter
from samestate.evidence.probe_records import IdentityRead, ProbeAnswered
from samestate.evidence.records import (
    EXTERNAL_HITS,
    LOCAL_HITS,
    LOCAL_QUERIES,
    AnyRecord,
    CountersRead,
    OperationEnded,
    OperationOutput,
    OperationStarted,
    PlanResolved,
    StreamClosed,
    StreamOpened,
)
from samestate.evidence.stream import StreamWriter
from samestate.lab.black_box import ProbeRequest, probe
from samestate.plans import black_box as b
from samestate.plans.model import AnalyzerPin

Edit = Callable[[list[AnyRecord]], Sequence[AnyRecord]]
ENDS = (StreamOpened, StreamClosed)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("probe") / "archive"
    means = b.Means(reset=False, evict=False)
    pin = AnalyzerPin(id=PROBE_V1, source_sha256=source_sha256(PROBE_V1))
    lengths = ["C+1", "2C", "3C+7"]
    plan = b.probe_plan(lengths, 8, means, pin)
    with answering(Conduct()) as server:
        box = BlackBox(server.url, Budget(250, 100_000))
        probe(ProbeRequest(plan, lengths, None, means, out), box, lambda done, total, op: None)
        box.close()
    return out


def again(archive: Path, out: Path, edit: Edit, resolved: Callable[[bytes], bytes] = lambda data: data) -> Judgement:
    """The judgement of the same run, sealed with other records."""
    old = Archive.open(archive)
    assert old.plan_json is not None and old.resolved_json is not None
    new = ArchiveWriter.create(out, old.plan_json)
    new.write_resolved(resolved(old.resolved_json))
    new.write_inputs(old.inputs)
    for line in old.attempts():
        if not isinstance(line.rec, ENDS):
            new.attempts.append(line.rec)
    client = StreamWriter(new.arm_dir(b.SERVER) / "client.jsonl", b.SERVER, "client")
    kept = [line.rec for line in old.records(b.SERVER, "client") if not isinstance(line.rec, ENDS)]
    for rec in edit(kept):
        client.append(rec)
    client.close()
    new.seal()
    return judge(Archive.open(out))


def without(kind: type, op: str | None = None) -> Edit:
    def named(rec: AnyRecord) -> bool:
        return isinstance(rec, kind) and op in (None, getattr(rec, "op", None), getattr(rec, "probe", None))

    return lambda records: [rec for rec in records if not named(rec)]


def changed(kind: type, op: str, **fields: object) -> Edit:
    def edited(rec: AnyRecord) -> AnyRecord:
        mine = isinstance(rec, kind) and getattr(rec, "op", None) == op
        return msgspec.structs.replace(rec, **fields) if mine else rec

    return lambda records: list(map(edited, records))


def verdict(judgement: Judgement, check: str) -> tuple[Verdict, str]:
    found = next(result for result in judgement.results if result.check == check)
    return found.verdict, next((finding.code for finding in found.findings), "")


def test_the_same_records_pass_again(archive: Path, tmp_path: Path) -> None:
    judgement = again(archive, tmp_path / "again", lambda records: records)
    assert judgement.verdict is Verdict.PASS, judgement.results
    assert judgement.required[:4] == ["integrity", "probe-whole", "probe-reuse", "probe-equality"]


UNKNOWN: dict[str, tuple[Edit, str, str]] = {
    "an answer": (without(OperationOutput, "N32.repeat"), "probe-whole", "operation_incomplete"),
    "what was delivered": (without(ProbeAnswered, "N32.cold"), "probe-whole", "operation_incomplete"),
    "a start": (without(OperationStarted, "N32.repeat-2"), "probe-whole", "operation_incomplete"),
    "an end": (without(OperationEnded, "N32.repeat-2"), "probe-whole", "operation_incomplete"),
    "a good end": (changed(OperationEnded, "N32.repeat", ok=False, error="x"), "probe-whole", "operation_incomplete"),
    "who answered": (without(IdentityRead), "probe-whole", "missing_identity"),
    "the resolved plan's record": (without(PlanResolved), "probe-whole", "missing_resolved"),
    "all answers": (without(OperationOutput), "probe-reuse", "vacuous"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_missing_is_unknown(archive: Path, tmp_path: Path, name: str) -> None:
    edit, check, code = UNKNOWN[name]
    judgement = again(archive, tmp_path / "edited", edit)
    assert verdict(judgement, check) == (Verdict.UNKNOWN, code)
    assert judgement.verdict is Verdict.UNKNOWN


FAIL: dict[str, tuple[Edit, str, str]] = {
    "another prompt": (changed(OperationStarted, "N32.repeat", prompt_sha256="0" * 64), "probe-whole", "wrong_prompt"),
    "an operation that nobody planned": (
        lambda records: [
            msgspec.structs.replace(rec, **{name: "N32.more" for name in ("op", "probe") if hasattr(rec, name)})
            if "N32.repeat-2" in (getattr(rec, "op", None), getattr(rec, "probe", None))
            else rec
            for rec in records
        ],
        "probe-whole",
        "operation_not_planned",
    ),
    "other tokens, and again": (
        lambda records: changed(OperationOutput, "N55.repeat", token_ids=[1] * 8)(
            list(changed(OperationOutput, "N32.repeat", token_ids=[1] * 8)(records))
        ),
        "probe-equality",
        "state_fault",
    ),
    "usage that the counters contradict": (changed(OperationOutput, "N17.cold", cached_tokens=16), "probe-usage", ""),
}


@pytest.mark.parametrize("name", FAIL)
def test_what_contradicts_fails(archive: Path, tmp_path: Path, name: str) -> None:
    edit, check, code = FAIL[name]
    judgement = again(archive, tmp_path / "edited", edit)
    found = next(result for result in judgement.results if result.check == check)
    codes = [finding.code for finding in found.findings if finding.verdict is Verdict.FAIL]
    assert judgement.verdict is Verdict.FAIL and codes and code in ("", *codes)


def test_one_difference_alone_is_asked_again(archive: Path, tmp_path: Path) -> None:
    judgement = again(archive, tmp_path / "edited", changed(OperationOutput, "N32.repeat", token_ids=[1] * 8))
    assert verdict(judgement, "probe-equality") == (Verdict.UNKNOWN, "differs")


def test_without_counters_usage_tells_what_was_reused(archive: Path, tmp_path: Path) -> None:
    judgement = again(archive, tmp_path / "edited", without(CountersRead))
    assert judgement.verdict is Verdict.PASS
    assert {row.path for row in judgement.table} == {"cold", None}


def test_a_resolved_plan_of_another_plan_is_no_evidence(archive: Path, tmp_path: Path) -> None:
    def other(data: bytes) -> bytes:
        return json.dumps(json.loads(data) | {"plan_sha256": "0" * 64}).encode()

    judgement = again(archive, tmp_path / "edited", lambda records: records, other)
    assert verdict(judgement, "probe-whole")[0] is Verdict.FAIL


@pytest.mark.regression
@pytest.mark.parametrize(("queries", "alone"), [(32, True), (64, False), (96, False)])
def test_counters_that_grew_by_more_are_not_held_against_the_usage(
    archive: Path, tmp_path: Path, queries: int, alone: bool
) -> None:
    """They say 32 of 32: a lie beside a usage of 16, unless somebody else looked up as much meanwhile."""
    before = {name: 0.0 for name in (LOCAL_QUERIES, LOCAL_HITS, EXTERNAL_HITS)}
    after = before | {LOCAL_QUERIES: float(queries), LOCAL_HITS: 32.0}

    def grown(records: list[AnyRecord]) -> list[AnyRecord]:
        return [
            msgspec.structs.replace(rec, values=before if rec.when == "before" else after)
            if isinstance(rec, CountersRead) and rec.op == "N32.repeat"
            else rec
            for rec in records
        ]

    found = verdict(again(archive, tmp_path / "edited", grown), "probe-usage")
    assert found == ((Verdict.FAIL, "usage_contradicts_counters") if alone else (Verdict.PASS, ""))


@pytest.mark.regression
@pytest.mark.parametrize(("shared", "code"), [(4, ""), (5, "reused_when_new")])
def test_a_shared_beginning_counts_for_each_prompt_of_a_request(
    archive: Path, tmp_path: Path, shared: int, code: str
) -> None:
    def alike(records: list[AnyRecord]) -> list[AnyRecord]:
        edited = list(without(CountersRead)(records))
        for op, times in (("N32.cold", 1), ("N32.cold-2", 2)):
            edited = list(changed(OperationOutput, op, cached_tokens=shared * times)(edited))
        return edited

    assert verdict(again(archive, tmp_path / "edited", alike), "probe-reuse")[1] == code


@pytest.mark.regression
@pytest.mark.parametrize(("tokens", "expected"), [(2, (Verdict.PASS, "")), (1, (Verdict.UNKNOWN, "too_short"))])
def test_answers_of_one_token_show_nothing(
    archive: Path, tmp_path: Path, tokens: int, expected: tuple[Verdict, str]
) -> None:
    def cut(records: list[AnyRecord]) -> list[AnyRecord]:
        return [
            msgspec.structs.replace(
                rec,
                token_ids=rec.token_ids[:tokens],
                logprobs=rec.logprobs and rec.logprobs[:tokens],
                margins=rec.margins and rec.margins[:tokens],
            )
            if isinstance(rec, OperationOutput)
            else rec
            for rec in records
        ]

    assert verdict(again(archive, tmp_path / "edited", cut), "probe-equality") == expected


def test_a_whole_answer_set_that_is_one_answer_shows_nothing(archive: Path, tmp_path: Path) -> None:
    def same(records: list[AnyRecord]) -> list[AnyRecord]:
        return [
            msgspec.structs.replace(rec, token_ids=[5] * len(rec.token_ids))
            if isinstance(rec, OperationOutput)
            else rec
            for rec in records
        ]

    judgement = again(archive, tmp_path / "edited", same)
    assert verdict(judgement, "probe-reuse") == (Verdict.UNKNOWN, "same_answers")
