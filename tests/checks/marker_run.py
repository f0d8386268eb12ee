"""Synthetic marker runs: probes with their traces as a real recorder leaves them, so that a test can spoil one thing.

`study_b` has study B's shape: 76 tokens traced, 75 delivered, two ranks, the close forced at 64, the stop at 74.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from samestate.checks.analyzers import MARKER_POST_STOP_V1, source_sha256
from samestate.checks.budget_oracle import Markers, decide_outputs
from samestate.evidence import marker_records as m
from samestate.evidence import probe_records as p
from samestate.evidence import records as r
from samestate.evidence.canonical import canonical_json, sha256_hex, token_digest
from samestate.plans.load import freeze, plan_json
from samestate.plans.model import (
    AnalyzerPin,
    ArmPlan,
    EnginePlan,
    InputIdentity,
    MarkerPlan,
    Plan,
    ProbePlan,
    ResolvedMarkers,
    ResolvedPlan,
    SpeculationPlan,
)

from . import builder as b

START, END, STOP, AFTER = 154841, 154842, 154827, 1654
ARM = "served"
CHECKS = [
    "integrity", "plan-identity", "settings", "probes", "attempts", "gates", "identity", "echo", "trace-whole",
    "trace-ranks", "trace-reconciled", "budget-close", "marker-class", "speculation", "usage",
]  # fmt: skip
SOURCE = m.PatchedFunction(
    module="vllm.v1.worker.gpu.sample.thinking_budget", qualname="ThinkingBudgetState.apply", source_sha256="c" * 64
)
SCHEDULER_SOURCE = m.PatchedFunction(
    module="vllm.v1.core.sched.scheduler", qualname="Scheduler.add_request", source_sha256="c" * 64
)
PATCHED = m.PatchedFunction(
    module="vllm.utils.cpu_triton_utils", qualname="_expand_kernel_impl", source_sha256="b" * 64
)
"""What guard and repair both replace on a CPU."""


@dataclass(frozen=True)
class Step:
    """What a rank did in one step: drafts proposed, tokens committed."""

    drafts: list[int]
    tokens: list[int]
    kept: int | None = None
    """That the scheduler delivered; None: all."""
    dropped: bool = False
    """It ran ahead of a stop: the scheduler dropped it all."""


@dataclass(frozen=True)
class Shape:
    """One probe: prompt, steps, and how it ended."""

    name: str
    steps: list[Step]
    prompt: list[int] = field(default_factory=lambda: [*range(100, 147), START])
    budget: int | None = 64
    max_tokens: int = 512
    finish: str = "stop"
    stop_reason: int | str | None = None
    argmax: dict[int, int] = field(default_factory=dict)
    """By output position, where the arg-max before forcing is not what stands there."""

    @property
    def delivered(self) -> list[int]:
        """What the API returns."""
        return [t for s in self.steps if not s.dropped for t in s.tokens[: len(s.tokens) if s.kept is None else s.kept]]


def thought(count: int, first: int = 1000) -> list[int]:
    """Plain tokens, each another."""
    return list(range(first, first + count))


def study_b_shape() -> Shape:
    """The close forced at 64 while drafts were accepted before it; the stop at 74 with one accepted token after it."""
    body, answer = thought(64), thought(9, 2000)
    steps = [Step([], body[:1])]
    steps += [Step(body[at : at + 3], body[at : at + 4]) for at in range(1, 61, 4)]  # 1 … 60, all three accepted
    steps += [Step([body[61], body[62], body[63]], [*body[61:], END])]  # the bonus row is forced
    steps += [Step(answer[:3], answer[:4]), Step(answer[4:7], answer[4:8])]
    steps += [Step([answer[8], STOP, AFTER + 1], [answer[8], STOP, AFTER], kept=2)]
    return Shape("exact-answer", steps)


def plan(shapes: Sequence[Shape], *, drafts: int = 3, answer: str | None = None, arms: Sequence[str] = (ARM,)) -> Plan:
    """A plan over these probes, the same for every arm."""
    probes = [
        ProbePlan(
            name=one.name,
            text="…",
            budget=one.budget,
            max_tokens=one.max_tokens,
            temperature=0.6,
            top_p=0.95,
            effort="max",
            answer=answer,
        )
        for one in shapes
    ]
    return Plan(
        format=1,
        name="reasoning-close",
        title="t",
        question="q",
        engine=EnginePlan(model="qwen3-tiny", settings={}, external_cache_bytes=0),
        arms=[
            ArmPlan(
                name=arm,
                connector="none",
                speculation=SpeculationPlan(method="mtp", drafts=drafts) if drafts else None,
            )
            for arm in arms
        ],
        markers=MarkerPlan(
            route="chat",
            start="<think>",
            end="</think>",
            probes=probes,
            gates=["selftest", "sampling"],
            allowed_probes=len(probes),
        ),
        template="none",
        output_tokens=512,
        seed=42,
        temperature=0.6,
        ignore_eos=False,
        analyzer=AnalyzerPin(id=MARKER_POST_STOP_V1, source_sha256=None),
        required_checks=CHECKS,
        differing_settings=[],
        scope="Holds for this plan.",
        not_shown=["speed"],
    )


def build(
    shapes: Sequence[Shape] | None = None,
    *,
    ranks: int = 2,
    drafts: int = 3,
    asynchronous: bool = False,
    the_plan: Plan | None = None,
) -> b.Run:
    """A run that passes under ``marker-post-stop-v1``: study B's probe on two ranks, if not said otherwise."""
    shapes = list(shapes or [study_b_shape()])
    frozen = freeze(the_plan or plan(shapes, drafts=drafts), source_sha256(MARKER_POST_STOP_V1))
    digests = [token_digest(one.prompt) for one in shapes]
    resolved = ResolvedPlan(
        format=1,
        plan_sha256=sha256_hex(plan_json(frozen)),
        checkpoint_interval=b.C,
        lengths=[len(one.prompt) for one in shapes],
        model=b.MODEL,
        inputs=[
            InputIdentity(case=one.name, role="target", tokens=len(one.prompt), sha256=digest)
            for one, digest in zip(shapes, digests, strict=True)
        ],
        operations=[one.name for one in shapes],
        markers=ResolvedMarkers(start_ids=[START], end_ids=[END], stop_ids={}),
    )
    inputs = dict(zip(digests, (one.prompt for one in shapes), strict=True))
    run = b.Run(frozen, resolved, inputs, [], {})
    run.attempts = b.attempt(resolved, [one.name for one in frozen.arms])
    run.streams[ARM, "client"] = _client(run, shapes, ranks, asynchronous=asynchronous)
    started = m.RecorderStarted(
        role="rank",
        rank=0,
        ranks=ranks,
        runner="v2",
        capacity=4096,
        speculative_tokens=drafts,
        asynchronous=asynchronous,
        start_ids=[START],
        end_ids=[END],
        functions=[SOURCE],
    )
    for rank in range(ranks):
        head = msgspec.structs.replace(started, rank=rank)
        run.streams[ARM, f"budget-{rank}"] = [head, *_attested(frozen), *_traced(shapes, rank, drafts)]
    head = msgspec.structs.replace(started, role="scheduler", rank=None, functions=[SCHEDULER_SOURCE])
    run.streams[ARM, "budget-scheduler"] = [head, *_scheduled(shapes)]
    recount(run)
    for other in frozen.arms[1:]:
        run.streams |= {(other.name, process): list(records) for (_, process), records in run.streams.items()}
    return run


def _attested(planned: Plan) -> list[r.Record]:
    """What a rank says of the guard and the repairs that the plan names."""
    markers = planned.markers
    names = [*([markers.guard] if markers.guard else []), *markers.repairs] if markers else []
    return [r.InterventionApplied(name=name, functions=[PATCHED]) for name in names]


def recount(run: b.Run) -> None:
    """Let every recorder's account be that of what is there."""
    for (_, process), records in run.streams.items():
        if process.startswith("budget-"):
            records[:] = [one for one in records if not isinstance(one, m.RecorderStopped)]
            rank = None if process == "budget-scheduler" else int(process.removeprefix("budget-"))
            records.append(m.RecorderStopped(rank=rank, written=len(records), dropped=0))


def trace(run: b.Run, rank: int = 0) -> list[r.Record]:
    return run.streams[ARM, f"budget-{rank}"]


def everywhere(run: b.Run, change: Callable[[list[r.Record]], None]) -> None:
    """Change every rank's trace alike."""
    ranks = [process for _, process in run.streams if process.startswith("budget-") and process != "budget-scheduler"]
    for process in ranks:
        change(run.streams[ARM, process])


def scheduler(run: b.Run) -> list[r.Record]:
    return run.streams[ARM, "budget-scheduler"]


def client(run: b.Run) -> list[r.Record]:
    return run.streams[ARM, "client"]


def edit_row(records: list[r.Record], position: int, **change: object) -> None:
    """Change the row that output position `position` was committed from."""
    for at, record in enumerate(records):
        if isinstance(record, m.LogitsRows) and 0 <= position - record.position < len(record.rows):
            rows = list(record.rows)
            rows[position - record.position] = msgspec.structs.replace(rows[position - record.position], **change)
            records[at] = msgspec.structs.replace(record, rows=rows)
            return
    raise AssertionError(f"no row for position {position}")


def request_of(shape: Shape) -> str:
    return f"chatcmpl-{shape.name}"


def _client(run: b.Run, shapes: Sequence[Shape], ranks: int, *, asynchronous: bool) -> list[r.Record]:
    values: dict[str, r.Scalar] = {"process": "77@1", "model": "tiny", "model_sha256": "b" * 64, "vllm": "0.32.0"}
    resolved_json = canonical_json(run.resolved.model_dump(mode="json"))
    guard = run.plan.markers.guard if run.plan.markers else None
    records: list[r.Record] = [
        r.EngineStarted(
            engine="vllm",
            process="77@1",
            versions={"vllm": "0.32.0"},
            checkpoint_interval=b.C,
            max_model_len=8192,
            tensor_parallel=ranks,
            pipeline_parallel=1,
            data_parallel=1,
            decode_context_parallel=1,
            connector=None,
            audit_level=None,
            settings={"cache_config.block_size": b.C, "scheduler_config.async_scheduling": asynchronous},
            eos_token_ids=[STOP],
        ),
        r.PlanResolved(resolved_sha256=sha256_hex(resolved_json)),
        p.IdentityRead(when="before", values=values, missing=[]),
        gate("selftest", 6, 108, guard),
        gate("sampling", 8, 272, guard),
    ]
    for shape in shapes:
        records += [_sent(shape), _answered(shape)]
    return [*records, p.IdentityRead(when="after", values=values, missing=[]), r.EngineStopped()]


def gate(name: Any, forced: int, ordinary: int, guard: str | None = None) -> p.GateReceipt:
    return p.GateReceipt(
        gate=name,
        ok=True,
        reason=None,
        source_sha256="d" * 64,
        functions=[SOURCE],
        kernel="triton-interpreter",
        forced_rows=forced,
        forced_right=forced,
        ordinary_rows=ordinary,
        ordinary_same=ordinary,
        guard=guard,
    )


def _sent(shape: Shape) -> p.ProbeSent:
    asked = {
        "model": "samestate",
        "messages": [{"role": "user", "content": "…"}],
        "max_completion_tokens": shape.max_tokens,
        "temperature": 0.6,
        "top_p": 0.95,
        "stop_token_ids": [],
        "ignore_eos": False,
        "n": 1,
        "stream": False,
        "return_token_ids": True,
    }
    budget = {} if shape.budget is None else {"thinking_token_budget": shape.budget}
    body = json.dumps(asked | budget | {"reasoning_effort": "max", "seed": 42})
    return p.ProbeSent(
        probe=shape.name,
        attempt=1,
        retries_allowed=0,
        address="/v1/chat/completions",
        model="samestate",
        body=body,
        body_sha256=sha256_hex(body.encode()),
        budget=shape.budget,
        max_tokens=shape.max_tokens,
        temperature=0.6,
        top_p=0.95,
        stop_token_ids=[],
        ignore_eos=False,
    )


def _answered(shape: Shape) -> p.ProbeAnswered:
    delivered = shape.delivered
    closed = delivered.index(END) if END in delivered else len(delivered)
    return p.ProbeAnswered(
        probe=shape.name,
        request=request_of(shape),
        status=200,
        prompt_token_ids=shape.prompt,
        token_ids=delivered,
        finish_reason=shape.finish,
        stop_reason=shape.stop_reason,
        usage=p.ProbeUsage(prompt=len(shape.prompt), completion=len(delivered), reasoning=closed),
        echo={"model": "samestate"},
        content="9567,1085,10652",
        reasoning="…",
        text_sha256=sha256_hex("…9567,1085,10652".encode()),
        anomalies=[],
    )


def _traced(shapes: Sequence[Shape], rank: int, drafts: int) -> list[r.Record]:
    """As the newer runner's recorder sees it: a store on every row that the policy forces, drafts taken as they are."""
    records: list[r.Record] = []
    step = 7  # warm-up came before
    for shape in shapes:
        if shape.budget is None:
            continue
        request = f"{request_of(shape)}-0a1b2c3d"
        start, end = (
            max((at for at, one in enumerate(shape.prompt) if one == id_), default=-1) for id_ in (START, END)
        )
        resident = len(shape.prompt) - 1 - start if start > end else None
        records.append(
            m.ReasoningRequest(
                rank=rank,
                request=request,
                slot=3,
                budget=shape.budget,
                prompt_tokens=len(shape.prompt),
                resident=resident,
            )
        )
        output: list[int] = []
        for one in shape.steps:
            done = {"rank": rank, "step": step, "request": request, "position": len(output)}
            records.append(m.LogitsRows(**done, slot=3, rows=_rows(shape, output, one)))
            records.append(m.TokensCommitted(**done, tokens=one.tokens, rows=list(range(len(one.tokens)))))
            output += one.tokens
            step += 1
    return records


def _rows(shape: Shape, output: list[int], step: Step) -> list[m.LogitsRow]:
    markers = Markers((START,), (END,))
    decisions = decide_outputs([*shape.prompt, *output], step.drafts, markers, shape.budget or 0)
    rows = []
    for local, decision in enumerate(decisions):
        at = len(output) + local
        token = step.tokens[local] if local < len(step.tokens) else AFTER
        led = shape.argmax.get(at, 31 if decision.forced == token else token)
        rows.append(
            m.LogitsRow(
                local=local,
                drafted=step.drafts[local] if local < len(step.drafts) else None,
                store=decision.forced is not None,
                stored=decision.forced,
                argmax=led,
                logprob=-0.5,
            )
        )
    return rows


def _scheduled(shapes: Sequence[Shape]) -> list[r.Record]:
    records: list[r.Record] = []
    for shape in shapes:
        request = f"{request_of(shape)}-0a1b2c3d"
        last = max(at for at, one in enumerate(shape.steps) if not one.dropped)
        position = 0
        for at, one in enumerate(shape.steps):
            if one.dropped:
                records.append(m.RunAheadDropped(request=request, tokens=one.tokens))
                continue
            after = len(one.tokens) if one.kept is None else one.kept
            records.append(
                m.TokensDelivered(
                    request=request,
                    position=position,
                    before=one.tokens,
                    after=after,
                    finish_reason=shape.finish if at == last else None,
                    stop_reason=shape.stop_reason if at == last else None,
                )
            )
            position += after
    return records


def changed(shape: Shape, **fields: Any) -> Shape:
    return replace(shape, **fields)
