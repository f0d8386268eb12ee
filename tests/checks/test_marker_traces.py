"""`trace-whole`, `trace-ranks` and `trace-reconciled`: whatever is missing or differs is unknown, never a pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from samestate.checks.analyzers import MARKER_FROZEN_V1, judge
from samestate.checks.base import Verdict
from samestate.evidence import marker_records as m
from samestate.evidence import probe_records as p
from samestate.evidence import records as r

from . import builder as b
from . import marker_run as k

Spoil = Callable[[b.Run], None]


def without_step(run: b.Run, step: int = 12) -> None:
    for rank in range(2):
        b.drop(k.trace(run, rank), m.LogitsRows, step=step)
        b.drop(k.trace(run, rank), m.TokensCommitted, step=step)
    k.recount(run)


def without(kind: type[r.Record], **match: object) -> Spoil:
    def spoil(run: b.Run) -> None:
        k.everywhere(run, lambda records: b.drop(records, kind, **match))
        k.recount(run)

    return spoil


def changed(kind: type[r.Record], change: dict[str, object], **match: object) -> Spoil:
    return lambda run: k.everywhere(run, lambda records: b.edit(records, kind, change, **match))


def overflow(run: b.Run) -> None:
    b.edit(k.trace(run, 1), m.RecorderStopped, {"dropped": 3})


def scheduler_overflow(run: b.Run) -> None:
    b.edit(k.scheduler(run), m.RecorderStopped, {"dropped": 1})


def not_stopped(run: b.Run) -> None:
    b.drop(k.trace(run, 1), m.RecorderStopped)


def cut(run: b.Run) -> None:
    """A record is gone and the account was not touched."""
    b.drop(k.trace(run, 1), m.TokensCommitted, step=12)


def lost_rank(run: b.Run) -> None:
    del run.streams[k.ARM, "budget-1"]


def lost_trace(run: b.Run) -> None:
    k.trace(run, 1)[:] = [one for one in k.trace(run, 1) if not hasattr(one, "request")]
    k.recount(run)


def foreign(run: b.Run) -> None:
    rows = next(one for one in k.trace(run, 0) if isinstance(one, m.LogitsRows))
    b.edit(k.trace(run, 0), m.LogitsRows, {"rank": 1}, step=rows.step)


def twice(run: b.Run) -> None:
    again = next(one for one in k.trace(run, 0) if isinstance(one, m.TokensCommitted))
    k.trace(run, 0).insert(4, again)
    k.recount(run)


def swapped(run: b.Run) -> None:
    """Tokens stand before the rows that they came from."""
    records = k.trace(run, 0)
    at = next(at for at, one in enumerate(records) if isinstance(one, m.LogitsRows))
    records[at], records[at + 1] = records[at + 1], records[at]


def after_the_end(run: b.Run) -> None:
    k.trace(run, 0).append(k.trace(run, 0).pop(-2))


WHOLE: list[tuple[Spoil, str]] = [
    (overflow, "overflow"),
    (scheduler_overflow, "overflow"),
    (not_stopped, "not_stopped"),
    (cut, "records_lost"),
    (without_step, "lost_step"),
    (without_step, "lost_position"),
    (without(m.LogitsRows, step=12), "missing_rows"),
    (without(m.TokensCommitted, step=12), "missing_tokens"),
    (without(m.ReasoningRequest), "missing_request"),
    (without(m.RecorderStarted), "missing_recorder"),
    (lost_rank, "missing_rank"),
    (lost_trace, "missing_trace"),
    (foreign, "foreign_records"),
    (swapped, "out_of_order"),
    (twice, "repeated_step"),
    (after_the_end, "after_the_end"),
    (changed(m.TokensCommitted, {"position": 6}, position=5), "step_contradicts"),
    (changed(m.TokensCommitted, {"rows": [0, 1, 3, 2]}, position=5), "step_contradicts"),
    (changed(m.LogitsRows, {"slot": 9}, position=5), "slot_changed"),
    (lambda run: k.everywhere(run, lambda records: k.edit_row(records, 6, drafted=77)), "step_contradicts"),
    (lambda run: k.everywhere(run, lambda records: k.edit_row(records, 6, store=True)), "step_contradicts"),
    (lambda run: b.edit(k.client(run), r.EngineStarted, {"tensor_parallel": 4}), "wrong_ranks"),
]


@pytest.mark.parametrize(("spoil", "code"), WHOLE)
def test_a_trace_that_is_not_whole_is_unknown(tmp_path: Path, spoil: Spoil, code: str) -> None:
    run = k.build()
    spoil(run)
    judgement = run.judge(tmp_path / "a")
    assert b.result(judgement, "trace-whole").verdict is Verdict.UNKNOWN
    assert code in b.codes(judgement, "trace-whole")
    assert judgement.verdict is Verdict.UNKNOWN
    assert not {one.check for one in judgement.results if one.verdict is Verdict.FAIL}
    for check in ("budget-close", "marker-class"):
        assert b.result(judgement, check).verdict is Verdict.UNKNOWN, check


def test_no_trace_at_all_is_unknown_everywhere(tmp_path: Path) -> None:
    run = k.build()
    for process in ("budget-0", "budget-1", "budget-scheduler"):
        del run.streams[k.ARM, process]
    judgement = run.judge(tmp_path / "a")
    for check in ("trace-whole", "trace-reconciled", "budget-close", "marker-class", "identity", "usage"):
        assert b.result(judgement, check).verdict is Verdict.UNKNOWN, check
    assert judgement.verdict is Verdict.UNKNOWN


def test_no_records_at_all_are_unknown_everywhere(tmp_path: Path) -> None:
    run = k.build()
    run.streams = {(k.ARM, "client"): [run.streams[k.ARM, "client"][0], r.EngineStopped()]}
    judgement = run.judge(tmp_path / "a")
    assert judgement.verdict is Verdict.UNKNOWN
    for check in judgement.required:
        if check not in ("integrity", "settings"):
            assert b.result(judgement, check).verdict is Verdict.UNKNOWN, check


# --- ranks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda t: k.edit_row(t, 64, stored=7), "row 3 stored"),
        (lambda t: k.edit_row(t, 10, logprob=-0.75), "row 1 logprob"),
        (lambda t: b.edit(t, m.TokensCommitted, {"tokens": [1, 2, 3, 4]}, position=5), "tokens"),
        (lambda t: b.edit(t, m.ReasoningRequest, {"slot": 4}), "slot 4"),
        (lambda t: b.edit(t, m.RecorderStarted, {"speculative_tokens": 5}), "speculative_tokens 5"),
        (lambda t: b.edit(t, m.RecorderStarted, {"functions": []}), "functions []"),
        (lambda t: b.edit(t, m.RecorderStarted, {"end_ids": [3]}), "end_ids [3]"),
        (lambda t: b.drop(t, m.LogitsRows, position=5), "record missing"),
    ],
)
def test_ranks_that_disagree_are_unknown(tmp_path: Path, spoil: Callable[[list[r.Record]], None], words: str) -> None:
    run = k.build()
    spoil(k.trace(run, 1))
    k.recount(run)
    judgement = run.judge(tmp_path / "a")
    result = b.result(judgement, "trace-ranks")
    assert (result.verdict, result.findings[0].place.rank) == (Verdict.UNKNOWN, 1)
    assert any(words in finding.message for finding in result.findings), result.findings
    assert judgement.verdict is Verdict.UNKNOWN
    assert b.result(judgement, "budget-close").verdict is Verdict.UNKNOWN


def test_one_rank_has_none_to_agree_with(tmp_path: Path) -> None:
    judgement = k.build(ranks=1).judge(tmp_path / "a")
    assert b.result(judgement, "trace-ranks").verdict is Verdict.NOT_EXERCISED
    row = judgement.table[0].marker
    assert row is not None and (row.ranks, row.ranks_agree) == (1, None)


# --- reconciled -------------------------------------------------------------------------------


def tail_of(count: int, *, trimmed: bool) -> k.Shape:
    """Study B's request, `count` tokens past the stop: trimmed in its step, or dropped from one that ran ahead."""
    shape = k.study_b_shape()
    *steps, last = shape.steps
    extra = k.thought(count, 7000)
    kept = last.tokens[:2]
    if trimmed:
        return k.changed(shape, steps=[*steps, k.Step([*kept, *extra][:3], [*kept, *extra], kept=2)])
    ahead = k.Step(extra[:-1][:3], extra, dropped=True)
    return k.changed(shape, steps=[*steps, k.Step([*kept, 5], kept), ahead])


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_step_that_ran_ahead_of_the_stop_is_witnessed(tmp_path: Path, count: int) -> None:
    judgement = k.build([tail_of(count, trimmed=False)], asynchronous=True).judge(tmp_path / "a")
    assert judgement.verdict is Verdict.PASS, judgement.results
    row = judgement.table[0].marker
    assert row is not None and (row.tail, row.tail_known, row.classes) == (
        count, True, f"74 sampled, {count} post_stop, 1 forced" if count > 1 else "74 sampled, 1 forced, 1 post_stop"
    )  # fmt: skip


def delivered(change: dict[str, object], **match: object) -> Spoil:
    return lambda run: b.edit(k.scheduler(run), m.TokensDelivered, change, **match)


def answered(**change: object) -> Spoil:
    return lambda run: b.edit(k.client(run), p.ProbeAnswered, change)


def answered_tokens(make: Callable[[list[int]], list[int]]) -> Spoil:
    def spoil(run: b.Run) -> None:
        tokens = make(k.study_b_shape().delivered)
        b.edit(k.client(run), p.ProbeAnswered, {"token_ids": tokens})

    return spoil


RECONCILED: list[tuple[Spoil, str]] = [
    (answered(finish_reason="length"), "finish_unexplained"),
    (answered(finish_reason=None), "finish_unexplained"),
    (answered(finish_reason="abort"), "finish_unexplained"),
    (answered(stop_reason="</s>"), "finish_unexplained"),
    (answered(stop_reason=5), "finish_unexplained"),
    (answered(token_ids=[]), "missing_tokens"),
    (answered_tokens(lambda ids: ids[:-1]), "finish_unexplained"),
    (answered_tokens(lambda ids: [*ids[:30], k.STOP, *ids[31:]]), "output_mismatch"),
    (answered_tokens(lambda ids: [*ids[:-2], 5, ids[-1]]), "output_mismatch"),
    (answered_tokens(lambda ids: [*ids, k.AFTER]), "finish_unexplained"),
    (delivered({"position": 70}, position=69), "delivery_contradicts"),
    (delivered({"after": 3}, position=69), "delivery_contradicts"),
    (delivered({"after": 9}, finish_reason="stop"), "delivery_contradicts"),
    (delivered({"finish_reason": "length"}, finish_reason="stop"), "finish_contradicts"),
    (delivered({"stop_reason": 5}, finish_reason="stop"), "finish_contradicts"),
    (changed(m.ReasoningRequest, {"prompt_tokens": 47}), "another_request"),
    (changed(m.ReasoningRequest, {"budget": 65}), "another_request"),
    (changed(m.ReasoningRequest, {"resident": 1}), "another_request"),
    (lambda run: b.edit(k.client(run), r.EngineStarted, {"eos_token_ids": [1]}), "finish_unexplained"),
    (lambda run: b.edit(k.client(run), p.ProbeSent, {"ignore_eos": True}), "finish_unexplained"),
]


@pytest.mark.parametrize(("spoil", "code"), RECONCILED)
def test_what_does_not_reconcile_is_unknown(tmp_path: Path, spoil: Spoil, code: str) -> None:
    run = k.build()
    spoil(run)
    judgement = run.judge(tmp_path / "a")
    assert b.result(judgement, "trace-reconciled").verdict is Verdict.UNKNOWN
    assert code in b.codes(judgement, "trace-reconciled"), b.codes(judgement, "trace-reconciled")
    assert judgement.verdict is not Verdict.PASS


@pytest.mark.parametrize(
    ("shape", "asynchronous", "code"),
    [
        (tail_of(4, trimmed=True), True, "tail_too_long"),
        (tail_of(5, trimmed=False), True, "tail_too_long"),
        (tail_of(1, trimmed=False), False, "tail_too_long"),
    ],
)
def test_a_tail_that_nothing_explains_is_unknown(tmp_path: Path, shape: k.Shape, asynchronous: bool, code: str) -> None:
    judgement = k.build([shape], asynchronous=asynchronous).judge(tmp_path / "a")
    assert b.result(judgement, "trace-reconciled").verdict is Verdict.UNKNOWN
    assert code in b.codes(judgement, "trace-reconciled")


def test_other_ids_than_were_dropped_are_no_witness(tmp_path: Path) -> None:
    run = k.build([tail_of(2, trimmed=False)], asynchronous=True)
    b.edit(k.scheduler(run), m.RunAheadDropped, {"tokens": [7000, 9999]})
    judgement = run.judge(tmp_path / "a")
    assert set(b.codes(judgement, "trace-reconciled")) == {"tail_not_witnessed"}


def test_a_step_that_was_dropped_before_the_end_is_no_tail(tmp_path: Path) -> None:
    run = k.build([tail_of(2, trimmed=False)], asynchronous=True)
    dropped = next(one for one in k.scheduler(run) if isinstance(one, m.RunAheadDropped))
    k.scheduler(run).remove(dropped)
    k.scheduler(run).insert(3, dropped)
    assert "dropped_early" in b.codes(run.judge(tmp_path / "a"), "trace-reconciled")


def test_a_cap_in_the_midst_of_drafts_reconciles_at_exactly_the_cap(tmp_path: Path) -> None:
    body = k.thought(8)
    steps = [k.Step([], body[:1]), k.Step(body[1:4], body[1:5]), k.Step(body[5:8], [*body[5:], 99], kept=2)]
    shape = k.Shape("capped", steps, budget=64, max_tokens=7, finish="length")
    run = k.build([shape, k.study_b_shape()])
    judgement = run.judge(tmp_path / "a")
    assert judgement.verdict is Verdict.PASS, [one for one in judgement.results if one.findings]
    row = judgement.table[0].marker
    assert row is not None and (row.tail, row.position, row.finish_reason) == (2, None, "length")
    b.edit(k.client(run), p.ProbeSent, {"max_tokens": 8}, probe="capped")
    other = run.judge(tmp_path / "b")
    assert "finish_unexplained" in b.codes(other, "trace-reconciled")


def test_a_declared_stop_is_one_of_the_requests_own(tmp_path: Path) -> None:
    shape = k.changed(k.study_b_shape(), stop_reason=k.STOP)
    judgement = k.build([shape]).judge(tmp_path / "a")
    assert b.result(judgement, "trace-reconciled").verdict is Verdict.PASS


def test_the_frozen_rule_passes_what_is_exactly_alike(tmp_path: Path) -> None:
    shape = k.study_b_shape()
    *steps, last = shape.steps
    exact = k.changed(shape, steps=[*steps, k.Step([last.drafts[0], 5], last.tokens[:2])])
    run = k.build([exact])
    del run.streams[k.ARM, "budget-scheduler"]
    judgement = judge(run.write(tmp_path / "a"), MARKER_FROZEN_V1)
    for check in ("trace-whole", "trace-ranks", "trace-reconciled", "budget-close", "marker-class"):
        assert b.result(judgement, check).verdict is Verdict.PASS, check
    assert b.codes(judgement, "plan-identity") == ["other_analyzer"]


@pytest.mark.parametrize("wrong", ["first", "second"])
def test_arms_that_ask_the_same_are_judged_each_by_its_own_trace(tmp_path: Path, wrong: str) -> None:
    the_plan = k.plan([k.study_b_shape()], arms=("first", "second"))
    run = k.build(the_plan=the_plan)
    run.streams = {("first" if arm == k.ARM else arm, process): rec for (arm, process), rec in run.streams.items()}
    clean = run.judge(tmp_path / "clean")
    assert clean.verdict is Verdict.PASS, [one for one in clean.results if one.findings]
    assert b.result(clean, "trace-reconciled").summary.startswith("2/2 requests")
    last = next(one for one in run.streams[wrong, "budget-scheduler"] if getattr(one, "finish_reason", None))
    run.streams[wrong, "budget-scheduler"].remove(last)
    judgement = run.judge(tmp_path / "a")
    assert b.result(judgement, "trace-reconciled").verdict is Verdict.UNKNOWN
    assert {one.place.arm for one in b.result(judgement, "trace-reconciled").findings} == {wrong}
    assert {row.arm: row.verdict for row in judgement.table if row.arm != wrong}.popitem()[1] is Verdict.PASS
    assert next(row.verdict for row in judgement.table if row.arm == wrong) is Verdict.UNKNOWN


def test_two_requests_that_go_by_one_answer_are_ambiguous(tmp_path: Path) -> None:
    run = k.build()
    for rank in range(2):
        asked = next(one for one in k.trace(run, rank) if isinstance(one, m.ReasoningRequest))
        k.trace(run, rank).insert(1, msgspec.structs.replace(asked, request=f"{asked.request}-1"))
    k.recount(run)
    judgement = run.judge(tmp_path / "a")
    assert "ambiguous_request" in b.codes(judgement, "trace-whole")
    assert "2 traced requests go by its id" in b.only(judgement, "trace-reconciled").message


# --- rows and deliveries that contradict themselves -------------------------------------------


def every_row(**change: object) -> Callable[[b.Run], None]:
    """Of every step on every rank, the last row."""

    def spoil(records: list[r.Record]) -> None:
        for at, record in enumerate(records):
            if isinstance(record, m.LogitsRows):
                rows = [*record.rows[:-1], msgspec.structs.replace(record.rows[-1], **change)]
                records[at] = msgspec.structs.replace(record, rows=rows)

    return lambda run: k.everywhere(run, spoil)


def steps_again(run: b.Run) -> None:
    """The second request counts its steps as the first did."""

    def spoil(records: list[r.Record]) -> None:
        first: dict[str, int] = {}
        for at, record in enumerate(records):
            if isinstance(record, m.LogitsRows | m.TokensCommitted):
                step = record.step - first.setdefault(record.request, record.step)
                records[at] = msgspec.structs.replace(record, step=step)

    k.everywhere(run, spoil)


def merged(run: b.Run) -> None:
    """Two deliveries told as one."""
    places = [at for at, one in enumerate(k.scheduler(run)) if isinstance(one, m.TokensDelivered)][1:3]
    first, second = (k.scheduler(run).pop(places[0]) for _ in range(2))
    assert isinstance(first, m.TokensDelivered)
    assert isinstance(second, m.TokensDelivered)
    whole = msgspec.structs.replace(first, before=first.before + second.before, after=first.after + second.after)
    k.scheduler(run).insert(places[0], whole)
    k.recount(run)


def dropped_nothing(run: b.Run) -> None:
    at = max(at for at, one in enumerate(k.scheduler(run)) if isinstance(one, m.TokensDelivered))
    last = k.scheduler(run)[at]
    assert isinstance(last, m.TokensDelivered)
    k.scheduler(run).insert(at + 1, m.RunAheadDropped(request=last.request, tokens=[]))
    k.recount(run)


@pytest.mark.parametrize(
    ("spoil", "check", "code"),
    [
        (every_row(logprob=5.0), "trace-whole", "step_contradicts"),
        (every_row(drafted=5), "trace-whole", "step_contradicts"),
        (steps_again, "trace-whole", "repeated_step"),
        (merged, "trace-reconciled", "steps_not_delivered"),
        (merged, "trace-reconciled", "delivery_too_long"),
        (dropped_nothing, "trace-reconciled", "tail_too_long"),
    ],
)
def test_records_that_contradict_themselves_are_unknown(
    tmp_path: Path, spoil: Callable[[b.Run], None], check: str, code: str
) -> None:
    run = k.build([k.study_b_shape(), k.changed(k.study_b_shape(), name="again")])
    assert run.judge(tmp_path / "clean").verdict is Verdict.PASS
    spoil(run)
    judgement = run.judge(tmp_path / "a")
    assert code in b.codes(judgement, check), b.result(judgement, check)
    assert judgement.verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(("temperature", "verdict"), [(0.0, Verdict.UNKNOWN), (0.6, Verdict.PASS)])
def test_at_temperature_0_the_token_without_a_store_leads_its_row(
    tmp_path: Path, temperature: float, verdict: Verdict
) -> None:
    run = k.build()
    k.everywhere(run, lambda records: k.edit_row(records, 9, argmax=77))
    b.edit(k.client(run), p.ProbeSent, {"temperature": temperature})
    assert b.result(run.judge(tmp_path / "a"), "trace-whole").verdict is verdict


def test_a_probe_without_a_budget_still_ends_as_its_finish_says(tmp_path: Path) -> None:
    free = k.changed(k.study_b_shape(), name="free", budget=None)
    run = k.build([k.study_b_shape(), free])
    assert run.judge(tmp_path / "clean").verdict is Verdict.PASS
    b.edit(k.client(run), p.ProbeAnswered, {"finish_reason": "nonsense"}, probe="free")
    judgement = run.judge(tmp_path / "a")
    assert b.codes(judgement, "trace-reconciled") == ["finish_unexplained"]
    assert judgement.verdict is Verdict.UNKNOWN
