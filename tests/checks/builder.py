"""Synthetic archives: a complete, plausible run, so that a test can spoil one thing.

`build` gives a `Run`: streams as plain lists of records. Spoil them, then `Run.write`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import msgspec

from samestate.checks.analyzers import Judgement, judge, source_sha256
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
CONV_BYTES = 128
TOKEN_BYTES = 2
BLOCKS = 64
ATTENTION, CONV, RECURRENT = range(3)
"""Entries: one of the attention layer, two of the recurrent one."""
MODEL = ModelIdentity(name="tiny", files={"config.json": "a" * 64}, sha256="b" * 64)


def small_plan() -> Plan:
    """The shipped plan with three lengths and eight tokens an answer."""
    return _small(load("boundary"))


def instrumented_plan() -> Plan:
    """The shipped instrumented plan, as small, for the builder's two groups and three entries."""
    shipped = load("boundary-instrumented")
    assert shipped.expected_layout is not None
    layout = shipped.expected_layout.model_copy(update={"transfer_groups": 2, "entries": 3})
    return _small(shipped).model_copy(update={"expected_layout": layout})


def _small(plan: Plan) -> Plan:
    engine = plan.engine.model_copy(update={"settings": {**plan.engine.settings, "block_size": C}})
    return plan.model_copy(update={"lengths": ["2C-1", "2C", "2C+1"], "output_tokens": 8, "engine": engine})


class Mark(NamedTuple):
    """Not written. Ends a phase: what stands before it, in any stream of the arm, happened before what stands after."""

    advance_ns: int


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
        # An attempt begins before its arms, on the clock that all of them share.
        with patch("samestate.evidence.stream.time.monotonic_ns", lambda: 1_000):
            writer = ArchiveWriter.create(root, plan_json(self.plan))
        writer.write_resolved(resolved)
        writer.write_inputs(self.inputs)
        for source, name in ((self.control, "control"), (self.reference, "reference-control")):
            if source is not None:
                writer.import_arm(source, "control", name, other_plan=self.plan.control_from is not None)
        for arm in dict.fromkeys(arm for arm, _ in self.streams):
            self._write_arm(writer, arm)
        with patch("samestate.evidence.stream.time.monotonic_ns", lambda: 1_000):
            for record in self.attempts:
                writer.attempts.append(record)
        if self.sealed:
            writer.seal()
        else:
            writer.abandon()
        return Archive.open(root)

    def _write_arm(self, writer: ArchiveWriter, arm: str) -> None:
        """Phase by phase on a clock of its own: a microsecond a record, and what the marks say."""
        mine = {process: iter(records) for (of, process), records in self.streams.items() if of == arm}
        ticks = count(1_000_000, 1_000)
        skipped = 0
        with patch("samestate.evidence.stream.time.monotonic_ns", lambda: next(ticks) + skipped):
            writers = {name: StreamWriter(writer.arm_dir(arm) / f"{name}.jsonl", arm, name) for name in mine}
            open_ = dict(mine)
            while open_:
                for process in list(open_):
                    for record in open_[process]:
                        if isinstance(record, Mark):
                            advance = record.advance_ns
                            break
                        writers[process].append(record)
                    else:
                        del open_[process]
                        continue
                skipped += advance if open_ else 0
            for stream in writers.values():
                stream.close()

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
    plan = plan or small_plan()
    plan = freeze(plan, source_sha256(plan.analyzer.id))
    planned = cases(plan, c, "candidate")
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
    run.attempts = attempt(resolved, names, fault)
    for name in names:
        _Arm(run, name, c, ranks, fault if name == "candidate" else None).record(planned, tokens)
    return run


def attempt(resolved: ResolvedPlan, arms: list[str], fault: str | None = None) -> list[r.Record]:
    """A first attempt that ran these arms live, reached requests and completed."""
    return [
        r.AttemptStarted(
            attempt=1,
            plan_sha256=resolved.plan_sha256,
            samestate_version="0",
            source_sha256="0" * 64,
            source_commit=None,
            fault=fault,
            arms=arms,
            control_seal_sha256=None,
            reference_seal_sha256=None,
            options={},
        ),
        *map(_reached, (r.ContactLevel.HOST, r.ContactLevel.MODEL, r.ContactLevel.REQUEST)),
        r.AttemptEnded(outcome=r.Outcome.COMPLETED, reason=None),
    ]


def _reached(level: r.ContactLevel) -> r.Record:
    return r.ContactReached(level=level)


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
    """Records one arm. Above level ``metadata`` also its pages: synthetic digests of what each page is the state of."""

    def __init__(self, run: Run, name: str, c: int, ranks: int, fault: str | None) -> None:
        self.run, self.name, self.c, self.ranks, self.fault = run, name, c, ranks, fault
        self.external = name == "candidate"
        self.level = run.plan.instruments.audit_level if self.external else None
        self.paged = self.level in ("digest", "poison")
        self.delay_ms = run.plan.instruments.save_delay_ms if self.external else 0
        self.client: list[r.Record] = run.streams.setdefault((name, "client"), [])
        self.scheduler: list[r.Record] = run.streams.setdefault((name, "scheduler"), [])
        self.workers: list[list[r.Record]] = []
        if self.external:
            self.workers = [run.streams.setdefault((name, f"worker-{rank}"), []) for rank in range(ranks)]
        self.hits = 0
        self.job = 0
        self.step = 0
        self.blocks = 0

    def record(self, planned: list[Case], tokens: dict[tuple[str, str], list[int]]) -> None:
        self._start()
        self._mark()
        for case in planned:
            for op in case.operations:
                self._counters(op.op, "before")
                if op.role is None:
                    self._reset(case, op)
                else:
                    self._generate(case, op, tokens[case.id, op.role])
                self._counters(op.op, "after")
                self._mark()
        self.client.append(r.EngineStopped())

    def _mode(self) -> dict[str, r.Scalar]:
        watched = self.run.plan.instruments.audit_level != "metadata"
        return {"cache_config.mamba_cache_mode": "align"} if watched else {}

    def _mark(self, advance_ns: int = 0) -> None:
        for stream in (self.client, self.scheduler, *self.workers):
            stream.append(Mark(advance_ns=advance_ns))

    def _start(self) -> None:
        resolved_json = canonical_json(self.run.resolved.model_dump(mode="json"))
        self.client += [
            r.EngineStarted(
                engine="sim",
                process=f"simulated-{self.name}",
                versions={"sim": "1"},
                checkpoint_interval=self.c,
                max_model_len=8192,
                tensor_parallel=self.ranks,
                pipeline_parallel=1,
                data_parallel=1,
                decode_context_parallel=1,
                connector="SimConnector" if self.external else None,
                audit_level=self.level,
                settings={"cache_config.block_size": self.c, "kv_transfer_config.kv_role": self.name, **self._mode()},
                eos_token_ids=[EOS],
            ),
            r.PlanResolved(resolved_sha256=sha256_hex(resolved_json)),
        ]
        groups = _registered(0, self.ranks, self.c, self.paged).engine_groups
        self.scheduler.append(r.SchedulerConfigured(block_size=self.c, saves_within_steps=False, engine_groups=groups))
        for rank, worker in enumerate(self.workers):
            worker.append(_registered(rank, self.ranks, self.c, self.paged))

    def _reset(self, case: Case, op: PlannedOperation) -> None:
        self.client += [
            r.OperationStarted(
                op=op.op, case=case.id, name=op.name, prompt_tokens=0, prompt_sha256=None, salt="", together=None
            ),
            r.CacheReset(op=op.op, local_reset=True, external_kept=True, running_kept=True, attempts=1),
            r.OperationEnded(op=op.op, ok=True, error=None),
        ]

    def _generate(self, case: Case, op: PlannedOperation, ids: list[int]) -> None:
        n, request, digest = len(ids), request_id(self.name, op.op), token_digest(ids)
        wrong = self.fault == "full-lookup" and op.name is r.OperationName.RELOAD and n % self.c == 0
        b = p = 0
        self.client.append(
            r.OperationStarted(
                op=op.op, case=case.id, name=op.name, prompt_tokens=n, prompt_sha256=digest, salt="", together=None
            )
        )
        self._mark()
        if self.external:
            if op.name is r.OperationName.RELOAD:
                b, p = (n, n - 1) if wrong else (boundary(n, self.c),) * 2
            self._lookup(request, n, p)
        self.attention = [self._block() for _ in range((n + self.run.plan.output_tokens) // self.c + 1)]
        self.states: dict[int, int] = {b: self._block()} if b else {}
        if b:
            blocks = [self.attention[: b // self.c], [0] * (b // self.c - 1) + [self.states[b]]]
            self.scheduler.append(r.Allocated(request=request, external_tokens=p, block_ids=blocks))
            self._mark()
            self._load(request, b)
            if self.paged:
                self._page_the_load(request, ids)
            self._mark()
            self.hits += p
        self._schedule(request, n, p)
        if self.external:
            self.scheduler.append(r.RequestFinished(request=request))
            self._mark()
            self._save(request, ids)
        self._mark()
        count = self.run.plan.output_tokens
        self.client += [
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

    def _block(self) -> int:
        self.blocks += 1
        return 1 + self.blocks % (BLOCKS - 1)

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
            end = row.start + row.scheduled
            ends_block = end % self.c == 0
            self.step += 1
            if self.paged and row is rows[0]:
                blocks = [list(self.attention), list(self.states.values())]
                self.scheduler.append(r.BlocksAssigned(step=self.step, request=request, blocks=blocks))
            if ends_block and end not in self.states:
                self.states[end] = self._block()
                if self.paged:
                    blocks = [[], [self.states[end]]]
                    self.scheduler.append(r.BlocksAssigned(step=self.step, request=request, blocks=blocks))
            self.scheduler += [_step(row, source) for source in [*sources, r.BatchSource.SCHEDULER]]
            if self.paged and ends_block:
                blocks = [[1, self.states[end]]]
                self.scheduler.append(r.StateComputed(step=self.step, request=request, boundary=end, blocks=blocks))

    def _save(self, request: str, ids: list[int]) -> None:
        self.job += 1
        parts = _parts(len(ids) // self.c * self.c, self.c)
        # As an engine does: the state at every step end, not the last one alone.
        first = min(self.states) // self.c - 1
        pages = len(ids) // self.c - first
        moved_state = {"first_block": first, "pages": pages, "bytes": pages * STATE_BYTES}
        parts[1] = msgspec.structs.replace(parts[1], **moved_state)
        moved = sum(part.bytes for part in parts)
        for rank, worker in enumerate(self.workers):
            worker.append(r.SaveSubmitted(rank=rank, job=self.job, request=request, parts=parts))
            if self.delay_ms:
                worker.append(r.SaveDelayed(rank=rank, job=self.job, delay_ms=self.delay_ms))
            if self.paged:
                worker.append(self._digested(rank, request, ids, parts, "save", r.PageSide.SOURCE, "submitted"))
        if self.paged:
            self._mark(self.delay_ms * 1_000_000)
        for rank, worker in enumerate(self.workers):
            if self.paged:
                worker += [
                    self._digested(rank, request, ids, parts, "save", side, "completed")
                    for side in (r.PageSide.SOURCE, r.PageSide.STORED)
                ]
            worker.append(r.SaveCompleted(rank=rank, job=self.job, ok=True, bytes=moved))

    def _load(self, request: str, b: int) -> None:
        self.job += 1
        for rank, worker in enumerate(self.workers):
            parts = _parts(b, self.c)
            moved = sum(part.bytes for part in parts)
            worker += [
                r.LoadSubmitted(rank=rank, job=self.job, request=request, boundary=b, parts=parts),
                r.LoadCompleted(rank=rank, job=self.job, ok=True, bytes=moved),
            ]

    def _page_the_load(self, request: str, ids: list[int]) -> None:
        """What is read of the pages of the load that was written last."""
        for rank, worker in enumerate(self.workers):
            done = worker.pop()
            submitted = worker[-1]
            assert isinstance(submitted, r.LoadSubmitted)
            parts = submitted.parts
            worker.append(self._digested(rank, request, ids, parts, "load", r.PageSide.STORED, "submitted"))
            arrived = self._digested(rank, request, ids, parts, "load", r.PageSide.DESTINATION, "completed")
            pages = len(arrived.rows)
            if self.level == "poison":
                worker.append(r.PagesPoisoned(rank=rank, job=self.job, pages=pages, bytes=100 * pages, guards=4))
            worker.append(arrived)
            if self.level == "poison":
                worker.append(r.GuardsChecked(rank=rank, job=self.job, steps_between=0, changed=[]))
            worker.append(done)

    def _digested(
        self,
        rank: int,
        request: str,
        ids: list[int],
        parts: list[r.TransferPart],
        direction: str,
        side: r.PageSide,
        moment: str,
    ) -> r.PagesDigested:
        rows = []
        for part in parts:
            for entry in (ATTENTION,) if part.group == 0 else (CONV, RECURRENT):
                for index in range(part.first_block, part.first_block + part.pages):
                    end = (index + 1) * self.c
                    block = self.attention[index] if part.group == 0 else self.states[end]
                    digest = page_digest(rank, entry, ids[:end])
                    row = r.PageRow(entry=entry, block_index=index, block=block, digest=digest, nonzero=20, sentinel=0)
                    rows.append(row)
        return r.PagesDigested(
            rank=rank,
            job=self.job,
            request=request,
            direction=direction,  # type: ignore[arg-type]
            side=side,
            moment=moment,  # type: ignore[arg-type]
            rows=rows,
        )

    def _counters(self, op: str, when: str) -> None:
        values = dict.fromkeys(r.COUNTERS, 0.0)
        missing = []
        if self.external:
            values[r.EXTERNAL_HITS] = float(self.hits)
        else:
            missing = [r.EXTERNAL_HITS, r.EXTERNAL_QUERIES]
            values = {name: value for name, value in values.items() if name not in missing}
        self.client.append(r.CountersRead(op=op, when=when, values=values, missing=missing))


def page_digest(rank: int, entry: int, prefix: list[int]) -> str:
    """What stands for the bytes of a page that is right."""
    return hashlib.blake2b(f"{rank} {entry} {prefix}".encode(), digest_size=16).hexdigest()


def edit_pages(
    run: Run,
    change: Callable[[r.PageRow], r.PageRow | None],
    *,
    rank: int = 0,
    **match: object,
) -> None:
    """Change the rows of every PagesDigested of a rank whose fields match; None drops the row. One must match."""
    records = run.worker(rank)
    hit = False
    for index, record in enumerate(records):
        if _matches(record, r.PagesDigested, match):
            assert isinstance(record, r.PagesDigested)
            rows = [row for row in map(change, record.rows) if row is not None]
            hit |= rows != record.rows
            records[index] = msgspec.structs.replace(record, rows=rows)
    assert hit, f"no page row changed with {match}"


def during(run: Run, index: int, records: list[r.Record], rank: int = 0) -> None:
    """Let a candidate's worker write records after line `index` - 1 of its scheduler and before line `index`."""
    scheduler = run.scheduler()
    phase = sum(isinstance(record, Mark) for record in scheduler[:index])
    scheduler.insert(index, Mark(advance_ns=0))
    for (arm, process), stream in run.streams.items():
        if arm == "candidate" and stream is not scheduler:
            at = [i for i, record in enumerate(stream) if isinstance(record, Mark)][phase]
            stream[at:at] = [*(records if process == f"worker-{rank}" else []), Mark(advance_ns=0)]


def _registered(rank: int, ranks: int, c: int, paged: bool) -> r.RankRegistered:
    shape = {"tokens_per_block": c, "page_bytes": 1024, "effective_bytes": 1024}
    attention, recurrent = r.EntryKind.ATTENTION, r.EntryKind.RECURRENT
    entries = [
        _entry(ATTENTION, "a", 0, attention, 0, c * TOKEN_BYTES),
        _entry(CONV, "b", 1, r.EntryKind.CONV, 0, CONV_BYTES),
        _entry(RECURRENT, "b", 1, recurrent, CONV_BYTES, STATE_BYTES - CONV_BYTES),
    ]
    return r.RankRegistered(
        rank=rank,
        world_size=ranks,
        num_blocks=BLOCKS,
        engine_groups=[
            r.EngineGroup(group=0, entry_kind=attention, spec="FullAttentionSpec", layers=["a"], **shape),
            r.EngineGroup(group=1, entry_kind=recurrent, spec="MambaSpec", layers=["b"], **shape),
        ],
        transfer_groups=[
            r.TransferGroup(group=0, engine_group=0, entries=1, bytes_per_block=c * TOKEN_BYTES, tokens_per_block=c),
            r.TransferGroup(group=1, engine_group=1, entries=1, bytes_per_block=STATE_BYTES, tokens_per_block=c),
        ],
        entries=entries if paged else [],
        digest="blake2b-128" if paged else "",
    )


def _entry(index: int, layer: str, group: int, kind: r.EntryKind, offset: int, size: int) -> r.Entry:
    return r.Entry(
        entry=index,
        layer=layer,
        engine_group=group,
        kind=kind,
        logical_dtype="bfloat16",
        transfer_dtype="int8",
        is_byte_view=True,
        shape=[size // 2],
        storage_offset=offset,
        block_stride=1 << 16,
        page_bytes=1 << 16,
        effective_bytes=size,
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
