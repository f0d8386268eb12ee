"""The plan model: what is to be done, frozen and hashed before first contact.

A plan says lengths as ``k*C+d`` (``"2C-1"``), because C depends on model, ranks and
platform. `ResolvedPlan` holds what only a started engine can tell: C, the lengths as
numbers, the token ids of every input.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer
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


Connector = Literal[
    "none",
    "native",
    "dictionary",
    "lmcache",
    "samestate-memory",
    "samestate-disk",
    "samestate-valkey",
    "samestate-object",
]
ReusePath = Literal["any", "cold", "local", "external", "mixed"]
Answered = Literal["kept", "stripped"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""``reasoning_effort`` of a request, as the OpenAI API has it."""
Route = Literal["chat", "engine"]
"""How a probe reaches its engine. ``chat``: a server's ``/v1/chat/completions``. ``engine``: as token ids."""
Gate = Literal["selftest", "sampling"]
Temperature = Annotated[float, Field(ge=0, le=2)]
Order = Literal["forward", "reverse"]
"""Of the arms of a repetition: as the plan lists them, or the last one first."""


class SpeculationPlan(Frozen):
    """Speculative decoding of an arm, in a marker plan."""

    method: Literal["ngram", "draft_model", "mtp"]
    drafts: Annotated[int, Field(gt=0)]
    """K, drafts per step at most."""
    draft_model: str | None = None
    """Of ``draft_model``: a model that `samestate models list` knows."""
    lookup: Annotated[int, Field(gt=0)] | None = None
    """Of ``ngram``: length of the n-gram that is looked up, in tokens."""


class ArmPlan(Frozen):
    """One engine under one configuration."""

    name: Slug
    connector: Connector
    """``none``: no connector at all. ``native``: vLLM's offloading. ``dictionary``: the smallest one there is, of our
    own. ``lmcache``: LMCache's, and its server beside the engine. ``samestate-…``: our own cache, with nothing, a
    folder, a Valkey server or an object store behind its memory tier. All but ``none`` are audited."""
    release: str | None = None
    """Of the connector's package, beside the engine's environment; None: the one that is installed."""
    options: dict[str, Scalar] = {}
    """Of the connector and its service, under upstream's names; what is not here keeps upstream's default."""
    repair: Slug | None = None
    """A repair put onto the release (`samestate.instruments.repairs`), or in all arms onto vLLM itself."""
    follows: Slug | None = None
    """The arm whose external cache this one finds, in a new engine."""
    service: Literal["kept", "restarted"] = "kept"
    """What became of the service beside the engine since the arm that this one follows."""
    ended: Literal["stopped", "killed"] = "stopped"
    """How its engine ends before the arm that follows it: in order, or by SIGKILL once its saves are complete."""
    settings: dict[str, Scalar] = {}
    """Of arm ``batched``, and of the arms of a marker plan: they win over those of `EnginePlan`, and
    `Plan.differing_settings` must name them."""
    speculation: SpeculationPlan | None = None
    """Of a marker plan's arms; None: no drafts."""


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


class ProbePlan(Frozen):
    """One request of a marker plan, sent once to every arm."""

    name: Slug
    text: str
    """Over ``chat`` the user's message. To ``engine`` the whole prompt, special tokens by their text."""
    budget: Annotated[int, Field(ge=0)] | None
    """``thinking_token_budget``, tokens; None: unlimited."""
    max_tokens: Annotated[int, Field(gt=0)]
    """The completion cap."""
    temperature: Temperature | None = None
    """None: the plan's."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    effort: Effort | None = None
    """Over ``chat``."""
    stop: list[str] = []
    """Texts of one token each, whose ids end the answer, besides those that end a sequence."""
    answer: str | None = None
    """What a model that can answer says, exactly; None: there is no such answer."""


class MarkerPlan(Frozen):
    """What is asked of reasoning markers: of every arm the same probes, one at a time."""

    route: Route
    start: str
    """The marker that begins reasoning, as text: its ids are the engine's own tokenizer's."""
    end: str
    probes: list[ProbePlan]
    gates: list[Gate] = []
    """That must have passed before the first probe is sent."""
    guard: Slug | None = None
    """Opt-in guard of vLLM's sampling code (`samestate.instruments`), in force in gates and engines alike."""
    repairs: list[Slug] = []
    """Of vLLM (`samestate.instruments`), put on in every engine."""
    retries: Annotated[Literal[0], BeforeValidator(_no_boolean)] = 0
    allowed_probes: Annotated[int, Field(gt=0)]
    """Requests that one arm may make: as many as it has probes."""


class LatencyPlan(Frozen):
    """Times of streamed answers: every length, cold, again and reloaded, OFF and ON (`samestate.plans.latency`)."""

    trials: Annotated[int, Field(gt=0)]
    """Measured, of every length, each with a prompt of its own."""
    warmups: Annotated[int, Field(ge=0)]
    """Before them, of every length; made alike and left out."""
    order_seed: int | None = None
    """Shuffles the measured trials, for all arms alike; None: ascending by trial, then by length."""
    interleaved: bool = False
    """All arms' engines run at once and take turns, trial by trial; there may then be more than one with a cache."""


class Plan(Frozen):
    """What is to be done. Its canonical JSON (RFC 8785) is its identity.

    Either a matrix, every length through the same operations, or a scenario, prompts that share
    beginnings in an order of its own, whose control computes every prompt cold; or probes of reasoning markers,
    or timed trials.
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
    markers: MarkerPlan | None = None
    """Of a marker plan (`samestate.plans.markers`)."""
    latency: LatencyPlan | None = None
    """Of a latency plan, which has `lengths` and no `operations`."""
    template: Slug
    """``none`` in a marker plan."""
    output_tokens: Annotated[int, Field(gt=0)]
    """In a marker plan the most that a probe may ask for."""
    seed: int
    temperature: Temperature
    """0 but in marker plans."""
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
    expected_patched: list[str] | None = None
    """Files of installed packages that are not as released in any arm, ``DISTRIBUTION/PATH``, and no others; empty: no
    file is patched. None: patches are recorded, and held to no list."""
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


class ResolvedMarkers(Frozen):
    """Token ids of a marker plan's texts, by the engine's own tokenizer."""

    start_ids: list[int]
    end_ids: list[int]
    stop_ids: dict[str, list[int]]
    """By probe: what it declares."""


class ResolvedPlan(Frozen):
    """What a started engine added to the plan, fixed before the first request."""

    format: Format
    plan_sha256: Sha256
    checkpoint_interval: int
    lengths: list[int]
    model: ModelIdentity
    inputs: list[InputIdentity]
    operations: list[str]
    """Operation ids of an arm, in order: ``N3583.cold``, ``N3583.interposer-1``, …; of a marker plan its probes."""
    markers: ResolvedMarkers | None = None
    """Of a marker plan, whose `lengths` and `inputs` are those of its probes' prompts."""

    @model_serializer(mode="wrap")
    def _without_markers(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Older plans' bytes stay what they were."""
        tree: dict[str, Any] = handler(self)
        if self.markers is None:
            del tree["markers"]
        return tree
