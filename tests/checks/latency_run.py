"""A synthetic latency run of study A's shape, record by record, so that a test can spoil one thing.

At C=16 the lengths are 31, 32 and 48. As in study A, an immediate repeat on the engine without a cache recomputes but
for the longest length, where it finds 16 tokens locally; with a cache, repeats and reloads come from outside.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from samestate.checks.analyzers import Judgement, judge, source_sha256
from samestate.evidence import records as r
from samestate.evidence.archive import Archive, ArchiveWriter
from samestate.evidence.canonical import canonical_json, sha256_hex, token_digest
from samestate.evidence.latency_records import (
    TIER_LOADED_BYTES,
    CopyMeasured,
    HostSampled,
    RequestTimed,
    StreamEvent,
)
from samestate.evidence.stream import StreamWriter
from samestate.plans.load import freeze, load, plan_json
from samestate.plans.model import InputIdentity, Plan, ResolvedPlan
from samestate.plans.operations import Case, PlannedOperation, boundary, cases, operation_ids, planned_inputs
from samestate.plans.repetitions import repeated_arms

from .builder import MODEL, attempt

C = 16
TOKEN_BYTES, STATE_BYTES = 2, 512
MS = 10**6
PER_TOKEN = 10 * MS
"""Of prefill, per prompt token."""
STEP = 5 * MS
LOAD = 2 * MS


@dataclass
class Entry:
    """A record of one process, or a pause."""

    process: str
    record: Any
    pause_ns: int = 0


@dataclass
class LatencyRun:
    """A run before it is written. Tests change it in place."""

    plan: Plan
    resolved: ResolvedPlan
    inputs: dict[str, list[int]]
    arms: dict[str, list[Entry]] = field(default_factory=dict)
    fault: str | None = None

    def edit(self, arm: str, kind: type[Any], change: Callable[[Any], Any], **match: object) -> None:
        """Change every record of a kind whose fields match, or drop it where `change` gives None; one must match."""
        hit = False
        for entry in list(self.arms[arm]):
            rec = entry.record
            if type(rec) is kind and all(getattr(rec, name) == value for name, value in match.items()):
                hit = True
                entry.record = change(rec)
                if entry.record is None:
                    self.arms[arm].remove(entry)
        assert hit, f"no {kind.__name__} with {match}"

    def write(self, root: Path) -> Archive:
        clock = _Clock()
        with clock.running():
            writer = ArchiveWriter.create(root, plan_json(self.plan))
            writer.write_resolved(canonical_json(self.resolved.model_dump(mode="json")))
            writer.write_inputs(self.inputs)
            *begun, ended = attempt(self.resolved, list(self.arms), self.fault)
            for record in begun:
                writer.attempts.append(record)
            for arm, entries in self.arms.items():
                _write_arm(writer, arm, entries, clock)
            writer.attempts.append(ended)
            writer.seal()
        return Archive.open(root)

    def judge(self, root: Path) -> Judgement:
        return judge(self.write(root))


def copies(run: LatencyRun, arm: str, rate: float, rank: int = 0) -> None:
    """Have a worker of the arm say that it copies so many bytes a second: three copies, one of them slow."""
    took = round(1_000_000 * 1e9 / rate)
    record = CopyMeasured(
        rank=rank, route="host-to-host", device="cpu", bytes=1_000_000, took_ns=[took, 4 * took, took]
    )
    at = next(i for i, entry in enumerate(run.arms[arm]) if isinstance(entry.record, r.RankRegistered))
    run.arms[arm].insert(at + 1, Entry(f"worker-{rank}", record))


class _Clock:
    def __init__(self) -> None:
        self.now = 1_000_000

    def __call__(self) -> int:
        self.now += 1_000
        return self.now

    @contextmanager
    def running(self) -> Iterator[None]:
        with patch("samestate.evidence.stream.time.monotonic_ns", self):
            yield


def _write_arm(writer: ArchiveWriter, arm: str, entries: list[Entry], clock: _Clock) -> None:
    names = dict.fromkeys(entry.process for entry in entries)
    writers = {name: StreamWriter(writer.arm_dir(arm) / f"{name}.jsonl", arm, name) for name in names}
    began = 0
    for entry in entries:
        clock.now += entry.pause_ns
        record = entry.record
        if record is None:
            continue
        if isinstance(record, RequestTimed):
            record = _shifted(record, began)
        writers[entry.process].append(record)
        if isinstance(record, r.OperationStarted):
            began = clock.now
    for stream in writers.values():
        stream.close()


def _shifted(rec: RequestTimed, by: int) -> RequestTimed:
    """Times of a request count from the start of its operation until they are written."""
    events = [StreamEvent(at_ns=event.at_ns + by, tokens=event.tokens) for event in rec.events]
    return msgspec.structs.replace(rec, began_ns=rec.began_ns + by, done_ns=rec.done_ns + by, events=events)


def small_plan(connector: str = "native", **latency: int) -> Plan:
    """The shipped plan at C=16, eight tokens an answer."""
    plan = load("latency")
    assert plan.latency is not None
    engine = plan.engine.model_copy(update={"settings": {"block_size": C}})
    arms = [arm if arm.connector == "none" else arm.model_copy(update={"connector": connector}) for arm in plan.arms]
    update = {"engine": engine, "output_tokens": 8, "arms": arms, "latency": plan.latency.model_copy(update=latency)}
    return plan.model_copy(update=update)


def build(plan: Plan | None = None) -> LatencyRun:
    """A run that passes."""
    plan = plan or small_plan()
    plan = freeze(plan, source_sha256(plan.analyzer.id))
    planned = planned_inputs(plan, C)
    tokens = {one.case: _tokens(one.case, one.tokens, 1000) for one in planned}
    resolved = ResolvedPlan(
        format=1,
        plan_sha256=sha256_hex(plan_json(plan)),
        checkpoint_interval=C,
        lengths=[one.tokens for one in planned],
        model=MODEL,
        inputs=[
            InputIdentity(case=case, role="target", tokens=len(ids), sha256=token_digest(ids))
            for case, ids in tokens.items()
        ],
        operations=operation_ids(plan, C),
    )
    run = LatencyRun(plan, resolved, {token_digest(ids): ids for ids in tokens.values()})
    for one in repeated_arms(plan):
        arm = _Arm(run, one.name, one.arm.connector)
        for case in cases(plan, C, one.name):
            for op in case.operations:
                arm.operation(case, op, tokens[case.id])
        arm.stop()
        run.arms[one.name] = arm.entries
    return run


class _Arm:
    def __init__(self, run: LatencyRun, name: str, connector: str) -> None:
        self.run, self.name, self.connector = run, name, connector
        self.on = connector != "none"
        self.entries: list[Entry] = []
        self.local_hits = self.external_hits = self.behind = 0
        self.job = self.step = 0
        self._start()

    def add(self, process: str, *records: Any, pause_ns: int = 0) -> None:
        self.entries += [Entry(process, record, pause_ns) for record in records]

    def _start(self) -> None:
        cls = {"none": None, "native": "OffloadingConnector"}.get(self.connector, "SamestateConnector")
        engine = r.EngineStarted(
            engine="vllm",
            process=f"{self.name}@1",
            versions={"vllm": "0"},
            checkpoint_interval=C,
            max_model_len=8192,
            tensor_parallel=1,
            pipeline_parallel=1,
            data_parallel=1,
            decode_context_parallel=1,
            connector=cls,
            audit_level="metadata" if self.on else None,
            settings={"cache_config.block_size": C, "kv_transfer_config.kv_role": self.name.removesuffix("-2")},
            eos_token_ids=[7],
        )
        shape = {"tokens_per_block": C, "page_bytes": 1024, "effective_bytes": 1024}
        attention, state = r.EntryKind.ATTENTION, r.EntryKind.RECURRENT
        groups = [
            r.EngineGroup(group=0, entry_kind=attention, spec="FullAttentionSpec", layers=["a"], **shape),
            r.EngineGroup(group=1, entry_kind=state, spec="MambaSpec", layers=["b"], **shape),
        ]
        self.add("frontend", engine)
        self.add("scheduler", r.SchedulerConfigured(block_size=C, saves_within_steps=False, engine_groups=groups))
        if self.on:
            transfer = [
                r.TransferGroup(group=0, engine_group=0, entries=1, bytes_per_block=32, tokens_per_block=C),
                r.TransferGroup(group=1, engine_group=1, entries=1, bytes_per_block=STATE_BYTES, tokens_per_block=C),
            ]
            registered = r.RankRegistered(
                rank=0,
                world_size=1,
                num_blocks=64,
                engine_groups=groups,
                transfer_groups=transfer,
                entries=[],
                digest="",
            )
            self.add("worker-0", registered)
        resolved = canonical_json(self.run.resolved.model_dump(mode="json"))
        self.add("client", r.PlanResolved(resolved_sha256=sha256_hex(resolved)))

    def stop(self) -> None:
        self.add("frontend", r.EngineStopped())

    def operation(self, case: Case, op: PlannedOperation, ids: list[int]) -> None:
        self._counters(op.op, "before")
        reset = op.role is None
        if not reset:
            self._host(op.op, "before")
        started = r.OperationStarted(
            op=op.op,
            case=case.id,
            name=op.name,
            prompt_tokens=0 if reset else len(ids),
            prompt_sha256=None if reset else token_digest(ids),
            salt="",
            together=None,
        )
        self.add("client", started)
        if reset:
            self.add(
                "client", r.CacheReset(op=op.op, local_reset=True, external_kept=True, running_kept=True, attempts=1)
            )
        else:
            self._generate(case, op, ids)
        self.add("client", r.OperationEnded(op=op.op, ok=True, error=None))
        self._counters(op.op, "after")
        if not reset:
            self._host(op.op, "after")

    def _reuse(self, case: Case, op: PlannedOperation) -> tuple[int, int]:
        """Local and external tokens, as in study A."""
        if op.name is r.OperationName.COLD:
            return 0, 0
        if self.on:
            return 0, boundary(case.tokens, C)
        return (C, 0) if case.tokens == 3 * C else (0, 0)

    def _generate(self, case: Case, op: PlannedOperation, ids: list[int]) -> None:
        n, request = len(ids), f"{self.name}-{op.op}-0"
        local, external = self._reuse(case, op)
        p = local + external
        if self.on:
            lookup = r.Lookup(
                request=request, queried_tokens=n, local_tokens=local, matched_tokens=external, is_async=True, salt=""
            )
            self.add("scheduler", lookup)
        if external:
            self._load(request, external)
        self.local_hits += local
        self.external_hits += external
        count = self.run.plan.output_tokens
        prefill = (n - p) * PER_TOKEN + (LOAD if external else 0) + _jitter(self.name + op.op)
        rows = [(p, n - p), *((n + i, 1) for i in range(count - 1))]
        pauses = [MS, prefill, *[STEP] * (count - 2)]
        for (start, scheduled), pause in zip(rows, pauses, strict=True):
            self.step += 1
            self.add("scheduler", None, pause_ns=pause)
            for source in [r.BatchSource.SCHEDULER, *([r.BatchSource.CONNECTOR] if self.on else [])]:
                row = r.BatchRow(request=request, start=start, scheduled=scheduled, drafted=0)
                self.add("scheduler", r.BatchScheduled(step=self.step, source=source, rows=[row], preempted=[]))
        if self.on:
            self.add("scheduler", r.RequestFinished(request=request))
        if self.on and op.name is r.OperationName.COLD:
            self._save(request, n)
        first = MS + prefill
        events = [StreamEvent(at_ns=MS // 2, tokens=0)]
        events += [StreamEvent(at_ns=first + i * STEP, tokens=1) for i in range(count)]
        done = events[-1].at_ns + MS
        timed = RequestTimed(
            op=op.op,
            request=request,
            peer="127.0.0.1:8000",
            concurrency=1,
            attempts=1,
            began_ns=0,
            done_ns=done,
            events=events,
        )
        output = r.OperationOutput(
            op=op.op,
            request=request,
            token_ids=_tokens(f"answer {case.id}", count, 100),
            logprobs=None,
            finish_reason="length",
            cached_tokens=p,
        )
        self.add("client", output, pause_ns=STEP + 2 * MS)
        self.add("client", timed)

    def _load(self, request: str, b: int) -> None:
        self.job += 1
        parts = [
            r.TransferPart(group=0, first_block=0, pages=b // C, bytes=b * TOKEN_BYTES, boundary=b),
            r.TransferPart(group=1, first_block=b // C - 1, pages=1, bytes=STATE_BYTES, boundary=b),
        ]
        moved = sum(part.bytes for part in parts)
        self.behind += 0 if self.connector in ("native", "samestate-memory") else moved
        allocated = r.Allocated(request=request, external_tokens=b, block_ids=[list(range(1, b // C + 1)), [1]])
        self.add("scheduler", allocated)
        self.add("worker-0", r.LoadSubmitted(rank=0, job=self.job, request=request, boundary=b, parts=parts))
        self.add("worker-0", r.LoadCompleted(rank=0, job=self.job, ok=True, bytes=moved))

    def _save(self, request: str, n: int) -> None:
        self.job += 1
        whole = n // C
        parts = [
            r.TransferPart(group=0, first_block=0, pages=whole, bytes=whole * C * TOKEN_BYTES, boundary=whole * C),
            r.TransferPart(group=1, first_block=0, pages=whole, bytes=whole * STATE_BYTES, boundary=whole * C),
        ]
        moved = sum(part.bytes for part in parts)
        self.add("worker-0", r.SaveSubmitted(rank=0, job=self.job, request=request, parts=parts))
        self.add("worker-0", r.SaveCompleted(rank=0, job=self.job, ok=True, bytes=moved))

    def _counters(self, op: str, when: Any) -> None:
        values = dict.fromkeys(r.COUNTERS, 0.0) | {r.LOCAL_HITS: float(self.local_hits)}
        missing = [] if self.on else [r.EXTERNAL_HITS, r.EXTERNAL_QUERIES]
        values |= {r.EXTERNAL_HITS: float(self.external_hits), TIER_LOADED_BYTES: float(self.behind)}
        values = {name: value for name, value in values.items() if name not in missing}
        self.add("client", r.CountersRead(op=op, when=when, values=values, missing=missing))

    def _host(self, op: str, when: Any) -> None:
        sampled = HostSampled(
            op=op,
            when=when,
            cpus=2,
            load=1.0,
            busy_ticks=10,
            total_ticks=20,
            memory_total=2**34,
            memory_available=2**33,
        )
        self.add("client", sampled)


def _jitter(seed: str) -> int:
    return int.from_bytes(hashlib.sha256(seed.encode()).digest()[:2], "big") * 10


def _tokens(seed: str, count: int, base: int) -> list[int]:
    stream = hashlib.shake_128(seed.encode()).digest(2 * count)
    return [base + int.from_bytes(stream[2 * i : 2 * i + 2]) % 997 for i in range(count)]
