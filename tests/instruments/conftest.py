"""All drills on one engine, and what the product's own analyzer makes of them: one candidate, one control."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from quiet import Silent
from samestate.checks.analyzers import judge, source_sha256
from samestate.checks.base import CheckResult, Finding
from samestate.engines.vllm import VllmEngine
from samestate.evidence.archive import Archive
from samestate.lab.run import RunRequest, run_plan
from samestate.plans.drills import DRILLS, drill_plan
from samestate.plans.load import freeze


class Drilled(NamedTuple):
    """A sealed run of drills, judged."""

    archive: Archive
    armed: dict[str, str | None]
    """By operation."""
    owners: dict[str, str]
    """Prompt -> fault."""
    results: dict[str, CheckResult]
    """By check."""
    findings: dict[str, list[tuple[str, Finding]]]
    """By operation: (check, finding). Under the empty name those that point at no operation."""

    def owner(self, op: str) -> str | None:
        """The fault whose drill a generation belongs to; None for a reset."""
        return self.owners.get(op.rpartition(".")[0])

    def operations(self, fault: str, *, armed: bool) -> list[str]:
        """The generations of a fault's drill, with it armed or without."""
        return [op for op, name in self.armed.items() if self.owner(op) == fault and (name is not None) is armed]


def drill(out: Path, model: Path, faults: Iterable[str]) -> Drilled:
    """Run the drills of these faults on a real engine."""
    drills = drill_plan(faults)
    plan = freeze(drills.plan, source_sha256(drills.plan.analyzer.id))
    request = RunRequest(
        plan=plan,
        model=model,
        out=out,
        make_engine=VllmEngine,
        fault=None,
        control=None,
        reference=None,
        serve_args=plan.engine.serve_args,
        armed=drills.armed,
    )
    archive = Archive.open(run_plan(request, Silent()).archive)
    results = {result.check: result for result in judge(archive).results}
    findings: dict[str, list[tuple[str, Finding]]] = {}
    for check, result in results.items():
        for finding in result.findings:
            findings.setdefault(finding.place.op or "", []).append((check, finding))
    return Drilled(archive, drills.armed, drills.owners, results, findings)


@pytest.fixture(scope="session")
def drilled(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Drilled:
    """Every fault that one rank shows."""
    return drill(tmp_path_factory.mktemp("drills") / "archive", tiny_model, DRILLS)
