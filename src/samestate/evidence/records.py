"""The things that can happen, as records.

A record is one thing that happened, seen by one process. Records are appended as
JSON lines (see `samestate.evidence.stream`), one file per process: ``scheduler``,
``worker-<rank>`` and ``client``. Checks read records and nothing else.

Words: N prompt tokens, C checkpoint interval, B the prefix length that a restored
state represents ([0, B)), p the computed-token count credited to the scheduler.
Lengths are counts; indices are zero-based.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from samestate.evidence.ground_records import (
    Argument,
    CallCaptured,
    CallsCounted,
    Control,
    EnvironmentObserved,
    KernelSelection,
    KernelsSelected,
    ModulesListed,
    PatchedFile,
    StepTraced,
    StorageRow,
    StoragesDigested,
)
from samestate.evidence.latency_records import CopyMeasured, HostSampled, LoadPhase, RequestTimed
from samestate.evidence.marker_records import (
    LogitsRows,
    ReasoningRequest,
    RecorderStarted,
    RecorderStopped,
    RunAheadDropped,
    TokensCommitted,
    TokensDelivered,
)
from samestate.evidence.probe_records import GateReceipt, IdentityRead, ProbeAnswered, ProbeFailed, ProbeSent
from samestate.evidence.record_base import NonNegative, PatchedFunction, Positive, Record, Scalar, Sha256

__all__ = [
    "Argument",
    "CallCaptured",
    "CallsCounted",
    "Control",
    "EnvironmentObserved",
    "KernelSelection",
    "KernelsSelected",
    "ModulesListed",
    "NonNegative",
    "PatchedFile",
    "PatchedFunction",
    "Positive",
    "Record",
    "Scalar",
    "Sha256",
    "StepTraced",
    "StorageRow",
    "StoragesDigested",
]

FORMAT = 1
"""Version of the archive format (docs/archive-format.md)."""


class OperationName(StrEnum):
    """What a plan asks an engine to do, one step of a case."""

    COLD = "cold"
    INTERPOSER = "interposer"
    RESET = "reset"
    RELOAD = "reload"
    REPEAT = "repeat"
    """The target again, the local cache kept."""
    PROMPT = "prompt"
    """A prompt of a scenario: what it reuses is what the scenario left behind."""


class EntryKind(StrEnum):
    """What later computation reads from a page."""

    ATTENTION = "attention"
    RECURRENT = "recurrent"
    CONV = "conv"
    TAIL = "tail"
    INDEXER = "indexer"


class BatchSource(StrEnum):
    """Who saw a scheduled batch: two sources, so that one can contradict the other."""

    SCHEDULER = "scheduler"
    CONNECTOR = "connector"


class ContactLevel(StrEnum):
    """How far an attempt got before it ended (requirements 124)."""

    NONE = "none"
    HOST = "host"
    GPU = "gpu"
    MODEL = "model"
    REQUEST = "request"


class Outcome(StrEnum):
    """How an attempt ended. Only `COMPLETED` leads to a seal."""

    COMPLETED = "completed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    EXCLUDED = "excluded"


# --- every stream -----------------------------------------------------------------------------


class StreamOpened(Record, frozen=True, kw_only=True, tag="stream_opened"):
    """First record of every stream."""

    format: int
    arm: str
    process: str
    pid: NonNegative
    wall_time: str
    """UTC, RFC 3339. The only wall clock in a stream; all other times are monotonic."""


class StreamClosed(Record, frozen=True, kw_only=True, tag="stream_closed"):
    """Last record of a stream that ended in order. Its absence means the process died."""

    dropped: NonNegative
    """Records that could not be written. Anything above zero makes the stream incomplete."""


# --- attempts.jsonl ---------------------------------------------------------------------------


class AttemptStarted(Record, frozen=True, kw_only=True, tag="attempt_started"):
    """Logged before first contact with anything (requirements 60, 83, 124)."""

    attempt: Positive
    plan_sha256: Sha256
    samestate_version: str
    source_sha256: Sha256
    """Of every file of the samestate that ran (`samestate.lab.source`)."""
    source_commit: str | None
    """The commit that it is, ``+changes`` where it was edited; None: not known (requirement 125)."""
    fault: str | None
    """Name of the injected fault: such an archive is tagged and never a normal run."""
    arms: list[str]
    """Arms that this attempt runs live, in order."""
    control_seal_sha256: Sha256 | None
    """SHA-256 of the seal of the archive whose control arm stands in for a live one."""
    reference_seal_sha256: Sha256 | None
    """SHA-256 of the seal of the archive whose control is compared with the live control."""
    options: dict[str, Scalar]


class ContactReached(Record, frozen=True, kw_only=True, tag="contact_reached"):
    """The attempt touched something for the first time at this level."""

    level: ContactLevel


class AttemptEnded(Record, frozen=True, kw_only=True, tag="attempt_ended"):
    """How the attempt ended, with the reason when it did not complete."""

    outcome: Outcome
    reason: str | None


# --- the engine -------------------------------------------------------------------------------


class EngineStarted(Record, frozen=True, kw_only=True, tag="engine_started"):
    """What the engine says of itself, as effective values (requirements 1, 2, 58, 108)."""

    engine: Literal["vllm", "sim", "transformers"]
    process: str
    """The engine's process, apart from every other of its host: ``4711@12345678``, id and start (ticks since boot)."""
    versions: dict[str, str]
    checkpoint_interval: Positive
    """C, in tokens, read from the engine's own cache groups."""
    max_model_len: Positive
    tensor_parallel: Positive
    pipeline_parallel: Positive
    data_parallel: Positive
    decode_context_parallel: Positive
    connector: str | None
    """Class of the connector inside the audit, or None without one."""
    audit_level: str | None
    settings: dict[str, Scalar]
    """Effective settings under vLLM's own names, e.g. ``cache_config.block_size``."""
    eos_token_ids: list[NonNegative]
    """Every end-of-sequence id known from tokenizer, model and generation config."""
    controls: list[Control] | None = None
    """The full set, those that are off too; None: not recorded, as before there was the field."""

    @property
    def ranks(self) -> int:
        """Workers that compute one forward pass: tensor times pipeline size."""
        return self.tensor_parallel * self.pipeline_parallel


class EngineGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of vLLM's KV cache groups."""

    group: NonNegative
    entry_kind: EntryKind
    spec: str
    """Class of the vLLM cache spec."""
    tokens_per_block: Positive
    layers: list[str]
    page_bytes: Positive
    """Bytes of one layer's page in one block, padding included."""
    effective_bytes: Positive
    """Bytes of it that later computation reads."""


class TransferGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the cache moves pages: a table of its own (requirements 5)."""

    group: NonNegative
    engine_group: NonNegative
    entries: Positive
    bytes_per_block: Positive
    """Effective bytes moved for one block of this group."""
    tokens_per_block: Positive


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One state tensor of one layer in a rank's registration (requirements 7-9, 33).

    The page of block ``b`` begins at ``storage_offset + b * block_stride`` bytes into the rank's cache
    allocation and holds `effective_bytes` that later computation reads.
    """

    entry: NonNegative
    """Index in the rank's table."""
    layer: str
    engine_group: NonNegative
    kind: EntryKind
    logical_dtype: str
    """What the model computes with, e.g. ``bfloat16``."""
    transfer_dtype: str
    """What the connector moves, e.g. ``int8``."""
    is_byte_view: bool
    """The connector moves it as bytes, whatever it holds."""
    shape: list[NonNegative]
    """Of one block, in elements of `logical_dtype`."""
    storage_offset: NonNegative
    block_stride: Positive
    page_bytes: Positive
    """Bytes from the page's beginning that the layer owns in a block, padding included."""
    effective_bytes: Positive


class RankRegistered(Record, frozen=True, kw_only=True, tag="rank_registered"):
    """A worker's cache registration (requirements 5, 6)."""

    rank: NonNegative
    world_size: Positive
    num_blocks: Positive
    engine_groups: list[EngineGroup]
    transfer_groups: list[TransferGroup]
    """Empty when the connector has no adapter: transfers are then ``not_reported``."""
    entries: list[Entry]
    """The layout, found from live tensors. Empty at level ``metadata``."""
    digest: str
    """Algorithm of this rank's page digests, ``xxh3-128`` or ``mix128``; empty at level ``metadata``."""


class EngineStopped(Record, frozen=True, kw_only=True, tag="engine_stopped"):
    """The engine shut down in order."""


class EngineKilled(Record, frozen=True, kw_only=True, tag="engine_killed"):
    """All processes of the engine were killed with SIGKILL, as planned; logged by the client once they were gone.

    The engine was idle and alive then, and had been told nothing but to close its streams.
    """

    process: str
    """As `EngineStarted` names it."""
    processes: Positive
    """That were killed."""


class ServiceStarted(Record, frozen=True, kw_only=True, tag="service_started"):
    """A server beside the engine answers, e.g. LMCache's; logged by the client."""

    service: str
    version: str
    options: dict[str, Scalar]
    """What it was started with, under the service's own names; no paths, no ports."""
    continues: bool
    """It was running already, for the arm before: what that arm stored is there."""


class ServiceStopped(Record, frozen=True, kw_only=True, tag="service_stopped"):
    """The server beside the engine is gone, or left running for the next arm."""

    service: str
    alive: bool
    """It still answered when the arm's last operation was over."""
    kept: bool
    """Left running for the arm that follows."""
    leftovers: NonNegative
    """Shared-memory segments that it left behind and the lab removed."""


class InterventionApplied(Record, frozen=True, kw_only=True, tag="intervention_applied"):
    """A repair was put onto a connector's release, in this process (requirements 48), or onto vLLM, on a rank."""

    name: str
    functions: list[PatchedFunction]
    """Exactly those that were replaced."""
    rank: NonNegative | None = None
    """Of a repair of vLLM: in the process of this rank. None: in the process that writes the stream."""


# --- operations (client) ----------------------------------------------------------------------


class PlanResolved(Record, frozen=True, kw_only=True, tag="plan_resolved"):
    """C was read and `resolved.json` written, before this arm's first request."""

    resolved_sha256: Sha256


class OperationStarted(Record, frozen=True, kw_only=True, tag="operation_started"):
    """One operation of one case begins. Only those that the plan hands in together overlap."""

    op: str
    """Unique within an arm, e.g. ``N3584.cold`` or ``N3584.interposer-1``."""
    case: str
    name: OperationName
    prompt_tokens: NonNegative
    """N; 0 for a reset."""
    prompt_sha256: Sha256 | None
    """Of the token ids as little-endian int32, see `token_digest`."""
    salt: str
    """Empty, or the SHA-256 of the request's cache salt."""
    together: str | None
    """Operations with the same word were handed to the engine at once; None: this one ran alone."""


class OperationOutput(Record, frozen=True, kw_only=True, tag="operation_output"):
    """What the engine returned for a generation."""

    op: str
    request: str
    """The engine's own request id, as schedule and transfer records use it."""
    token_ids: list[NonNegative]
    logprobs: list[float] | None
    """Of the chosen tokens, natural logarithms."""
    margins: list[float] | None = None
    """By how much each chosen token's log-probability is above the runner-up's; None: not reported."""
    finish_reason: str | None
    cached_tokens: NonNegative | None
    """Prompt tokens that the engine says it did not compute."""


class OperationEnded(Record, frozen=True, kw_only=True, tag="operation_ended"):
    """The operation is over."""

    op: str
    ok: bool
    error: str | None


class CacheReset(Record, frozen=True, kw_only=True, tag="cache_reset"):
    """A reset of the local cache, with the parameters in force (requirements 65)."""

    op: str
    local_reset: bool
    """The engine confirmed that its local cache was reset."""
    external_kept: bool
    """The reset was asked to leave the external cache alone."""
    running_kept: bool
    attempts: Positive


class CountersRead(Record, frozen=True, kw_only=True, tag="counters_read"):
    """Engine counters around an operation. A counter that cannot be read is listed, never zero."""

    op: str
    when: Literal["before", "after"]
    values: dict[str, float]
    missing: list[str]


PREEMPTIONS = "vllm:num_preemptions"
LOCAL_QUERIES = "vllm:prefix_cache_queries"
LOCAL_HITS = "vllm:prefix_cache_hits"
EXTERNAL_QUERIES = "vllm:external_prefix_cache_queries"
EXTERNAL_HITS = "vllm:external_prefix_cache_hits"
DROPS_LAST_BLOCK = "speculative_config.use_eagle_block_drop"
"""Effective setting: whether a hit gives up its last whole block, so that drafts (EAGLE, MTP) have hidden states."""
COUNTERS = (PREEMPTIONS, LOCAL_QUERIES, LOCAL_HITS, EXTERNAL_QUERIES, EXTERNAL_HITS)


# --- scheduler --------------------------------------------------------------------------------


class Lookup(Record, frozen=True, kw_only=True, tag="lookup"):
    """The connector answered how much of a prompt it can load."""

    request: str
    queried_tokens: NonNegative
    """Tokens the request has when it asks (N, for a new one)."""
    local_tokens: NonNegative
    """Tokens the local cache already holds."""
    matched_tokens: NonNegative | None
    """Tokens beyond the local ones; None: ask again later."""
    is_async: bool
    salt: str
    """Empty, or the SHA-256 of the cache salt (requirements 31)."""


class Allocated(Record, frozen=True, kw_only=True, tag="allocated"):
    """Blocks were allocated for a request that the connector loads for."""

    request: str
    external_tokens: NonNegative
    block_ids: list[list[NonNegative]]
    """Per engine group. Block 0 is the null block."""


class SchedulerConfigured(Record, frozen=True, kw_only=True, tag="scheduler_configured"):
    """What the scheduler has when its first step begins, after everything that a start changes."""

    block_size: Positive
    """``cache_config.block_size`` in the scheduler's own process: where prefill steps end, in align mode."""
    saves_within_steps: bool
    """The backend of a recurrent group can also save a state within a step, not at its end alone."""
    engine_groups: list[EngineGroup]


class BatchRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True):
    """One request in one step: ``[request, start, scheduled, drafted]``."""

    request: str
    start: NonNegative
    """Computed tokens before the step; p, in the first step after a load."""
    scheduled: NonNegative
    """Tokens scheduled in the step, drafts included."""
    drafted: NonNegative


class BatchScheduled(Record, frozen=True, kw_only=True, tag="batch_scheduled"):
    """One step with work in it."""

    step: NonNegative
    source: BatchSource
    rows: list[BatchRow]
    preempted: list[str]


class StateComputed(Record, frozen=True, kw_only=True, tag="state_computed"):
    """A step will end on a block boundary, so these blocks then hold the state of [0, boundary).

    From the scheduler's own step ends and block tables, never from a connector's label.
    Steps with draft tokens make no such record.
    """

    step: NonNegative
    request: str
    boundary: Positive
    blocks: list[list[NonNegative]]
    """``[engine group, block id]`` for every recurrent group."""


class BlocksAssigned(Record, frozen=True, kw_only=True, tag="blocks_assigned"):
    """Blocks went to a request in a step; what they held before is gone (levels above ``metadata``)."""

    step: NonNegative
    request: str
    blocks: list[list[NonNegative]]
    """New block ids, per engine group."""


class RequestFinished(Record, frozen=True, kw_only=True, tag="request_finished"):
    """The scheduler told the connector that a request is over."""

    request: str


# --- transfers (worker) -----------------------------------------------------------------------


class TransferPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one job moves for one transfer group."""

    group: NonNegative
    first_block: NonNegative
    """Index of the first page in the request's own block table."""
    pages: NonNegative
    bytes: NonNegative
    boundary: NonNegative
    """Tokens up to which these pages reach, by the transfer's own description."""


class LoadSubmitted(Record, frozen=True, kw_only=True, tag="load_submitted"):
    """A load was handed to the worker's copy engine."""

    rank: NonNegative
    job: NonNegative
    request: str
    boundary: NonNegative | None
    """B, as the transfer describes it; None: the connector has no adapter, ``not_reported``."""
    parts: list[TransferPart]


class LoadCompleted(Record, frozen=True, kw_only=True, tag="load_completed"):
    """The worker reported the load as done."""

    rank: NonNegative
    job: NonNegative
    ok: bool
    bytes: NonNegative | None


class SaveSubmitted(Record, frozen=True, kw_only=True, tag="save_submitted"):
    """A save was handed to the worker's copy engine. Not yet a completion (requirements 36)."""

    rank: NonNegative
    job: NonNegative
    request: str | None
    parts: list[TransferPart]


class SaveCompleted(Record, frozen=True, kw_only=True, tag="save_completed"):
    """The worker reported the save as done."""

    rank: NonNegative
    job: NonNegative
    ok: bool
    bytes: NonNegative | None


class SaveWaited(Record, frozen=True, kw_only=True, tag="save_waited"):
    """The worker blocked until these jobs were done, before their blocks could be reused."""

    rank: NonNegative
    jobs: list[NonNegative]
    waited_ns: NonNegative
    """How long it blocked."""
    timed_out: bool
    """It gave up, and the worker went on with a job still open."""


class PageSide(StrEnum):
    """Whose bytes were digested."""

    SOURCE = "source"
    """The engine's page that a save reads."""
    STORED = "stored"
    """The external tier's copy."""
    DESTINATION = "destination"
    """The engine's page that a load fills."""


class PageRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True):
    """One page: ``[entry, block_index, block, digest, nonzero, sentinel]``.

    Rows are repeated internal checks, never trials (requirements 40).
    """

    entry: NonNegative
    block_index: NonNegative
    """Position in the request's block table: the page covers tokens up to ``(block_index + 1) * C``."""
    block: NonNegative
    """Engine block id; also for `STORED` rows, where it names the page on the engine's side."""
    digest: str
    """Of the effective bytes: XXH3-128, 32 hex digits."""
    nonzero: NonNegative
    """Effective bytes that are not zero."""
    sentinel: NonNegative
    """Effective bytes that still hold the poison; 0 without poison."""


class PagesDigested(Record, frozen=True, kw_only=True, tag="pages_digested"):
    """Effective bytes of every page of a transfer job, digested at addresses taken from the layout."""

    rank: NonNegative
    job: NonNegative
    request: str
    direction: Literal["save", "load"]
    side: PageSide
    moment: Literal["submitted", "completed"]
    rows: list[PageRow]


class PagesPoisoned(Record, frozen=True, kw_only=True, tag="pages_poisoned"):
    """The destination of a load was filled with the sentinel; neighbours and block 0 are under guard."""

    rank: NonNegative
    job: NonNegative
    pages: NonNegative
    bytes: NonNegative
    guards: NonNegative
    """Pages under guard: of the same entries, not part of the load."""


class GuardsChecked(Record, frozen=True, kw_only=True, tag="guards_checked"):
    """The guarded pages were digested again when the load completed."""

    rank: NonNegative
    job: NonNegative
    steps_between: NonNegative
    """Steps with a forward pass since the poison; above 0 a changed guard may be the engine's own work."""
    changed: list[list[NonNegative]]
    """``[entry, block]`` of every guarded page whose bytes changed."""


class SaveDelayed(Record, frozen=True, kw_only=True, tag="save_delayed"):
    """The completion of a save is held back (requirements 37, 38)."""

    rank: NonNegative
    job: NonNegative
    delay_ms: Positive


# --- faults -----------------------------------------------------------------------------------


class FaultArmed(Record, frozen=True, kw_only=True, tag="fault_armed"):
    """A fault was armed. Reports show it; checks never read it."""

    fault: str
    parameters: dict[str, Scalar]


AnyRecord = (
    StreamOpened
    | StreamClosed
    | AttemptStarted
    | ContactReached
    | AttemptEnded
    | EngineStarted
    | KernelsSelected
    | EnvironmentObserved
    | StoragesDigested
    | CallCaptured
    | CallsCounted
    | ModulesListed
    | StepTraced
    | RankRegistered
    | EngineStopped
    | EngineKilled
    | ServiceStarted
    | ServiceStopped
    | InterventionApplied
    | PlanResolved
    | OperationStarted
    | OperationOutput
    | OperationEnded
    | CacheReset
    | CountersRead
    | Lookup
    | Allocated
    | SchedulerConfigured
    | BatchScheduled
    | RequestFinished
    | LoadSubmitted
    | LoadCompleted
    | SaveSubmitted
    | SaveCompleted
    | SaveWaited
    | StateComputed
    | BlocksAssigned
    | PagesDigested
    | PagesPoisoned
    | GuardsChecked
    | SaveDelayed
    | RecorderStarted
    | ReasoningRequest
    | LogitsRows
    | TokensCommitted
    | TokensDelivered
    | RunAheadDropped
    | RecorderStopped
    | IdentityRead
    | GateReceipt
    | ProbeSent
    | ProbeAnswered
    | ProbeFailed
    | RequestTimed
    | HostSampled
    | CopyMeasured
    | LoadPhase
    | FaultArmed
)


class Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of a stream."""

    n: NonNegative
    """Position in the stream, from 0."""
    prev: Sha256
    """SHA-256 of the line before, newline excluded; 64 zeros for the first."""
    t_ns: NonNegative
    """The host's monotonic clock, nanoseconds."""
    rec: AnyRecord
