"""Claims: sentences that somebody means to publish, held against what archives can carry.

A lint, not a judge: it refuses the claims that evidence of this kind cannot carry, by a rule with a remedy. What it
lets through may still be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from samestate.checks import coverage, integrity, layout, poison, transfers
from samestate.checks.analyzers import Judgement
from samestate.checks.base import CheckResult, Verdict
from samestate.checks.claim import ATTRIBUTIONS, DIGESTS, Claim, Kind, Said, by_words, device_read
from samestate.checks.history import History, MissingEvidence
from samestate.evidence.archive import Archive
from samestate.evidence.places import read_place
from samestate.evidence.records import (
    GuardsChecked,
    OperationEnded,
    OperationStarted,
    PagesDigested,
    PagesPoisoned,
)
from samestate.plans.errors import quoted

ARCHIVED = "candidate_vs_archived"
BYTES = DIGESTS | {transfers.CHECK}
"""Checks that count or compare bytes, and measure no time."""
_PAGE_ROWS = DIGESTS | {poison.CHECK}
"""Checks that compare rows of pages with each other."""


class Basis(NamedTuple):
    """What one result rests on."""

    check: str
    unit: str
    """Unit of analysis: ``comparisons``, ``records``, …"""
    examined: int
    independence: Literal["recomputed"]
    """Recomputed from records; a second implementation of the engine would be ``reimplemented``, and there is none."""
    kind: Literal["live", "recorded"]
    """``recorded``: the control was recorded earlier, so that this is no new run of both sides."""
    evidence: list[str]
    """Records that its findings cite."""


def bases(judgement: Judgement) -> list[Basis]:
    """What each result of a judgement rests on, in its order."""
    return [_basis(judgement, result) for result in judgement.results]


def _basis(judgement: Judgement, result: CheckResult) -> Basis:
    evidence = list(dict.fromkeys(where for finding in result.findings for where in finding.evidence))
    kind: Literal["live", "recorded"] = "recorded" if judgement.comparison_kind == ARCHIVED else "live"
    return Basis(result.check, result.unit, result.examined, "recomputed", kind, evidence)


class Evidence(NamedTuple):
    """One archive, judged."""

    archive: Archive
    judgement: Judgement
    history: History


CARRIES: Mapping[Kind, frozenset[str]] = {
    Kind.EQUALITY: frozenset(
        {"paired-equality", "reload-equality", "controls-equal", "local-equality", "cold-equality"}
    ),
    Kind.BOUNDARY: frozenset({"boundary", "prefix-identity", "provenance", "local-hits"}),
    Kind.TRANSFER: frozenset({"transfers", "save-completion", "page-coverage", "paths"}),
    Kind.BYTES: DIGESTS,
    Kind.COVERAGE: frozenset({coverage.CHECK, "probes"}),
    Kind.ATTRIBUTION: ATTRIBUTIONS,
}
"""Of each kind: the checks of which a claim needs one."""


class Refusal(NamedTuple):
    """A claim that its evidence cannot carry."""

    claim: str
    rule: str
    why: str
    remedy: str


def lint(claims: list[Claim], given: Mapping[str, Evidence]) -> list[Refusal]:
    """Every claim that its evidence cannot carry, by rule. `given`: seal hash -> archive."""
    return [Refusal(claim.id, rule, why, remedy) for claim in claims for rule, why, remedy in _refusals(claim, given)]


def _refusals(claim: Claim, given: Mapping[str, Evidence]) -> Said:
    evidence = _find(claim.archive, given)
    if evidence is None:
        yield (
            "no-such-archive",
            f"no archive given has a seal that begins with {claim.archive}",
            "name it with --archive",
        )
        return
    if not claim.checks and not claim.records:
        yield "no-evidence", "names neither a check nor a record", "name what carries it"
        return
    results = {result.check: result for result in evidence.judgement.results}
    cited = [results[check] for check in claim.checks if check in results]
    for check in claim.checks:
        if check not in results:
            yield "no-such-check", f"the judgement has no check {check!r}", f"name one of: {', '.join(results)}"
    records = {where: _record(evidence.archive, where) for where in claim.records}
    for where, record in records.items():
        if record is None:
            remedy = "name it as arms/ARM/PROCESS.jsonl:LINE, lines from 1"
            yield "no-such-record", f"the archive has no record at {quoted(where)}", remedy
    if results[integrity.CHECK].verdict is not Verdict.PASS:
        yield "not-whole", "the archive is not whole and undamaged", "claim nothing from it"
    yield from by_words(claim, cited, recorded=evidence.judgement.comparison_kind == ARCHIVED)
    yield from _by_verdict(claim, evidence, cited)
    yield from _device(claim, records)
    match claim.kind:
        case Kind.LATENCY:
            yield from _latency(claim, evidence, records)
        case Kind.CAUSE:
            yield from _cause(claim, evidence, given, cited)
        case Kind.ADDRESSING:
            yield from _addressing(claim)
        case kind if kind in CARRIES and not CARRIES[kind] & set(claim.checks):
            yield "kind-without-check", f"a claim of {kind} rests on no check of that", _one_of(CARRIES[kind], results)


def _find(seal: str, given: Mapping[str, Evidence]) -> Evidence | None:
    found = [evidence for sha256, evidence in given.items() if sha256.startswith(seal)]
    return found[0] if len(found) == 1 else None


def _one_of(checks: frozenset[str], known: Mapping[str, CheckResult]) -> str:
    there = sorted(checks & known.keys())
    return f"cite one of: {', '.join(there)}" if there else "this archive has no check that could carry it"


def _record(archive: Archive, where: str) -> Any:
    """The record at a place; None: there is none."""
    place = read_place(where)
    parts = place.file.split("/") if place is not None else []
    if place is None or len(parts) != 3 or parts[0] != "arms" or not parts[2].endswith(".jsonl"):
        return None
    lines = archive.records(parts[1], parts[2].removesuffix(".jsonl"))
    return next((one.rec for one in lines if one.n == place.line), None)


def _by_verdict(claim: Claim, evidence: Evidence, cited: list[CheckResult]) -> Said:
    verdicts = {result.verdict for result in cited}
    if claim.kind is Kind.FAILURE:
        if Verdict.FAIL not in verdicts:
            yield "no-failure", "claims a failure; no cited check fails", "cite the check that fails"
        return
    if claim.kind is Kind.CAUSE:
        return
    for result in cited:
        if result.verdict is not Verdict.PASS:
            yield (
                "not-passed",
                f"rests on {result.check}, which is {result.verdict}",
                "claim a failure, or drop it",
            )
    if evidence.judgement.fault is not None:
        yield (
            "fault-run",
            f"fault {evidence.judgement.fault} was injected",
            "claim a failure or a cause from it",
        )


def _latency(claim: Claim, evidence: Evidence, records: Mapping[str, Any]) -> Said:
    if moved := sorted(BYTES & set(claim.checks)):
        yield "latency-from-bytes", f"rests on {moved[0]}, which counts bytes", "cite records of time, no byte counts"
    if not evidence.judgement.performance_eligible:
        yield (
            "latency-not-eligible",
            "no time of this run is a measurement",
            "measure without audit and fault",
        )
    started = {rec.op for rec in records.values() if isinstance(rec, OperationStarted)}
    ended = {rec.op for rec in records.values() if isinstance(rec, OperationEnded)}
    if not started & ended:
        remedy = "cite operation_started and operation_ended of the same operations"
        yield "latency-not-timed", "cites no beginning and end of one operation", remedy


def _device(claim: Claim, records: Mapping[str, Any]) -> Said:
    """Page rows are what was recorded as pages moved, in a live run too: a judgement reads no device (requirement 42).

    Parameters and buffers (`storages`) are read from the device: a claim on those cites no pages.
    """
    rows = any(isinstance(rec, PagesDigested | PagesPoisoned | GuardsChecked) for rec in records.values())
    if not rows and not _PAGE_ROWS & set(claim.checks):
        return
    if said := device_read(claim.text):
        yield (
            "device-from-page-rows",
            f"says {said!r}, and rests on recorded page rows: no device memory was read again",
            "say that recorded digests of pages were compared",
        )


def _addressing(claim: Claim) -> Said:
    lacking = sorted({layout.CHECK, poison.CHECK} - set(claim.checks))
    if not lacking:
        return
    if DIGESTS & set(claim.checks):
        why = "takes equal digests for correct addressing"
    else:
        why = "rests on nothing that looks at addresses"
    yield "addressing-from-digests", why, f"cite {' and '.join(lacking)} too: where pages lie, and which were written"


def _cause(claim: Claim, evidence: Evidence, given: Mapping[str, Evidence], cited: list[CheckResult]) -> Said:
    other = _find(claim.ablation, given) if claim.ablation else None
    if other is None or other.judgement.seal_sha256 == evidence.judgement.seal_sha256:
        remedy = "run without it, and name that archive as ablation and with --archive"
        yield "cause-without-ablation", "names no other archive in which the cause is absent", remedy
        return
    there = {result.check: result.verdict for result in other.judgement.results}
    decided = {Verdict.PASS, Verdict.FAIL}
    if not any({result.verdict, there.get(result.check)} == decided for result in cited):
        yield "no-contrast", "no cited check passes in one archive and fails in the other", "cite one that does"
    differing = _differing(evidence.history, other.history)
    if len(differing) != 1:
        said = ", ".join(differing) or "nothing"
        yield "joint-intervention", f"the two runs differ in {said}", "change exactly one thing between them"


def _differing(one: History, other: History) -> list[str]:
    """Controls in which two runs differ: plan, model, versions, fault."""
    left, right = _controls(one), _controls(other)
    return sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))


def _controls(history: History) -> dict[str, Any]:
    controls: dict[str, Any] = {"fault": history.fault}
    try:
        plan, resolved = history.plan, history.resolved
    except MissingEvidence as missing:
        return {"fault": history.fault, missing.code: id(history)}
    done = plan.model_dump(mode="json", exclude=_WORDS)
    _flatten("plan", done, controls)
    controls |= {"model": resolved.model.sha256, "checkpoint_interval": resolved.checkpoint_interval}
    for arm in history.arms.values():
        for seen in arm.engines[:1]:
            _flatten(f"versions.{arm.name}", seen.rec.versions, controls)
            for one in seen.rec.controls or []:
                # One control is one thing, in however many arms it is on.
                controls.setdefault(f"controls.{one.name}", {})[arm.name] = (one.on, one.sha256)
    return controls


_WORDS = {"name", "title", "question", "scope", "not_shown", "analyzer", "required_checks", "control_from"}
"""Fields of a plan that change nothing in what is run."""


def _flatten(path: str, value: Any, into: dict[str, Any]) -> None:
    match value:
        case dict():
            for name, item in value.items():
                _flatten(f"{path}.{name}", item, into)
        case list() if value and all(isinstance(item, dict) and "name" in item for item in value):
            for item in value:
                _flatten(f"{path}.{item['name']}", item, into)
        case _:
            into[path] = value
