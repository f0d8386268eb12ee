"""Marker plans: probes with a reasoning budget, the same to every arm, one at a time.

An arm is one engine with one way of speculating. What the probes ask is the plan's; which token ids its markers and
stops are, only a tokenizer can tell (`resolve_markers`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

from samestate.evidence.marker_records import SPLIT_TOP_P
from samestate.plans.errors import PlanError, nearest
from samestate.plans.model import ArmPlan, MarkerPlan, Plan, ProbePlan, ResolvedMarkers

NO_TEMPLATE = NO_REPAIR = "none"
GATES, SPECULATION = "gates", "speculation"
"""Checks (`samestate.checks`) that a plan with gates, or with drafts, cannot do without."""
GUARDS = (SPLIT_TOP_P,)
REPAIRS = ("cpu-draft-rows",)
"""Of vLLM itself: ``cpu-draft-rows``, drafts are sampled with their request's temperature, top-k and top-p."""
ADDRESSES = {"chat": "/v1/chat/completions", "engine": "engine"}
"""What a probe's address is, by route: a path of the server, or the engine itself."""


def probes(plan: Plan) -> list[ProbePlan]:
    """The probes of every arm, in order; none in other plans."""
    return plan.markers.probes if plan.markers else []


def address(markers: MarkerPlan) -> str:
    """Where the plan's probes go, without host and port: ``/v1/chat/completions``."""
    return ADDRESSES[markers.route]


def temperature(plan: Plan, probe: ProbePlan) -> float:
    """What a probe samples with."""
    return plan.temperature if probe.temperature is None else probe.temperature


def resolve_markers(plan: Plan, encode: Callable[[str], list[int]]) -> ResolvedMarkers:
    """Ids of the plan's markers and stops. `encode`: the engine's tokenizer, no special tokens added.

    Raises `PlanError` for a marker without a token, and for a stop that is not one token.
    """
    markers = _markers(plan)
    found = {field: encode(getattr(markers, field)) for field in ("start", "end")}
    for field, ids in found.items():
        if not ids:
            raise PlanError(
                f"markers.{field}: {getattr(markers, field)!r} has no token in this tokenizer; name another"
            )
    stops: dict[str, list[int]] = {}
    for index, probe in enumerate(markers.probes):
        for at, text in enumerate(probe.stop):
            ids = encode(text)
            if len(ids) != 1:
                where = f"markers.probes[{index}].stop[{at}]"
                raise PlanError(f"{where}: {text!r} is {len(ids)} tokens in this tokenizer, not one; name another")
            stops.setdefault(probe.name, []).extend(ids)
    return ResolvedMarkers(start_ids=found["start"], end_ids=found["end"], stop_ids=stops)


def with_repair(plan: Plan, repair: str) -> Plan:
    """The same plan with this repair alone, or with ``none``. Raises `PlanError` for an unknown one."""
    repairs = [] if repair == NO_REPAIR else [repair]
    changed = plan.model_copy(update={"markers": _markers(plan).model_copy(update={"repairs": repairs})})
    check_markers(changed)
    return changed


def check_markers(plan: Plan) -> None:
    """Raise `PlanError` for a marker plan that makes no sense."""
    markers = _markers(plan)
    if plan.template != NO_TEMPLATE:
        raise PlanError(f"template: {plan.template!r}, and a marker plan's probes have their own text; make it 'none'")
    if not markers.start or not markers.end:
        raise PlanError("markers.start, markers.end: one is empty, so nothing marks reasoning; say both")
    if markers.start == markers.end:
        raise PlanError(f"markers.end: is {markers.end!r} as start is; name another")
    if markers.guard is not None and markers.guard not in GUARDS:
        raise PlanError(f"markers.guard: no guard {markers.guard!r}; known: {', '.join(GUARDS)}")
    for field in ("gates", "repairs"):
        names = getattr(markers, field)
        if len(set(names)) < len(names):
            raise PlanError(f"markers.{field}: names one twice; remove it")
    for index, repair in enumerate(markers.repairs):
        if repair not in REPAIRS:
            raise PlanError(
                f"markers.repairs[{index}]: no repair {repair!r}{nearest(repair, REPAIRS)}; known: {', '.join(REPAIRS)}"
            )
    _check_probes(plan, markers)
    _check_arms(plan)
    _check_required(plan, markers)


def _check_probes(plan: Plan, markers: MarkerPlan) -> None:
    if not markers.probes:
        raise PlanError("markers.probes: is empty, so nothing would be asked; add one")
    if markers.allowed_probes != len(markers.probes):
        raise PlanError(
            f"markers.allowed_probes: is {markers.allowed_probes} and an arm has {len(markers.probes)} probes; "
            "nothing is tried again, so make them equal"
        )
    for index, probe in enumerate(markers.probes):
        where = f"markers.probes[{index}]"
        if any(probe.name == other.name for other in markers.probes[:index]):
            raise PlanError(f"{where}.name: {probe.name!r} is taken; choose another")
        if probe.max_tokens > plan.output_tokens:
            raise PlanError(f"{where}.max_tokens: the plan allows {plan.output_tokens} (output_tokens); ask for fewer")
        if not probe.text:
            raise PlanError(f"{where}.text: is empty; say what is asked")
        if markers.route == "engine" and probe.effort is not None:
            raise PlanError(f"{where}.effort: belongs to a chat template, and this route has none; remove it")
        if len(set(probe.stop)) < len(probe.stop):
            raise PlanError(f"{where}.stop: names a text twice; remove one")
    if all(probe.budget is None for probe in markers.probes):
        raise PlanError("markers.probes: none has a budget, so no marker could be forced; give one a budget")


def _check_arms(plan: Plan) -> None:
    if not plan.arms:
        raise PlanError("arms: is empty, so nothing would run; add one")
    for index, arm in enumerate(plan.arms):
        where = f"arms[{index}]"
        if arm.connector != "none":
            raise PlanError(f"{where}.connector: markers are asked of the engine alone; make it 'none'")
        for field in ("release", "options", "repair", "follows"):
            if getattr(arm, field):
                raise PlanError(f"{where}.{field}: is for arms with a connector; remove it")
        _check_speculation(arm, where)
    for one, other in combinations(plan.arms, 2):
        if one.name == other.name:
            raise PlanError(f"arms: {one.name!r} is there twice; rename one")
    if plan.engine.external_cache_bytes:
        raise PlanError("engine.external_cache_bytes: no arm has an external cache; make it 0")


def _check_required(plan: Plan, markers: MarkerPlan) -> None:
    """Gates and drafts that a plan has must decide."""
    if markers.gates and GATES not in plan.required_checks:
        raise PlanError(f"required_checks: lacks {GATES!r}, and markers.gates names some; add it")
    if SPECULATION not in plan.required_checks and any(arm.speculation for arm in plan.arms):
        raise PlanError(f"required_checks: lacks {SPECULATION!r}, and an arm has drafts; add it")


def _check_speculation(arm: ArmPlan, where: str) -> None:
    if "speculative_config" in arm.settings:
        raise PlanError(f"{where}.settings.speculative_config: is made of {where}.speculation; write it there")
    said = arm.speculation
    if said is None:
        return
    if (said.method == "draft_model") != (said.draft_model is not None):
        raise PlanError(f"{where}.speculation.draft_model: comes with method 'draft_model', and only with it")
    if said.lookup is not None and said.method != "ngram":
        raise PlanError(f"{where}.speculation.lookup: is for method 'ngram'; remove it")


def _markers(plan: Plan) -> MarkerPlan:
    if plan.markers is None:
        raise PlanError(f"plan {plan.name}: has no markers, so it is no marker plan")
    return plan.markers
