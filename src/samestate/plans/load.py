"""Finding, reading, checking and freezing plans.

A plan file is YAML or JSON. A lock (`samestate plan freeze`) is
``{"format": 1, "plan": …, "plan_sha256": …}`` in canonical JSON. An archive's `plan.json`
is the plan alone; the `SHA256SUMS` beside it holds its hash.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable
from contextlib import suppress
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal

import yaml

from samestate.evidence.canonical import canonical_json, sha256_hex
from samestate.plans.errors import PlanError, nearest, parse_model
from samestate.plans.lengths import check_lengths
from samestate.plans.model import AnalyzerPin, Frozen, Plan, Sha256
from samestate.plans.operations import check_operations

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
    "with_engine",
]

EXACT = 2**53
CONTROL, CANDIDATE = "control", "candidate"
_SUFFIXES = {".yaml", ".yml", ".json", ".lock"}
_SET_BY_ARMS = ("model", "kv_transfer_config")


class _Lock(Frozen):
    format: Literal[1]
    plan: Plan
    plan_sha256: Sha256


def shipped() -> dict[str, str]:
    """Names of the plans that come with samestate, and their titles."""
    return {name: _read(path.read_bytes(), path.name).title for name, path in sorted(_shipped_files().items())}


def load(name_or_path: str) -> Plan:
    """Read a shipped plan by name, or a plan or lock from a file.

    Raises `PlanError` for an unknown name, an unreadable or malformed file, a plan that
    makes no sense, and a frozen plan that no longer has its hash.
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


def validate_checks(plan: Plan, known: Collection[str]) -> None:
    """Raise `PlanError` when the plan requires a check that is not among the `known` ids."""
    for index, check in enumerate(plan.required_checks):
        if check not in known:
            raise PlanError(
                f"required_checks[{index}]: no check {check!r}{nearest(check, known)}; known: {', '.join(known)}"
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
    return canonical_json(plan.model_dump(mode="json"))


def plan_sha256(plan: Plan) -> str:
    """SHA-256 of `plan_json`, in hexadecimal."""
    return sha256_hex(plan_json(plan))


def lock_json(plan: Plan) -> bytes:
    """The lock file of a frozen plan: plan and hash, canonical JSON."""
    lock = _Lock(format=1, plan=plan, plan_sha256=plan_sha256(plan))
    return canonical_json(lock.model_dump(mode="json"))


def with_engine(plan: Plan, *, model: str, serve_args: list[str]) -> Plan:
    """The same plan on another model and with further ``vllm serve`` arguments.

    A setting that the arguments name leaves the plan: they win. Raises `PlanError` for
    arguments that belong to the arms.
    """
    named = _named(serve_args)
    settings = {name: value for name, value in plan.engine.settings.items() if name not in named}
    update = {"model": model, "settings": settings, "serve_args": [*plan.engine.serve_args, *serve_args]}
    changed = plan.model_copy(update={"engine": plan.engine.model_copy(update=update)})
    _check_engine(changed)
    return changed


def _named(serve_args: list[str]) -> set[str]:
    """The settings that ``vllm serve`` arguments name."""
    return {_setting_of(argument) for argument in serve_args if argument.startswith("--")}


def _setting_of(argument: str) -> str:
    name = argument.removeprefix("--").partition("=")[0].partition(".")[0].replace("-", "_")
    return name.removeprefix("no_")


def _shipped_files() -> dict[str, Traversable]:
    folder = files("samestate.plans").joinpath("shipped")
    return {path.name.removesuffix(".yaml"): path for path in folder.iterdir() if path.name.endswith(".yaml")}


def _load_file(path: Path) -> Plan:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PlanError(f"{path}: cannot be read ({error.strerror}); check the file's permissions") from None
    plan = _read(data, str(path))
    sums = path.parent / "SHA256SUMS"
    if path.name == "plan.json" and sums.is_file():
        expected = {line[66:]: line[:64] for line in sums.read_text("utf-8", "replace").splitlines()}
        _check_hash(expected.get("plan.json"), sha256_hex(data), str(path))
    return plan


def _read(data: bytes, origin: str) -> Plan:
    """Parse and check one file. `origin` heads every error."""
    try:
        tree = _parse(data)
        if isinstance(tree, dict) and "plan_sha256" in tree:
            lock = parse_model(_Lock, _to_json(tree))
            plan = lock.plan
            _check_canonical(plan.model_dump(mode="json"), "")
            _check_hash(lock.plan_sha256, plan_sha256(plan), "plan_sha256")
        else:
            plan = parse_model(Plan, _to_json(tree))
            _check_canonical(plan.model_dump(mode="json"), "")
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
    check_lengths(plan.lengths)
    check_operations(plan.operations)
    _check_arms(plan)
    _check_engine(plan)
    for field, words in (("required_checks", plan.required_checks), ("differing_settings", plan.differing_settings)):
        for index, word in enumerate(words):
            if word in words[:index]:
                raise PlanError(f"{field}[{index}]: {word!r} is there twice; remove one")
    if not plan.required_checks:
        raise PlanError("required_checks: is empty, so nothing could fail; name at least one check")


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
            raise PlanError(f"{within}{name}: {value} has no exact JSON form; use a finite, smaller number") from None


def _check_engine(plan: Plan) -> None:
    """Settings and arguments leave the arms' own alone, hide nothing and do not contradict each other."""
    settings, named = plan.engine.settings, _named(plan.engine.serve_args)
    for setting in _SET_BY_ARMS:
        if setting in settings:
            raise PlanError(f"engine.settings.{setting}: is set for each arm; remove it")
        if setting in named:
            raise PlanError(f"engine.serve_args: {_flag(setting)} is set for each arm; remove it")
    if "config" in named:
        raise PlanError("engine.serve_args: --config hides settings from the plan; write its flags out")
    for setting in sorted(named & set(settings)):
        raise PlanError(f"engine.serve_args: {_flag(setting)} is in engine.settings too; remove one")


def _flag(setting: str) -> str:
    return "--" + setting.replace("_", "-")


def _check_arms(plan: Plan) -> None:
    if sorted(arm.name for arm in plan.arms) != sorted((CONTROL, CANDIDATE)):
        raise PlanError(f"arms: must be one {CONTROL!r} and one {CANDIDATE!r}, each once")
    for index, arm in enumerate(plan.arms):
        if arm.name == CONTROL and arm.connector != "none":
            raise PlanError(f"arms[{index}].connector: the control reuses nothing external; make it 'none'")
        if arm.name == CANDIDATE and arm.connector == "none":
            raise PlanError(f"arms[{index}].connector: a candidate without a connector tests nothing; make it 'native'")


class _Loader(yaml.SafeLoader):
    """YAML without silent surprises: a key said twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be text", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is there twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _parse(data: bytes) -> Any:
    """JSON where it is JSON: to YAML 1.1, ``1e-7`` is a text."""
    if data.lstrip().startswith(b"{"):
        with suppress(json.JSONDecodeError, UnicodeDecodeError, RecursionError):
            return json.loads(data, object_pairs_hook=_unique)
    return _parse_yaml(data)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise PlanError(f"{twice}: is there twice; remove one")
    return tree


def _parse_yaml(data: bytes) -> Any:
    try:
        return yaml.load(data, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}" if mark else "the file"
        raise PlanError(f"{line}: not valid YAML ({error.problem or error.context}); correct it") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PlanError(f"the file: not valid YAML ({reason}); correct it") from None


def _to_json(tree: Any) -> str:
    try:
        # A date or another YAML type becomes text; the plan model says which field expected what.
        return json.dumps(tree, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise PlanError(f"the file: holds what JSON cannot ({error}); use text, numbers, lists and mappings") from None
