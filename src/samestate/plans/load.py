"""Finding, reading, checking and freezing plans.

A plan file is YAML or JSON. A lock (`samestate plan freeze`) is
``{"format": 1, "plan": …, "plan_sha256": …}`` in canonical JSON. An archive's `plan.json`
is the plan alone; the `SHA256SUMS` beside it holds its hash.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, get_args

from samestate.evidence.canonical import canonical_json, sha256_hex
from samestate.evidence.controls import ENGINE_REPAIRS
from samestate.evidence.records import OperationName, Scalar
from samestate.evidence.seal import SEAL_NAME, SUMS_NAME, read_pair, read_sums
from samestate.plans.engine_repairs import check_engine_repairs
from samestate.plans.errors import PlanError, nearest, parse_model, quoted
from samestate.plans.files import parse, read_bytes, to_json
from samestate.plans.latency import check_latency, check_side_by_side
from samestate.plans.lengths import check_lengths
from samestate.plans.markers import check_markers
from samestate.plans.model import AnalyzerPin, ArmPlan, Connector, Format, Frozen, Plan, Sha256
from samestate.plans.operations import check_operations
from samestate.plans.repetitions import check_repetitions
from samestate.plans.scenarios import BATCHED, CANDIDATE, CONTROL, check_scenario
from samestate.plans.serve_args import check_serve_args, refused_settings, settings_named

__all__ = [
    "CANDIDATE",
    "CONTROL",
    "PlanError",
    "freeze",
    "load",
    "lock_json",
    "plan_json",
    "plan_sha256",
    "shipped",
    "validate_checks",
    "with_connector",
    "with_engine",
]

EXACT = 2**53
NATIVE_OPTIONS = ("offload_prompt_only",)
"""Of vLLM's offloading, what a plan may say: of an answer nothing is stored unless it is false."""
SAMESTATE_OPTIONS = (*NATIVE_OPTIONS, "eviction_policy")
"""Of our own cache: vLLM's, and which families go first."""
_PLAN_NAME = "plan.json"
_SUFFIXES = {".yaml", ".yml", ".json", ".lock"}


class _Lock(Frozen):
    format: Format
    plan: Plan
    plan_sha256: Sha256


def shipped() -> dict[str, str]:
    """Names of the plans that come with samestate, and their titles."""
    return {name: _read(path.read_bytes(), path.name).title for name, path in sorted(_shipped_files().items())}


def load(name_or_path: str) -> Plan:
    """Read a shipped plan by name, or a plan or lock from a file.

    Raises `PlanError` for an unknown name, an unreadable or malformed file, a plan that
    makes no sense, and a frozen plan that no longer has its hash or has none to be held against.
    """
    known = _shipped_files()
    if name_or_path in known:
        return _read(known[name_or_path].read_bytes(), name_or_path)
    path = Path(name_or_path)
    if path.is_dir():
        raise PlanError(f"{path}: is a folder; name a plan file or one of: {', '.join(sorted(known))}")
    if path.exists():
        return _load_file(path)
    if path.suffix in _SUFFIXES or len(path.parts) > 1:
        raise PlanError(f"{path}: no such file; check the path, or see `samestate plan list`")
    raise PlanError(f"no plan {name_or_path!r}{nearest(name_or_path, known)}; shipped: {', '.join(sorted(known))}")


def validate_checks(plan: Plan, known: Collection[str], floor: Collection[str]) -> None:
    """Raise `PlanError` when the plan requires a check that is not `known`, or lacks one of the analyzer's `floor`."""
    for index, check in enumerate(plan.required_checks):
        if check not in known:
            raise PlanError(
                f"required_checks[{index}]: no check {check!r}{nearest(check, known)}; known: {', '.join(known)}"
            )
    lacking = [check for check in floor if check not in plan.required_checks]
    if lacking:
        raise PlanError(
            f"required_checks: {plan.analyzer.id} decides no run without {', '.join(lacking)}; add what is missing"
        )


def freeze(plan: Plan, analyzer_sha256: str) -> Plan:
    """Pin the deciding analyzer's source. Raises `PlanError` when another source is pinned already."""
    pinned = plan.analyzer.source_sha256
    if pinned not in (None, analyzer_sha256):
        raise PlanError(
            f"analyzer.source_sha256: the plan is frozen for another source of {plan.analyzer.id} "
            f"({pinned[:12]}, this one is {analyzer_sha256[:12]}); freeze it again from its YAML"
        )
    return plan.model_copy(update={"analyzer": AnalyzerPin(id=plan.analyzer.id, source_sha256=analyzer_sha256)})


def plan_json(plan: Plan) -> bytes:
    """Canonical JSON (RFC 8785): the bytes that are the plan's identity."""
    return canonical_json(_written(plan))


def plan_sha256(plan: Plan) -> str:
    """SHA-256 of `plan_json`, in hexadecimal."""
    return sha256_hex(plan_json(plan))


def lock_json(plan: Plan) -> bytes:
    """The lock file of a frozen plan: plan and hash, canonical JSON."""
    return canonical_json({"format": 1, "plan": _written(plan), "plan_sha256": plan_sha256(plan)})


def _written(plan: Plan) -> dict[str, Any]:
    """What was added later goes without saying where a plan does not use it, so that older plans keep their hash."""
    tree = plan.model_dump(mode="json")
    if plan.repetitions == ["forward"]:
        del tree["repetitions"]
    if plan.expected_patched is None:
        del tree["expected_patched"]
    if plan.markers is None:
        del tree["markers"]
    if plan.latency is None:
        del tree["latency"]
    elif not plan.latency.interleaved:
        del tree["latency"]["interleaved"]
    for arm in tree["arms"]:
        if arm["ended"] == "stopped":
            del arm["ended"]
        if not arm["settings"]:
            del arm["settings"]
        if arm["speculation"] is None:
            del arm["speculation"]
    for prompt in tree["prompts"]:
        for field in ("continues", "answer", "thinking"):
            if prompt[field] is None:
                del prompt[field]
    return tree


def with_engine(plan: Plan, *, model: str, serve_args: list[str]) -> Plan:
    """The same plan on another model and with further ``vllm serve`` arguments.

    A setting that the arguments name leaves the plan: they win. Raises `PlanError` for
    arguments that belong to the arms.
    """
    named = settings_named(serve_args)
    settings = {name: value for name, value in plan.engine.settings.items() if name not in named}
    update = {"model": model, "settings": settings, "serve_args": [*plan.engine.serve_args, *serve_args]}
    arms = []
    for arm in plan.arms:
        own = {name: value for name, value in arm.settings.items() if name not in named}
        arms.append(arm.model_copy(update={"settings": own}))
    changed = plan.model_copy(update={"engine": plan.engine.model_copy(update=update), "arms": arms})
    _check_engine(changed)
    return changed


def with_connector(
    plan: Plan,
    connector: Connector | None,
    *,
    release: str | None = None,
    options: dict[str, Scalar] | None = None,
    repair: str | None = None,
) -> Plan:
    """The same plan with another connector in the arms that have one; None keeps theirs.

    Raises `PlanError` where the plan has no such arm, or the options are not this connector's.
    """
    if all(arm.connector == "none" for arm in plan.arms):
        raise PlanError(f"plan {plan.name} has no arm with a connector; leave the connector's options out")
    update = {
        "release": release,
        "options": options or None,
        "repair": repair,
        "connector": connector,
    }
    given = {field: value for field, value in update.items() if value is not None}
    arms = [arm if arm.connector == "none" else arm.model_copy(update=_fitting(arm, given)) for arm in plan.arms]
    changed = plan.model_copy(update={"arms": arms})
    _check_arms(changed)
    return changed


def _fitting(arm: ArmPlan, given: dict[str, Any]) -> dict[str, Any]:
    """With another connector, an arm's options are none of it."""
    changed = given.get("connector", arm.connector) != arm.connector
    return {"options": {}, **given} if changed else given


def _shipped_files() -> dict[str, Traversable]:
    folder = files("samestate.plans").joinpath("shipped")
    return {path.name.removesuffix(".yaml"): path for path in folder.iterdir() if path.name.endswith(".yaml")}


def _load_file(path: Path) -> Plan:
    data = read_bytes(path)
    return _read(data, str(path), confirmed=path.name == _PLAN_NAME and _confirmed(path, data))


def _confirmed(path: Path, data: bytes) -> bool:
    """Whether the plan's archive, around it, is sealed over these bytes. Raises `PlanError` when it is over others."""
    sums_data, seal_data = (_beside(path, name) for name in (SUMS_NAME, SEAL_NAME))
    if sums_data is None:
        return False
    sums, _ = read_sums(sums_data, SUMS_NAME)
    _check_hash(sums.get(_PLAN_NAME), sha256_hex(data), str(path))
    if seal_data is None:
        return False
    seal, _, defects = read_pair(seal_data, sums_data, "")
    if defects:
        raise PlanError(f"{path}: its archive is damaged ({defects[0].where}: {defects[0].what}); use the plan's lock")
    _check_hash(seal.plan_sha256 if seal else None, sha256_hex(data), str(path))
    return True


def _beside(path: Path, name: str) -> bytes | None:
    found = path.parent / name
    return found.read_bytes() if found.is_file() else None


def _read(data: bytes, origin: str, *, confirmed: bool = False) -> Plan:
    """Parse and check one file. `origin` heads every error; `confirmed`: its archive's seal holds its hash."""
    try:
        tree = parse(data)
        if isinstance(tree, dict) and "plan_sha256" in tree:
            lock = parse_model(_Lock, to_json(tree))
            plan = lock.plan
            _check_canonical(plan.model_dump(mode="json"), "")
            _check_hash(lock.plan_sha256, plan_sha256(plan), "plan_sha256")
        else:
            plan = parse_model(Plan, to_json(tree))
            _check_canonical(plan.model_dump(mode="json"), "")
            if plan.analyzer.source_sha256 is not None and not confirmed:
                raise PlanError(
                    "analyzer.source_sha256: a frozen plan counts only as its lock, or in its sealed archive; "
                    "use one of these, or make it null and freeze the plan again"
                )
        _check_sense(plan)
    except PlanError as error:
        raise error.within(origin) from None
    return plan


def _check_hash(expected: str | None, actual: str, where: str) -> None:
    if expected != actual:
        recorded = expected[:12] if expected else "none"
        raise PlanError(
            f"{where}: the plan was changed after it was frozen (hash {actual[:12]}, was {recorded}); freeze it again"
        )


def _check_sense(plan: Plan) -> None:
    if plan.markers is not None:
        if plan.latency or plan.prompts or plan.scenario or plan.lengths or plan.operations or plan.series:
            raise PlanError("markers: beside a matrix or a scenario; a plan is one of the three")
        check_markers(plan)
    else:
        if plan.analyzer.id.startswith("marker-"):
            raise PlanError(f"markers: is missing, and {plan.analyzer.id} judges marker plans; add it")
        _check_matrix_or_scenario(plan)
    check_repetitions(plan)
    for index, arm in enumerate(plan.arms):
        if arm.ended == "killed" and not any(other.follows == arm.name for other in plan.arms):
            raise PlanError(f"arms[{index}].ended: no arm follows this one, so a kill would test nothing; remove it")
    _check_engine(plan)
    if plan.expected_patched is not None and plan.analyzer.id.startswith("probe-"):
        raise PlanError("expected_patched: nothing of a server's files is recorded; remove it")
    listed = plan.expected_patched or []
    for index, name in enumerate(listed):
        if not _names_a_file(name):
            raise PlanError(f"expected_patched[{index}]: {name!r} is no DISTRIBUTION/PATH; say it as vllm/vllm/envs.py")
    once = {"required_checks": plan.required_checks, "differing_settings": plan.differing_settings}
    for field, words in (once | {"expected_patched": listed}).items():
        for index, word in enumerate(words):
            if word in words[:index]:
                raise PlanError(f"{field}[{index}]: {word!r} is there twice; remove one")
    if not plan.required_checks:
        raise PlanError("required_checks: is empty, so nothing could fail; name at least one check")


def _names_a_file(name: str) -> bool:
    """Whether it is ``DISTRIBUTION/PATH`` as records of Python files have it: no detours, no blanks around a part."""
    distribution, *parts = name.split("/")
    plain = all(part == part.strip() and part not in ("", ".", "..") for part in (distribution, *parts))
    return plain and bool(parts) and name.endswith(".py")


def _check_matrix_or_scenario(plan: Plan) -> None:
    if plan.latency is not None:
        if plan.prompts or plan.scenario:
            raise PlanError("latency: beside a scenario; a plan is one or the other")
        check_lengths(plan.lengths)
        check_latency(plan)
    elif plan.prompts or plan.scenario:
        if plan.lengths or plan.operations or plan.series:
            raise PlanError("scenario: beside lengths, operations or series; a plan is one or the other")
        check_scenario(plan)
    else:
        check_lengths(plan.lengths)
        check_operations(plan.operations)
        _check_series(plan)
    if plan.temperature != 0:
        raise PlanError(f"temperature: must be 0, not {plan.temperature:g}; only a marker plan samples")
    _check_arms(plan)


def _check_canonical(tree: dict[str, Any], within: str) -> None:
    for name, value in tree.items():
        if isinstance(value, dict):
            _check_canonical(value, f"{within}{name}.")
            continue
        try:
            canonical_json(value)
            # Such a float is written as an integer that no longer reads back exactly.
            exact = not isinstance(value, float) or abs(value) < EXACT
        except ValueError:
            exact = False
        if not exact:
            given = quoted(value)
            raise PlanError(f"{within}{name}: {given} has no exact JSON form; use a finite, smaller number") from None


def _check_engine(plan: Plan) -> None:
    """Settings and arguments leave the arms' own alone, hide nothing and do not contradict each other."""
    for setting, why in refused_settings().items():
        if setting in plan.engine.settings:
            raise PlanError(f"engine.settings.{setting}: {why}")
        for index, arm in enumerate(plan.arms):
            if setting in arm.settings:
                raise PlanError(f"arms[{index}].settings.{setting}: {why}")
    settings_of = {"engine": plan.engine.settings}
    settings_of |= {f"arms[{index}]": arm.settings for index, arm in enumerate(plan.arms)}
    for where, settings in settings_of.items():
        size = settings.get("block_size", 1)
        if type(size) is not int or size < 1:
            raise PlanError(f"{where}.settings.block_size: must be a whole number above 0, not {quoted(size)}")
    own = {name: value for arm in plan.arms for name, value in arm.settings.items()}
    check_serve_args(plan.engine.serve_args, plan.engine.settings | own)


def _check_series(plan: Plan) -> None:
    for index, series in enumerate(plan.series):
        try:
            check_lengths(series.lengths)
        except PlanError as error:
            raise PlanError(f"series[{index}].{error}") from None
        if any(series.name == other.name for other in plan.series[:index]):
            raise PlanError(f"series[{index}].name: {series.name!r} is there twice; choose another")
        if "." in series.name:
            raise PlanError(f"series[{index}].name: {series.name!r} holds a dot; leave it out")


def _check_arms(plan: Plan) -> None:
    for index, arm in enumerate(plan.arms):
        if arm.speculation is not None:
            raise PlanError(
                f"arms[{index}].speculation: belongs to a marker plan; say it in engine.settings, or remove it"
            )
        if arm.settings and arm.name != BATCHED:
            raise PlanError(f"arms[{index}].settings: only arm {BATCHED!r} has its own; put them into engine.settings")
    check_engine_repairs(plan)
    if plan.scenario or plan.latency or OperationName.RELOAD in plan.operations:
        _check_connected_arms(plan)
    elif [(arm.name, arm.connector) for arm in plan.arms] != [(CANDIDATE, "none")]:
        raise PlanError(f"arms: 'repeat' tests the local cache alone; make it one {CANDIDATE!r} with connector 'none'")


def _check_connected_arms(plan: Plan) -> None:
    known_options = {"native": NATIVE_OPTIONS}
    known_options |= {name: SAMESTATE_OPTIONS for name in get_args(Connector) if name.startswith("samestate-")}
    names = [arm.name for arm in plan.arms]
    later = [arm.name for arm in plan.arms if arm.follows is not None]
    beside = {*later, BATCHED} if plan.scenario else set(later)
    if plan.latency is not None and plan.latency.interleaved:
        check_side_by_side(plan)
    elif sorted(set(names) - beside) != sorted((CONTROL, CANDIDATE)) or len(set(names)) < len(names):
        raise PlanError(f"arms: must be one {CONTROL!r} and one {CANDIDATE!r}, each once")
    if later and not plan.scenario:
        raise PlanError(f"arms: {later[0]!r} follows another, which only a scenario's arms do; remove it")
    for index, arm in enumerate(plan.arms):
        where = f"arms[{index}]"
        if arm.name in (CONTROL, BATCHED) and arm.connector != "none":
            name = "the control" if arm.name == CONTROL else repr(arm.name)
            raise PlanError(f"{where}.connector: {name} reuses nothing external; make it 'none'")
        if arm.name not in (CONTROL, BATCHED) and arm.connector == "none":
            raise PlanError(f"{where}.connector: a candidate without a connector tests nothing; make it 'native'")
        if arm.follows is not None and arm.follows != _before(plan, index):
            raise PlanError(f"{where}.follows: must name the arm with a connector before it, {_before(plan, index)!r}")
        if arm.service == "restarted" and arm.follows is None:
            raise PlanError(f"{where}.service: nothing ran before this arm; remove it or say whom the arm follows")
        if arm.connector != "lmcache":
            for field in ("release", "options", "repair"):
                fits = {"options": arm.connector in known_options, "repair": arm.repair in ENGINE_REPAIRS}
                if getattr(arm, field) and not fits.get(field):
                    raise PlanError(f"{where}.{field}: is for connector 'lmcache', not {arm.connector!r}; remove it")
        known = known_options.get(arm.connector)
        if known is not None and (unknown := sorted(set(arm.options) - set(known))):
            raise PlanError(f"{where}.options.{unknown[0]}: not for a plan; known: {', '.join(known)}")
    if not plan.engine.external_cache_bytes:
        raise PlanError("engine.external_cache_bytes: is 0, and the candidate's connector needs room; make it larger")
    if plan.engine.core != "here" and plan.latency is None:
        raise PlanError("engine.core: transfers are watched in the engine's own process; make it 'here'")


def _before(plan: Plan, index: int) -> str | None:
    connected = [arm.name for arm in plan.arms[:index] if arm.connector != "none"]
    return connected[-1] if connected else None
