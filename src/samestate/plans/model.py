"""The plan model: what is to be done, frozen and hashed before first contact.

A plan says lengths as ``k*C+d`` (``"2C-1"``), because C depends on model, ranks and
platform. `ResolvedPlan` holds what only a started engine can tell: C, the lengths as
numbers, the token ids of every input.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticKnownError

from samestate.evidence.records import OperationName, Scalar

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


def _no_boolean(value: object) -> object:
    """To a Literal, true is 1 and false is 0."""
    if isinstance(value, bool):
        raise PydanticKnownError("int_type")
    return value


Format = Annotated[Literal[1], BeforeValidator(_no_boolean)]
Slug = Annotated[str, Field(pattern="^[a-z0-9][a-z0-9.-]*$")]


class Frozen(BaseModel):
    """Strict, immutable, no unknown fields: a typo in a plan is an error."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class ArmPlan(Frozen):
    """One engine under one configuration."""

    name: Slug
    connector: Literal["none", "native"]
    """``none``: no connector at all. ``native``: vLLM's offloading, audited."""


class EnginePlan(Frozen):
    """Settings that matter, said explicitly. Keys are vLLM's engine arguments."""

    model: str
    """A model that `samestate models list` knows, or ``external`` for the user's own."""
    settings: dict[str, Scalar]
    external_cache_bytes: Annotated[int, Field(ge=0)]
    """Size of the external tier, bytes over all ranks; 0 where no arm has one."""
    serve_args: list[str] = []
    """Further ``vllm serve`` arguments of the user's; they win over `settings`."""
    core: Literal["here", "own-process"] = "here"
    """Where scheduler and engine core run. ``own-process``: as under ``vllm serve`` and ``vllm.LLM``."""


class InstrumentPlan(Frozen):
    """How closely arms with a connector are watched. Above ``metadata`` a run measures no performance."""

    audit_level: Literal["metadata", "digest", "poison"]
    save_delay_ms: Annotated[int, Field(ge=0)]
    """Completions of saves are held back this long, so that whoever depends on one must wait."""


class ExpectedLayout(Frozen):
    """What every rank must register; other counts are a layout drift, not a result."""

    transfer_groups: Annotated[int, Field(gt=0)]
    entries: Annotated[int, Field(gt=0)]


class AnalyzerPin(Frozen):
    """The analyzer that decides, named by id and by the hash of its source."""

    id: Slug
    source_sha256: Sha256 | None
    """None in a shipped plan; filled in when the plan is frozen."""


class Plan(Frozen):
    """What is to be done. Its canonical JSON (RFC 8785) is its identity."""

    format: Format
    name: Slug
    title: str
    question: str
    engine: EnginePlan
    arms: list[ArmPlan]
    lengths: list[str]
    """Prompt lengths N: ``"2C-1"``, ``"3C"``, or plain numbers."""
    operations: list[OperationName]
    """The operations of every case, in order."""
    template: Slug
    output_tokens: Annotated[int, Field(gt=0)]
    seed: int
    temperature: Annotated[Literal[0], BeforeValidator(_no_boolean)]
    ignore_eos: bool
    analyzer: AnalyzerPin
    required_checks: list[Slug]
    differing_settings: list[str]
    """Effective settings in which arms may differ; any other difference is a finding."""
    scope: str
    not_shown: list[str]
    """What a pass does not show; printed under every verdict."""
    instruments: InstrumentPlan = InstrumentPlan(audit_level="metadata", save_delay_ms=0)
    expected_layout: ExpectedLayout | None = None
    control_from: Slug | None = None
    """The plan whose archives may lend their control arm, besides this plan's own (`samestate.plans.lending`)."""


class InputIdentity(Frozen):
    """One prompt: which operation of which case, how long, which tokens."""

    case: str
    role: str
    """``target``, ``interposer-1``, ``interposer-2``."""
    tokens: int
    sha256: Sha256


class ModelIdentity(Frozen):
    """This checkpoint, not its family (requirements 4)."""

    name: str
    files: dict[str, Sha256]
    sha256: Sha256
    """Of the sorted ``<file sha256>  <name>`` lines."""


class ResolvedPlan(Frozen):
    """What a started engine added to the plan, fixed before the first request."""

    format: Format
    plan_sha256: Sha256
    checkpoint_interval: int
    lengths: list[int]
    model: ModelIdentity
    inputs: list[InputIdentity]
    operations: list[str]
    """Operation ids of an arm, in order: ``N3583.cold``, ``N3583.interposer-1``, …"""
