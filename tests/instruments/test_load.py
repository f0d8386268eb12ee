"""The sanitizer under load, on one real engine: four requests at once, steps shorter than C, and too few blocks.

Batches of four are computed cold and reloaded together, first without a fault, then with one armed. The pool is so
small that requests are preempted, in cold batches and in reloads, and resume from the external cache; blocks that
were saved from are soon used again.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from instruments.driven import CHECKS, Driver, prompt
from samestate.checks.base import CheckResult, Finding, Verdict
from samestate.evidence.records import (
    PREEMPTIONS,
    BatchScheduled,
    BatchSource,
    BlocksAssigned,
    LoadCompleted,
    LoadSubmitted,
    Lookup,
    OperationName,
    PagesDigested,
)
from samestate.faults.catalogue import FAULTS

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.deep]

C = 256
CHUNK = 100
"""Most prompt tokens of a request in one step: a step seldom ends on a boundary."""
TOKENS = (2 * C - 6, 2 * C + 1, 2 * C - 2, 3 * C - 5)
"""N of the requests of a batch. All but one decode over a boundary, where they want new blocks."""
OUTPUT_TOKENS = 16
BLOCKS = 24
"""Fewer than four requests want: a request has up to three blocks in each of three recurrent groups, and four more."""
ARMED = ("stale-page", "short-copy")
CLEAN = ("before", "after")


class Session(NamedTuple):
    """One engine's life."""

    lines: list[tuple[int, object]]
    """(t_ns, record) of scheduler and worker, in order."""
    requests: dict[str, str]
    """Operation by request."""
    outputs: dict[str, list[int]]
    preemptions: dict[str, float]
    """By batch."""
    results: dict[str, CheckResult]
    findings: dict[str, dict[tuple[str, str], Finding]]
    """By operation, check and code."""

    def of(self, batch: str, kind: type) -> list[object]:
        """Records of a kind that name a request of the batch, in order."""
        return [
            one
            for _, one in self.lines
            if isinstance(one, kind) and self.requests.get(one.request, "").startswith(f"{batch}-")
        ]


class Loaded(Driver):
    """Runs batches on one engine."""

    preemptions: dict[str, float]
    """By batch."""

    def batch(self, case: str, name: str) -> None:
        """All prompts of a case at once."""
        kind = OperationName.COLD if name == "cold" else OperationName.RELOAD
        asked = [
            (f"{case}.{name}-{n}", f"{case}-{n}", prompt(f"{case} {n}", tokens)) for n, tokens in enumerate(TOKENS)
        ]
        before = self.engine.counters().values[PREEMPTIONS]
        self.ask(asked, kind, together=f"{case}.{name}")
        self.preemptions[f"{case}.{name}"] = self.engine.counters().values[PREEMPTIONS] - before

    def case(self, name: str, fault: str | None = None) -> None:
        self.engine.arm_fault(fault)
        self.batch(name, "cold")
        self.batch(name, "reload")
        self.engine.arm_fault(None)


@pytest.fixture(scope="module")
def session(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Session:
    root = tmp_path_factory.mktemp("load") / "archive"
    settings = {
        "block_size": C,
        "max_num_batched_tokens": 2 * C,
        "long_prefill_token_threshold": CHUNK,
        "max_num_seqs": 4,
        "num_gpu_blocks_override": BLOCKS,
    }
    driver = Loaded(root, tiny_model, settings, output_tokens=OUTPUT_TOKENS)
    driver.preemptions = {}
    try:
        assert driver.engine.start().checkpoint_interval == C
        driver.case("before")
        for fault in ARMED:
            driver.case(fault, fault)
        driver.case("after")
    finally:
        driver.close()
    seen = driver.seal()
    return Session(
        seen.lines,
        {answer.request: answer.op for answer in seen.answers},
        {answer.op: answer.token_ids for answer in seen.answers},
        driver.preemptions,
        seen.results,
        seen.findings,
    )


def operations(batch: str) -> list[str]:
    return [f"{batch}-{n}" for n in range(len(TOKENS))]


def test_several_loads_are_open_at_once_and_none_is_synchronous(session: Session) -> None:
    for case in CLEAN:
        loading, most = set[int](), 0
        for _, one in session.lines:
            if isinstance(one, LoadSubmitted) and session.requests[one.request].startswith(f"{case}.reload-"):
                loading.add(one.job)
                most = max(most, len(loading))
            elif isinstance(one, LoadCompleted):
                loading.discard(one.job)
        assert most >= 2, case
        assert all(one.is_async for one in session.of(f"{case}.reload", Lookup) if one.matched_tokens)  # type: ignore[attr-defined]
        loaded = {session.requests[one.request] for one in session.of(f"{case}.reload", LoadSubmitted)}  # type: ignore[attr-defined]
        assert loaded == set(operations(f"{case}.reload"))


def test_prompts_are_computed_together_in_steps_shorter_than_a_block(session: Session) -> None:
    batches = [one for _, one in session.lines if isinstance(one, BatchScheduled)]
    steps = [one.rows for one in batches if one.source is BatchSource.SCHEDULER]
    cold = [[row for row in rows if session.requests[row.request].startswith("before.cold")] for rows in steps]
    prefill = [[row for row in rows if row.scheduled > 1] for rows in cold]
    assert max(len(rows) for rows in prefill) >= 2
    assert all(row.scheduled <= CHUNK < C for rows in prefill for row in rows)
    ends = [row.start + row.scheduled for rows in prefill for row in rows]
    assert any(end % C for end in ends)
    assert any(end % C == 0 for end in ends)


def test_requests_are_preempted_and_blocks_that_were_saved_from_are_used_again(session: Session) -> None:
    assert all(session.preemptions[f"{case}.{name}"] > 0 for case in CLEAN for name in ("cold", "reload"))
    resumed = {session.requests[one.request] for case in CLEAN for one in session.of(f"{case}.cold", LoadSubmitted)}  # type: ignore[attr-defined]
    assert resumed, "no preempted request came back from the external cache"
    saved: dict[int, str] = {}
    reused = 0
    for _, one in session.lines:
        if isinstance(one, PagesDigested) and one.direction == "save":
            saved.update((row.block, one.request) for row in one.rows)
        elif isinstance(one, BlocksAssigned):
            blocks = {block for group in one.blocks for block in group if block}
            reused += sum(saved.pop(block, one.request) != one.request for block in blocks)
    assert reused > 0


@pytest.mark.parametrize("check", CHECKS)
def test_a_clean_engine_under_load_raises_no_alarm(session: Session, check: str) -> None:
    assert session.results[check].examined > 0
    clean = {op for case in CLEAN for name in ("cold", "reload") for op in operations(f"{case}.{name}")}
    assert clean <= session.outputs.keys()
    of_clean = [found for op, found in session.findings.items() if op in clean or not op]
    assert [finding.message for found in of_clean for (of, _), finding in found.items() if of == check] == []


@pytest.mark.parametrize("fault", ARMED)
def test_a_fault_under_the_same_load_is_named(session: Session, fault: str) -> None:
    named = (FAULTS[fault].check, FAULTS[fault].code)
    reloads = operations(f"{fault}.reload")
    found = [session.findings[op][named] for op in reloads if named in session.findings.get(op, {})]
    assert found
    assert all((one.verdict, one.place.rank) == (Verdict.FAIL, 0) for one in found)
