"""Analyzers: a named, hashed set of checks, and the judgement that one of them passes on an archive.

A new rule is a new analyzer: an old one is never edited once archives cite it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from samestate.checks import (
    beside,
    cacheability,
    completion,
    continuation,
    controls,
    counters,
    coverage,
    each,
    environment,
    equality,
    failures,
    floor,
    geometry,
    hit_length,
    integrity,
    latency,
    latency_reuse,
    latency_side,
    latency_study,
    latency_table,
    layout,
    local_hit,
    marker_checks,
    marker_table,
    page_coverage,
    pages,
    paths,
    poison,
    prefix_identity,
    probe_equality,
    probe_reuse,
    probe_table,
    probe_usage,
    provenance,
    queries,
    ranks,
    reference,
    repetitions,
    resets,
    resumptions,
    reuse,
    scenario,
    settings,
    sources,
    steps,
    storages,
    topology,
    transfers,
    turns,
)
from samestate.checks.base import Check, CheckResult, Verdict
from samestate.checks.boundary import CHECK as BOUNDARY
from samestate.checks.boundary import boundary
from samestate.checks.history import REFERENCE, History, MissingEvidence
from samestate.checks.marker_reconcile import Rule
from samestate.checks.page_history import PAGE_LEVELS
from samestate.checks.plan_identity import CHECK as PLAN_IDENTITY
from samestate.checks.plan_identity import Running, plan_identity
from samestate.checks.table import CaseRow, table
from samestate.checks.verdicts import run_verdict
from samestate.evidence.archive import Archive
from samestate.evidence.canonical import sha256_hex
from samestate.plans.scenarios import CONTROL

_DECIDING_SOURCES = {
    "samestate.checks": None,
    "samestate.plans": {
        "black_box.py",
        "latency.py",
        "lending.py",
        "lengths.py",
        "markers.py",
        "model.py",
        "operations.py",
        "repetitions.py",
        "scenarios.py",
        "turns.py",
    },
    "samestate.evidence": {
        "archive.py",
        "canonical.py",
        "controls.py",
        "ground_records.py",
        "inputs.py",
        "latency_records.py",
        "marker_records.py",
        "places.py",
        "probe_records.py",
        "record_base.py",
        "records.py",
        "seal.py",
        "stream.py",
        "verify.py",
    },
}
"""What an analyzer's hash covers: every module that can change a verdict. None: all of the room."""
_REMARKS = {"known.py", "remarks.py", "claim.py", "claims.py", "written.py"}
"""What people say of a verdict once it is there; it changes none."""


_WHERE_IT_COMES_UP = (
    equality.CONTROLS,
    beside.INTERVENTION,
    beside.SERVICES,
    repetitions.CHECK,
    equality.REPETITION,
    controls.CHECK,
    topology.CHECK,
    environment.CHECK,
    storages.CHECK,
    reference.CHECK,
)
"""Of a reference, a repair, a release, a server or a repetition, which most runs have not: not exercised there. And of
what older archives do not record."""

HOST_LMCACHE = "HostLMCacheConnector"
SIMULATED = "Here the engine was the simulated one, inside samestate's own process, and no model ran."
"""What a scope says of it, whatever its plan says of engines."""

Comparison = Literal["paired_live", "candidate_vs_archived", "within_one_arm", "trace_vs_api"]


class AnalyzerError(Exception):
    """No such analyzer. ``str(error)`` is one line that says what to do."""


class Analyzer(NamedTuple):
    """A set of checks under one id."""

    id: str
    checks: Mapping[str, Check]
    """By check id, in the order in which they are shown."""
    table: Callable[[History, Sequence[CheckResult], Sequence[str]], list[CaseRow]] = table
    two_arms: bool = True
    """A candidate is compared with a control; False: an arm with itself."""

    conditional: tuple[str, ...] = _WHERE_IT_COMES_UP
    """Checks that decide a run only where their question comes up."""
    reported: tuple[str, ...] = ()
    """Checks that decide a run only where its plan requires them."""
    traces: bool = False
    """What each rank committed is compared with what the API delivered, arm by arm."""

    @property
    def floor(self) -> tuple[str, ...]:
        """Checks that decide every run, whatever the plan requires: all but the conditional and the reported ones."""
        return tuple(check for check in self.checks if check not in (*self.conditional, *self.reported))


class Judgement(BaseModel):
    """What an analyzer makes of an archive."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    analyzer: str
    analyzer_sha256: str
    seal_sha256: str | None
    plan_sha256: str | None
    fault: str | None
    """The injected fault that the archive is tagged with. Shown, never judged by."""
    comparison_kind: Comparison
    performance_eligible: bool
    """False: pages were read, saves held back or a fault injected, so no time of this run is a measurement."""
    verdict: Verdict
    repetitions: list[each.RepetitionVerdict] = []
    """What each came to by itself; empty where the plan has one. `verdict` is over all of them, and pools none."""
    results: list[CheckResult]
    required: list[str]
    table: list[CaseRow]
    latency: latency_study.Study | None = None
    """What a latency study shows; None for another plan. It decides nothing."""
    scope: str
    not_shown: list[str]
    limitations: list[str]


def source_sha256(analyzer_id: str) -> str:
    """SHA-256 over the sources that decide under this analyzer. Raises AnalyzerError."""
    _known(analyzer_id)
    return _source_sha256()


@cache
def _source_sha256() -> str:
    lines = []
    for package, names in _DECIDING_SOURCES.items():
        for source in files(package).iterdir():
            if not source.name.endswith(".py") or source.name in _REMARKS:
                continue
            if names is None or source.name in names:
                lines.append(f"{sha256_hex(source.read_bytes())}  {package}/{source.name}\n")
    return sha256_hex("".join(sorted(lines)).encode())


def judge(archive: Archive, analyzer_id: str | None = None) -> Judgement:
    """Judge an archive under the plan's own analyzer, or another. Raises AnalyzerError for an unknown one.

    Damage, gaps and crashing checks never raise: they are in the judgement.
    """
    history = History.read(archive)
    analyzer = _known(analyzer_id or _planned_analyzer(history))
    results, repeated = each.run_checks(analyzer.checks, history)
    required = _required(history, analyzer, results)
    rows, limitations = _table(history, analyzer, results, required, repeated)
    return Judgement(
        analyzer=analyzer.id,
        analyzer_sha256=source_sha256(analyzer.id),
        seal_sha256=history.seal_sha256,
        plan_sha256=history.plan_sha256,
        fault=history.fault,
        comparison_kind=_comparison(history, analyzer),
        performance_eligible=_performance_eligible(history),
        verdict=run_verdict(required, results),
        repetitions=[one.verdict(required) for one in repeated],
        results=results,
        required=required,
        table=rows,
        latency=_study(history),
        scope=_scope(history),
        not_shown=_not_shown(history),
        limitations=[*limitations, *_limitations(history, analyzer), *_hidden_fault(history, results, required)],
    )


def _study(history: History) -> latency_study.Study | None:
    try:
        return latency_study.study(history, eligible=_performance_eligible(history))
    except MissingEvidence:
        return None


def _known(analyzer_id: str) -> Analyzer:
    if analyzer_id not in ANALYZERS:
        raise AnalyzerError(f"no analyzer {analyzer_id!r} in this version; use one of: {', '.join(ANALYZERS)}")
    return ANALYZERS[analyzer_id]


def _planned_analyzer(history: History) -> str:
    try:
        return history.plan.analyzer.id
    except MissingEvidence:
        return BOUNDARY_V1


def _required(history: History, analyzer: Analyzer, results: Sequence[CheckResult]) -> list[str]:
    """The analyzer's floor, what else the plan requires, and the checks whose question came up in this run."""
    try:
        planned = history.plan.required_checks
    except MissingEvidence:
        planned = []
    reference = [equality.CONTROLS] if REFERENCE in history.arms and equality.CONTROLS in analyzer.checks else []
    come_up = [
        result.check
        for result in results
        if result.check in analyzer.conditional
        and result.check != equality.CONTROLS
        and result.verdict is not Verdict.NOT_EXERCISED
    ]
    return list(dict.fromkeys([*analyzer.floor, *planned, *reference, *come_up]))


def _comparison(history: History, analyzer: Analyzer) -> Comparison:
    if analyzer.traces:
        return "trace_vs_api"
    if not analyzer.two_arms:
        return "within_one_arm"
    control = history.arms.get(CONTROL)
    return "candidate_vs_archived" if control and control.imported_from is not None else "paired_live"


def _table(
    history: History,
    analyzer: Analyzer,
    results: list[CheckResult],
    required: list[str],
    repeated: Sequence[each.Repetition],
) -> tuple[list[CaseRow], list[str]]:
    try:
        if repeated:
            return [row for one in repeated for row in one.rows(analyzer.table, required)], []
        return analyzer.table(history, results, required), []
    except MissingEvidence as missing:
        return [], [f"No table: {missing}."]
    except Exception as error:  # the table decides nothing, so it must not keep the verdict from being shown
        return [], [f"No table: it could not be made ({type(error).__name__}: {error})."]


def _scope(history: History) -> str:
    """The plan's own words, and the hashes of what they hold for."""
    try:
        plan, resolved = history.plan, history.resolved
    except MissingEvidence as missing:
        return f"None: {missing}."
    engines = {
        f"{arm.name}: {seen.rec.engine} {seen.rec.versions.get(seen.rec.engine, '')}".rstrip()
        for arm in history.arms.values()
        for seen in arm.engines[:1]
    }
    identities = [
        f"plan {(history.plan_sha256 or '')[:12]}",
        f"model {resolved.model.name} {resolved.model.sha256[:12]}",
        f"C={resolved.checkpoint_interval}",
        *sorted(engines),
        *sorted(
            {f"{name} {sha256}" for arm in history.arms.values() for name, sha256 in controls.in_force(arm).items()}
        ),
        *(f"run by {attempt.source}" for attempt in history.attempts[-1:]),
    ]
    words = [plan.scope, *([SIMULATED] if _simulated(history) else [])]
    return f"{' '.join(words)} ({', '.join(identities)})"


def _simulated(history: History) -> bool:
    return any(seen.rec.engine == "sim" for arm in history.arms.values() for seen in arm.engines)


def _not_shown(history: History) -> list[str]:
    try:
        return list(history.plan.not_shown)
    except MissingEvidence:
        return []


def _performance_eligible(history: History) -> bool:
    engines = [seen.rec for arm in history.arms.values() for seen in arm.engines]
    delayed = any(arm.pages.delayed or arm.markers.streams for arm in history.arms.values())
    return not (history.fault or delayed or any(engine.audit_level in PAGE_LEVELS for engine in engines))


def _limitations(history: History, analyzer: Analyzer) -> list[str]:
    """What the records themselves say that this run cannot show."""
    simulated = _simulated(history)
    found = (
        ["No model ran: the engine was the simulated one, and the checkpoint only lent its name."] if simulated else []
    )
    if any(seen.rec.connector == HOST_LMCACHE for arm in history.arms.values() for seen in arm.engines):
        found.append(
            f"LMCache's connector ran inside {HOST_LMCACHE} (samestate's): on CPU platforms that changes how pages are "
            "registered with LMCache's server; on CUDA it adds nothing."
        )
    found += ["Checks recompute results from recorded evidence; they are no second implementation of the engine."]
    if prefix_identity.CHECK in analyzer.checks and any(arm.pages.transfers for arm in history.arms.values()):
        found.append("Digests show which bytes a page held, not that the model reads the page at that address.")
        found.append("Page rows are repeated internal checks of recorded bytes; no device memory was read again.")
    elif analyzer.traces:
        found += marker_checks.LIMITATIONS
    elif analyzer.two_arms:
        found.append("B is what each transfer says of itself; the bytes were not inspected.")
    if any(arm.storages for arm in history.arms.values()):
        found.append(storages.LIMITATION)
    found += latency_study.limitations(history)
    together = max((arm.concurrency for arm in history.arms.values()), default=0)
    if not any(arm.engines for arm in history.arms.values()):
        pass  # no schedule was seen, so neither can be said
    elif together <= 1:
        found.append("No two requests were ever in one step: nothing is shown about concurrency.")
    else:
        found.append(f"Up to {together} requests were in one step: nothing is shown about more, or other company.")
    control = history.arms.get(CONTROL)
    if control is not None and control.imported_from is not None:
        source = control.imported_from[:12]
        found.append(f"The control was recorded earlier (seal {source}): this is no new run of two arms.")
    if history.fault is not None:
        found.append(f"Fault {history.fault} was injected: the run belongs in no rate and no performance figure.")
    return found


def _hidden_fault(history: History, results: list[CheckResult], required: list[str]) -> list[str]:
    """A fault run is there to fail: one that does not shows that nothing would have caught the fault.

    Where evidence itself was damaged a check cannot fail; that it cannot tell is then what shows.
    """
    needed = [result for result in results if result.check in required]
    if history.fault is None or any(result.verdict is Verdict.FAIL for result in needed):
        return []
    if unsure := [result.check for result in needed if result.verdict is Verdict.UNKNOWN]:
        return [f"Fault {history.fault} was injected: no required check failed, unknown are {', '.join(unsure)}."]
    return [f"Fault {history.fault} was injected and did not show: no required check failed."]


BOUNDARY_V1 = "boundary-v1"
BOUNDARY_INSTRUMENTED_V1 = "boundary-instrumented-v1"
BOUNDARY_SNAPSHOT_V1 = "boundary-snapshot-v1"
LOCAL_HIT_V1 = "local-hit-v1"
SHARED_PREFIX_V1 = "shared-prefix-v1"
PRESSURE_V1 = "pressure-v1"
CONVERSATION_V1 = "conversation-v1"
CACHEABILITY_V1 = "cacheability-v1"
LATENCY_V1 = "latency-v1"
LATENCY_SIDE_V1 = "latency-side-v1"
PROBE_V1 = "probe-v1"
MARKER_FROZEN_V1 = Rule.FROZEN.value
MARKER_POST_STOP_V1 = Rule.POST_STOP.value


def _foundations(analyzer_id: str) -> dict[str, Check]:
    """What must hold before anything else means something."""
    return {
        integrity.CHECK: integrity.integrity,
        coverage.CHECK: coverage.coverage,
        PLAN_IDENTITY: lambda history: plan_identity(history, Running(analyzer_id, source_sha256(analyzer_id))),
        settings.CHECK: settings.settings,
        controls.CHECK: controls.controls,
        topology.CHECK: topology.topology,
        environment.CHECK: environment.environment,
        storages.CHECK: storages.storages,
        reference.CHECK: reference.reference,
    }


def _boundary_checks(analyzer_id: str) -> dict[str, Check]:
    return {
        **_foundations(analyzer_id),
        geometry.CHECK: geometry.geometry,
        equality.PAIRED: equality.paired_equality,
        equality.RELOAD: equality.reload_equality,
        BOUNDARY: boundary,
        transfers.CHECK: transfers.transfers,
        counters.CHECK: counters.preemptions,
        continuation.EOS_ABSENT: continuation.eos_absent,
        continuation.NON_VACUITY: continuation.non_vacuity,
        equality.CONTROLS: equality.controls_equal,
        **_BESIDE,
        **_REPEATED,
    }


def _latency_checks(analyzer_id: str) -> dict[str, Check]:
    return {
        **_foundations(analyzer_id),
        latency.OUTPUTS: latency.outputs,
        latency.INSTRUMENTS: latency.instruments,
        latency.SERIAL: latency.serial,
        latency.TIMES: latency.times,
        latency_reuse.PATHS: latency_reuse.paths,
        latency_reuse.RELOADS: latency_reuse.reloaded,
        BOUNDARY: boundary,
        counters.CHECK: counters.preemptions,
        **_BESIDE,
        **_REPEATED,
    }


def _latency_side_checks(analyzer_id: str) -> dict[str, Check]:
    """Those of a latency study, over as many engines with a cache as take turns."""
    instead: dict[str, tuple[str, Check]] = {
        latency.SERIAL: (latency_side.TURNS, latency_side.turns_taken),
        latency_reuse.RELOADS: (latency_side.RELOADS, latency_side.reloaded),
        BOUNDARY: (latency_side.BOUNDARY, latency_side.boundaries),
    }
    checks = _latency_checks(analyzer_id)
    return dict(instead.get(check_id, (check_id, check)) for check_id, check in checks.items())


def _local_hit_checks(analyzer_id: str) -> dict[str, Check]:
    return {
        **_foundations(analyzer_id),
        local_hit.BLOCK_SIZE: local_hit.block_size,
        local_hit.EQUALITY: local_hit.local_equality,
        local_hit.HITS: local_hit.local_hits,
        counters.CHECK: counters.preemptions,
        continuation.EOS_ABSENT: continuation.eos_absent,
        continuation.NON_VACUITY: local_hit.non_vacuity,
        **_REPEATED,
    }


def _probe_checks(analyzer_id: str) -> dict[str, Check]:
    """Of a server of which nothing is seen but its API and its counters."""
    return {
        integrity.CHECK: integrity.integrity,
        probe_reuse.WHOLE: lambda history: probe_reuse.whole(history, (analyzer_id, source_sha256(analyzer_id))),
        probe_reuse.REUSE: probe_reuse.reuse,
        probe_equality.FLOOR: probe_equality.floor,
        probe_equality.CHECK: probe_equality.equality,
        probe_usage.BOUNDARY: probe_usage.boundary,
        probe_usage.USAGE: probe_usage.usage,
        probe_reuse.RELOAD: probe_reuse.reload,
    }


def _cold_equality(history: History) -> CheckResult:
    return scenario.cold_equality(history, provenance.impossible(history), unlike=sources.unlike_sources(history))


def _shared_prefix_checks(analyzer_id: str) -> dict[str, Check]:
    return {
        **_foundations(analyzer_id),
        scenario.COLD_EQUALITY: _cold_equality,
        provenance.CHECK: provenance.provenance,
        paths.CHECK: paths.paths,
        reuse.CHECK: reuse.transfers,
        counters.CHECK: counters.preemptions_shown,
        continuation.EOS_ABSENT: continuation.eos_absent,
        continuation.NON_VACUITY: paths.non_vacuity,
        **_REUSE,
        **_PAGE_CHECKS,
        poison.CHECK: poison.poison_as_planned,
        **_BESIDE,
    }


def _floor_equality(history: History) -> CheckResult:
    return floor.floor_equality(history, provenance.impossible(history))


def _floor_checks(analyzer_id: str) -> dict[str, Check]:
    """Those of shared prefixes, but outputs may part from cold where company alone explains it, which is no pass."""
    checks = {floor.FLOOR: floor.floor, floor.EQUALITY: _floor_equality, **_shared_prefix_checks(analyzer_id)}
    del checks[scenario.COLD_EQUALITY]
    return checks


def _pressure_checks(analyzer_id: str) -> dict[str, Check]:
    needed: dict[str, Check] = {counters.CHECK: counters.preemptions_needed, resumptions.CHECK: resumptions.resumptions}
    return _floor_checks(analyzer_id) | needed


def _conversation_checks(analyzer_id: str) -> dict[str, Check]:
    return _floor_checks(analyzer_id) | {turns.CHECK: turns.turns}


def _cacheability_checks(analyzer_id: str) -> dict[str, Check]:
    return _shared_prefix_checks(analyzer_id) | {hit_length.CHECK: hit_length.hit_length}


def _marker_analyzer(rule: Rule, table: each.Table) -> Analyzer:
    return Analyzer(
        rule.value,
        marker_checks.marker_checks(rule, _foundations(rule.value)),
        table,
        two_arms=False,
        conditional=(*_WHERE_IT_COMES_UP, *marker_checks.WHERE_IT_COMES_UP),
        reported=marker_checks.REPORTED,
        traces=True,
    )


_BESIDE: dict[str, Check] = {beside.INTERVENTION: beside.intervention, beside.SERVICES: beside.services}
_REPEATED: dict[str, Check] = {
    repetitions.CHECK: repetitions.repetitions,
    equality.REPETITION: equality.repetition_equality,
}
_REUSE: dict[str, Check] = {
    steps.CHECK: steps.steps,
    cacheability.CHECK: cacheability.cacheability,
    ranks.CHECK: ranks.ranks,
    resets.CHECK: resets.resets,
    queries.CHECK: queries.queries,
    failures.CHECK: failures.failures,
}
_PAGE_CHECKS: dict[str, Check] = {
    layout.CHECK: layout.layout,
    pages.CHECK: pages.page_bytes,
    page_coverage.CHECK: page_coverage.page_coverage,
    poison.CHECK: poison.poison,
    completion.CHECK: completion.save_completion,
    prefix_identity.CHECK: prefix_identity.prefix_identity,
}
"""Of the bytes themselves. None stands for another (requirement 41)."""

_WHERE_A_SCENARIO_MEETS_IT = (*_WHERE_IT_COMES_UP, poison.CHECK, cacheability.CHECK, ranks.CHECK, resets.CHECK)

ANALYZERS: dict[str, Analyzer] = {
    BOUNDARY_V1: Analyzer(BOUNDARY_V1, _boundary_checks(BOUNDARY_V1)),
    BOUNDARY_INSTRUMENTED_V1: Analyzer(
        BOUNDARY_INSTRUMENTED_V1, _boundary_checks(BOUNDARY_INSTRUMENTED_V1) | _PAGE_CHECKS
    ),
    # Of an engine that makes restored tensors anew: there is nothing to poison, and no neighbour to guard.
    BOUNDARY_SNAPSHOT_V1: Analyzer(
        BOUNDARY_SNAPSHOT_V1,
        _boundary_checks(BOUNDARY_SNAPSHOT_V1)
        | {name: check for name, check in _PAGE_CHECKS.items() if name != poison.CHECK},
    ),
    SHARED_PREFIX_V1: Analyzer(
        SHARED_PREFIX_V1,
        _shared_prefix_checks(SHARED_PREFIX_V1),
        scenario.scenario_table,
        conditional=_WHERE_A_SCENARIO_MEETS_IT,
    ),
    PRESSURE_V1: Analyzer(
        PRESSURE_V1, _pressure_checks(PRESSURE_V1), floor.floor_table, conditional=_WHERE_A_SCENARIO_MEETS_IT
    ),
    CONVERSATION_V1: Analyzer(
        CONVERSATION_V1,
        _conversation_checks(CONVERSATION_V1),
        floor.floor_table,
        conditional=_WHERE_A_SCENARIO_MEETS_IT,
    ),
    CACHEABILITY_V1: Analyzer(
        CACHEABILITY_V1,
        _cacheability_checks(CACHEABILITY_V1),
        scenario.scenario_table,
        conditional=tuple(check for check in _WHERE_A_SCENARIO_MEETS_IT if check != cacheability.CHECK),
    ),
    LOCAL_HIT_V1: Analyzer(LOCAL_HIT_V1, _local_hit_checks(LOCAL_HIT_V1), local_hit.repeat_table, two_arms=False),
    LATENCY_V1: Analyzer(LATENCY_V1, _latency_checks(LATENCY_V1), latency_table.latency_table),
    LATENCY_SIDE_V1: Analyzer(LATENCY_SIDE_V1, _latency_side_checks(LATENCY_SIDE_V1), latency_side.side_table),
    PROBE_V1: Analyzer(
        PROBE_V1,
        _probe_checks(PROBE_V1),
        probe_table.probe_table,
        two_arms=False,
        conditional=(*_WHERE_IT_COMES_UP, probe_usage.BOUNDARY, probe_usage.USAGE, probe_reuse.RELOAD),
        reported=(probe_equality.FLOOR,),
    ),
    MARKER_FROZEN_V1: _marker_analyzer(Rule.FROZEN, marker_table.frozen_table),
    MARKER_POST_STOP_V1: _marker_analyzer(Rule.POST_STOP, marker_table.post_stop_table),
}
