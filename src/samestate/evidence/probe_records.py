"""Records of served probes, as the client saw them: what was sent, what came back, what was true before and after.

All of them are in the arm's ``client`` stream, in the order in which things happened: identity before, gate
receipts, then each probe's `ProbeSent` and `ProbeAnswered` (or `ProbeFailed`), identity after. Token ids are the
server's (``return_token_ids``), never made again from text.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from samestate.evidence.record_base import NonNegative, PatchedFunction, Positive, Record, Scalar, Sha256

SELFTEST, SAMPLING = "selftest", "sampling"


class IdentityRead(Record, frozen=True, kw_only=True, tag="identity_read"):
    """What the server is, asked before the first probe and after the last: both must say the same."""

    when: Literal["before", "after"]
    values: dict[str, Scalar]
    """``process`` and ``model_sha256`` at least, then ``model``, ``vllm``, …: effective values, no paths, no times."""
    missing: list[str]
    """Names of values that could not be read."""


class GateReceipt(Record, frozen=True, kw_only=True, tag="gate_receipt"):
    """A gate ran on the sampling code that serves the probe; it must be here, and have passed, before `ProbeSent`."""

    gate: Literal["selftest", "sampling"]
    """``selftest``: the two-step synthetic fixture, before weights load. ``sampling``: forced and ordinary rows."""
    ok: bool
    reason: str | None
    """Why it did not pass, or could not run."""
    source_sha256: Sha256
    """Of the gate's own source."""
    functions: list[PatchedFunction]
    """Of vLLM's sampling code that ran, with the hash of their sources."""
    kernel: str
    """What ran them: ``cuda``, ``triton-interpreter``, ``cpu``."""
    forced_rows: NonNegative
    forced_right: NonNegative
    """Forced rows that chose the end id."""
    ordinary_rows: NonNegative
    ordinary_same: NonNegative
    """Ordinary rows bitwise the same with and without instrument and patch."""
    guard: str | None
    """Name of the opt-in patch that was in force; None: vLLM as it is."""


class ProbeSent(Record, frozen=True, kw_only=True, tag="probe_sent"):
    """A probe is about to be sent. Written before the first byte."""

    probe: str
    """Unique within an arm; the plan's name of it."""
    attempt: Positive
    """1; anything above is a retry."""
    retries_allowed: NonNegative
    """Of the client's transport: 0."""
    address: str
    """Derived from the route: ``/v1/chat/completions``, or ``engine``; no host, no port, no credentials."""
    model: str
    """The served name that was asked for."""
    body: str
    """As it was sent, UTF-8; to an engine its parameters as JSON."""
    body_sha256: Sha256
    """Of `body`'s bytes."""
    budget: NonNegative | None
    """``thinking_token_budget``; None: the request has none."""
    max_tokens: Positive
    """The completion cap."""
    temperature: float
    top_p: float
    stop_token_ids: list[NonNegative]
    """Declared in the request, beside the engine's end-of-sequence ids."""
    ignore_eos: bool


class ProbeUsage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The server's own account, in tokens. None: it does not say."""

    prompt: NonNegative | None
    completion: NonNegative | None
    reasoning: NonNegative | None


class ProbeAnswered(Record, frozen=True, kw_only=True, tag="probe_answered"):
    """What the API delivered."""

    probe: str
    request: str
    """The answer's id, as the API gives it. The engine's is this, or this and a hyphen and more (``-0``, a suffix)."""
    status: Positive
    """HTTP."""
    prompt_token_ids: list[NonNegative]
    """As the server returned them."""
    token_ids: list[NonNegative]
    """As the server returned them: all that it delivered, the stop included where the server does."""
    finish_reason: str | None
    stop_reason: int | str | None
    usage: ProbeUsage
    echo: dict[str, Scalar]
    """What the server says of the request, under `ProbeSent`'s field names: at least ``model``."""
    content: str | None
    """The answer's text after reasoning."""
    reasoning: str | None
    """The reasoning's text."""
    text_sha256: Sha256
    """Of reasoning and content, joined, as UTF-8."""
    anomalies: list[str]
    """Whatever the client found odd, one line each; empty: nothing."""


class ProbeFailed(Record, frozen=True, kw_only=True, tag="probe_failed"):
    """The probe got no answer. It is not sent again."""

    probe: str
    status: Positive | None
    """HTTP; None: no answer at all."""
    error: str
    """One line, without addresses and credentials."""
