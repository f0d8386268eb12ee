"""The sanitizer under load, on one real engine: four requests at once, steps shorter than C, and too few blocks.

Batches of four are computed cold and reloaded together, first without a fault, then with one armed. The pool is so
small that requests are preempted, in cold batches and in reloads, and resume from the external cache; blocks that
were saved from are soon used again.
"""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

from samestate.checks.analyzers import ANALYZERS
from samestate.checks.base import CheckResult, Finding, Verdict
from samestate.checks.history import History
from samestate.engines.base import Ask, EngineSpec
from samestate.engines.vllm import VllmEngine
from samestate.evidence.archive import Archive, ArchiveWriter
from samestate.evidence.canonical import token_digest
from samestate.evidence.records import (
    PREEMPTIONS,
    BatchScheduled,
    BatchSource,
    BlocksAssigned,
    LoadCompleted,
    LoadSubmitted,
    Lookup,
    OperationEnded,
    OperationName,
    OperationOutput,
    OperationStarted,
    PagesDigested,
)
from samestate.evidence.stream import StreamWriter
from samestate.faults.catalogue import FAULTS
from samestate.plans.load import load, plan_json

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

C = 256
CHUNK = 100
"""Most prompt tokens of a request in one step: a step seldom ends on a boundary."""
TOKENS = (2 * C - 6, 2 * C + 1, 2 * C - 2, 3 * C - 5)
"""N of the requests of a batch. All but one decode over a boundary, where they want new blocks."""
OUTPUT_TOKENS = 16
BLOCKS = 24
"""Fewer than four requests want: a request has up to three blocks in each of three recurrent groups, and four more."""
CHECKS = ("page-bytes", "page-coverage", "poison", "save-completion", "prefix-identity")
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


def prompt(tag: str, tokens: int) -> list[int]:
    source = random.Random(tag)
    return [source.randrange(2, 500) for _ in range(tokens)]


class Driver:
    """Runs batches on one engine and writes down what a client sees."""

    def __init__(self, engine: VllmEngine, client: StreamWriter) -> None:
        self.engine = engine
        self.client = client
        self.inputs: dict[str, list[int]] = {}
        self.preemptions: dict[str, float] = {}

    def batch(self, case: str, name: str) -> None:
        """All prompts of a case at once."""
        kind = OperationName.COLD if name == "cold" else OperationName.RELOAD
        asks = []
        for n, tokens in enumerate(TOKENS):
            op, ids = f"{case}.{name}-{n}", prompt(f"{case} {n}", tokens)
            digest = token_digest(ids)
            self.inputs[digest] = ids
            asks.append(Ask(op, ids))
            self.client.append(
                OperationStarted(
                    op=op,
                    case=f"{case}-{n}",
                    name=kind,
                    prompt_tokens=tokens,
                    prompt_sha256=digest,
                    salt="",
                    together=f"{case}.{name}",
                )
            )
        before = self.engine.counters().values[PREEMPTIONS]
        answers = self.engine.generate(asks, OUTPUT_TOKENS, 42, True)
        self.preemptions[f"{case}.{name}"] = self.engine.counters().values[PREEMPTIONS] - before
        for ask, answer in zip(asks, answers, strict=True):
            told = {name: value for name, value in answer._asdict().items() if name != "first_token_s"}
            self.client.append(OperationOutput(op=ask.request, **told))
            self.client.append(OperationEnded(op=ask.request, ok=True, error=None))
        assert self.engine.reset_local_cache().local_reset

    def case(self, name: str, fault: str | None = None) -> None:
        self.engine.arm_fault(fault)
        self.batch(name, "cold")
        self.batch(name, "reload")
        self.engine.arm_fault(None)


@pytest.fixture(scope="module")
def session(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Session:
    root = tmp_path_factory.mktemp("load") / "archive"
    plan = load("boundary-instrumented")
    undelayed = plan.instruments.model_copy(update={"save_delay_ms": 0})
    writer = ArchiveWriter.create(root, plan_json(plan.model_copy(update={"instruments": undelayed})))
    folder = writer.arm_dir("candidate")
    client = StreamWriter(folder / "client.jsonl", "candidate", "client")
    engine = VllmEngine(
        EngineSpec(
            arm="candidate",
            model=tiny_model,
            settings={
                "block_size": C,
                "max_model_len": 1024,
                "max_num_batched_tokens": 2 * C,
                "long_prefill_token_threshold": CHUNK,
                "max_num_seqs": 4,
                "num_gpu_blocks_override": BLOCKS,
                "enforce_eager": True,
                "enable_prefix_caching": True,
                "skip_tokenizer_init": True,
            },
            serve_args=[],
            connector="native",
            external_cache_bytes=1 << 28,
            audit_level="poison",
            save_delay_ms=0,
            fault=None,
            stream_dir=folder,
            log_path=writer.log_path("candidate"),
        )
    )
    driver = Driver(engine, client)
    try:
        assert engine.start().checkpoint_interval == C
        driver.case("before")
        for fault in ARMED:
            driver.case(fault, fault)
        driver.case("after")
    finally:
        engine.close()
        client.close()
    writer.write_inputs(driver.inputs)
    writer.seal()
    return read(Archive.open(root), driver.preemptions)


def read(archive: Archive, preemptions: dict[str, float]) -> Session:
    assert archive.verify() == []
    lines = [(line.t_ns, line.rec) for of in ("scheduler", "worker-0") for line in archive.records("candidate", of)]
    answers = [line.rec for line in archive.records("candidate", "client") if isinstance(line.rec, OperationOutput)]
    history = History.read(archive)
    results = {name: ANALYZERS["boundary-instrumented-v1"].checks[name](history) for name in CHECKS}
    findings: dict[str, dict[tuple[str, str], Finding]] = defaultdict(dict)
    for name, result in results.items():
        for finding in result.findings:
            findings[finding.place.op or ""][name, finding.code] = finding
    return Session(
        sorted(lines, key=lambda line: line[0]),
        {answer.request: answer.op for answer in answers},
        {answer.op: answer.token_ids for answer in answers},
        preemptions,
        results,
        dict(findings),
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
