"""Sealed archives of any size, for benchmarks: a watched run of the `boundary-instrumented` plan that never happened.

The records are those that a run on a model with 12 attention and 36 recurrent layers leaves (84 entries a rank,
C = 272), written by the package's own writers, so that every check has its evidence and the archive passes. No engine
computes anything: a page's digest is a hash of what the page is the state of. Archives grow by cases, as a longer
plan's do.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from samestate.checks.analyzers import source_sha256
from samestate.evidence import records as r
from samestate.evidence.archive import ArchiveWriter
from samestate.evidence.canonical import canonical_json, sha256_hex, token_digest
from samestate.evidence.stream import StreamWriter
from samestate.plans.load import freeze, load, plan_json
from samestate.plans.model import ExpectedLayout, InputIdentity, InstrumentPlan, ModelIdentity, Plan, ResolvedPlan
from samestate.plans.operations import Case, PlannedOperation, boundary, cases

C = 272
BLOCKS_A_PROMPT = 4
OUTPUT_TOKENS = 8
POOL = 4096
EOS = 7
BYTES = 1024
"""Effective bytes of every page: no check reads more of a size than that it fits."""


class Shape(NamedTuple):
    """How many layers there are: engine groups 1 to `recurrent_groups` are recurrent, group 0 is attention."""

    layers_a_group: int = 12
    recurrent_groups: int = 3

    @property
    def entries(self) -> int:
        return self.layers_a_group * (1 + 2 * self.recurrent_groups)

    def of_group(self, group: int) -> range:
        """Entries of an engine group: one a layer of attention, convolution and state of a recurrent one."""
        if group == 0:
            return range(self.layers_a_group)
        first = self.layers_a_group * (2 * group - 1)
        return range(first, first + 2 * self.layers_a_group)

    @property
    def groups(self) -> range:
        return range(1 + self.recurrent_groups)

    @property
    def rows_a_case(self) -> int:
        """Page rows of one case: three runs that save on three sides, one that loads on two."""
        pages = self.layers_a_group * BLOCKS_A_PROMPT + 2 * self.layers_a_group * self.recurrent_groups
        saved = self.entries * BLOCKS_A_PROMPT
        return 3 * 3 * saved + 2 * pages


class Made(NamedTuple):
    """What was written."""

    page_rows: int
    records: int
    bytes: int
    cases: int


def make(root: Path, page_rows: int, shape: Shape | None = None, damage_every: int = 0) -> Made:
    """Write a sealed archive with about `page_rows` page rows into `root`, which must not exist.

    `damage_every` 10: of the rows that arrive, every tenth has other bytes than were saved.
    """
    shape = shape or Shape()
    count = max(1, -(-page_rows // shape.rows_a_case))
    plan = _plan(count, shape)
    planned = cases(plan, C, "candidate")
    inputs = {(case.id, op.role): _tokens(case, op.role) for case in planned for op in case.operations if op.role}
    resolved = ResolvedPlan(
        format=1,
        plan_sha256=sha256_hex(plan_json(plan)),
        checkpoint_interval=C,
        lengths=[case.tokens for case in planned],
        model=ModelIdentity(name="made", files={"config.json": "a" * 64}, sha256="b" * 64),
        inputs=[
            InputIdentity(case=case, role=role, tokens=len(ids), sha256=token_digest(ids))
            for (case, role), ids in inputs.items()
        ],
        operations=[op.op for case in planned for op in case.operations],
    )
    resolved_json = canonical_json(resolved.model_dump(mode="json"))
    writer = ArchiveWriter.create(root, plan_json(plan))
    writer.write_resolved(resolved_json)
    writer.write_inputs({token_digest(ids): ids for ids in inputs.values()})
    rows = _attempt(writer, resolved.plan_sha256, planned, inputs, shape, sha256_hex(resolved_json), plan, damage_every)
    writer.seal()
    streams = list((root / "arms").rglob("*.jsonl"))
    records = 0
    for path in streams:
        with path.open("rb") as file:
            records += sum(1 for _ in file)
    return Made(rows, records, sum(path.stat().st_size for path in streams), count)


def _plan(count: int, shape: Shape) -> Plan:
    shipped = load("boundary-instrumented")
    engine = shipped.engine.model_copy(update={"settings": {**shipped.engine.settings, "block_size": C}})
    changed = {
        "engine": engine,
        "lengths": [f"{BLOCKS_A_PROMPT}C+{index + 1}" for index in range(count)],
        "output_tokens": OUTPUT_TOKENS,
        "instruments": InstrumentPlan(audit_level="poison", save_delay_ms=0),
        "expected_layout": ExpectedLayout(transfer_groups=len(shape.groups), entries=shape.entries),
    }
    plan = shipped.model_copy(update=changed)
    return freeze(plan, source_sha256(plan.analyzer.id))


def _attempt(
    writer: ArchiveWriter,
    plan_sha256: str,
    planned: Sequence[Case],
    inputs: dict[tuple[str, str], list[int]],
    shape: Shape,
    resolved_sha256: str,
    plan: Plan,
    damage_every: int,
) -> int:
    """Write both arms and what was attempted; the page rows written."""
    arms = ["control", "candidate"]
    started = r.AttemptStarted(
        attempt=1,
        plan_sha256=plan_sha256,
        samestate_version="0",
        source_sha256="0" * 64,
        source_commit=None,
        fault=None,
        arms=arms,
        control_seal_sha256=None,
        reference_seal_sha256=None,
        options={},
    )
    writer.attempts.append(started)
    for level in (r.ContactLevel.HOST, r.ContactLevel.MODEL, r.ContactLevel.REQUEST):
        writer.attempts.append(r.ContactReached(level=level))
    rows = sum(_Arm(writer, arm, shape, plan, damage_every).record(planned, inputs, resolved_sha256) for arm in arms)
    writer.attempts.append(r.AttemptEnded(outcome=r.Outcome.COMPLETED, reason=None))
    return rows


class _Arm:
    """Records one arm. The candidate has the cache and is watched."""

    def __init__(self, writer: ArchiveWriter, name: str, shape: Shape, plan: Plan, damage_every: int) -> None:
        self.name, self.shape, self.plan = name, shape, plan
        self.damage_every = damage_every
        self.external = name == "candidate"
        folder = writer.arm_dir(name)
        self.client = StreamWriter(folder / "client.jsonl", name, "client")
        self.scheduler = StreamWriter(folder / "scheduler.jsonl", name, "scheduler")
        self.worker = StreamWriter(folder / "worker-0.jsonl", name, "worker-0") if self.external else None
        self.hits = self.job = self.step = self.block = self.page_rows = 0

    def record(self, planned: Sequence[Case], inputs: dict[tuple[str, str], list[int]], resolved_sha256: str) -> int:
        self._start(resolved_sha256)
        for case in planned:
            for op in case.operations:
                self._counters(op.op, "before")
                if op.role is None:
                    self._reset(case, op)
                else:
                    self._generate(case, op, inputs[case.id, op.role])
                self._counters(op.op, "after")
        self.client.append(r.EngineStopped())
        for stream in (self.client, self.scheduler, *([self.worker] if self.worker else [])):
            stream.close()
        return self.page_rows

    def _start(self, resolved_sha256: str) -> None:
        started = r.EngineStarted(
            engine="sim",
            process=f"made-{self.name}",
            versions={"sim": "1"},
            checkpoint_interval=C,
            max_model_len=8192,
            tensor_parallel=1,
            pipeline_parallel=1,
            data_parallel=1,
            decode_context_parallel=1,
            connector="SimConnector" if self.external else None,
            audit_level="poison" if self.external else None,
            settings={"cache_config.block_size": C, "cache_config.mamba_cache_mode": "align"},
            eos_token_ids=[EOS],
        )
        self.client.append(started)
        self.client.append(r.PlanResolved(resolved_sha256=resolved_sha256))
        registered = _registered(self.shape)
        groups = registered.engine_groups
        self.scheduler.append(r.SchedulerConfigured(block_size=C, saves_within_steps=False, engine_groups=groups))
        if self.worker:
            self.worker.append(registered)

    def _reset(self, case: Case, op: PlannedOperation) -> None:
        self._started(case, op, None)
        self.client.append(r.CacheReset(op=op.op, local_reset=True, external_kept=True, running_kept=True, attempts=1))
        self.client.append(r.OperationEnded(op=op.op, ok=True, error=None))

    def _started(self, case: Case, op: PlannedOperation, ids: list[int] | None) -> None:
        self.client.append(
            r.OperationStarted(
                op=op.op,
                case=case.id,
                name=op.name,
                prompt_tokens=len(ids or ()),
                prompt_sha256=token_digest(ids) if ids else None,
                salt="",
                together=None,
            )
        )

    def _generate(self, case: Case, op: PlannedOperation, ids: list[int]) -> None:
        n, request = len(ids), f"{self.name}-{op.op}-0"
        self._started(case, op, ids)
        b = boundary(n, C) if self.external and op.name is r.OperationName.RELOAD else 0
        if self.external:
            self.scheduler.append(
                r.Lookup(request=request, queried_tokens=n, local_tokens=0, matched_tokens=b, is_async=True, salt="")
            )
        self.attention = [self._block() for _ in range((n + self.plan.output_tokens) // C + 1)]
        self.states: dict[int, list[int]] = {b: [self._block() for _ in self.shape.groups[1:]]} if b else {}
        digests = [hashlib.sha256(array("i", ids[: (at + 1) * C])).digest() for at in range(n // C)]
        if b:
            self._load(request, b, digests)
            self.hits += b
        self._schedule(request, n, b)
        if self.external:
            self.scheduler.append(r.RequestFinished(request=request))
            if not b:
                self._save(request, n // C, digests)
        output = r.OperationOutput(
            op=op.op,
            request=request,
            token_ids=_ids(f"{case.id} {op.role} output", self.plan.output_tokens),
            logprobs=None,
            finish_reason="length",
            cached_tokens=b,
        )
        self.client.append(output)
        self.client.append(r.OperationEnded(op=op.op, ok=True, error=None))

    def _block(self) -> int:
        self.block += 1
        return 1 + self.block % (POOL - 1)

    def _schedule(self, request: str, n: int, p: int) -> None:
        ends = [*range(p + C, n, C), n, *range(n + 1, n + self.plan.output_tokens)]
        at = p
        for end in ends:
            self.step += 1
            if self.external and at == p:
                blocks = [self.attention, *([blocks] for blocks in self.states.get(p, ()))]
                self._assigned(request, blocks)
            if end % C == 0 and end <= n:
                self.states[end] = [self._block() for _ in self.shape.groups[1:]]
                if self.external:
                    self._assigned(request, [[], *([block] for block in self.states[end])])
            row = r.BatchRow(request=request, start=at, scheduled=end - at, drafted=0)
            for source in (
                (r.BatchSource.CONNECTOR, r.BatchSource.SCHEDULER) if self.external else (r.BatchSource.SCHEDULER,)
            ):
                self.scheduler.append(r.BatchScheduled(step=self.step, source=source, rows=[row], preempted=[]))
            if self.external and end % C == 0 and end <= n:
                held = [[group, block] for group, block in zip(self.shape.groups[1:], self.states[end], strict=True)]
                self.scheduler.append(r.StateComputed(step=self.step, request=request, boundary=end, blocks=held))
            at = end

    def _assigned(self, request: str, blocks: list[list[int]]) -> None:
        self.scheduler.append(r.BlocksAssigned(step=self.step, request=request, blocks=blocks))

    # --- transfers ----------------------------------------------------------------------------

    def _save(self, request: str, blocks: int, digests: list[bytes]) -> None:
        assert self.worker
        self.job += 1
        parts = [self._part(group, 0, blocks) for group in self.shape.groups]
        rows = self._rows(parts, digests)
        self.worker.append(r.SaveSubmitted(rank=0, job=self.job, request=request, parts=parts))
        self._pages(request, "save", r.PageSide.SOURCE, "submitted", rows)
        self._pages(request, "save", r.PageSide.SOURCE, "completed", rows)
        self._pages(request, "save", r.PageSide.STORED, "completed", rows)
        self.worker.append(r.SaveCompleted(rank=0, job=self.job, ok=True, bytes=sum(part.bytes for part in parts)))

    def _load(self, request: str, b: int, digests: list[bytes]) -> None:
        assert self.worker
        self.job += 1
        blocks = b // C
        null = [0] * (blocks - 1)
        tables = [self.attention[:blocks], *([*null, block] for block in self.states[b])]
        self.scheduler.append(r.Allocated(request=request, external_tokens=b, block_ids=tables))
        parts = [self._part(0, 0, blocks), *(self._part(group, blocks - 1, 1) for group in self.shape.groups[1:])]
        rows = self._rows(parts, digests)
        self.worker.append(r.LoadSubmitted(rank=0, job=self.job, request=request, boundary=b, parts=parts))
        self._pages(request, "load", r.PageSide.STORED, "submitted", rows)
        pages = len(rows)
        self.worker.append(r.PagesPoisoned(rank=0, job=self.job, pages=pages, bytes=BYTES * pages, guards=4))
        arrived = [self._damaged(row) if self._hit(at) else row for at, row in enumerate(rows)]
        self._pages(request, "load", r.PageSide.DESTINATION, "completed", arrived)
        self.worker.append(r.GuardsChecked(rank=0, job=self.job, steps_between=0, changed=[]))
        self.worker.append(r.LoadCompleted(rank=0, job=self.job, ok=True, bytes=sum(part.bytes for part in parts)))

    def _hit(self, at: int) -> bool:
        return self.damage_every > 0 and at % self.damage_every == 0

    def _damaged(self, row: r.PageRow) -> r.PageRow:
        return msgspec.structs.replace(row, digest=hashlib.blake2b(row.digest.encode(), digest_size=16).hexdigest())

    def _part(self, group: int, first: int, blocks: int) -> r.TransferPart:
        pages = blocks * len(self.shape.of_group(group))
        boundary = (first + blocks) * C
        return r.TransferPart(group=group, first_block=first, pages=pages, bytes=BYTES * pages, boundary=boundary)

    def _rows(self, parts: Sequence[r.TransferPart], digests: list[bytes]) -> list[r.PageRow]:
        rows = []
        for part in parts:
            entries = self.shape.of_group(part.group)
            for index in range(part.first_block, part.first_block + part.pages // len(entries)):
                held = self.states.get((index + 1) * C)
                block = self.attention[index] if part.group == 0 else held[part.group - 1] if held else 0
                for entry in entries:
                    digest = hashlib.blake2b(digests[index], digest_size=16, salt=entry.to_bytes(2)).hexdigest()
                    rows.append(
                        r.PageRow(entry=entry, block_index=index, block=block, digest=digest, nonzero=1000, sentinel=0)
                    )
        return rows

    def _pages(
        self,
        request: str,
        direction: Literal["save", "load"],
        side: r.PageSide,
        moment: Literal["submitted", "completed"],
        rows: list[r.PageRow],
    ) -> None:
        assert self.worker
        self.page_rows += len(rows)
        self.worker.append(
            r.PagesDigested(
                rank=0, job=self.job, request=request, direction=direction, side=side, moment=moment, rows=rows
            )
        )

    def _counters(self, op: str, when: Literal["before", "after"]) -> None:
        values = dict.fromkeys(r.COUNTERS, 0.0)
        missing = [] if self.external else [r.EXTERNAL_HITS, r.EXTERNAL_QUERIES]
        values[r.EXTERNAL_HITS] = float(self.hits)
        kept = {name: value for name, value in values.items() if name not in missing}
        self.client.append(r.CountersRead(op=op, when=when, values=kept, missing=missing))


def _registered(shape: Shape) -> r.RankRegistered:
    engine, transfer, entries = [], [], []
    for group in shape.groups:
        kind, spec = (r.EntryKind.RECURRENT, "MambaSpec") if group else (r.EntryKind.ATTENTION, "FullAttentionSpec")
        layers = [f"layers.{group}.{index}" for index in range(shape.layers_a_group)]
        of_group = shape.of_group(group)
        size = BYTES * len(of_group) // len(layers)
        engine.append(
            r.EngineGroup(
                group=group,
                entry_kind=kind,
                spec=spec,
                tokens_per_block=C,
                layers=layers,
                page_bytes=size,
                effective_bytes=size,
            )
        )
        transfer.append(
            r.TransferGroup(
                group=group,
                engine_group=group,
                entries=len(of_group),
                bytes_per_block=BYTES * len(of_group),
                tokens_per_block=C,
            )
        )
        for entry in of_group:
            inside = (entry - of_group[0]) % 2 if group else 0
            entries.append(_entry(entry, layers[(entry - of_group[0]) // (2 if group else 1)], group, inside))
    return r.RankRegistered(
        rank=0,
        world_size=1,
        num_blocks=POOL,
        engine_groups=engine,
        transfer_groups=transfer,
        entries=entries,
        digest="blake2b-128",
    )


def _entry(entry: int, layer: str, group: int, inside: int) -> r.Entry:
    kinds = (r.EntryKind.CONV, r.EntryKind.RECURRENT) if group else (r.EntryKind.ATTENTION,)
    return r.Entry(
        entry=entry,
        layer=layer,
        engine_group=group,
        kind=kinds[inside],
        logical_dtype="bfloat16",
        transfer_dtype="int8",
        is_byte_view=True,
        shape=[BYTES // 2],
        storage_offset=inside * BYTES,
        block_stride=1 << 20,
        page_bytes=2 * BYTES,
        effective_bytes=BYTES,
    )


def _tokens(case: Case, role: str | None) -> list[int]:
    return _ids(f"{case.id} {role}", case.tokens)


def _ids(seed: str, count: int) -> list[int]:
    """Ids that depend on the seed alone; never `EOS`."""
    stream = hashlib.shake_128(seed.encode()).digest(4 * count)
    return [1000 + value % 100_000 for value in array("I", stream)]
