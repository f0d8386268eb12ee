"""Scenarios on the simulated engine, taken apart into their records, so that a test can spoil one thing."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from quiet import Silent
from samestate.checks.analyzers import source_sha256
from samestate.engines.sim import SimEngine
from samestate.evidence import records as r
from samestate.evidence.archive import Archive
from samestate.evidence.records import EngineStarted
from samestate.lab.run import RunRequest, run_plan
from samestate.plans.load import freeze, load
from samestate.plans.model import ArmPlan, Plan, PromptPlan, ResolvedPlan, StepPlan

from . import builder as b

C = 400
"""Above what the template needs."""
TRUNK, ONE = 3 * C + 7, C + 9
RESET = StepPlan(reset=True)


class Outliving(SimEngine):
    """Its tier is found by every engine made from the same subclass."""

    def start(self) -> EngineStarted:
        started = super().start()
        if self._connected:
            if not hasattr(type(self), "shared"):
                type(self).shared = self._tier  # type: ignore[attr-defined]
            self._tier = type(self).shared  # type: ignore[attr-defined]
        return started


def step(*prompts: str, path: str = "any", salt: str | None = None, arm: str = "candidate") -> StepPlan:
    return StepPlan.model_validate({"prompts": list(prompts), "path": path, "salt": salt, "arm": arm})


def reset(arm: str) -> StepPlan:
    return StepPlan(reset=True, arm=arm)


TOUR = [
    step("trunk", path="cold"),
    RESET,
    step("trunk", path="external"),
    step("trunk", path="local"),
    RESET,
    step("one"),
    RESET,
    step("one", path="external"),
    step("trunk", path="mixed"),
    RESET,
    step("trunk", salt="another", path="cold"),
    RESET,
    step("trunk", salt="another", path="external"),
    RESET,
    step("trunk", "one", path="external"),
]
"""All four paths, a salt and a batch. ``one`` is cold the first time: the trunk's only state is that of [0, 3C)."""

RELAY = [
    step("trunk", path="cold"),
    RESET,
    step("trunk", path="external"),
    step("trunk", path="external", arm="candidate-2"),
    reset("candidate-2"),
    step("one", arm="candidate-2"),
    step("one", path="external", arm="candidate-3"),
    reset("candidate-3"),
    step("trunk", path="external", arm="candidate-3"),
]
"""Three engines after each other, for `relay`."""


def small(scenario: list[StepPlan] | None = None, **settings: Any) -> Plan:
    """The shipped plan with two prompts, `ONE` of which shares C+5 tokens with the `TRUNK`, and eight output tokens."""
    plan = load("shared-prefix")
    engine = plan.engine.model_copy(
        update={"settings": {**plan.engine.settings, "block_size": C, "max_num_seqs": 1, **settings}}
    )
    prompts = [
        PromptPlan(name="trunk", tokens="3C+7"),
        PromptPlan(name="one", tokens="C+9", shares="trunk", shared="C+5"),
    ]
    update = {"engine": engine, "prompts": prompts, "scenario": scenario or TOUR, "output_tokens": 8}
    return plan.model_copy(update=update)


def relay(follows: bool = True) -> Plan:
    """`RELAY` over three arms that follow one another, or do not."""
    plan = small(RELAY)
    later = [
        ArmPlan(name=name, connector="native", follows=before if follows else None)
        for before, name in (("candidate", "candidate-2"), ("candidate-2", "candidate-3"))
    ]
    return plan.model_copy(update={"arms": [*plan.arms, *later]})


def sealed(plan: Plan, folder: Path, engine: type[SimEngine] = SimEngine, fault: str | None = None) -> Archive:
    """A run of `plan` on the simulated engine."""
    plan = freeze(plan, source_sha256(plan.analyzer.id))
    model = folder / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    request = RunRequest(plan, model, folder / "recorded", engine, fault, None, None, plan.engine.serve_args)
    return Archive.open(run_plan(request, Silent()).archive)


def recorded(plan: Plan, folder: Path, engine: type[SimEngine] = SimEngine) -> b.Run:
    """The records of such a run, in the order in which they were made."""
    archive = sealed(plan, folder, engine)
    streams: dict[tuple[str, str], list[r.Record]] = {}
    for arm in archive.arms:
        mine: dict[str, list[r.Record]] = {process: [] for process in archive.streams(arm)}
        lines = [(line.t_ns, process, line.rec) for process in mine for line in archive.records(arm, process)]
        before = ""
        for _, process, record in sorted(lines, key=lambda line: line[0]):
            if isinstance(record, r.StreamOpened | r.StreamClosed):
                continue
            if process != before:
                for stream in mine.values():
                    stream.append(b.Mark(advance_ns=0))
            mine[process].append(record)
            before = process
        streams |= {(arm, process): records for process, records in mine.items()}
    attempts = [line.rec for line in archive.attempts() if not isinstance(line.rec, r.StreamOpened | r.StreamClosed)]
    resolved = ResolvedPlan.model_validate_json(archive.resolved_json or b"")
    plan = Plan.model_validate_json(archive.plan_json or b"")
    return b.Run(plan, resolved, archive.inputs, attempts, streams)


def request(run: b.Run, op: str, arm: str = "candidate") -> str:
    """The request that answered an operation."""
    (name,) = [rec.request for rec in run.client(arm) if isinstance(rec, r.OperationOutput) and rec.op == op]
    return name


def spoil(run: b.Run, op: str, token: int = 3, arm: str = "candidate") -> None:
    """Another answer from `token` on."""
    (output,) = [rec for rec in run.client(arm) if isinstance(rec, r.OperationOutput) and rec.op == op]
    ids = [*output.token_ids[:token], *(other + 1 for other in output.token_ids[token:])]
    b.edit(run.client(arm), r.OperationOutput, {"token_ids": ids}, op=op)


def prefill(run: b.Run, op: str, ends: list[int], arm: str = "candidate") -> None:
    """Let the prompt of `op` be computed in other steps: [ends[0], ends[1]), … in every source."""
    name, records = request(run, op, arm), run.scheduler(arm)
    for source in r.BatchSource:
        mine = [
            rec
            for rec in records
            if isinstance(rec, r.BatchScheduled)
            and rec.source is source
            and rec.rows[0].request == name
            and rec.rows[0].start < ends[-1]
        ]
        if not mine:
            continue
        at = records.index(mine[0])
        for rec in mine:
            records.remove(rec)
        records[at:at] = [
            msgspec.structs.replace(mine[0], rows=[r.BatchRow(request=name, start=a, scheduled=z - a, drafted=0)])
            for a, z in pairwise(ends)
        ]


def merge(run: b.Run, *ops: str, arm: str = "candidate") -> None:
    """Let the operations of a batch run in the same steps, first step with first step."""
    names = [request(run, op, arm) for op in ops]
    records = run.scheduler(arm)
    for source in r.BatchSource:
        steps = {
            name: [
                rec
                for rec in records
                if isinstance(rec, r.BatchScheduled) and rec.source is source and rec.rows[0].request == name
            ]
            for name in names
        }
        first, *others = steps.values()
        for index, rec in enumerate(first):
            joined = [of_one[index] for of_one in others if index < len(of_one)]
            rows = [*rec.rows, *(row for other in joined for row in other.rows)]
            records[records.index(rec)] = msgspec.structs.replace(rec, rows=rows)
        for of_one in others:
            assert len(of_one) <= len(first)
            for rec in of_one:
                records.remove(rec)
