"""Records of a swap: what a serving process, its router and its host were before, during and after.

One journal a swap, ``journal.jsonl`` in its folder (`samestate.evidence.custody_journal`). A swap puts a diagnostic
*candidate* in the place of the *incumbent*, probes it, and restores the incumbent. A *field* of a snapshot is a value,
or missing with the reason; a missing one never counts as equal.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from samestate.evidence.record_base import NonNegative, Positive, Record, Sha256

FORMAT = 1
JOURNAL = "journal.jsonl"
RAW = "raw"
"""Folder of raw requests and responses, by the names that `SmokeDone` gives."""
PRIVATE = "private"
"""Folder of what a resumption needs and nobody else: not part of the records, may hold addresses and paths."""

When = Literal["before", "candidate", "after"]
Outcome = Literal["ok", "failed", "skipped"]


class Step(StrEnum):
    """The steps of a swap, in order."""

    SNAPSHOT = "snapshot"
    DRAIN = "drain"
    STOP = "stop"
    CANDIDATE_START = "candidate-start"
    GATES = "gates"
    PROBE = "probe"
    CANDIDATE_STOP = "candidate-stop"
    RESTORE = "restore"
    VERIFY = "verify"
    READMIT = "readmit"
    DONE = "done"


class Field(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One property, as it was seen. Exactly one of `value` and `missing` is there."""

    name: str
    """Dotted: ``argv``, ``environment.OMP_NUM_THREADS``, ``router.config.haproxy.cfg``."""
    value: str | None
    missing: str | None
    """Why there is no value: one line."""


class Layer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A layer or patch upon a base."""

    name: str
    declared: Sha256
    seen: Sha256 | None
    """Of the file as it lay there; None: nobody could read it."""


class CgroupKills(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OOM kills that one memory cgroup counted."""

    inode: NonNegative
    """Of the cgroup's folder: paths come again, this does not while it lives."""
    kills: NonNegative | None
    """None: the kernel does not say."""


class SwapStarted(Record, frozen=True, kw_only=True, tag="swap_started"):
    """What this swap is held to; nothing was touched before."""

    format: Positive
    swap: str
    spec_sha256: Sha256
    samestate_version: str
    boot_id: str
    expected_change: list[str]
    """Fields that a restart must change; patterns as of a shell."""
    ignore: list[str]
    """Fields that do not count."""
    candidate_differs: list[str]
    """Fields in which the candidate may differ from the incumbent."""
    required_before: list[str]
    """What must be there from before the stop: field names, and ``smoke.NAME``."""
    smokes: list[str]
    stable_samples: Positive
    """How often in a row the engine must be seen idle."""
    period_ms: Positive
    """The longest gap between two observations of the host."""
    probe: str | None
    """Name of the plan; None: none was asked for."""
    identity: list[str] = msgspec.field(default_factory=list)
    """Fields, or families of them, that the spec has recorded of the incumbent beside what every snapshot has."""


class StepBegan(Record, frozen=True, kw_only=True, tag="step_began"):
    """Written before anything of the step is done."""

    step: Step


class StepEnded(Record, frozen=True, kw_only=True, tag="step_ended"):
    """The step is over."""

    step: Step
    outcome: Outcome
    note: str
    """One line; empty where there is nothing to say."""


class SnapshotTaken(Record, frozen=True, kw_only=True, tag="snapshot_taken"):
    """A serving process as it was."""

    when: When
    fields: list[Field]


class RouterSeen(Record, frozen=True, kw_only=True, tag="router_seen"):
    """The router: who it is, its configuration's bytes, and how it treats the incumbent's place."""

    when: Literal["before", "drained", "candidate", "restored", "after"]
    fields: list[Field]
    """Identity and configuration, under ``router.``."""
    admitting: bool
    """It sends new requests there."""
    sessions: NonNegative
    """Open there, queued ones included."""
    failed: NonNegative | None
    """Requests that failed in its backend since the router started: answers of 5xx, its own included.
    None: it does not count them."""


class IdleSeen(Record, frozen=True, kw_only=True, tag="idle_seen"):
    """Requests in the engine at one moment, from ``/metrics``."""

    when: Literal["before", "drained", "after"]
    running: NonNegative | None
    waiting: NonNegative | None
    missing: str | None


class HostSeen(Record, frozen=True, kw_only=True, tag="host_seen"):
    """The host at one moment: one transition observation."""

    memory_available: NonNegative | None
    """Bytes, ``MemAvailable``."""
    oom_kills: NonNegative | None
    """Of the host since its start, ``/proc/vmstat``."""
    cgroups: list[CgroupKills]
    """Of the incumbent and of the candidate, whichever runs; the last known one of the incumbent's."""
    gpu_memory_used: list[NonNegative] | None
    """Bytes by device; None: no device, or nobody says."""


class GateSeen(Record, frozen=True, kw_only=True, tag="gate_seen"):
    """A gate before the probe."""

    name: str
    ok: bool
    reason: str


class CompositionSeen(Record, frozen=True, kw_only=True, tag="composition_seen"):
    """What a build is made of."""

    role: Literal["base", "candidate", "reference"]
    name: str
    base: str | None
    """Name of what it is built on; None: on nothing."""
    base_sha256: Sha256 | None
    sha256: Sha256 | None
    """Of the build itself, where it has one hash."""
    layers: list[Layer]


class SmokeDone(Record, frozen=True, kw_only=True, tag="smoke_done"):
    """A functional smoke: one request, sent once."""

    name: str
    when: When
    form: Literal["text", "strict-json"]
    status: int | None
    """HTTP; None: no answer came."""
    ok: bool
    error: str | None
    """One line; the same words for the same failure."""
    request_sha256: Sha256
    response: str | None
    """Its raw bytes, a file in `RAW`; None: they were not kept, or there were none."""
    response_sha256: Sha256 | None


class ProbeEnded(Record, frozen=True, kw_only=True, tag="probe_ended"):
    """What the probe left. Its verdict is the plan's and stands beside the swap's."""

    plan: str
    archive: str | None
    """Folder beside the journal."""
    seal_sha256: Sha256 | None
    verdict: str | None
    checks: dict[str, str]
    """Verdict by check, as the plan's analyzer came to."""
    error: str | None


class ProcessStopped(Record, frozen=True, kw_only=True, tag="process_stopped"):
    """A serving process is gone, with all of its session."""

    role: Literal["incumbent", "candidate"]
    process: str | None
    """``4711@12345678``; None: none was there."""
    killed: bool
    """It did not end by itself in the time that it had."""
    left: list[NonNegative]
    """Process ids that could not be ended."""


class Resumed(Record, frozen=True, kw_only=True, tag="resumed"):
    """The tool died, and another takes over towards the incumbent."""

    step: Step | None
    """In which it died; None: before the first."""
    torn: bool
    """Its last line was cut off, and was removed."""
    boot_id: str


class SwapEnded(Record, frozen=True, kw_only=True, tag="swap_ended"):
    """The last record."""

    incumbent: Literal["restored", "untouched", "not restored"]
    """As the tool left it; whether that is exact, checks say."""
    disposition: Literal["held"]
    """A candidate is never promoted."""


CustodyRecord = (
    SwapStarted
    | StepBegan
    | StepEnded
    | SnapshotTaken
    | RouterSeen
    | IdleSeen
    | HostSeen
    | GateSeen
    | CompositionSeen
    | SmokeDone
    | ProbeEnded
    | ProcessStopped
    | Resumed
    | SwapEnded
)


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of a journal."""

    n: NonNegative
    prev: Sha256
    """Of the line before, without its newline; zeros in the first."""
    t_ns: NonNegative
    """Monotonic clock of one boot."""
    wall: str
    """RFC 3339, UTC."""
    rec: CustodyRecord
