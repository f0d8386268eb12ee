"""Records of a latency study: when a streamed answer came, as the client saw it, and what the host did meanwhile.

All of them but `CopyMeasured`, a worker's, are in the arm's ``client`` stream. Times are the host's monotonic clock,
raw; what is made of them (time to first token, total, decode rate) is for the checks.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from samestate.evidence.record_base import NonNegative, Positive, Record

TIER_LOADED_BYTES = "vllm:kv_offload_tier_loaded_bytes"
"""Engine counter: bytes that places behind our own cache's memory tier gave, all of them together."""
MEASURE_COPIES = "SAMESTATE_MEASURE_COPIES"
"""Environment of an engine: where it is set, every worker leaves a `CopyMeasured` before the first request."""


class StreamEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True):
    """One event of an answer's stream: ``[at_ns, tokens]``. Events without a token are there too."""

    at_ns: NonNegative
    tokens: NonNegative


class RequestTimed(Record, frozen=True, kw_only=True, tag="request_timed"):
    """One streamed request, from its start to the stream's end marker."""

    op: str
    request: str
    """As in `OperationOutput`."""
    peer: str
    """``HOST:PORT`` that was connected to."""
    concurrency: Positive
    """Requests of this client that were open at once, this one included."""
    attempts: Positive
    """Requests that went out for it; anything above 1 is a retry."""
    began_ns: NonNegative
    """Before the request was handed over."""
    done_ns: NonNegative
    """The end marker, ``[DONE]``, was here."""
    events: list[StreamEvent]
    """All before the end marker, in order."""


class HostSampled(Record, frozen=True, kw_only=True, tag="host_sampled"):
    """The host at one moment, from ``/proc``: who else works there is not known, how much is."""

    op: str
    when: Literal["before", "after"]
    cpus: Positive
    """That this process may use."""
    load: float
    """Runnable and waiting tasks of the whole host, averaged over a minute."""
    busy_ticks: NonNegative
    """Clock ticks that all processors of the host worked since it was started, for whomever."""
    total_ticks: NonNegative
    """The same, idle ones too."""
    memory_total: NonNegative
    """Bytes."""
    memory_available: NonNegative
    """Bytes that a new process could have without swapping."""


class CopyMeasured(Record, frozen=True, kw_only=True, tag="copy_measured"):
    """How fast a worker copies plain memory to where its cache lies, before its engine has any work.

    One buffer onto another, whole, in the worker's own process: as its cache's copies are made, without pages,
    tables or checksums. From page-locked memory where the cache is on a device.
    """

    rank: NonNegative
    route: Literal["host-to-host", "host-to-device"]
    device: str
    """Where the cache lies: ``cpu``, or what the device calls itself."""
    bytes: Positive
    """Of one copy."""
    took_ns: list[Positive]
    """Each timed copy; those that warm the memory up are left out."""


class LoadPhase(Record, frozen=True, kw_only=True, tag="load_phase"):
    """A phase of a load begins: many requests, so many of them at once, or each when it falls due."""

    level: str
    """``c4``: four at once. ``r2``: two a second."""
    attempted: str
    """``cold``, ``repeat`` or ``reload``, of every request of the phase."""
    concurrency: Positive | None
    """Of a closed loop: a request begins when one of so many is over. None: an open loop."""
    rate: float | None
    """Of an open loop: requests a second, on average."""
    seed: NonNegative
    """Of the order, and of an open loop's times."""
    ops: list[str]
    """The requests, in the order in which they begin."""
    due_ns: list[NonNegative]
    """Of an open loop: when each falls due, on the monotonic clock; empty for a closed one."""
