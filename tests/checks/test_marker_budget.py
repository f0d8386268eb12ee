"""`budget-close` and classes of closes: every way to break a budget fails, and names rank, request, position, row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from samestate.checks.analyzers import Judgement
from samestate.checks.base import Verdict
from samestate.checks.budget_oracle import Markers, decide
from samestate.evidence import marker_records as m
from samestate.evidence import probe_records as p
from samestate.evidence import records as r

from . import builder as b
from . import marker_run as k

MARKERS = Markers((k.START,), (k.END,))
K = 3


def in_steps(tokens: list[int], first: int = 1) -> list[k.Step]:
    """These tokens, `first` of them in the first step, then four in each step, the drafts all accepted."""
    steps = [k.Step(tokens[: first - 1], tokens[:first])]
    for at in range(first, len(tokens), K + 1):
        some = tokens[at : at + K + 1]
        steps.append(k.Step([*some[:-1], *([5] * (K + 1 - len(some)))][:K], some))
    return steps


def shape(tokens: list[int], **fields: object) -> k.Shape:
    return k.Shape("probe", in_steps([*tokens, k.STOP]), **fields)  # type: ignore[arg-type]


def stores(run: b.Run, at: dict[int, int | None], *, rest: bool = False) -> None:
    """Let rows of these output positions hold a store of this id, or none; `rest`: and no other row any."""
    for rank in range(2):
        records = k.trace(run, rank)
        for index, record in enumerate(records):
            if isinstance(record, m.LogitsRows):
                rows = [_row(row, record.position + row.local, at, rest) for row in record.rows]
                records[index] = m.LogitsRows(
                    rank=rank, step=record.step, request=record.request, slot=3, position=record.position, rows=rows
                )


def _row(row: m.LogitsRow, position: int, at: dict[int, int | None], rest: bool) -> m.LogitsRow:
    stored = at.get(position, None if rest else row.stored)
    return m.LogitsRow(
        local=row.local,
        drafted=row.drafted,
        store=stored is not None,
        stored=stored,
        argmax=row.argmax,
        logprob=row.logprob,
    )


def failed(judgement: Judgement, code: str, *others: str) -> list[str]:
    """Messages of the findings of one code, one a rank; beside this check only that of rows fails, and `others`."""
    found = [one for one in b.result(judgement, "budget-close").findings if one.code == code]
    assert found, b.result(judgement, "budget-close").findings
    assert [one.place.rank for one in found] == [0, 1]
    assert all((one.place.op, one.place.request) == ("probe", "chatcmpl-probe") for one in found)
    assert all(any("budget-" in where for where in one.evidence) for one in found)
    assert judgement.verdict is Verdict.FAIL
    assert b.failing(judgement) == {"budget-close", "budget-rows", *others}
    return [one.message for one in found]


# --- clean ------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", range(9))
@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_close_on_any_row_of_a_step_passes(tmp_path: Path, budget: int, first: int) -> None:
    tokens = [*k.thought(budget), k.END, *k.thought(4, 2000)]
    one = k.Shape("probe", in_steps([*tokens, k.STOP], first), budget=budget)
    judgement = k.build([one]).judge(tmp_path / "a")
    assert judgement.verdict is Verdict.PASS, [found for found in judgement.results if found.findings]
    row = judgement.table[0].marker
    assert row is not None and (row.position, row.marker_class) == (budget, "forced")


@pytest.mark.parametrize(
    ("tokens", "fields", "said"),
    [
        ([*k.thought(8), k.END, 5], {"argmax": {8: k.END}}, "natural_coincident at 8"),
        ([*k.thought(5), k.END, 5], {"prompt": [1, k.START, 2, 3, 4]}, "forced at 5"),
        ([k.END, 5], {"prompt": [1, k.START, *k.thought(9)]}, "forced at 0"),
        ([5, k.START, *k.thought(8), k.END, 6], {"prompt": [1, 2, k.START, 3, k.END]}, "forced at 10"),
    ],
)
def test_what_keeps_to_the_budget_passes(
    tmp_path: Path, tokens: list[int], fields: dict[str, object], said: str
) -> None:
    judgement = k.build([with_budget(shape(tokens, **fields), 8)], ranks=1).judge(tmp_path / "a")
    assert b.result(judgement, "budget-close").verdict is Verdict.PASS
    assert b.result(judgement, "marker-class").summary.startswith(said)


def with_budget(one: k.Shape, budget: int) -> k.Shape:
    return k.changed(one, budget=budget)


def test_closes_before_any_budget_is_spent_test_no_budget(tmp_path: Path) -> None:
    judgement = k.build([with_budget(shape([*k.thought(3), k.END, 5]), 8)], ranks=1).judge(tmp_path / "a")
    result = b.result(judgement, "budget-close")
    assert (result.verdict, b.codes(judgement, "budget-close")) == (Verdict.NOT_EXERCISED, ["no_close_due"])
    assert judgement.verdict is Verdict.UNKNOWN
    assert b.result(judgement, "marker-class").summary.startswith("sampled at 3")


def test_an_end_that_is_due_and_held_no_store_fails(tmp_path: Path) -> None:
    """The token is right, and nothing forced it: the budget code writes whatever leads without it."""
    run = k.build([with_budget(shape([*k.thought(8), k.END, 5]), 8)])
    stores(run, {}, rest=True)
    judgement = run.judge(tmp_path / "a")
    assert b.codes(judgement, "budget-close") == ["not_stored", "not_stored"]
    assert judgement.verdict is Verdict.FAIL
    assert b.result(judgement, "marker-class").summary.startswith("sampled at 8")


# --- broken -----------------------------------------------------------------------------------


def judged(tmp_path: Path, one: k.Shape, spoil: Callable[[b.Run], None]) -> Judgement:
    run = k.build([one])
    spoil(run)
    if one.budget is not None and k.END not in one.delivered:
        within = len(one.delivered)
        usage = p.ProbeUsage(prompt=len(one.prompt), completion=within, reasoning=within)
        b.edit(k.client(run), p.ProbeAnswered, {"usage": usage})
    return run.judge(tmp_path / "a")


def test_a_budget_that_is_ignored(tmp_path: Path) -> None:
    judgement = judged(tmp_path, with_budget(shape(k.thought(20)), 8), lambda run: stores(run, {}, rest=True))
    found = b.result(judgement, "budget-close").findings
    assert [one.code for one in found] == ["budget_ignored", "budget_ignored"]
    assert (
        "due at 8 (8 tokens counted), 1008 committed; reasoning ran on to the end, 13 tokens past" in found[0].message
    )
    assert "rank 0, request chatcmpl-probe (served probe): budget 8" in found[0].message
    assert "row 3 of step 9 held no store, nor did another" in found[0].message
    assert judgement.verdict is Verdict.FAIL


def test_a_close_that_is_late(tmp_path: Path) -> None:
    one = with_budget(shape([*k.thought(11), k.END, 5]), 8)
    judgement = judged(tmp_path, one, lambda run: stores(run, {11: k.END}, rest=True))
    assert "reasoning closed at 11, 3 late" in failed(judgement, "closed_late")[0]


def test_a_store_on_another_row_of_the_step(tmp_path: Path) -> None:
    one = with_budget(shape([*k.thought(8), k.END, 5]), 6)
    judgement = judged(tmp_path, one, lambda run: stores(run, {8: k.END}, rest=True))
    message = failed(judgement, "store_on_wrong_row")[0]
    assert "due at 6" in message and "row 1 of step 9 held no store, row 3 did" in message


def test_a_forced_row_that_was_masked(tmp_path: Path) -> None:
    one = with_budget(shape([*k.thought(12), k.END, 5]), 8)
    judgement = judged(tmp_path, one, lambda run: stores(run, {8: k.END, 12: k.END}, rest=True))
    assert "row 3 of step 9 held the store, and another id was committed" in failed(judgement, "forced_row_masked")[0]


def test_a_store_of_another_id(tmp_path: Path) -> None:
    one = with_budget(shape([*k.thought(8), 77, *k.thought(3, 3000), k.END, 5]), 8)
    judgement = judged(tmp_path, one, lambda run: stores(run, {8: 77, 12: k.END}, rest=True))
    assert "row 3 of step 9 held a store of 77" in failed(judgement, "wrong_id_stored")[0]


def test_a_close_that_is_early(tmp_path: Path) -> None:
    one = with_budget(shape([*k.thought(5), k.END, 5]), 8)
    judgement = judged(tmp_path, one, lambda run: stores(run, {5: k.END}, rest=True))
    message = failed(judgement, "closed_early")[0]
    assert "id 154842 stored on row 0 of step 9, position 5, and committed: 5 of 8 tokens counted" in message


def test_a_second_close_by_force(tmp_path: Path) -> None:
    one = with_budget(shape([*k.thought(8), k.END, k.END, 5]), 8)
    run = k.build([one])
    stores(run, {8: k.END, 9: k.END}, rest=True)
    judgement = run.judge(tmp_path / "a")
    assert "reasoning was closed already, at 8" in failed(judgement, "closed_twice", "second-close")[0]


def test_a_store_that_was_not_due_and_not_taken(tmp_path: Path) -> None:
    one = with_budget(shape([*k.thought(8), k.END, 5]), 8)
    judgement = judged(tmp_path, one, lambda run: stores(run, {3: k.END}))
    assert "overridden by 1003: 3 of 8 tokens counted" in failed(judgement, "closed_early")[0]


@pytest.mark.parametrize(
    ("prompt", "code", "words"),
    [
        ([1, 2, 3], "forced_outside", "reasoning had not begun"),
        ([1, k.START, 3, k.END], "closed_twice", "reasoning was closed already"),
    ],
)
def test_a_close_by_force_where_there_is_no_reasoning(tmp_path: Path, prompt: list[int], code: str, words: str) -> None:
    one = with_budget(shape([5, 6, k.END, 7], prompt=prompt), 8)
    run = k.build([one])
    stores(run, {2: k.END})
    usage = p.ProbeUsage(prompt=len(prompt), completion=5, reasoning=0)
    b.edit(k.client(run), p.ProbeAnswered, {"usage": usage})
    assert words in failed(run.judge(tmp_path / "a"), code)[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_violation_in_the_delivered_ids_needs_no_trace(tmp_path: Path, ranks: int) -> None:
    run = k.build([with_budget(shape(k.thought(20)), 8)], ranks=ranks)
    k.everywhere(run, lambda records: b.drop(records, m.TokensCommitted, position=5))
    k.recount(run)
    judgement = run.judge(tmp_path / "a")
    finding = b.only(judgement, "budget-close")
    assert (finding.code, finding.verdict, finding.place.rank) == ("not_closed", Verdict.FAIL, None)
    assert "due at 8" in finding.message
    assert judgement.verdict is Verdict.FAIL


def test_rows_of_a_trace_that_is_not_whole_prove_nothing(tmp_path: Path) -> None:
    """A store in the wrong place is on record, and so is that records were dropped."""
    run = k.build([with_budget(shape([*k.thought(8), k.END, 5]), 8)])
    stores(run, {3: k.END})
    b.edit(k.trace(run, 0), m.RecorderStopped, {"dropped": 1})
    judgement = run.judge(tmp_path / "a")
    assert b.codes(judgement, "budget-close") == ["trace_not_usable"]
    assert judgement.verdict is Verdict.UNKNOWN


# --- rows that were not committed -------------------------------------------------------------


def test_stores_on_all_rows_are_those_of_the_policy(tmp_path: Path) -> None:
    judgement = k.build([with_budget(shape([*k.thought(5), k.END, *k.thought(6, 3000)]), 5)]).judge(tmp_path / "a")
    result = b.result(judgement, "budget-rows")
    assert (result.verdict, result.summary) == (Verdict.PASS, "8/8 steps have the policy's stores and no others")


def test_a_store_on_a_row_that_was_not_committed_is_told_and_decides_nothing(tmp_path: Path) -> None:
    steps = [k.Step([], [5]), k.Step([6, 7, 8], [6, 9]), k.Step([5, 5, 5], [k.END, 3]), k.Step([], [k.STOP])]
    steps[2] = k.Step([k.END, 5, 5], [k.END, 3])
    run = k.build([k.Shape("probe", steps, budget=8)])
    for rank in range(2):
        k.edit_row(k.trace(run, rank), 4, store=True, stored=k.END)
    first = next(one for one in k.trace(run) if isinstance(one, m.LogitsRows) and one.position == 1)
    assert first.rows[3].store and len(steps[1].tokens) == 2
    judgement = run.judge(tmp_path / "a")
    result = b.result(judgement, "budget-rows")
    assert result.verdict is Verdict.FAIL
    assert "stores 154842 on row 3, the policy has on no row" in result.findings[0].message
    assert "budget-rows" not in judgement.required
    assert judgement.verdict is not Verdict.FAIL


V1 = m.PatchedFunction(
    module="vllm.v1.worker.gpu_model_runner", qualname="GPUModelRunner._sample", source_sha256="c" * 64
)


def of_v1(run: b.Run) -> b.Run:
    """The same trace, left by the older runner."""
    k.everywhere(run, lambda records: b.edit(records, m.RecorderStarted, {"runner": "v1", "functions": [V1]}))
    b.edit(k.scheduler(run), m.RecorderStarted, {"runner": "v1"})
    return run


def rows_once(run: b.Run) -> b.Run:
    """Of several stores in a step the first alone, as the older runner makes it."""
    for rank in range(2):
        records = k.trace(run, rank)
        for index, record in enumerate(records):
            if isinstance(record, m.LogitsRows):
                first = next((row.local for row in record.rows if row.store), None)
                rows = [
                    row if row.local == first else msgspec.structs.replace(row, store=False, stored=None)
                    for row in record.rows
                ]
                records[index] = msgspec.structs.replace(record, rows=rows)
    return run


def test_a_close_forced_behind_an_accepted_natural_one_fails_though_the_older_runner_is_like_that(
    tmp_path: Path,
) -> None:
    """docs/findings.md: vLLM's host code does not look at drafts. The policy is the yardstick, not the runner."""
    steps = [
        k.Step([], [1000]),
        k.Step([], [1001]),
        k.Step([1002, k.END, 7], [1002, k.END, k.END]),
        k.Step([], [k.STOP]),
    ]
    run = of_v1(k.build([k.Shape("probe", steps, budget=4)]))
    stores(run, {4: k.END}, rest=True)
    judgement = run.judge(tmp_path / "a")
    assert judgement.verdict is Verdict.FAIL
    found = b.result(judgement, "budget-close").findings
    assert [(one.code, one.verdict, one.place.rank) for one in found] == [
        ("closed_twice", Verdict.FAIL, rank) for rank in range(2)
    ]
    assert "reasoning was closed already, at 3, by a draft that this step accepted" in found[0].message
    assert b.result(judgement, "budget-rows").verdict is Verdict.PASS, "these are the older runner's rows"


def test_what_the_older_runner_does_after_a_start_marker_of_its_own_is_not_claimed(tmp_path: Path) -> None:
    for at, run in enumerate((of_v1(k.build([again(count=8)])), of_v1(rows_once(k.build([again(count=8)]))))):
        judgement = run.judge(tmp_path / str(at))
        found = b.result(judgement, "budget-rows").findings
        assert [(one.code, one.verdict) for one in found] == [("not_modelled", Verdict.UNKNOWN)] * 2
        assert "after a start marker in the output, v1 is not modelled" in found[0].message
        assert b.result(judgement, "budget-close").verdict is Verdict.PASS
    newer = b.result(k.build([again(count=8)]).judge(tmp_path / "newer"), "budget-rows")
    assert newer.verdict is Verdict.PASS


def test_the_older_runner_is_not_excused_where_it_leaves_the_policy(tmp_path: Path) -> None:
    run = of_v1(k.build([again(count=8)]))
    stores(run, {10: k.END})
    assert "rows_differ" in b.codes(run.judge(tmp_path / "a"), "budget-rows")


def test_rows_of_a_lost_trace_are_unknown(tmp_path: Path) -> None:
    run = k.build()
    b.edit(k.trace(run, 0), m.RecorderStopped, {"dropped": 1})
    assert b.codes(run.judge(tmp_path / "a"), "budget-rows") == ["trace_not_usable"]


# --- second closes ----------------------------------------------------------------------------


def again(*, count: int) -> k.Shape:
    """Reasoning that closes by itself, begins again and goes on for `count` tokens to a close."""
    tokens = [*k.thought(3), k.END, 5, k.START, *k.thought(count, 4000), k.END, 6]
    return with_budget(shape(tokens), 8)


@pytest.mark.parametrize(("count", "said"), [(8, "forced at 14"), (5, "sampled at 11")])
def test_a_second_close_is_attributed(tmp_path: Path, count: int, said: str) -> None:
    judgement = k.build([again(count=count)]).judge(tmp_path / "a")
    result = b.result(judgement, "second-close")
    assert (result.verdict, result.examined) == (Verdict.PASS, 1)
    assert said in result.summary
    wanted = Verdict.PASS if count == 8 else Verdict.NOT_EXERCISED  # no budget was spent
    assert b.result(judgement, "budget-close").verdict is wanted


def test_a_second_close_by_force_without_new_reasoning_fails(tmp_path: Path) -> None:
    run = k.build([with_budget(shape([*k.thought(8), k.END, k.END, 5]), 8)])
    stores(run, {9: k.END})
    judgement = run.judge(tmp_path / "a")
    assert b.only(judgement, "second-close").code == "second_close_forced"


def test_a_second_close_that_was_sampled_is_told_as_that(tmp_path: Path) -> None:
    judgement = k.build([with_budget(shape([*k.thought(8), k.END, 5, k.END, 6]), 8)]).judge(tmp_path / "a")
    assert b.result(judgement, "second-close").summary == "sampled at 10 (served probe)"
    assert judgement.verdict is Verdict.PASS


def test_a_second_close_whose_rows_are_lost_is_unknown(tmp_path: Path) -> None:
    run = k.build([again(count=8)])
    k.everywhere(run, lambda records: b.drop(records, m.LogitsRows, position=13))
    k.recount(run)
    judgement = run.judge(tmp_path / "a")
    assert b.only(judgement, "second-close").code == "not_attributed"


def test_without_a_close_marker_there_is_nothing_to_class(tmp_path: Path) -> None:
    one = k.Shape("probe", in_steps([*k.thought(6), k.STOP]), budget=64)
    judgement = k.build([one]).judge(tmp_path / "a")
    result = b.result(judgement, "marker-class")
    assert (result.verdict, result.examined) == (Verdict.UNKNOWN, 0)
    assert result.findings[-1].code == "nothing_examined"


# --- any request at all -----------------------------------------------------------------------


def served(chance: Random, budget: int, resident: int) -> k.Shape:
    """What an engine that keeps to the policy does: random drafts, random acceptance, natural markers among them."""
    prompt = [1, k.START, *k.thought(resident, 900)]
    plain = [*range(50, 58), k.START, k.END, *range(60, 75)]
    steps: list[k.Step] = []
    output: list[int] = []
    while len(output) < 24:
        drafts = [chance.choice(plain) for _ in range(K if output else 0)]
        tokens: list[int] = []
        for at in range(len(drafts) + 1):
            forced = decide([*prompt, *output, *tokens], MARKERS, budget).forced
            likely = drafts[at] if at < len(drafts) and chance.random() < 0.7 else chance.choice(plain)
            tokens.append(likely if forced is None else forced)
            if at < len(drafts) and tokens[-1] != drafts[at]:
                break
        steps.append(k.Step(drafts, tokens))
        output += tokens
    while (forced := decide([*prompt, *output], MARKERS, budget).forced) is not None:
        steps.append(k.Step([], [forced]))
        output.append(forced)
    steps.append(k.Step([5, 6, 7], [k.STOP]))
    return k.Shape("probe", steps, prompt=prompt, budget=budget)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(chance=st.randoms(use_true_random=False), budget=st.integers(0, 12), resident=st.integers(0, 14))
def test_whoever_keeps_to_the_policy_passes_and_whoever_leaves_it_does_not(
    chance: Random, budget: int, resident: int
) -> None:
    one = served(chance, budget, resident)
    run = k.build([one], ranks=1)
    with TemporaryDirectory() as folder:
        judgement = run.judge(Path(folder) / "a")
        for check in ("trace-whole", "trace-reconciled"):
            assert b.result(judgement, check).verdict is Verdict.PASS, b.result(judgement, check)
        due = _due(one)
        wanted = Verdict.NOT_EXERCISED if due is None else Verdict.PASS
        assert b.result(judgement, "budget-close").verdict is wanted, b.result(judgement, "budget-close")
        if due is None:
            return
        spoilt = k.build([_replaced(one, due)], ranks=1)
        other = spoilt.judge(Path(folder) / "b")
        assert b.result(other, "budget-close").verdict is Verdict.FAIL
        assert f"due at {due}" in b.result(other, "budget-close").findings[0].message


def _due(one: k.Shape) -> int | None:
    """A position at which the policy forces."""
    places = range(len(one.delivered))
    return next(
        (at for at in places if decide([*one.prompt, *one.delivered[:at]], MARKERS, one.budget or 0).forced), None
    )


def _replaced(one: k.Shape, due: int) -> k.Shape:
    """The same with another token at a position, and everything after it as it was."""
    steps, at = [], 0
    for step in one.steps:
        tokens = [29 if at + i == due else token for i, token in enumerate(step.tokens)]
        # Where the next token was an accepted draft's, the draft must have been the new one.
        drafts = [tokens[i] if i < len(tokens) - 1 else draft for i, draft in enumerate(step.drafts)]
        steps.append(k.Step(drafts, tokens))
        at += len(tokens)
    return k.changed(one, steps=steps)


def test_no_rank_no_recorder_no_markers(tmp_path: Path) -> None:
    run = k.build()
    k.everywhere(run, lambda records: b.edit(records, m.RecorderStarted, {"end_ids": []}))
    judgement = run.judge(tmp_path / "a")
    assert b.codes(judgement, "budget-close") == ["missing_markers"]
    assert b.result(judgement, "budget-close").verdict is Verdict.UNKNOWN
    assert isinstance(run.client(k.ARM)[0], r.EngineStarted)
