"""Faults in a running vLLM: one control and one candidate for all of them, and two more where ranks are needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from samestate.checks.analyzers import judge
from samestate.cli.failures import Failure
from samestate.cli.outcomes import Fired, Outcome, failures
from samestate.cli.plan import frozen
from samestate.cli.run import engine_maker, model_folder
from samestate.evidence.archive import Archive
from samestate.evidence.records import OperationEnded, OperationStarted
from samestate.faults.catalogue import Fault
from samestate.lab.run import Progress, RunError
from samestate.lab.zoo import in_turn
from samestate.plans.drills import CLEAN, RANK_DRILLS, DrillPlan, drill_plan
from samestate.plans.scenarios import CANDIDATE

ENGINE = "vllm"


def run_live(chosen: Sequence[Fault], folder: Path, progress: Progress) -> tuple[list[Outcome], list[str], int]:
    """Outcomes in the order of `chosen`, what was said of clean prompts, and how many clean generations there were."""
    outcomes: dict[str, Outcome] = {}
    alarms: list[str] = []
    clean = 0
    for name, drilled in (
        ("one-rank", [fault for fault in chosen if fault.name not in RANK_DRILLS]),
        ("two-ranks", [fault for fault in chosen if fault.name in RANK_DRILLS]),
    ):
        if not drilled:
            continue
        drills = drill_plan(fault.name for fault in drilled)
        archive = _run(drills, folder / name, progress)
        fired, seconds = failures(judge(archive)), _seconds(archive, drills)
        clean += sum(op.partition(".")[0].endswith(f"-{CLEAN}") for op in drills.armed)
        alarms += _alarms(fired, drills)
        for fault in drilled:
            mine = [one for one in fired if _owner(one, drills) == fault.name]
            outcomes[fault.name] = Outcome(fault, name, mine, seconds.get(fault.name, 0.0))
    return [outcomes[fault.name] for fault in chosen], alarms, clean


def _run(drills: DrillPlan, out: Path, progress: Progress) -> Archive:
    plan = frozen(drills.plan)
    model = model_folder(plan, None)
    try:
        root = in_turn(plan, drills.armed, model, out, engine_maker(ENGINE), progress, engine=ENGINE)
    except RunError as error:
        raise Failure(str(error), error.log_tail) from None
    return Archive.open(root)


def _owner(one: Fired, drills: DrillPlan) -> str | None:
    """The fault whose prompt a finding names; None for a clean prompt, and for one that names none."""
    case = one.finding.place.case or ""
    return None if case.endswith(f"-{CLEAN}") else drills.owners.get(case)


def _alarms(fired: Sequence[Fired], drills: DrillPlan) -> Iterator[str]:
    for one in fired:
        case = one.finding.place.case or ""
        if case.endswith(f"-{CLEAN}") or case not in drills.owners:
            yield f"{one.check}: {one.finding.message}"


def _seconds(archive: Archive, drills: DrillPlan) -> dict[str, float]:
    """How long each fault's operations took in the candidate."""
    spans: dict[str, list[int]] = {}
    started: dict[str, str] = {}
    for line in archive.records(CANDIDATE, "client"):
        if isinstance(line.rec, OperationStarted):
            started[line.rec.op] = line.rec.case
        if isinstance(line.rec, OperationStarted | OperationEnded):
            owner = drills.owners.get(started.get(line.rec.op, ""))
            if owner is not None:
                spans.setdefault(owner, []).append(line.t_ns)
    return {owner: (max(times) - min(times)) / 1e9 for owner, times in spans.items()}
