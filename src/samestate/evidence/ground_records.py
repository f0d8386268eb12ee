"""Records of what an engine stands on: controls, environment, weights, chosen kernels, single calls.

What may differ between two arms beside the state that they reuse. All stand in the stream that has the arm's
`EngineStarted`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from samestate.evidence.record_base import NonNegative, Record, Scalar, Sha256


class Control(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A switch on what is computed or in which steps, apart from every other (requirements 13)."""

    name: str
    """One of `samestate.evidence.controls.CONTROLS`."""
    on: bool
    sha256: Sha256 | None
    """Of the file or the sources that it is made of; None where it is off."""


class PatchedFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A Python file of an installed package that is not as the package was released."""

    distribution: str
    path: str
    """Inside the environment, as the package's own list has it."""
    sha256: Sha256 | None
    """None: the file is gone."""


class EnvironmentObserved(Record, frozen=True, kw_only=True, tag="environment_observed"):
    """What a rank's process stands on, its model loaded; it speaks for this arm and no other (requirement 12)."""

    rank: NonNegative
    observed_at: str
    """UTC, RFC 3339."""
    device: str
    """As its driver names it; ``cpu`` without one."""
    device_uuid: str | None
    driver: str | None
    variables: dict[str, str]
    """Of the environment, by allow-list; what is not set is not there."""
    backends: dict[str, str]
    """Kind of layer -> classes that its kernels come from."""
    patched: list[PatchedFile]


class StorageRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True):
    """One tensor of a model: ``[name, role, shape, dtype, digest]``."""

    name: str
    role: Literal["parameter", "buffer"]
    shape: list[NonNegative]
    dtype: str
    digest: str
    """Of its values, contiguous: 32 hex digits."""


class StoragesDigested(Record, frozen=True, kw_only=True, tag="storages_digested"):
    """Every named parameter and buffer of a rank's model (requirements 48, 49); only where it was asked for."""

    rank: NonNegative
    moment: Literal["start", "end"]
    """Before the first operation, after the last."""
    digest: str
    """Algorithm: ``xxh3-128`` or ``mix128``."""
    rows: list[StorageRow]
    """Sorted by name."""


OPAQUE = "<"
"""Begins the value of an argument whose own values were not captured; no value of a tensor or scalar begins so."""


class Argument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one call was given, or gave."""

    name: str
    """``args[0]``, ``hidden_states``, ``output[1]``."""
    value: str
    """Of a tensor its dtype and the digest of its values; of a scalar the value, of a long one its beginning and its
    SHA-256; of another object ``<kind>``."""
    shape: list[NonNegative] | None
    """None: no tensor."""
    written: bool
    """The call changed it in place, so that what it held before may have meant nothing."""


class CallCaptured(Record, frozen=True, kw_only=True, tag="call_captured"):
    """One call of a named module (requirements 50-52); only where it was asked for."""

    rank: NonNegative
    module: str
    call: NonNegative
    """Of this module, since the engine started."""
    at_ns: NonNegative
    """When it began, by the clock of `Line.t_ns`; the record is written when the engine stops."""
    inputs: list[Argument]
    outputs: list[Argument]


class CallsCounted(Record, frozen=True, kw_only=True, tag="calls_counted"):
    """How often a watched module was called, and how many of these calls were captured."""

    rank: NonNegative
    module: str
    calls: NonNegative
    captured: NonNegative


class ModulesListed(Record, frozen=True, kw_only=True, tag="modules_listed"):
    """Which outputs a traced step of a rank has, in the order in which they came; only where it was asked for."""

    rank: NonNegative
    listing: NonNegative
    """Number of this list on this rank."""
    outputs: list[str]
    """``model.layers.3.mlp``; ``…mlp [1]`` of several; ``…mlp (args[0])``: it returned none, and was given this."""


class StepTraced(Record, frozen=True, kw_only=True, tag="step_traced"):
    """Outputs of all modules of the decoder layers in one step, by digest; only where it was asked for."""

    rank: NonNegative
    op: str
    """The operation whose one request the step belongs to."""
    step: NonNegative
    """Of this operation; its first ones are traced."""
    at_ns: NonNegative
    """When it began, by the clock of `Line.t_ns`; the record is written when the engine stops."""
    tokens: NonNegative
    """That the model was given; 0: it does not say. Of an output with more rows only so many are digested."""
    listing: NonNegative
    digests: str
    """Of each output in the listing's order, `TRACE_DIGITS` hex digits: of dtype, shape and values."""


TRACE_DIGITS = 16


class KernelSelection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration that an autotuned kernel ran with, for one key (requirements 53, 56)."""

    kernel: str
    """``module.name`` of the tuner."""
    key: list[str]
    """What the tuner selects by: its key arguments and dtypes."""
    config: dict[str, Scalar]
    """The chosen configuration."""


class KernelsSelected(Record, frozen=True, kw_only=True, tag="kernels_selected"):
    """What a rank's autotuned kernels ran with, read back when the engine's last operation was over."""

    rank: NonNegative
    mode: Literal["record", "pin", "release"]
    """``pin``: held to a profile. ``release``: the same with one kernel let go."""
    profile_sha256: Sha256 | None
    benchmarks: NonNegative
    """Times that a tuner measured its configurations."""
    selections: list[KernelSelection]
    violations: list[str]
    """Where a call was not what the profile says, one line each."""
