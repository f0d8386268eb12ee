"""``custody-v1``: the judgement on a swap, on two axes, from its records alone.

The swap is judged, not the candidate: the probe's own verdict stands beside. A new rule is a new analyzer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from pydantic import BaseModel, ConfigDict

from samestate.checks import (
    custody_composition,
    custody_fields,
    custody_probe,
    custody_smokes,
    custody_steps,
    custody_window,
)
from samestate.checks.base import CheckResult, Verdict
from samestate.checks.custody_history import CustodyHistory
from samestate.checks.verdicts import conclude, unknown
from samestate.evidence import custody_records as c
from samestate.evidence.canonical import sha256_hex

ANALYZER = "custody-v1"
CustodyCheck = Callable[[CustodyHistory], CheckResult]
OPERATIONAL: Mapping[str, CustodyCheck] = MappingProxyType(
    {
        custody_window.JOURNAL: custody_window.journal,
        custody_steps.STEPS: custody_steps.steps,
        custody_fields.REQUIRED: custody_fields.required,
        custody_fields.RESTORED: custody_fields.restored,
        custody_fields.UNPATCHED: custody_fields.unpatched,
        custody_fields.ROUTER: custody_fields.router,
        custody_fields.ROUTER_BYTES: custody_fields.router_bytes,
        custody_composition.COMPOSITION: custody_composition.composition,
        custody_probe.PROBE: custody_probe.probe,
        custody_window.IDLE: custody_window.idle,
        custody_window.ROUTE: custody_window.route,
        custody_window.MEMORY: custody_window.memory,
        custody_window.OOM: custody_window.oom,
    }
)
FUNCTIONAL: Mapping[str, CustodyCheck] = MappingProxyType({custody_smokes.SMOKES: custody_smokes.smokes})
NOT_SHOWN = (
    "No promotion, quality ranking, capacity or performance claim follows: the candidate stays held.",
    "Smokes are single requests, no population; a pass is no quality.",
    "Fields that the spec does not name, and what a device holds, were not compared.",
    "A candidate's files were read where its spec, its plan or its command line says; what it loaded was not seen.",
)
_CLAIMS: Mapping[str, str] = MappingProxyType(
    {
        custody_fields.RESTORED: "exact restoration of the incumbent",
        custody_fields.ROUTER: "the router is as it was",
        custody_fields.ROUTER_BYTES: "parity of the router's configuration bytes",
        custody_fields.UNPATCHED: "no diagnostic patch is left",
        custody_smokes.SMOKES: "functional acceptance of the restoration",
        custody_window.OOM: "no OOM kill in the window",
        custody_window.MEMORY: "least available host memory over the window",
    }
)
"""What a pass of a check lets one claim."""


class Probe(BaseModel):
    """What the probe came to, by its own analyzer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    plan: str
    verdict: str | None
    """None: it did not come to one."""
    seal_sha256: str | None
    checks: dict[str, str]
    error: str | None


class CustodyJudgement(BaseModel):
    """The verdict on a swap and everything that it rests on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    analyzer: str
    analyzer_sha256: str
    swap: str | None
    verdict: Verdict
    operational: Verdict
    functional: Verdict
    disposition: Literal["held"]
    incumbent: str
    """As the tool left it: ``restored``, ``untouched``, ``not restored``, ``unfinished``."""
    resumed: int
    probe: Probe | None
    results: list[CheckResult]
    claims: list[str]
    suppressed: list[str]
    """Claims that the records do not carry."""
    not_shown: list[str]


def judge_custody(folder: Path) -> CustodyJudgement:
    """Judge the records of a swap. Never raises for what lies in `folder`."""
    history = CustodyHistory.read(folder)
    results = {name: _run(name, check, history) for name, check in [*OPERATIONAL.items(), *FUNCTIONAL.items()]}
    operational = _axis([results[name] for name in OPERATIONAL])
    functional = _axis([results[name] for name in FUNCTIONAL])
    ended = history.all(c.SwapEnded)
    carried = [name for name in _CLAIMS if results[name].verdict is Verdict.PASS]
    whole = results[custody_window.JOURNAL].verdict is Verdict.PASS
    return CustodyJudgement(
        analyzer=ANALYZER,
        analyzer_sha256=source_sha256(),
        swap=history.started.swap if history.started else None,
        verdict=_both(operational, functional),
        operational=operational,
        functional=functional,
        disposition="held",
        incumbent=ended[-1].rec.incumbent if ended else "unfinished",
        resumed=len(history.resumptions),
        probe=_probe(history, results[custody_probe.PROBE]),
        results=list(results.values()),
        claims=[_claim(name, history) for name in carried if whole],
        suppressed=[claim for name, claim in _CLAIMS.items() if not (whole and name in carried)],
        not_shown=list(NOT_SHOWN),
    )


def _claim(name: str, history: CustodyHistory) -> str:
    """What a pass lets one claim, with what it leaves out."""
    return _CLAIMS[name] + (custody_fields.reservation(history) if name == custody_fields.RESTORED else "")


def failing(folder: Path, check: str) -> list[str]:
    """Messages of what `check` has against the records so far: contrary evidence, and nothing that is only missing."""
    checks = {**OPERATIONAL, **FUNCTIONAL}
    result = _run(check, checks[check], CustodyHistory.read(folder))
    return [finding.message for finding in result.findings if finding.verdict is Verdict.FAIL]


@cache
def source_sha256() -> str:
    """Of the sources that decide."""
    lines = []
    for package, wanted in (("samestate.checks", "custody_"), ("samestate.evidence", "custody_")):
        for file in sorted(files(package).iterdir(), key=lambda one: one.name):
            if file.name.startswith(wanted) or file.name in ("base.py", "verdicts.py", "canonical.py"):
                lines.append(f"{sha256_hex(file.read_bytes())}  {package}/{file.name}")
    return sha256_hex("\n".join(lines).encode())


def _run(name: str, check: CustodyCheck, history: CustodyHistory) -> CheckResult:
    """Never raises; a pass over nothing is unknown."""
    try:
        result = check(history)
    except Exception as error:  # a broken checker must not decide a swap
        crashed = unknown("checker_crashed", f"{name} crashed: {type(error).__name__}: {error}")
        return conclude(name, [crashed], unit="evidence", examined=0, summary=crashed.message)
    if result.verdict is Verdict.PASS and result.examined <= 0:
        empty = unknown("nothing_examined", f"{name} found no {result.unit} to examine")
        return result.model_copy(update={"verdict": Verdict.UNKNOWN, "findings": [*result.findings, empty]})
    return result


def _axis(results: list[CheckResult]) -> Verdict:
    """Any fail, else any unknown, else a pass where anything passed."""
    seen = {result.verdict for result in results}
    return next((one for one in (Verdict.FAIL, Verdict.UNKNOWN, Verdict.PASS) if one in seen), Verdict.NOT_EXERCISED)


def _both(operational: Verdict, functional: Verdict) -> Verdict:
    if Verdict.FAIL in (operational, functional):
        return Verdict.FAIL
    return Verdict.PASS if operational is functional is Verdict.PASS else Verdict.UNKNOWN


def _probe(history: CustodyHistory, archive: CheckResult) -> Probe | None:
    """The last probe's; a verdict whose archive is not the one that was sealed is none."""
    ended = history.all(c.ProbeEnded)
    if ended:
        rec = ended[-1].rec
        if archive.verdict is Verdict.UNKNOWN:
            why = archive.findings[0].message
            return Probe(plan=rec.plan, verdict=None, seal_sha256=rec.seal_sha256, checks={}, error=why)
        return Probe(
            plan=rec.plan, verdict=rec.verdict, seal_sha256=rec.seal_sha256, checks=rec.checks, error=rec.error
        )
    if history.started is None or history.started.probe is None:
        return None
    return Probe(plan=history.started.probe, verdict=None, seal_sha256=None, checks={}, error="it did not run")
