"""``settings``: the arms ran the planned engine, and the same but for what the plan declares (requirements 2, 108)."""

from __future__ import annotations

from collections.abc import Iterator

from samestate.checks.base import CheckResult, Finding, Place
from samestate.checks.history import ArmHistory, History
from samestate.checks.verdicts import conclude, fail, unknown
from samestate.evidence.records import EngineStarted, Scalar
from samestate.plans.model import ArmPlan

CHECK = "settings"
ENGINES_CHOICE = "auto"
"""A planned value that leaves the effective one to the engine."""
CONNECTOR_CLASSES = {
    "native": ("OffloadingConnector",),
    "dictionary": ("DictionaryConnector",),
    "lmcache": ("HostLMCacheConnector",),
    "samestate-memory": ("SamestateConnector",),
    "samestate-disk": ("SamestateConnector",),
    "samestate-valkey": ("SamestateConnector",),
    "samestate-object": ("SamestateConnector",),
}
"""The class that each planned connector runs as inside the audit, on a real engine."""
OTHER_ENGINES: dict[str, tuple[str, ...]] = {"sim": ("SimConnector",), "transformers": ("SnapshotCache",)}
"""The class that stands for every planned connector on another engine than vLLM."""


def settings(history: History) -> CheckResult:
    """Hold every arm's effective settings and versions against those of the first planned arm."""
    first = history.arm(history.plan.arms[0].name)
    expected = effective_settings(first.engine.rec)
    findings: list[Finding] = []
    # A planned release lies in the arms that have the connector alone; `intervention` holds them to it.
    released = [f"versions.{planned.connector}" for planned in history.plan.arms if planned.release]
    for arm in history.arms.values():
        findings += _differences(first, arm, expected, [*history.plan.differing_settings, *released])
        engine = arm.engine
        if engine.rec.data_parallel != 1:
            message = f"arm {arm.name}: {engine.rec.data_parallel} engines (data_parallel), planned 1"
            findings.append(fail("not_one_engine", message, Place(arm=arm.name), [engine.where]))
    for planned in history.plan.arms:
        arm = history.arm(planned.name)
        findings += [*_connector(arm, planned), *_in_force(arm, history.plan.engine.settings | planned.settings)]
        findings += [*_audit(arm, planned, history.plan.instruments.audit_level), *_registered_once(arm)]
    summary = f"{len(expected)} settings and versions alike in {len(history.arms)} arms"
    if findings:
        summary = f"{len(findings)} differences from the plan or between the arms"
    return conclude(CHECK, findings, unit="settings", examined=len(first.engine.rec.settings), summary=summary)


def effective_settings(engine: EngineStarted) -> dict[str, Scalar]:
    """Everything that could make two engines compute differently, under dotted names."""
    shape: dict[str, Scalar] = {
        "engine": engine.engine,
        "max_model_len": engine.max_model_len,
        "tensor_parallel": engine.tensor_parallel,
        "pipeline_parallel": engine.pipeline_parallel,
        "data_parallel": engine.data_parallel,
        "decode_context_parallel": engine.decode_context_parallel,
        "eos_token_ids": str(sorted(engine.eos_token_ids)),
    }
    versions = {f"versions.{name}": version for name, version in engine.versions.items()}
    return shape | versions | engine.settings


def _differences(
    first: ArmHistory, arm: ArmHistory, expected: dict[str, Scalar], declared: list[str]
) -> Iterator[Finding]:
    actual = effective_settings(arm.engine.rec)
    for name in sorted(expected.keys() | actual.keys()):
        if any(name == prefix or name.startswith(f"{prefix}.") for prefix in declared):
            continue
        if name not in expected or name not in actual or _differ(expected[name], actual[name]):
            ours, theirs = (repr(side[name]) if name in side else "absent" for side in (expected, actual))
            message = f"{name} is {ours} in arm {first.name} and {theirs} in arm {arm.name}"
            yield fail("setting_differs", message, Place(arm=arm.name), [first.engine.where, arm.engine.where])


def _differ(left: Scalar, right: Scalar) -> bool:
    """1, 1.0 and True are three values."""
    return type(left) is not type(right) or left != right


def _connector(arm: ArmHistory, planned: ArmPlan) -> Iterator[Finding]:
    engine = arm.engine.rec
    classes = OTHER_ENGINES.get(engine.engine, CONNECTOR_CLASSES.get(planned.connector, ()))
    right = engine.connector is None if planned.connector == "none" else engine.connector in classes
    if not right:
        message = f"arm {arm.name}: connector {engine.connector or 'none'}, planned {planned.connector}"
        yield fail("wrong_connector", message, Place(arm=arm.name), [arm.engine.where])


def _audit(arm: ArmHistory, planned: ArmPlan, level: str) -> Iterator[Finding]:
    """Every arm with a connector was watched as closely as planned."""
    actual, expected = arm.engine.rec.audit_level, None if planned.connector == "none" else level
    if actual != expected:
        message = f"arm {arm.name}: audit level {actual or 'none'}, planned {expected or 'none'}"
        yield fail("wrong_audit_level", message, Place(arm=arm.name), [arm.engine.where])


def _registered_once(arm: ArmHistory) -> Iterator[Finding]:
    for again in arm.ranks_again:
        message = f"arm {arm.name}: rank {again.rec.rank} registered its cache again: which tables hold is not known"
        yield unknown("registered_again", message, Place(arm=arm.name, rank=again.rec.rank), [again.where])


def _in_force(arm: ArmHistory, planned: dict[str, Scalar]) -> Iterator[Finding]:
    """What the engine reports of a planned setting is what was planned."""
    effective = effective_settings(arm.engine.rec)
    for name, value in planned.items():
        if value == ENGINES_CHOICE:
            continue
        for reported, actual in effective.items():
            section, _, last = reported.rpartition(".")
            if last != name or not (section == "" or (section.endswith("_config") and "." not in section)):
                continue
            if _differ(_plain(value), _plain(actual)):
                message = f"arm {arm.name}: {reported} is {actual!r}, the plan sets {name} to {value!r}"
                yield fail("setting_not_in_force", message, Place(arm=arm.name), [arm.engine.where])


def _plain(value: Scalar) -> Scalar:
    """A dtype without the library that it is named after."""
    return value.removeprefix("torch.") if isinstance(value, str) else value
