"""Every vLLM on its own terms: with a budget, with drafts, ahead of a stop, in another process; the trace tells it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from samestate.evidence.marker_records import (
    CPU_DRAFT_ROWS,
    REPAIRS,
    REPLACES,
    SAMPLING_GUARD,
    SPLIT_TOP_P,
    TRACE_ARM,
    TRACE_CAPACITY,
    TRACE_FOLDER,
    LogitsRows,
    ReasoningRequest,
    RecorderStarted,
    RecorderStopped,
    RunAheadDropped,
    TokensCommitted,
    TokensDelivered,
)
from samestate.evidence.records import InterventionApplied
from samestate.evidence.stream import Defect, read_stream
from samestate.models import scripts
from samestate.models.catalogue import ensure

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.deep]

CHILD = Path(__file__).parent / "budget_child.py"
BUDGET = 24
NEVER = [50, 60, scripts.token("close-never"), 70, scripts.START, scripts.NEWLINE]
"""One reasoning token, the newline, is the prompt's own."""
NATURAL = [50, scripts.token("close-after-9"), 61, scripts.START, scripts.NEWLINE]
REQUESTS = [
    {"prompt": NEVER, "params": {"temperature": 0, "max_tokens": 60, "thinking_token_budget": BUDGET}},
    {"prompt": NATURAL, "params": {"temperature": 0, "max_tokens": 40, "thinking_token_budget": 20}},
    {"prompt": NATURAL, "params": {"temperature": 0, "max_tokens": 40}},
    {"prompt": NEVER, "params": {"temperature": 0, "max_tokens": 15, "thinking_token_budget": 60}},
]
FORCED, CLOSED, FREE, CAPPED = range(len(REQUESTS))
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


class Run(NamedTuple):
    """What an engine answered, and what was recorded of it."""

    outputs: list[dict[str, Any]]
    logits: list[str]
    caches: list[str]
    rank: list[Any]
    scheduler: list[Any]

    def of(self, kind: type[Any], number: int) -> list[Any]:
        """Records of a kind about the request of this number; vLLM adds to its name."""
        every = [*self.rank, *self.scheduler]
        return [rec for rec in every if isinstance(rec, kind) and rec.request.partition("-")[0] == str(number)]

    def committed(self, number: int) -> list[int]:
        """The request's tokens as the rank committed them, without a gap."""
        tokens: list[int] = []
        for record in self.of(TokensCommitted, number):
            assert record.position == len(tokens)
            assert record.rows == list(range(len(record.tokens)))
            tokens += record.tokens
        return tokens


Drive = Callable[..., Run]


def records(path: Path) -> list[Any]:
    lines = list(read_stream(path)) if path.exists() else []
    assert not [line for line in lines if isinstance(line, Defect)]
    return [line.rec for line in lines if not isinstance(line, Defect)]


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Drive:
    model, draft = ensure("qwen3-tiny"), ensure("qwen3-tiny-draft")
    drafts = {"none": None, "ngram": NGRAM}
    drafts["draft"] = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}

    def run(
        speculation: str,
        *,
        runner: str = "v1",
        recorded: bool = True,
        asynchronous: bool = False,
        own: bool = False,
        **environ: str,
    ) -> Run:
        folder = tmp_path_factory.mktemp("budget")
        job = {
            "model": str(model),
            "speculative": drafts[speculation],
            "runner": runner,
            "in_process": not own,
            "asynchronous": asynchronous,
            "requests": REQUESTS,
        }
        (folder / "job.json").write_text(json.dumps(job))
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SAMESTATE_BUDGET")}
        if runner == "v2":
            environ |= {"TRITON_INTERPRET": "1"}
        if recorded:
            environ |= {TRACE_FOLDER: str(folder / "trace"), TRACE_ARM: "candidate"}
        command = [sys.executable, str(CHILD), str(folder / "job.json")]
        done = subprocess.run(command, env=clean | environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        answer = json.loads(done.stdout.splitlines()[-1])
        streams = (records(folder / "trace" / f"budget-{process}.jsonl") for process in ("0", "scheduler"))
        return Run(answer["outputs"], answer["logits"], answer["caches"], *streams)

    return run


@pytest.fixture(scope="module")
def drafted(drive: Drive) -> Run:
    """A draft model, recorded."""
    return drive("draft")


def assert_whole(run: Run, runner: str = "v1") -> None:
    """Both streams begin and end as they should, and nothing was lost."""
    for stream, rank in ((run.rank, 0), (run.scheduler, None)):
        assert isinstance(stream[1], RecorderStarted)
        assert (stream[1].rank, stream[1].ranks, stream[1].runner) == (rank, 1, runner)
        assert (stream[1].start_ids, stream[1].end_ids) == ([scripts.START], [scripts.END])
        assert stream[-2] == RecorderStopped(rank=rank, written=len(stream) - 3, dropped=0)


def assert_forced_at_the_budget(run: Run) -> None:
    """The never-ending reasoning ends where its budget does: by a store on the very row that was committed."""
    position = BUDGET - 1  # the prompt holds one reasoning token
    assert run.outputs[FORCED]["tokens"].index(scripts.END) == position
    stores = [
        (rows.position + row.local, row.stored, row.argmax)
        for rows in run.of(LogitsRows, FORCED)
        for row in rows.rows
        if row.store
    ]
    assert {stored for _, stored, _ in stores} == {scripts.END}
    assert min(at for at, _, _ in stores) == position
    assert stores[0][2] != scripts.END
    (took,) = [record for record in run.of(TokensCommitted, FORCED) if scripts.END in record.tokens]
    place = took.tokens.index(scripts.END)
    assert took.position + took.rows[place] == position
    (rows,) = [record for record in run.of(LogitsRows, FORCED) if record.step == took.step]
    assert [row.store for row in rows.rows if row.local == took.rows[place]] == [True]


def assert_rank_and_scheduler_tell_one_story(run: Run, in_flight: int = 0) -> None:
    """What was delivered is what was answered; what was committed is that and what was trimmed or dropped.

    An engine that is driven from outside stops with its last answer: a step that ran ahead of it, `in_flight` tokens at
    most, never comes back to the scheduler.
    """
    for number, output in enumerate(run.outputs):
        if number == FREE:
            continue
        delivered = [token for record in run.of(TokensDelivered, number) for token in record.before[: record.after]]
        trimmed = [token for record in run.of(TokensDelivered, number) for token in record.before[record.after :]]
        dropped = [token for record in run.of(RunAheadDropped, number) for token in record.tokens]
        assert delivered == output["tokens"]
        told, committed = delivered + trimmed + dropped, run.committed(number)
        assert committed[: len(told)] == told
        assert len(committed) - len(told) <= in_flight
        assert run.of(TokensDelivered, number)[-1].finish_reason == output["finish"]


def test_logits_caches_and_tokens_are_bitwise_the_same_with_the_recorder_on(drive: Drive, drafted: Run) -> None:
    bare = drive("draft", recorded=False)
    assert bare.rank == bare.scheduler == []
    assert len(bare.logits) > 20
    assert len(bare.caches) > 2
    assert bare.logits == drafted.logits
    assert bare.caches == drafted.caches
    assert [output["tokens"] for output in bare.outputs] == [output["tokens"] for output in drafted.outputs]


def test_v1_stores_once(drafted: Run) -> None:
    assert [row.store for rows in drafted.of(LogitsRows, FORCED) for row in rows.rows].count(True) == 1


def test_a_draft_model_s_trace(drafted: Run) -> None:
    assert_whole(drafted)
    assert_forced_at_the_budget(drafted)
    assert_rank_and_scheduler_tell_one_story(drafted)
    assert drafted.rank[1].speculative_tokens == 3


def test_requests_are_announced_once_with_what_their_prompt_holds(drafted: Run) -> None:
    announced = {number: drafted.of(ReasoningRequest, number) for number in range(len(REQUESTS))}
    assert [len(found) for found in announced.values()] == [1, 1, 0, 1]
    (forced,) = announced[FORCED]
    assert (forced.budget, forced.prompt_tokens, forced.resident) == (BUDGET, len(NEVER), 1)


def test_a_request_without_a_budget_leaves_nothing(drafted: Run) -> None:
    assert drafted.outputs[FREE]["tokens"]
    for kind in (ReasoningRequest, LogitsRows, TokensCommitted, TokensDelivered, RunAheadDropped):
        assert drafted.of(kind, FREE) == []


def test_rows_carry_their_drafts_and_the_last_has_none(drafted: Run) -> None:
    accepted = 0
    for number in (FORCED, CLOSED, CAPPED):
        for rows, took in zip(drafted.of(LogitsRows, number), drafted.of(TokensCommitted, number), strict=True):
            assert [row.local for row in rows.rows] == list(range(len(rows.rows)))
            assert rows.rows[-1].drafted is None
            drafts = [row.drafted for row in rows.rows[:-1]]
            kept = len(took.tokens) - 1
            assert took.tokens[:kept] == drafts[:kept]
            # Greedy: a row that was not forced takes its arg-max.
            for token, row in zip(took.tokens, rows.rows, strict=False):
                assert token == (row.stored if row.store else row.argmax)
            accepted += kept
    assert accepted > 10


def test_a_natural_close_is_stored_by_nobody(drafted: Run) -> None:
    assert scripts.END in drafted.committed(CLOSED)
    assert not [row for rows in drafted.of(LogitsRows, CLOSED) for row in rows.rows if row.store]


@pytest.mark.parametrize(("number", "finish"), [(FORCED, "stop"), (CAPPED, "length")])
def test_an_end_inside_a_draft_shows_its_trim(drafted: Run, number: int, finish: str) -> None:
    last = drafted.of(TokensDelivered, number)[-1]
    assert last.finish_reason == finish
    assert len(last.before) > last.after > 0
    assert drafted.committed(number)[last.position :] == last.before


def test_n_gram_speculation(drive: Drive) -> None:
    run = drive("ngram")
    assert_whole(run)
    assert_forced_at_the_budget(run)
    assert_rank_and_scheduler_tell_one_story(run)
    assert any(len(rows.rows) > 1 for rows in run.of(LogitsRows, FORCED))


def test_a_step_that_ran_ahead_of_a_stop_is_dropped_and_told(drive: Drive) -> None:
    run = drive("draft", asynchronous=True)
    assert run.rank[1].asynchronous
    assert_whole(run)
    assert_forced_at_the_budget(run)
    assert_rank_and_scheduler_tell_one_story(run, in_flight=4)
    assert run.of(RunAheadDropped, CLOSED)


def test_no_speculation_in_an_engine_core_of_its_own(drive: Drive) -> None:
    run = drive("none", own=True)
    assert_whole(run)
    assert_forced_at_the_budget(run)
    assert_rank_and_scheduler_tell_one_story(run)


def test_the_worker_that_guard_and_repair_were_put_on_says_so(drive: Drive) -> None:
    run = drive("draft", own=True, **{SAMPLING_GUARD: SPLIT_TOP_P, REPAIRS: CPU_DRAFT_ROWS})
    assert_whole(run)
    said = [record for record in run.rank if isinstance(record, InterventionApplied)]
    assert run.rank[2:4] == said
    assert {record.name for record in said} == {SPLIT_TOP_P, CPU_DRAFT_ROWS}
    for record in said:
        (function,) = record.functions
        assert f"{function.module}.{function.qualname}" in REPLACES[record.name]
    assert not [record for record in run.scheduler if isinstance(record, InterventionApplied)]


def test_nothing_is_attested_that_was_not_put_on(drafted: Run) -> None:
    assert not [record for record in drafted.rank if isinstance(record, InterventionApplied)]


def test_a_ring_that_is_too_small_overflows_and_says_so(drive: Drive, drafted: Run) -> None:
    run = drive("draft", own=True, **{TRACE_CAPACITY: "1"})
    assert [output["tokens"] for output in run.outputs] == [output["tokens"] for output in drafted.outputs]
    stopped = run.rank[-2]
    assert isinstance(stopped, RecorderStopped)
    assert stopped.dropped > 0
    assert stopped.written == len(run.rank) - 3
    assert run.rank[1].capacity == 1


@pytest.mark.parametrize("speculation", ["none", "draft"])
def test_the_newer_runner_interpreted(drive: Drive, speculation: str) -> None:
    run, bare = (drive(speculation, runner="v2", recorded=recorded) for recorded in (True, False))
    assert_whole(run, "v2")
    assert_forced_at_the_budget(run)
    assert_rank_and_scheduler_tell_one_story(run)
    assert run.of(ReasoningRequest, FORCED)[0].resident == 1
    assert bare.rank == []
    assert len(bare.logits) > 10
    assert bare.logits == run.logits
    assert bare.caches == run.caches
