"""A small sealed archive, and a sealer of its own, so that tests can damage what a seal alone would not show."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from samestate.evidence.archive import ArchiveWriter
from samestate.evidence.canonical import canonical_json, token_digest
from samestate.evidence.records import (
    AttemptEnded,
    AttemptStarted,
    BatchRow,
    BatchScheduled,
    BatchSource,
    OperationEnded,
    OperationName,
    OperationStarted,
    Outcome,
    SaveCompleted,
)
from samestate.evidence.stream import StreamWriter

PLAN = canonical_json({"format": 1, "name": "tiny"})
TOKENS = [7, 8, 9]


def write_archive(root: Path, plan: bytes = PLAN) -> ArchiveWriter:
    """An archive of one arm, `control`, all but sealed."""
    writer = ArchiveWriter.create(root, plan)
    writer.attempts.append(
        AttemptStarted(
            attempt=1,
            plan_sha256=writer.plan_sha256,
            samestate_version="0",
            source_sha256="0" * 64,
            source_commit=None,
            fault=None,
            arms=["control"],
            control_seal_sha256=None,
            reference_seal_sha256=None,
            options={},
        )
    )
    writer.write_resolved(canonical_json({"checkpoint_interval": 4}))
    writer.write_inputs({token_digest(TOKENS): TOKENS})
    folder = writer.arm_dir("control")
    client = StreamWriter(folder / "client.jsonl", "control", "client")
    client.append(
        OperationStarted(
            op="N3.cold",
            case="N3",
            name=OperationName.COLD,
            prompt_tokens=3,
            prompt_sha256=token_digest(TOKENS),
            salt="",
            together=None,
        )
    )
    client.append(OperationEnded(op="N3.cold", ok=True, error=None))
    client.close()
    scheduler = StreamWriter(folder / "scheduler.jsonl", "control", "scheduler")
    for step in range(3):
        row = BatchRow(request="r", start=step, scheduled=1, drafted=0)
        scheduler.append(BatchScheduled(step=step, source=BatchSource.SCHEDULER, rows=[row], preempted=[]))
    scheduler.close()
    worker = StreamWriter(folder / "worker-0.jsonl", "control", "worker-0")
    worker.append(SaveCompleted(rank=0, job=1, ok=True, bytes=64))
    worker.close()
    writer.log_path("control").write_text("engine said hello\n")
    writer.attempts.append(AttemptEnded(outcome=Outcome.COMPLETED, reason=None))
    return writer


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Folder of a sealed, undamaged archive."""
    writer = write_archive(tmp_path / "archive")
    writer.seal()
    return writer.root


def reseal_folder(root: Path) -> None:
    """Seal a folder as it is now, by the words of docs/archive-format.md and the standard library alone."""
    outside = ("verdicts", "amendments", "signatures", "SHA256SUMS", "seal.json")
    files = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*")
        if path.is_file() and path.relative_to(root).parts[0] not in outside
    )
    sums = "".join(f"{hashlib.sha256((root / name).read_bytes()).hexdigest()}  {name}\n" for name in files).encode()
    seal = {
        "files": len(files),
        "format": 1,
        "plan_sha256": hashlib.sha256((root / "plan.json").read_bytes()).hexdigest(),
        "samestate_version": "0",
        "sha256sums_sha256": hashlib.sha256(sums).hexdigest(),
        "wall_time": "2026-01-01T00:00:00.000Z",
    }

    def canonical(fields: object) -> bytes:
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()

    seal["self_sha256"] = hashlib.sha256(canonical(seal)).hexdigest()
    (root / "SHA256SUMS").write_bytes(sums)
    (root / "seal.json").write_bytes(canonical(seal))
