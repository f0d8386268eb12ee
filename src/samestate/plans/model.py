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
    """To a Literal, true and 1.0 are 1, false and 0.0 are 0."""
    if isinstance(value, bool | float):
        raise PydanticKnownError("int_type")
    return value


Format = Annotated[Literal[1], BeforeValidator(_no_boolean)]
Slug = Annotated[str, Field(pattern="^[a-z0-9][a-z0-9.-]*$")]


class Frozen(BaseModel):
    """Strict, immutable, no unknown fields: a typo in a plan is an error."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


Connector = Literal["none", "native", "dictionary", "lmcache"]
ReusePath = Literal["any", "cold", "local", "external", "mixed"]
Answered = Literal["kept", "stripped"]
Order = Literal["forward", "reverse"]
"""Of the arms of a repetition: as the plan lists them, or the last one first."""


class ArmPlan(Frozen):
    """One engine under one configuration."""

    name: Slug
    connector: Connector
    """``none``: no connector at all. ``native``: vLLM's offloading. ``dictionary``: the smallest one there is, of our
    own. ``lmcache``: LMCache's, and its server beside the engine. All but ``none`` are audited."""
    release: str | None = None
    """Of the connector's package, beside the engine's environment; None: the one that is installed."""
    options: dict[str, Scalar] = {}
    """Of the connector and its service, under upstream's names; what is not here keeps upstream's default."""
    repair: Slug | None = None
    """A repair put onto the release (`samestate.instruments.repairs`)."""
    follows: Slug | None = None
    """The arm whose external cache this one finds, in a new engine."""
    service: Literal["kept", "restarted"] = "kept"
    """What became of the service beside the engine since the arm that this one follows."""
    settings: dict[str, Scalar] = {}
    """Of arm ``batched`` alone: they win over those of `EnginePlan`, and `Plan.differing_settings` must name them."""


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


class SeriesPlan(Frozen):
    """Further cases of a matrix: another template, lengths and output of its own, the same operations."""

    name: Slug
    """Begins the ids of its cases: ``ledger-N3584``."""
    template: Slug
    lengths: list[str]
    output_tokens: Annotated[int, Field(gt=0)]


class PromptPlan(Frozen):
    """A prompt of a scenario."""

    name: Slug
    tokens: str
    """N: ``"3C+7"``."""
    shares: Slug | None = None
    """The prompt, named before, whose beginning is this one's beginning too; the rest is its own."""
    shared: str | None = None
    """How many tokens of it: ``"2C+1"``. At most N of both."""
    continues: Slug | None = None
    """The prompt, named before, with all of which and the control's own answer to it this one begins."""
    answer: Answered | None = None
    """How much of that answer: ``kept``, all of it; ``stripped``, without its first `thinking` tokens."""
    thinking: Annotated[int, Field(gt=0)] | None = None
    """Tokens that are left out, as chat templates leave reasoning out."""


class StepPlan(Frozen):
    """One step of a scenario: a reset of the local cache, or prompts handed to the engine at once."""

    prompts: list[Slug] = []
    reset: bool = False
    salt: str | None = None
    """Cache salt of the requests: other salts share nothing."""
    output_tokens: Annotated[int, Field(gt=0)] | None = None
    """Fewer than the plan's, which the cold runs make; None: as many."""
    path: ReusePath = "any"
    """Where reused tokens must come from, or nothing was tested. ``any``: up to the engine."""
    arm: Slug = "candidate"


class Plan(Frozen):
    """What is to be done. Its canonical JSON (RFC 8785) is its identity.

    Either a matrix, every length through the same operations, or a scenario, prompts that share
    beginnings in an order of its own; a scenario's control computes every prompt cold.
    """

    format: Format
    name: Slug
    title: str
    question: str
    engine: EnginePlan
    arms: list[ArmPlan]
    lengths: list[str] = []
    """Of a matrix: prompt lengths N: ``"2C-1"``, ``"3C"``, or plain numbers."""
    operations: list[OperationName] = []
    """Of a matrix: the operations of every case, in order."""
    series: list[SeriesPlan] = []
    """Of a matrix: further cases after those of `lengths`."""
    prompts: list[PromptPlan] = []
    """Of a scenario."""
    scenario: list[StepPlan] = []
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
    allowed_attempts: Annotated[int, Field(gt=0)] | None = None
    """Attempts at this plan's lock that may reach a request (`samestate.lab.ledger`); None: any number."""
    control_from: Slug | None = None
    """The plan whose archives may lend their control arm, besides this plan's own (`samestate.plans.lending`)."""
    repetitions: list[Order] = ["forward"]
    """Of a matrix: all arms run as often as there are words, each time in fresh engines, in this order."""


class InputIdentity(Frozen):
    """One prompt: which operation of which case, how long, which tokens."""

    case: str
    role: str
    """``target``, ``interposer-1``, ``interposer-2``; ``own``: what a prompt that continues an answer has after it."""
    tokens: int
    sha256: Sha256 | None
    """None: it continues an answer, and is made when that is known (`samestate.plans.turns`)."""


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
