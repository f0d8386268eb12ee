"""Attaching the audit changes no schedule, no hit and no token."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from samestate.engines.base import EngineSpec, Generation
from samestate.engines.vllm import VllmEngine
from samestate.evidence.archive import Archive
from samestate.evidence.records import BatchScheduled, BatchSource, OperationName, OperationOutput
from samestate.evidence.stream import Defect, read_stream
from samestate.plans.load import load
from samestate.plans.model import ResolvedPlan
from samestate.plans.operations import cases

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.deep]

CASES = ("N3583", "N3584", "N5376")
"""Below, on and on a boundary; the first cases of the archive, so that histories are equal."""


class Seen(NamedTuple):
    """All that serving could show of one operation."""

    token_ids: list[int]
    logprobs: list[float] | None
    cached_tokens: int | None
    schedule: list[tuple[int, int, int]]


def schedules(stream: Path) -> dict[str, list[tuple[int, int, int]]]:
    """What the scheduler ran, by request."""
    by_request: dict[str, list[tuple[int, int, int]]] = {}
    for line in read_stream(stream):
        assert not isinstance(line, Defect), line
        if isinstance(line.rec, BatchScheduled) and line.rec.source is BatchSource.SCHEDULER:
            for row in line.rec.rows:
                by_request.setdefault(row.request, []).append((row.start, row.scheduled, row.drafted))
    return by_request


def test_audited_and_bare_engine_do_the_same(clean_archive: Path, tiny_model: Path, tmp_path: Path) -> None:
    archive = Archive.open(clean_archive)
    recorded = schedules(clean_archive / "arms/candidate/scheduler.jsonl")
    audited = {
        line.rec.op: Seen(line.rec.token_ids, line.rec.logprobs, line.rec.cached_tokens, recorded[line.rec.request])
        for line in archive.records("candidate", "client")
        if isinstance(line.rec, OperationOutput)
    }
    plan = load("boundary")
    resolved = ResolvedPlan.model_validate_json(archive.resolved_json or b"")
    digests = {(given.case, given.role): given.sha256 for given in resolved.inputs}
    spec = EngineSpec(
        arm="bare",
        model=tiny_model,
        settings=dict(plan.engine.settings),
        serve_args=[],
        connector="native",
        external_cache_bytes=plan.engine.external_cache_bytes,
        audit_level="off",
        save_delay_ms=0,
        fault=None,
        stream_dir=tmp_path,
        log_path=tmp_path / "engine.log",
    )
    answers: dict[str, Generation] = {}
    engine = VllmEngine(spec)
    try:
        started = engine.start()
        assert (started.connector, started.audit_level) == ("OffloadingConnector", "off")
        for case in cases(plan, started.checkpoint_interval, "candidate"):
            if case.id not in CASES:
                continue
            for step in case.operations:
                if step.name is OperationName.RESET:
                    assert engine.reset_local_cache().local_reset
                    continue
                assert step.role is not None
                prompt = archive.inputs[digests[case.id, step.role]]
                answers[step.op] = engine.generate_one(step.op, prompt, plan.output_tokens, plan.seed, plan.ignore_eos)
    finally:
        engine.close()
    ran = schedules(tmp_path / "scheduler.jsonl")
    assert len(answers) == 4 * len(CASES)
    for op, answer in answers.items():
        bare = Seen(answer.token_ids, answer.logprobs, answer.cached_tokens, ran[answer.request])
        assert bare == audited[op], op
