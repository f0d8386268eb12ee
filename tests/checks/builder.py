"""Synthetic archives: a complete, plausible run, so that a test can spoil one thing.

`build` gives a `Run`: streams as plain lists of records. Spoil them, then `Run.write`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from samestate.checks.analyzers import BOUNDARY_V1, Judgement, judge, source_sha256
from samestate.checks.base import CheckResult, Finding, Verdict
from samestate.evidence import records as r
from samestate.evidence.archive import Archive, ArchiveWriter
from samestate.evidence.canonical import canonical_json, sha256_hex, token_digest
from samestate.evidence.stream import StreamWriter
from samestate.plans.load import freeze, load, plan_json
from samestate.plans.model import InputIdentity, ModelIdentity, Plan, ResolvedPlan
from samestate.plans.operations import Case, PlannedOperation, boundary, cases

C = 16
EOS = 7
STATE_BYTES = 512
TOKEN_BYTES = 2
MODEL = ModelIdentity(name="tiny", files={"config.json": "a" * 64}, sha256="b" * 64)


def small_plan() -> Plan:
    """The shipped plan with three lengths and eight tokens an answer."""
    update = {"lengths": ["2C-1", "2C", "2C+1"], "output_tokens": 8}
    return load("boundary").model_copy(update=update)


@dataclass
class Run:
    """A run before it is written. Tests change it in place."""

    plan: Plan
    resolved: ResolvedPlan
    inputs: dict[str, list[int]]
    attempts: list[r.Record]
    streams: dict[tuple[str, str], list[r.Record]]
    """(arm, process) -> records."""
    sealed: bool = True
    control: Archive | None = None
    """Imported as arm ``control``."""
    reference: Archive | None = None
    """Imported as arm ``reference-control``."""

    def client(self, arm: str = "candidate") -> list[r.Record]:
        return self.streams[arm, "client"]

    def scheduler(self, arm: str = "candidate") -> list[r.Record]:
        return self.streams[arm, "scheduler"]

    def worker(self, rank: int = 0, arm: str = "candidate") -> list[r.Record]:
        return self.streams[arm, f"worker-{rank}"]

    def write(self, root: Path) -> Archive:
        """The archive, through the real writer."""
        resolved = canonical_json(self.resolved.model_dump(mode="json"))
        writer = ArchiveWriter.create(root, plan_json(self.plan))
        writer.write_resolved(resolved)
        writer.write_inputs(self.inputs)
        for source, name in ((self.control, "control"), (self.reference, "reference-control")):
            if source is not None:
                writer.import_arm(source, "control", name)
        for (arm, process), records in self.streams.items():
            stream = StreamWriter(writer.arm_dir(arm) / f"{process}.jsonl", arm, process)
            for record in records:
                stream.append(record)
            stream.close()
        for record in self.attempts:
            writer.attempts.append(record)
        if self.sealed:
            writer.seal()
        else:
            writer.abandon()
        return Archive.open(root)

    def judge(self, root: Path) -> Judgement:
        return judge(self.write(root))


def edit(records: list[r.Record], kind: type[r.Record], change: dict[str, object], **match: object) -> None:
    """Change every record of a kind whose fields match; at least one must."""
    hit = False
    for index, record in enumerate(records):
        if _matches(record, kind, match):
            records[index] = msgspec.structs.replace(record, **change)
            hit = True
    assert hit, f"no {kind.__name__} with {match}"


def drop(records: list[r.Record], kind: type[r.Record], **match: object) -> None:
    """Take out every record of a kind whose fields match; at least one must."""
    kept = [record for record in records if not _matches(record, kind, match)]
    assert len(kept) < len(records), f"no {kind.__name__} with {match}"
    records[:] = kept


def edit_rows(
    run: Run, op: str, change: Callable[[list[r.BatchRow]], list[r.BatchRow]], arm: str = "candidate"
) -> None:
    """Change the rows of one operation, alike for every source."""
    request = request_id(arm, op)
    records = run.scheduler(arm)
    sources = {record.source for record in records if isinstance(record, r.BatchScheduled)}
    for source in sources:
        mine = [rec for rec in records if isinstance(rec, r.BatchScheduled) and rec.source is source]
        mine = [rec for rec in mine if rec.rows[0].request == request]
        at = records.index(mine[0])
        rows = change([rec.rows[0] for rec in mine])
        for rec in mine:
            records.remove(rec)
        records[at:at] = [_step(row, source) for row in rows]


def result(judgement: Judgement, check: str) -> CheckResult:
    return next(one for one in judgement.results if one.check == check)


def codes(judgement: Judgement, check: str) -> list[str]:
    return [finding.code for finding in result(judgement, check).findings]


def only(judgement: Judgement, check: str) -> Finding:
    """The single finding of a check."""
    (finding,) = result(judgement, check).findings
    return finding


def failing(judgement: Judgement) -> set[str]:
    return {one.check for one in judgement.results if one.verdict is Verdict.FAIL}


def request_id(arm: str, op: str) -> str:
    return f"{arm}-{op}-0"


def build(
    plan: Plan | None = None, c: int = C, *, ranks: int = 1, fault: str | None = None, arms: tuple[str, ...] = ()
) -> Run:
    """A complete run that passes, or with fault ``full-lookup`` fails where N is a multiple of C."""
    plan = freeze(plan or small_plan(), source_sha256(BOUNDARY_V1))
    planned = cases(plan, c)
    tokens = {
        (case.id, op.role): _tokens(f"{case.id} {op.role}", case.tokens, 1000)
        for case in planned
        for op in case.operations
        if op.role
    }
    resolved = ResolvedPlan(
        format=1,
        plan_sha256=sha256_hex(plan_json(plan)),
        checkpoint_interval=c,
        lengths=[case.tokens for case in planned],
        model=MODEL,
        inputs=[
            InputIdentity(case=case, role=role, tokens=len(ids), sha256=token_digest(ids))
            for (case, role), ids in tokens.items()
        ],
        operations=[op.op for case in planned for op in case.operations],
    )
    run = Run(plan, resolved, {token_digest(ids): ids for ids in tokens.values()}, [], {})
    names = list(arms or ("control", "candidate"))
    run.attempts = [
        r.AttemptStarted(
            attempt=1,
            plan_sha256=resolved.plan_sha256,
            samestate_version="0",
            fault=fault,
            arms=names,
            control_seal_sha256=None,
            reference_seal_sha256=None,
            options={},
        ),
        r.AttemptEnded(outcome=r.Outcome.COMPLETED, reason=None),
    ]
    for name in names:
        _Arm(run, name, c, ranks, fault if name == "candidate" else None).record(planned, tokens)
    return run


def imported(run: Run, control: Archive | None = None, reference: Archive | None = None) -> Run:
    """Let the run take arms from other archives, and say so in its attempt."""
    run.control, run.reference = control, reference
    seals = {
        "control_seal_sha256": control.seal_sha256 if control else None,
        "reference_seal_sha256": reference.seal_sha256 if reference else None,
    }
    run.attempts[0] = msgspec.structs.replace(run.attempts[0], **seals)
    return run


class _Arm:
    """Records one arm."""

    def __init__(self, run: Run, name: str, c: int, ranks: int, fault: str | None) -> None:
        self.run, self.name, self.c, self.ranks, self.fault = run, name, c, ranks, fault
        self.external = name == "candidate"
        self.client: list[r.Record] = run.streams.setdefault((name, "client"), [])
        self.scheduler: list[r.Record] = run.streams.setdefault((name, "scheduler"), [])
        self.workers: list[list[r.Record]] = []
        if self.external:
            self.workers = [run.streams.setdefault((name, f"worker-{rank}"), []) for rank in range(ranks)]
        self.hits = 0
        self.job = 0

    def record(self, planned: list[Case], tokens: dict[tuple[str, str], list[int]]) -> None:
        self._start()
        for case in planned:
            for op in case.operations:
                self._counters(op.op, "before")
                if op.role is None:
                    self._reset(case, op)
                else:
                    self._generate(case, op, tokens[case.id, op.role])
                self._counters(op.op, "after")
        self.client.append(r.EngineStopped())

    def _start(self) -> None:
        resolved_json = canonical_json(self.run.resolved.model_dump(mode="json"))
        self.client += [
            r.EngineStarted(
                engine="sim",
                versions={"sim": "1"},
                checkpoint_interval=self.c,
                max_model_len=8192,
                tensor_parallel=self.ranks,
                pipeline_parallel=1,
                data_parallel=1,
                decode_context_parallel=1,
                connector="Sim" if self.external else None,
                audit_level="metadata" if self.external else None,
                settings={"cache_config.block_size": self.c, "kv_transfer_config.kv_role": self.name},
                eos_token_ids=[EOS],
            ),
            r.PlanResolved(resolved_sha256=sha256_hex(resolved_json)),
        ]
        for rank, worker in enumerate(self.workers):
            worker.append(_registered(rank, self.ranks, self.c))

    def _reset(self, case: Case, op: PlannedOperation) -> None:
        self.client += [
            r.OperationStarted(op=op.op, case=case.id, name=op.name, prompt_tokens=0, prompt_sha256=None),
            r.CacheReset(op=op.op, local_reset=True, external_kept=True, running_kept=True, attempts=1),
            r.OperationEnded(op=op.op, ok=True, error=None),
        ]

    def _generate(self, case: Case, op: PlannedOperation, ids: list[int]) -> None:
        n, request, digest = len(ids), request_id(self.name, op.op), token_digest(ids)
        wrong = self.fault == "full-lookup" and op.name is r.OperationName.RELOAD and n % self.c == 0
        b = p = 0
        if self.external:
            if op.name is r.OperationName.RELOAD:
                b, p = (n, n - 1) if wrong else (boundary(n, self.c),) * 2
            self._lookup(request, n, p)
        self._schedule(request, n, p)
        if self.external:
            self._save(request, n)
        count = self.run.plan.output_tokens
        self.client += [
            r.OperationStarted(op=op.op, case=case.id, name=op.name, prompt_tokens=n, prompt_sha256=digest),
            r.OperationOutput(
                op=op.op,
                request=request,
                token_ids=_tokens(digest + ("wrong" if wrong else ""), count, 100),
                logprobs=None,
                finish_reason="length",
                cached_tokens=p,
            ),
            r.OperationEnded(op=op.op, ok=True, error=None),
        ]
        if b:
            self._load(request, b)
            self.hits += p

    def _lookup(self, request: str, n: int, p: int) -> None:
        self.scheduler.append(
            r.Lookup(request=request, queried_tokens=n, local_tokens=0, matched_tokens=p, is_async=True, salt="")
        )

    def _schedule(self, request: str, n: int, p: int) -> None:
        rows, at = [], p
        while at < n:
            step = min(self.c - at % self.c, n - at)
            rows.append(r.BatchRow(request=request, start=at, scheduled=step, drafted=0))
            at += step
        rows += [
            r.BatchRow(request=request, start=n + i, scheduled=1, drafted=0)
            for i in range(self.run.plan.output_tokens - 1)
        ]
        sources = [r.BatchSource.CONNECTOR] if self.external else []
        for row in rows:
            self.scheduler += [_step(row, source) for source in [*sources, r.BatchSource.SCHEDULER]]

    def _save(self, request: str, n: int) -> None:
        self.job += 1
        for rank, worker in enumerate(self.workers):
            parts = _parts(n // self.c * self.c, self.c)
            moved = sum(part.bytes for part in parts)
            worker += [
                r.SaveSubmitted(rank=rank, job=self.job, request=request, parts=parts),
                r.SaveCompleted(rank=rank, job=self.job, ok=True, bytes=moved),
            ]

    def _load(self, request: str, b: int) -> None:
        self.job += 1
        for rank, worker in enumerate(self.workers):
            parts = _parts(b, self.c)
            moved = sum(part.bytes for part in parts)
            worker += [
                r.LoadSubmitted(rank=rank, job=self.job, request=request, boundary=b, parts=parts),
                r.LoadCompleted(rank=rank, job=self.job, ok=True, bytes=moved),
            ]

    def _counters(self, op: str, when: str) -> None:
        values = dict.fromkeys(r.COUNTERS, 0.0)
        missing = []
        if self.external:
            values[r.EXTERNAL_HITS] = float(self.hits)
        else:
            missing = [r.EXTERNAL_HITS, r.EXTERNAL_QUERIES]
            values = {name: value for name, value in values.items() if name not in missing}
        self.client.append(r.CountersRead(op=op, when=when, values=values, missing=missing))


def _registered(rank: int, ranks: int, c: int) -> r.RankRegistered:
    shape = {"tokens_per_block": c, "page_bytes": 1024, "effective_bytes": 1024}
    attention, recurrent = r.EntryKind.ATTENTION, r.EntryKind.RECURRENT
    return r.RankRegistered(
        rank=rank,
        world_size=ranks,
        num_blocks=8,
        engine_groups=[
            r.EngineGroup(group=0, entry_kind=attention, spec="FullAttentionSpec", layers=["a"], **shape),
            r.EngineGroup(group=1, entry_kind=recurrent, spec="MambaSpec", layers=["b"], **shape),
        ],
        transfer_groups=[
            r.TransferGroup(group=0, engine_group=0, entries=1, bytes_per_block=c * TOKEN_BYTES, tokens_per_block=c),
            r.TransferGroup(group=1, engine_group=1, entries=1, bytes_per_block=STATE_BYTES, tokens_per_block=c),
        ],
    )


def _parts(b: int, c: int) -> list[r.TransferPart]:
    pages = b // c
    return [
        r.TransferPart(group=0, first_block=0, pages=pages, bytes=b * TOKEN_BYTES, boundary=b),
        r.TransferPart(group=1, first_block=max(pages - 1, 0), pages=1, bytes=STATE_BYTES, boundary=b),
    ]


def _step(row: r.BatchRow, source: r.BatchSource) -> r.BatchScheduled:
    return r.BatchScheduled(step=0, source=source, rows=[row], preempted=[])


def _tokens(seed: str, count: int, base: int) -> list[int]:
    """Distinct-looking ids that depend on the seed alone; never EOS."""
    stream = hashlib.shake_128(seed.encode()).digest(2 * count)
    return [base + int.from_bytes(stream[2 * i : 2 * i + 2]) % 997 for i in range(count)]


def _matches(record: r.Record, kind: type[r.Record], match: dict[str, object]) -> bool:
    return type(record) is kind and all(getattr(record, name) == value for name, value in match.items())
