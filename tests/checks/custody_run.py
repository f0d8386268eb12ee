"""A swap's records, made up: one that passes on both axes, to be damaged record by record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from samestate.checks.custody_steps import GATES
from samestate.evidence import custody_records as c
from samestate.evidence import records as r
from samestate.evidence.archive import ArchiveWriter
from samestate.evidence.canonical import sha256_hex
from samestate.evidence.stream import StreamWriter

RAW = b'{"choices": []}'
SEAL = "5" * 64
"""Stands for the seal of the archive that `Records.write` makes."""
PERIOD_NS = 2_000_000_000
GIB = 1 << 30


def value(name: str, text: str) -> c.Field:
    return c.Field(name=name, value=text, missing=None)


def gone(name: str) -> c.Field:
    return c.Field(name=name, value=None, missing="cannot be read")


def fields(pid: int, **changed: str) -> list[c.Field]:
    known = {
        "pid": str(pid),
        "process_start": str(pid * 10),
        "executable": "/usr/bin/serve",
        "argv": '["serve"]',
        "cwd": "/srv",
        "environment": "e" * 64,
        "environment.OMP_NUM_THREADS": "a" * 64,
        "user": "Uid: 0 0 0 0",
        "umask": "Umask: 0022",
        "limits": "{}",
        "affinity": "Cpus_allowed_list: 0-1",
        "nice": "0",
        "oom_score_adj": "0",
        "mount_namespace": "mnt:[1]",
        "cgroup": "/serving (inode 11)",
        "ports": "tcp 0100007F:8000",
        "gpus": "GPU-1",
        "boot_id": "boot",
        "config.models": "[]",
        "template": "b" * 64,
        "mount./models": "inode 7",
        "sources.vllm": "c" * 64,
        "model.files": "d" * 64,
    }
    return [value(name, text) for name, text in {**known, **changed}.items()]


ROUTER = [
    value("router.process", "7@70"),
    value("router.weight", "1"),
    value("router.config.haproxy.cfg", "f" * 64),
]


def seen(when: str, *, admitting: bool, sessions: int = 0, failed: int = 3) -> c.RouterSeen:
    return c.RouterSeen(
        when=when,  # type: ignore[arg-type]
        fields=ROUTER,
        admitting=admitting,
        sessions=sessions,
        failed=failed,
    )


def idle(when: str, running: int = 0) -> c.IdleSeen:
    return c.IdleSeen(when=when, running=running, waiting=0, missing=None)  # type: ignore[arg-type]


def host(available: int = GIB, kills: int = 5, groups: tuple[tuple[int, int | None], ...] = ((11, 0),)) -> c.HostSeen:
    return c.HostSeen(
        memory_available=available,
        oom_kills=kills,
        cgroups=[c.CgroupKills(inode=inode, kills=count) for inode, count in groups],
        gpu_memory_used=None,
    )


def smoke(when: str, *, ok: bool = True, error: str | None = None) -> c.SmokeDone:
    return c.SmokeDone(
        name="strict",
        when=when,  # type: ignore[arg-type]
        form="strict-json",
        status=200,
        ok=ok,
        error=error,
        request_sha256="1" * 64,
        response=f"{when}-strict.response",
        response_sha256=sha256_hex(RAW),
    )


STARTED = c.SwapStarted(
    format=1,
    swap="made-up",
    spec_sha256="2" * 64,
    samestate_version="0",
    boot_id="boot",
    expected_change=["pid", "process_start"],
    ignore=["config.instance_id"],
    candidate_differs=["pid", "process_start", "argv"],
    required_before=["router.config.haproxy.cfg", "template", "smoke.strict"],
    smokes=["strict"],
    stable_samples=2,
    period_ms=2000,
    probe="reasoning-close",
)


def stepped(step: c.Step, *records: c.CustodyRecord) -> Iterator[c.CustodyRecord]:
    yield c.StepBegan(step=step)
    yield from records
    yield c.StepEnded(step=step, outcome="ok", note="")


def stopped(role: str) -> c.ProcessStopped:
    return c.ProcessStopped(role=role, process="1@10", killed=False, left=[])  # type: ignore[arg-type]


def composed(**changed: Any) -> c.CompositionSeen:
    made: dict[str, Any] = {
        "role": "candidate",
        "name": "marker-trace",
        "base": "vllm",
        "base_sha256": "c" * 64,
        "sha256": None,
        "layers": [c.Layer(name="trace", declared="9" * 64, seen="9" * 64)],
    }
    return c.CompositionSeen(**{**made, **changed})


REFERENCE = c.CompositionSeen(
    role="reference", name="prior-image", base=None, base_sha256=None, sha256="4" * 64, layers=[]
)


def good() -> list[c.CustodyRecord]:
    """Records of a swap that passes."""
    step, candidate = c.Step, fields(2, argv='["traced"]')
    gates = [c.GateSeen(name=name, ok=True, reason="") for name in GATES]
    probe = c.ProbeEnded(
        plan="reasoning-close",
        archive="probe",
        seal_sha256=SEAL,
        verdict="pass",
        checks={"answer": "pass"},
        error=None,
    )
    return [
        STARTED,
        host(),
        *stepped(
            step.SNAPSHOT,
            c.SnapshotTaken(when="before", fields=fields(1)),
            seen("before", admitting=True),
            smoke("before"),
        ),
        *stepped(step.DRAIN, idle("drained", 1), idle("drained"), idle("drained"), seen("drained", admitting=False)),
        *stepped(step.STOP, stopped("incumbent")),
        host(),
        *stepped(
            step.CANDIDATE_START,
            composed(),
            REFERENCE,
            c.SnapshotTaken(when="candidate", fields=candidate),
            seen("candidate", admitting=False),
        ),
        *stepped(step.GATES, *gates),
        *stepped(step.PROBE, probe),
        *stepped(step.CANDIDATE_STOP, stopped("candidate")),
        *stepped(step.RESTORE),
        host(available=GIB // 2),
        *stepped(
            step.VERIFY,
            smoke("after"),
            idle("after"),
            idle("after"),
            c.SnapshotTaken(when="after", fields=fields(3)),
            seen("restored", admitting=False),
        ),
        *stepped(step.READMIT, seen("after", admitting=True)),
        c.StepBegan(step=step.DONE),
        host(),
        c.StepEnded(step=step.DONE, outcome="ok", note=""),
        c.SwapEnded(incumbent="restored", disposition="held"),
    ]


def sealed(folder: Path, engine: Literal["vllm", "sim"] = "vllm", plan: bytes = b"{}") -> str:
    """An archive with one arm, in which an engine started; its seal."""
    writer = ArchiveWriter.create(folder, plan)
    stream = StreamWriter(writer.arm_dir("control") / "client.jsonl", arm="control", process="client")
    stream.append(
        r.EngineStarted(
            engine=engine,
            process="9@90",
            versions={},
            checkpoint_interval=16,
            max_model_len=64,
            tensor_parallel=1,
            pipeline_parallel=1,
            data_parallel=1,
            decode_context_parallel=1,
            connector=None,
            audit_level=None,
            settings={},
            eos_token_ids=[],
        )
    )
    stream.close()
    return writer.seal()


@dataclasses.dataclass
class Records:
    """Records with the time between two of them, nanoseconds."""

    records: list[c.CustodyRecord]
    between: int = 10_000_000
    pauses: dict[int, int] = dataclasses.field(default_factory=dict)
    """Longer ones, by the index of the record after."""
    wall: str = "2026-01-01T00:00:00.000Z"
    engine: Literal["vllm", "sim"] = "vllm"
    plan: bytes = b"{}"
    """Of the probe's archive."""

    def write(self, folder: Path) -> Path:
        """As a journal whose chain is whole, with raw responses beside it."""
        raw = folder / c.RAW
        raw.mkdir(parents=True, exist_ok=True)
        lines, prev, now = [], "0" * 64, 0
        for n, rec in enumerate(self._with_archive(folder)):
            now += self.pauses.get(n, self.between)
            entry = c.Entry(n=n, prev=prev, t_ns=now, wall=self.wall, rec=rec)
            line = msgspec.json.encode(entry)
            lines.append(line + b"\n")
            prev = sha256_hex(line)
            if isinstance(rec, c.SmokeDone) and rec.response:
                (raw / rec.response).write_bytes(RAW)
        (folder / c.JOURNAL).write_bytes(b"".join(lines))
        return folder

    def _with_archive(self, folder: Path) -> Iterator[c.CustodyRecord]:
        for rec in self.records:
            if isinstance(rec, c.ProbeEnded) and rec.seal_sha256 == SEAL and rec.archive is not None:
                yield msgspec.structs.replace(rec, seal_sha256=sealed(folder / rec.archive, self.engine, self.plan))
            else:
                yield rec


def changed(
    records: list[c.CustodyRecord], kind: type, change: Callable[[Any], Any], *, last: bool = False
) -> list[c.CustodyRecord]:
    """`records` with the first (or last) one of a kind changed; a change to None takes it out."""
    indices = [index for index, rec in enumerate(records) if isinstance(rec, kind)]
    at = indices[-1 if last else 0]
    made = change(records[at])
    return [*records[:at], *([made] if made is not None else []), *records[at + 1 :]]
