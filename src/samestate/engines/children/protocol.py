"""The wire between an engine's driver and its child process: JSON lines over two pipes.

The driver sends one command and reads one reply. Types only; no torch here, both sides import it.
"""

from __future__ import annotations

import msgspec

from samestate.evidence.records import EngineStarted, Scalar


class Command(msgspec.Struct, frozen=True, kw_only=True, tag_field="cmd"):
    """Base of what the driver may ask."""


class Start(Command, frozen=True, kw_only=True, tag="start"):
    """Start the engine; answered by `Started`."""

    arm: str
    model: str
    settings: dict[str, Scalar]
    serve_args: list[str]
    connector: str
    external_cache_bytes: int
    audit_level: str
    save_delay_ms: int
    fault: str | None
    stream_dir: str
    connector_options: dict[str, Scalar]
    service: str | None
    repair: str | None


class Encode(Command, frozen=True, kw_only=True, tag="encode"):
    """Tokenize; answered by `Encoded`."""

    text: str


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One request."""

    request: str
    token_ids: list[int]
    salt: str | None


class Generate(Command, frozen=True, kw_only=True, tag="generate"):
    """Hand in requests at once and run them to their ends; answered by `Generated`."""

    asks: list[Asked]
    output_tokens: int
    seed: int
    ignore_eos: bool


class Find(Command, frozen=True, kw_only=True, tag="find"):
    """Look a token up by its text; answered by `Encoded`."""

    text: str


class Probe(Command, frozen=True, kw_only=True, tag="probe"):
    """Run one request with a reasoning budget to its end; answered by `Probed`."""

    request: str
    token_ids: list[int]
    budget: int | None
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop_token_ids: list[int]
    ignore_eos: bool


class Identify(Command, frozen=True, kw_only=True, tag="identify"):
    """Say what runs at this moment; answered by `Identified`."""


class Reset(Command, frozen=True, kw_only=True, tag="reset"):
    """Reset the local cache, keep the external one; answered by `WasReset`."""


class Count(Command, frozen=True, kw_only=True, tag="count"):
    """Read the engine's counters; answered by `Counted`."""


class Arm(Command, frozen=True, kw_only=True, tag="arm"):
    """Arm a fault in the running engine, None disarms; answered by `Armed`."""

    fault: str | None


class SetLevel(Command, frozen=True, kw_only=True, tag="set_level"):
    """Switch the audit's level in the idle engine; answered by `LevelSet`."""

    level: str


class CloseStreams(Command, frozen=True, kw_only=True, tag="close_streams"):
    """Be idle, and close the streams of all processes, because the kill comes next; answered by `StreamsClosed`."""


class Close(Command, frozen=True, kw_only=True, tag="close"):
    """Shut down in order; answered by `Closed`, then the child exits."""


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag_field="reply"):
    """Base of what the child answers."""


class Started(Reply, frozen=True, kw_only=True, tag="started"):
    engine: EngineStarted


class Encoded(Reply, frozen=True, kw_only=True, tag="encoded"):
    token_ids: list[int]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one request."""

    request: str
    token_ids: list[int]
    logprobs: list[float] | None
    margins: list[float] | None
    finish_reason: str | None
    cached_tokens: int | None
    first_token_s: float


class Generated(Reply, frozen=True, kw_only=True, tag="generated"):
    answers: list[Answer]


class Probed(Reply, frozen=True, kw_only=True, tag="probed"):
    request: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    text: str
    echo: dict[str, Scalar]


class Identified(Reply, frozen=True, kw_only=True, tag="identified"):
    values: dict[str, Scalar]


class WasReset(Reply, frozen=True, kw_only=True, tag="was_reset"):
    local_reset: bool
    attempts: int


class Counted(Reply, frozen=True, kw_only=True, tag="counted"):
    values: dict[str, float]
    missing: list[str]


class Armed(Reply, frozen=True, kw_only=True, tag="armed"):
    pass


class LevelSet(Reply, frozen=True, kw_only=True, tag="level_set"):
    pass


class StreamsClosed(Reply, frozen=True, kw_only=True, tag="streams_closed"):
    pass


class Closed(Reply, frozen=True, kw_only=True, tag="closed"):
    pass


class Failed(Reply, frozen=True, kw_only=True, tag="failed"):
    """The command failed; one line. The child may be used no further but to close it."""

    message: str


AnyCommand = Start | Encode | Find | Generate | Probe | Identify | Reset | Count | Arm | SetLevel | CloseStreams | Close
AnyReply = (
    Started
    | Encoded
    | Generated
    | Probed
    | Identified
    | WasReset
    | Counted
    | Armed
    | LevelSet
    | StreamsClosed
    | Closed
    | Failed
)


class Serve(msgspec.Struct, frozen=True, kw_only=True):
    """What a served engine's process is told, once, as an argument."""

    name: str
    model: str
    settings: dict[str, Scalar]
    serve_args: list[str]
    host: str
    port: int
    served_name: str
    stream_dir: str | None
    """Where it says what it serves; None: nowhere."""
    core: Start | None = None
    """Connector and audit of its engine core, whose schedule is then recorded; None: neither."""
