"""One failing request as a small bundle for a bug report: what it did, what it reused, what was found.

Everything in it comes through an allow-list: numbers, hashes, token ids (or only their digests), and words made of
plain characters. Paths, hosts, names of users, texts of errors, free words of a plan and serve arguments stay out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import msgspec

from samestate.checks.analyzers import Judgement
from samestate.checks.base import Finding, Verdict
from samestate.checks.history import ArmHistory, History, MissingEvidence
from samestate.checks.seen import Seen
from samestate.evidence import records as r
from samestate.evidence.archive import Archive
from samestate.evidence.canonical import token_digest
from samestate.evidence.places import place
from samestate.evidence.text import printable
from samestate.plans.load import load, shipped, with_connector
from samestate.plans.model import Plan
from samestate.plans.repetitions import arm_name as arm_name_of
from samestate.plans.repetitions import repeated_arms
from samestate.plans.scenarios import CONTROL
from samestate.reports.case_readme import readme

LEFT_OUT = "(left out)"
SETTINGS = (
    "cache_config.block_size",
    "cache_config.cache_dtype",
    "cache_config.enable_prefix_caching",
    "cache_config.mamba_block_size",
    "cache_config.mamba_cache_dtype",
    "cache_config.mamba_cache_mode",
    "cache_config.mamba_ssm_cache_dtype",
    "cache_config.num_gpu_blocks",
    "kv_transfer_config.kv_connector",
    "kv_transfer_config.kv_load_failure_policy",
    "model_config.dtype",
    "model_config.enforce_eager",
    "model_config.max_model_len",
    "model_config.quantization",
    "model_config.seed",
    "parallel_config.data_parallel_size",
    "parallel_config.pipeline_parallel_size",
    "parallel_config.tensor_parallel_size",
    "scheduler_config.async_scheduling",
    "scheduler_config.enable_chunked_prefill",
    "scheduler_config.max_num_batched_tokens",
    "scheduler_config.max_num_seqs",
    "speculative_config.num_speculative_tokens",
    "env.OMP_NUM_THREADS",
    "env.PYTHONHASHSEED",
    "env.VLLM_BATCH_INVARIANT",
    "env.VLLM_ENABLE_V1_MULTIPROCESSING",
)
"""Effective settings that a bundle may hold."""
VERSIONS = ("samestate", "sim", "python", "vllm", "torch", "transformers", "triton", "fla-core", "lmcache")

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:+-]{0,127}")
_ELSEWHERE = re.compile(
    r"(?<![^\s'\"`=(\[,:<>])[~.]{0,2}/[^\s'\",;)\]]+|[a-z][a-z0-9+.-]*://\S+|[\w.+-]+@[\w-]+\.\w[\w.]*|\b[A-Za-z]:\\\S+"
)
"""Paths that begin somewhere, addresses of the web and of mail."""
_WHERE = re.compile(r"arms/[a-z0-9.-]+/[A-Za-z0-9._-]+\.jsonl:\d+")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Timeout|Interrupt)\b")


class CaseError(Exception):
    """No bundle can be made. ``str(error)`` is one line."""


class Bundle(NamedTuple):
    """File name -> text."""

    files: dict[str, str]
    records: int


def bundle(archive: Archive, history: History, judgement: Judgement, op: str, *, redact_tokens: bool) -> Bundle:
    """The bundle of operation `op`. CaseError where it has no finding, or the archive is not whole."""
    if history.defects:
        where, what = history.defects[0]
        raise CaseError(f"{where}: {what}; a report from damaged evidence helps nobody, run again")
    try:
        plan, c = history.plan, history.resolved.checkpoint_interval
    except MissingEvidence as missing:
        raise CaseError(f"{missing}; run again") from None
    if plan.markers is not None:
        raise CaseError(f"OP: plan {plan.name} asks probes, of which no bundle is made; send the archive, it is small")
    findings = [(check, finding) for check, finding in _failing(judgement) if _concerns(finding, op, history)]
    # What happened before what it led to.
    findings.sort(key=lambda found: (found[1].verdict is not Verdict.FAIL, found[0].endswith("equality")))
    if not findings:
        with_findings = sorted({finding.place.op for _, finding in _failing(judgement) if finding.place.op})
        raise CaseError(f"OP: {op!a} has no failing finding; those that have one: {', '.join(with_findings) or 'none'}")
    arm_name = next((finding.place.arm for _, finding in findings if finding.place.arm in history.arms), None)
    arm_name = arm_name or next(name for name, arm in history.arms.items() if _started(arm, op))
    target = _started(history.arms[arm_name], op)
    if target is None:
        raise CaseError(f"OP: arm {arm_name} never began {op!a}; name another operation")
    chosen = _chosen(history, plan, c, arm_name, target)
    words = _Words(history)
    lines = [
        {"where": where, "rec": words.clean(rec, redact_tokens=redact_tokens)}
        for where, rec in _records(archive, history, chosen)
    ]
    about = _about(history, judgement, plan, arm_name, target.rec, chosen, findings, words)
    files = {
        "README.md": readme(about, judgement, redact_tokens=redact_tokens),
        "case.json": json.dumps(about, indent=2) + "\n",
        "records.jsonl": "".join(json.dumps(line) + "\n" for line in lines),
    }
    if not redact_tokens:
        files["tokens.json"] = json.dumps(_tokens(history, chosen)) + "\n"
    for name, text in files.items():
        if leak := _ELSEWHERE.search(text):
            raise CaseError(f"{name} would hold {leak[0][:40]!a}, which looks like a place; nothing was written")
    return Bundle(files, len(lines))


def _failing(judgement: Judgement) -> Iterator[tuple[str, Finding]]:
    for result in judgement.results:
        for finding in result.findings:
            if finding.verdict in (Verdict.FAIL, Verdict.UNKNOWN):
                yield result.check, finding


def _concerns(finding: Finding, op: str, history: History) -> bool:
    """Of the operation itself, or of its whole case."""
    if finding.place.op is not None or finding.place.case is None:
        return finding.place.op == op
    started = (_started(arm, op) for arm in history.arms.values())
    return any(seen is not None and seen.rec.case == finding.place.case for seen in started)


def _started(arm: ArmHistory, op: str) -> Seen[r.OperationStarted] | None:
    return next((seen for seen in arm.started if seen.rec.op == op), None)


def _chosen(
    history: History, plan: Plan, c: int, arm_name: str, target: Seen[r.OperationStarted]
) -> dict[str, list[Seen[r.OperationStarted]]]:
    """By arm: the operation, the earlier ones whose first checkpoint it can reuse, and the resets between them.

    Earlier ones also in arms whose external cache this one found. Of the control, the same operation.
    """
    follows = {arm.name: arm.follows for arm in plan.arms}
    ids = history.inputs.get(target.rec.prompt_sha256 or "", [])
    chosen: dict[str, list[Seen[r.OperationStarted]]] = {}
    at: str | None = arm_name
    while at is not None and at not in chosen and at in history.arms:
        earlier = [seen for seen in history.arms[at].started if at != arm_name or seen.n < target.n]
        reused = [seen for seen in earlier if _shares(history, seen.rec, target.rec, ids, c)]
        since = reused[0].n if reused else target.n
        resets = [seen for seen in earlier if seen.rec.name is r.OperationName.RESET and seen.n > since]
        chosen[at] = sorted([*reused, *resets], key=lambda seen: seen.n)
        at = follows.get(at)
    chosen[arm_name].append(target)
    repetition = next((one.repetition for one in repeated_arms(plan) if one.name == arm_name), 1)
    name = arm_name_of(CONTROL, repetition)
    control = history.arms.get(name)
    if control is not None and name not in chosen and (same := _started(control, target.rec.op)):
        chosen[name] = [same]
    return chosen


def _shares(history: History, one: r.OperationStarted, target: r.OperationStarted, ids: list[int], c: int) -> bool:
    if one.prompt_sha256 is None or one.salt != target.salt:
        return False
    theirs = history.inputs.get(one.prompt_sha256, [])
    return one.prompt_sha256 == target.prompt_sha256 or (len(ids) >= c and theirs[:c] == ids[:c])


def _records(
    archive: Archive, history: History, chosen: dict[str, list[Seen[r.OperationStarted]]]
) -> Iterator[tuple[str, r.Record]]:
    """The records of the chosen operations, arm after arm; batches and waits cut down to their requests and jobs."""
    for name, started in chosen.items():
        ops = {seen.rec.op for seen in started}
        requests = {seen.rec.request for op in ops for seen in history.arms[name].outputs.get(op, ())}
        for process in archive.streams(name):
            jobs: set[int] = set()
            for line in archive.records(name, process):
                if (rec := _mine(line.rec, ops, requests, jobs)) is not None:
                    yield place(f"arms/{name}/{process}.jsonl", line.n), rec


def _mine(rec: Any, ops: Collection[str], requests: Collection[str], jobs: set[int]) -> r.Record | None:
    """The record as far as it is of these operations; None where it is not."""
    match rec:
        case r.BatchScheduled():
            rows = [row for row in rec.rows if row.request in requests]
            preempted = [request for request in rec.preempted if request in requests]
            return msgspec.structs.replace(rec, rows=rows, preempted=preempted) if rows or preempted else None
        case r.LoadSubmitted() | r.SaveSubmitted() if rec.request in requests:
            jobs.add(rec.job)
            return rec
        case r.LoadSubmitted() | r.SaveSubmitted():
            jobs.discard(rec.job)
            return None
        case r.LoadCompleted() | r.SaveCompleted():
            mine = rec.job in jobs
            jobs.discard(rec.job)
            return rec if mine else None
        case r.PagesDigested() | r.PagesPoisoned() | r.GuardsChecked() | r.SaveDelayed():
            return rec if rec.job in jobs else None
        case r.OperationStarted() | r.OperationOutput() | r.OperationEnded() | r.CacheReset() | r.CountersRead():
            return rec if rec.op in ops else None
        case r.Lookup() | r.Allocated() | r.StateComputed() | r.BlocksAssigned() | r.RequestFinished():
            return rec if rec.request in requests else None
        case _:
            return None


class _Words:
    """What an archive says, as far as others may read it."""

    def __init__(self, history: History) -> None:
        self._names: dict[str, str] = {}
        self._texts: set[str] = set()
        for arm in history.arms.values():
            for outputs in arm.outputs.values():
                for seen in outputs:
                    self._names.setdefault(seen.rec.request, f"request-{len(self._names) + 1}")
            for ends in arm.ends.values():
                self._texts |= {seen.rec.error for seen in ends if seen.rec.error}

    def clean(self, rec: r.Record, *, redact_tokens: bool) -> Any:
        """A record as JSON: engine request ids and salts by aliases, of an error its class alone."""
        fields = msgspec.to_builtins(rec)
        if isinstance(rec, r.OperationEnded) and rec.error is not None:
            known = _EXCEPTION.match(rec.error)
            fields["error"] = known[0].rpartition(".")[2] if known else LEFT_OUT
        if isinstance(rec, r.OperationOutput):
            fields["logprobs"] = None
            if redact_tokens:
                fields |= {"token_ids": len(rec.token_ids), "tokens_sha256": token_digest(rec.token_ids)}
        if isinstance(rec, r.CountersRead):
            fields["values"] = {name: value for name, value in rec.values.items() if name in r.COUNTERS}
        if fields.get("salt"):
            fields["salt"] = "salted"
        return self._plain(fields)

    def said(self, text: str) -> str:
        """A finding's message without engine request ids, texts of errors, and what looks like a place."""
        for secret in sorted(self._texts, key=len, reverse=True):
            text = text.replace(secret, LEFT_OUT)
        for request in sorted(self._names, key=len, reverse=True):
            text = text.replace(request, self._names[request])
        return printable(_ELSEWHERE.sub(LEFT_OUT, text))

    def _plain(self, value: Any) -> Any:
        match value:
            case str():
                return self._names.get(value) or plain(value)
            case list():
                return [self._plain(item) for item in value]
            case dict():
                return {name: self._plain(item) for name, item in value.items()}
            case _:
                return value


def plain(value: Any) -> Any:
    """A scalar; a text only where it is one short word of plain characters."""
    if isinstance(value, str):
        return value if value == "" or _PLAIN.fullmatch(value) else LEFT_OUT
    return value


def _about(
    history: History,
    judgement: Judgement,
    plan: Plan,
    arm_name: str,
    target: r.OperationStarted,
    chosen: dict[str, list[Seen[r.OperationStarted]]],
    findings: list[tuple[str, Finding]],
    words: _Words,
) -> dict[str, Any]:
    known = _shipped(plan)
    model = history.resolved.model
    return {
        "operation": target.op,
        "arm": arm_name,
        "prompt_tokens": target.prompt_tokens,
        "checkpoint_interval": history.resolved.checkpoint_interval,
        "seal_sha256": judgement.seal_sha256,
        "fault_injected": plain(judgement.fault),
        "verdict": judgement.verdict.value,
        "analyzer": {"id": judgement.analyzer, "source_sha256": judgement.analyzer_sha256},
        "plan": {
            "shipped_as": known,
            "connector": _connector(plan),
            "sha256": judgement.plan_sha256,
            "kind": "scenario" if plan.scenario else "matrix",
            "lengths": [plain(length) for length in plan.lengths],
            "operations": [name.value for name in plan.operations],
            "output_tokens": plan.output_tokens,
            "temperature": plan.temperature,
            "seed": plan.seed,
            "ignore_eos": plan.ignore_eos,
            "further_serve_arguments": len(plan.engine.serve_args),
        },
        "model": {"name": plain(model.name) if plan.engine.model == model.name else "external", "sha256": model.sha256},
        "arms": {name: _engine(history.arms[name], plan, name) for name in chosen},
        "operations": {name: [seen.rec.op for seen in started] for name, started in chosen.items()},
        "findings": [
            {
                "check": check,
                "code": finding.code,
                "verdict": finding.verdict.value,
                "message": words.said(finding.message),
                "evidence": [where for where in finding.evidence if _WHERE.fullmatch(where)],
            }
            for check, finding in findings
        ],
    }


def _engine(arm: ArmHistory, plan: Plan, name: str) -> dict[str, Any]:
    planned = next((one.arm for one in repeated_arms(plan) if one.name == name), None)
    about: dict[str, Any] = {"ranks": len(arm.ranks), "imported": arm.imported_from is not None}
    if planned is not None:
        about |= {"connector": planned.connector, "release": plain(planned.release), "repair": planned.repair}
    for seen in arm.engines[:1]:
        rec = seen.rec
        about |= {
            "engine": rec.engine,
            "versions": {what: plain(rec.versions[what]) for what in VERSIONS if what in rec.versions},
            "connector_class": plain(rec.connector),
            "audit_level": plain(rec.audit_level),
            "settings": {what: plain(rec.settings[what]) for what in SETTINGS if what in rec.settings},
        }
    return about


def _connector(plan: Plan) -> dict[str, Any] | None:
    """What was asked of the connector, where that is not vLLM's own; texts only where they are one plain word."""
    arm = next((arm for arm in plan.arms if arm.connector not in ("none", "native")), None)
    if arm is None:
        return None
    options = {name: plain(value) for name, value in arm.options.items()}
    return {"name": arm.connector, "release": plain(arm.release), "options": options, "repair": arm.repair}


def _shipped(plan: Plan) -> str | None:
    """The name of the shipped plan that this one is, freezing, another checkpoint and the connector apart."""
    if plan.name not in shipped():
        return None
    known = load(plan.name)
    connected = next((arm for arm in plan.arms if arm.connector != "none"), None)
    if connected is not None:
        options = dict(connected.options)
        known = with_connector(
            known, connected.connector, release=connected.release, options=options, repair=connected.repair
        )
    pin = plan.analyzer.model_copy(update={"source_sha256": None})
    engine = plan.engine.model_copy(update={"model": known.engine.model})
    return plan.name if plan.model_copy(update={"analyzer": pin, "engine": engine}) == known else None


def _tokens(history: History, chosen: dict[str, list[Seen[r.OperationStarted]]]) -> dict[str, list[int]]:
    wanted = {seen.rec.prompt_sha256 for started in chosen.values() for seen in started}
    return {digest: ids for digest, ids in history.inputs.items() if digest in wanted}
