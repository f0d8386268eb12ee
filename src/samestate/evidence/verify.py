#!/usr/bin/env python3
"""The second verifier: judges a sealed archive with the standard library alone (Python 3.9 or later).

    python verify.py [ARCHIVE] [--json]

Written by hand from docs/archive-format.md, sharing no code with samestate, so that a fault in one of the two
shows as a disagreement. ARCHIVE is the folder that this file lies in, if not said. It reads and never writes.

It recomputes the checks named in COVERED. Exit codes: 0 every required check was recomputed and passes, 1 one of them
fails, 2 usage, 3 unknown: evidence is missing, or a required check is not recomputed (the pages of an instrumented
plan, another analyzer, a scenario, a newer format).

Who can write the archive can write this copy too: compare it with the one that samestate ships before you run it.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.isolated and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # the archive: no module that lies there is imported

import argparse
import hashlib
import json
import os
import re
import struct
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from itertools import chain, dropwhile
from typing import Any, NamedTuple

FORMAT = 1
PASS, FAIL, UNKNOWN, NOT_EXERCISED = "pass", "fail", "unknown", "not_exercised"
EXIT_CODES = {PASS: 0, FAIL: 1}
CONTROL, CANDIDATE, REFERENCE = "control", "candidate", "reference-control"
PREEMPTIONS = "vllm:num_preemptions"
LOCAL_HITS = "vllm:prefix_cache_hits"
EXTERNAL_HITS = "vllm:external_prefix_cache_hits"
DROPS_LAST_BLOCK = "speculative_config.use_eagle_block_drop"

# --- the words of the format: name:type, where a name that ends in = may be absent -----------------
# integer, count, hash, text, scalar, number, bool as in the document; ? or null, [] list of, {} object of;
# a|b one of these words; @name a table of NESTED; %name a list with exactly these types.

NESTED = {
    "engine_group": "group:integer entry_kind:attention|recurrent|conv|tail|indexer spec:text tokens_per_block:count "
    "layers:text[] page_bytes:count effective_bytes:count",
    "transfer_group": "group:integer engine_group:integer entries:count bytes_per_block:count tokens_per_block:count",
    "entry": "entry:integer layer:text engine_group:integer kind:attention|recurrent|conv|tail|indexer "
    "logical_dtype:text transfer_dtype:text is_byte_view:bool shape:integer[] storage_offset:integer "
    "block_stride:count page_bytes:count effective_bytes:count",
    "part": "group:integer first_block:integer pages:integer bytes:integer boundary:integer",
    "batch_row": "request:text start:integer scheduled:integer drafted:integer",
    "page_row": "entry:integer block_index:integer block:integer digest:text nonzero:integer sentinel:integer",
    "place": "group:integer block:integer",
    "storage_row": "name:text role:parameter|buffer shape:integer[] dtype:text digest:text",
    "argument": "name:text value:text shape:integer[]? written:bool",
    "control": "name:text on:bool sha256:hash?",
    "patched_file": "distribution:text path:text sha256:hash?",
    "kernel_selection": "kernel:text key:text[] config:scalar{}",
    "patched_function": "module:text qualname:text source_sha256:hash",
    "arm_plan": "name:slug connector:none|native|dictionary|lmcache|samestate-memory|samestate-disk|samestate-valkey|"
    "samestate-object release=:text? options=:scalar{} repair=:slug? "
    "follows=:slug? service=:kept|restarted ended=:stopped|killed settings=:scalar{} speculation=:@speculation_plan?",
    "speculation_plan": "method:ngram|draft_model|mtp drafts:count draft_model=:text? lookup=:count?",
    "probe_plan": "name:slug text:text budget:integer? max_tokens:count temperature=:temperature? top_p=:share "
    "effort=:none|minimal|low|medium|high|xhigh|max? stop=:text[] answer=:text?",
    "marker_plan": "route:chat|engine start:text end:text probes:@probe_plan[] gates=:selftest|sampling[] "
    "guard=:slug? repairs=:slug[] retries=:zero allowed_probes:count",
    "latency_plan": "trials:count warmups:integer order_seed=:int? interleaved=:bool",
    "stream_event": "at_ns:integer tokens:integer",
    "resolved_markers": "start_ids:int[] end_ids:int[] stop_ids:int[]{}",
    "logits_row": "local:integer drafted:integer? store:bool stored:integer? argmax:integer logprob:number",
    "probe_usage": "prompt:integer? completion:integer? reasoning:integer?",
    "engine_plan": "model:text settings:scalar{} external_cache_bytes:integer serve_args=:text[] "
    "core=:here|own-process",
    "instrument_plan": "audit_level:metadata|digest|poison save_delay_ms:integer",
    "expected_layout": "transfer_groups:count entries:count",
    "analyzer_pin": "id:slug source_sha256:hash?",
    "prompt_plan": "name:slug tokens:text shares=:slug? shared=:text? continues=:slug? answer=:kept|stripped? "
    "thinking=:count?",
    "step_plan": "prompts=:slug[] reset=:bool salt=:text? output_tokens=:count? "
    "path=:any|cold|local|external|mixed arm=:slug",
    "series_plan": "name:slug template:slug lengths:text[] output_tokens:count",
    "input": "case:text role:text tokens:int sha256:hash?",
    "model": "name:text files:hash{} sha256:hash",
}
PLAN = (
    "format:one name:slug title:text question:text engine:@engine_plan arms:@arm_plan[] lengths=:text[] "
    "operations=:cold|interposer|reset|reload|repeat|prompt[] series=:@series_plan[] prompts=:@prompt_plan[] "
    "scenario=:@step_plan[] markers=:@marker_plan? latency=:@latency_plan? "
    "template:slug output_tokens:count seed:int temperature:temperature ignore_eos:bool analyzer:@analyzer_pin "
    "required_checks:slug[] differing_settings:text[] scope:text not_shown:text[] instruments=:@instrument_plan "
    "expected_layout=:@expected_layout? allowed_attempts=:count? control_from=:slug? "
    "expected_patched=:text[]? repetitions=:forward|reverse[]"
)
RESOLVED = (
    "format:one plan_sha256:hash checkpoint_interval:int lengths:int[] model:@model inputs:@input[] operations:text[] "
    "markers=:@resolved_markers?"
)
SEAL = (
    "format:int sha256sums_sha256:hash files:integer plan_sha256:hash wall_time:text samestate_version:text "
    "self_sha256:hash"
)
LINE = "n:integer prev:hash t_ns:integer rec:@record"
KINDS = {
    "stream_opened": "format:int arm:text process:text pid:integer wall_time:text",
    "stream_closed": "dropped:integer",
    "attempt_started": "attempt:count plan_sha256:hash samestate_version:text source_sha256:hash "
    "source_commit:text? fault:text? arms:text[] "
    "control_seal_sha256:hash? reference_seal_sha256:hash? options:scalar{}",
    "contact_reached": "level:none|host|gpu|model|request",
    "attempt_ended": "outcome:completed|failed|interrupted|excluded reason:text?",
    "engine_started": "engine:vllm|sim|transformers process:text versions:text{} checkpoint_interval:count "
    "max_model_len:count tensor_parallel:count pipeline_parallel:count data_parallel:count "
    "decode_context_parallel:count connector:text? audit_level:text? settings:scalar{} eos_token_ids:integer[] "
    "controls=:@control[]?",
    "kernels_selected": "rank:integer mode:record|pin|release profile_sha256:hash? benchmarks:integer "
    "selections:@kernel_selection[] violations:text[]",
    "call_captured": "rank:integer module:text call:integer at_ns:integer inputs:@argument[] outputs:@argument[]",
    "calls_counted": "rank:integer module:text calls:integer captured:integer",
    "storages_digested": "rank:integer moment:start|end digest:text rows:%storage_row[]",
    "environment_observed": "rank:integer observed_at:text device:text device_uuid:text? driver:text? variables:text{} "
    "backends:text{} patched:@patched_file[]",
    "rank_registered": "rank:integer world_size:count num_blocks:count engine_groups:@engine_group[] "
    "transfer_groups:@transfer_group[] entries:@entry[] digest:text",
    "engine_stopped": "",
    "engine_killed": "process:text processes:count",
    "service_started": "service:text version:text options:scalar{} continues:bool",
    "service_stopped": "service:text alive:bool kept:bool leftovers:integer",
    "modules_listed": "rank:integer listing:integer outputs:text[]",
    "step_traced": "rank:integer op:text step:integer at_ns:integer tokens:integer listing:integer digests:text",
    "intervention_applied": "name:text functions:@patched_function[] rank=:integer?",
    "plan_resolved": "resolved_sha256:hash",
    "operation_started": "op:text case:text name:cold|interposer|reset|reload|repeat|prompt "
    "prompt_tokens:integer prompt_sha256:hash? salt:text together:text?",
    "operation_output": "op:text request:text token_ids:integer[] logprobs:number[]? margins=:number[]? "
    "finish_reason:text? cached_tokens:integer?",
    "operation_ended": "op:text ok:bool error:text?",
    "cache_reset": "op:text local_reset:bool external_kept:bool running_kept:bool attempts:count",
    "counters_read": "op:text when:before|after values:number{} missing:text[]",
    "lookup": "request:text queried_tokens:integer local_tokens:integer matched_tokens:integer? is_async:bool "
    "salt:text",
    "allocated": "request:text external_tokens:integer block_ids:integer[][]",
    "scheduler_configured": "block_size:count saves_within_steps:bool engine_groups:@engine_group[]",
    "batch_scheduled": "step:integer source:scheduler|connector rows:%batch_row[] preempted:text[]",
    "state_computed": "step:integer request:text boundary:count blocks:%place[]",
    "blocks_assigned": "step:integer request:text blocks:integer[][]",
    "request_finished": "request:text",
    "load_submitted": "rank:integer job:integer request:text boundary:integer? parts:@part[]",
    "load_completed": "rank:integer job:integer ok:bool bytes:integer?",
    "save_submitted": "rank:integer job:integer request:text? parts:@part[]",
    "save_completed": "rank:integer job:integer ok:bool bytes:integer?",
    "save_waited": "rank:integer jobs:integer[] waited_ns:integer timed_out:bool",
    "save_delayed": "rank:integer job:integer delay_ms:count",
    "pages_digested": "rank:integer job:integer request:text direction:save|load side:source|stored|destination "
    "moment:submitted|completed rows:%page_row[]",
    "pages_poisoned": "rank:integer job:integer pages:integer bytes:integer guards:integer",
    "guards_checked": "rank:integer job:integer steps_between:integer changed:integer[][]",
    "recorder_started": "role:rank|scheduler rank:integer? ranks:count runner:v1|v2 capacity:count "
    "speculative_tokens:integer asynchronous:bool start_ids:integer[] end_ids:integer[] functions:@patched_function[]",
    "reasoning_request": "rank:integer request:text slot:integer budget:integer prompt_tokens:count resident:integer?",
    "logits_rows": "rank:integer step:integer request:text slot:integer position:integer rows:%logits_row[]",
    "tokens_committed": "rank:integer step:integer request:text position:integer tokens:integer[] rows:integer[]",
    "tokens_delivered": "request:text position:integer before:integer[] after:integer finish_reason:text? "
    "stop_reason:reason",
    "run_ahead_dropped": "request:text tokens:integer[]",
    "recorder_stopped": "rank:integer? written:integer dropped:integer",
    "identity_read": "when:before|after values:scalar{} missing:text[]",
    "gate_receipt": "gate:selftest|sampling ok:bool reason:text? source_sha256:hash functions:@patched_function[] "
    "kernel:text forced_rows:integer forced_right:integer ordinary_rows:integer ordinary_same:integer guard:text?",
    "probe_sent": "probe:text attempt:count retries_allowed:integer address:text model:text body:text "
    "body_sha256:hash budget:integer? max_tokens:count temperature:number top_p:number stop_token_ids:integer[] "
    "ignore_eos:bool",
    "probe_answered": "probe:text request:text status:count prompt_token_ids:integer[] token_ids:integer[] "
    "finish_reason:text? stop_reason:reason usage:@probe_usage echo:scalar{} content:text? reasoning:text? "
    "text_sha256:hash anomalies:text[]",
    "probe_failed": "probe:text status:count? error:text",
    "request_timed": "op:text request:text peer:text concurrency:count attempts:count began_ns:integer done_ns:integer "
    "events:%stream_event[]",
    "host_sampled": "op:text when:before|after cpus:count load:number busy_ticks:integer total_ticks:integer "
    "memory_total:integer memory_available:integer",
    "copy_measured": "rank:integer route:host-to-host|host-to-device device:text bytes:count took_ns:count[]",
    "load_phase": "level:text attempted:text concurrency:count? rate:number? seed:integer ops:text[] due_ns:integer[]",
    "fault_armed": "fault:text parameters:scalar{}",
}

HASH = re.compile(r"[0-9a-f]{64}")
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", re.ASCII)
SLUG = re.compile(r"[a-z0-9][a-z0-9.-]*")
Fits = Callable[[Any], bool]
ATOMS: dict[str, Fits] = {
    "int": lambda value: type(value) is int,
    "integer": lambda value: type(value) is int and value >= 0,
    "count": lambda value: type(value) is int and value >= 1,
    "one": lambda value: type(value) is int and value == 1,
    "zero": lambda value: type(value) is int and value == 0,
    "temperature": lambda value: type(value) in (int, float) and 0 <= value <= 2,
    "share": lambda value: type(value) in (int, float) and 0 < value <= 1,
    "reason": lambda value: value is None or type(value) in (int, str),
    "number": lambda value: type(value) in (int, float),
    "bool": lambda value: type(value) is bool,
    "text": lambda value: type(value) is str,
    "scalar": lambda value: value is None or type(value) in (str, int, float, bool),
    "hash": lambda value: type(value) is str and HASH.fullmatch(value) is not None,
    "slug": lambda value: type(value) is str and SLUG.fullmatch(value) is not None,
}


def fits(spec: str) -> Fits:
    """The test for one type of the language above."""
    if spec.endswith("?"):
        inner = fits(spec[:-1])
        return lambda value: value is None or inner(value)
    if spec.endswith("[]"):
        inner = fits(spec[:-2])
        return lambda value: type(value) is list and all(map(inner, value))
    if spec.endswith("{}"):
        inner = fits(spec[:-2])
        return lambda value: type(value) is dict and all(map(inner, value.values()))
    if spec == "@record":
        kinds = {kind: table(f"kind:{kind}| {fields}") for kind, fields in KINDS.items()}
        none = table("")
        return lambda value: type(value) is dict and kinds.get(str(value.get("kind")), none)(value)
    if spec.startswith("@"):
        return table(NESTED[spec[1:]])
    if spec.startswith("%"):
        types = [fits(field.partition(":")[2]) for field in NESTED[spec[1:]].split()]
        return lambda value: (
            type(value) is list and len(value) == len(types) and all(t(v) for t, v in zip(types, value))  # noqa: B905
        )
    if "|" in spec:
        words = set(spec.split("|"))
        return lambda value: type(value) is str and value in words
    return ATOMS[spec]


def table(text: str) -> Fits:
    """The test for an object with these fields and no others."""
    pairs = [field.partition(":")[::2] for field in text.split()]
    fields = {name.rstrip("="): fits(spec) for name, spec in pairs}
    needed = {name for name, _ in pairs if not name.endswith("=")}

    def is_one(value: Any) -> bool:
        if type(value) is not dict or not needed <= value.keys() <= fields.keys():
            return False
        for name, one in value.items():  # noqa: SIM110  every line of every stream comes by here
            if not fields[name](one):
                return False
        return True

    return is_one


IS_LINE, IS_SEAL, IS_PLAN, IS_RESOLVED = table(LINE), table(SEAL), table(PLAN), table(RESOLVED)


def no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")


def finite(text: str) -> float:
    number = float(text)
    return number if abs(number) < float("inf") else no_number(text)


DECODER = json.JSONDecoder(parse_constant=no_number, parse_float=finite)


def parse(data: bytes) -> Any:
    """One JSON value, strictly. Raises ValueError (RecursionError for absurd depth)."""
    text = data.decode("utf-8")
    value = DECODER.decode(text)
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # refuses half a surrogate pair
    return value


def canonical(value: Any) -> bytes:
    """RFC 8785 for objects, lists, texts and integers: no float stands in what is hashed here."""
    return json.dumps(ordered(value), ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def ordered(value: Any) -> Any:
    """The same with the keys of every object in canonical order. Raises ValueError for what has no form here."""
    if type(value) is dict:
        return {name: ordered(value[name]) for name in sorted(value, key=lambda name: name.encode("utf-16-be"))}
    if type(value) is list:
        return [ordered(one) for one in value]
    if type(value) is str or (type(value) is int and abs(value) < 2**53):
        return value
    raise ValueError("only texts and integers below 2^53 have a canonical form here")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def shown(text: str) -> str:
    """Text from an archive, with whatever a terminal might obey written as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


# --- the archive and its integrity ----------------------------------------------------------------

SUMS, SEAL_NAME, VERIFIER = "SHA256SUMS", "seal.json", "verify.py"
SOURCES = ("source-seal.json", "source-SHA256SUMS", "source-plan.json")
OUTSIDE = ("amendments", "signatures", "verdicts")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*)*")
SUMS_LINE = re.compile(r"([0-9a-f]{64})  (.+)")
STREAM = re.compile(r"arms/[^/]+/[A-Za-z0-9][A-Za-z0-9._-]*\.jsonl")
LEVELS = ["host", "model", "request"]
PAGE_LEVELS = ("digest", "poison")
WRAPPER = "UniformTypeKVCacheSpecs"
TRACE_DIGITS = 16
DIGITS = re.compile(r"[0-9a-f]*", re.ASCII)
MOST = 20
"""Defects told of one stream."""
OLDER: tuple[str, ...] = (
    "c1aba434cf214712b0f0a160ffea92e06a65e98d0e8207fd58182785f94f045b",
    "8ef34730550b57d321d96b139d127762b1623dee62405798c1c4be56194a670d",
    "a206e24fed59af3822bf6fcaaf60949ed194d361a3e03736533568e3cb21ad84",
)
"""SHA-256 of earlier copies of this file that releases, or the archives in docs/results, carry."""


class NewerFormat(Exception):
    """Nothing of a newer format is judged."""


class Missing(Exception):
    """A check needs what the archive does not hold: it is unknown."""


class Seen(NamedTuple):
    """A record, its line, its time and its process."""

    rec: dict[str, Any]
    n: int
    t: int
    process: str


class Load:
    """A load that was submitted, and its completion."""

    def __init__(self, seen: Seen) -> None:
        self.rec, self.n = seen.rec, seen.n
        self.done: dict[str, Any] | None = None

    @property
    def bytes(self) -> int:
        """Moved, as far as it is known."""
        return int(self.done["bytes"] or 0) if self.done and self.done["ok"] else 0


class Saved(NamedTuple):
    """A part of a save that completed well."""

    part: dict[str, Any]
    n: int
    """Line of the completion."""
    t: int
    """When it was submitted."""


class Row(NamedTuple):
    """One request in one step."""

    start: int
    scheduled: int
    drafted: int

    @property
    def end(self) -> int:
        return self.start + self.scheduled


class Rows:
    """The steps of one request as one source saw them, and when the first and the last were written."""

    def __init__(self) -> None:
        self.cells = array("q")
        self.first = self.last = 0

    def add(self, t: int, n: int, *cells: int) -> None:
        array("q", (n,))  # OverflowError before anything is added, here and below
        self.cells.extend(array("q", cells))
        self.first, self.last = (self.first if len(self) > 1 else t), t

    def __len__(self) -> int:
        return len(self.cells) // 3

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return Row(*self.cells[3 * index : 3 * index + 3])

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))


class Arm:
    """What the checks need of an arm's records."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.source: str | None = None
        self.sealed: str | None = None
        """When that seal says it was written."""
        """Hash of the seal that it was imported under."""
        self.source_plan_sha256: str | None = None
        """Of the plan that it was recorded under, where that is another."""
        self.source_plan: dict[str, Any] | None = None
        """That plan; None also where it cannot be read."""
        self.processes: list[str] = []
        self.all: dict[str, list[Seen]] = defaultdict(list)
        """Records by kind, of the kinds in KEPT."""
        self.by_op: dict[tuple[str, str], list[Seen]] = defaultdict(list)
        """Records by (kind, operation)."""
        self.rows: dict[tuple[str, str], Rows] = {}
        """By (request, source)."""
        self.preempted: set[str] = set()
        self.ranks: dict[int, dict[str, Any]] = {}
        self.ranks_again: set[int] = set()
        self.lookups: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.allocated: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.loads: dict[str, dict[int, list[Load]]] = {}
        """By request and rank."""
        self.open_loads: dict[tuple[int, int], Load] = {}
        """By (rank, job)."""
        self.stray_loads = 0
        self.finished: set[str] = set()
        self.assigned: set[str] = set()
        self.times: dict[str, list[int]] = {}
        """By request: first and last time of its lookups, allocations, end and loads."""
        self.saves: dict[tuple[int, str], list[Saved]] = defaultdict(list)
        """By (rank, request)."""
        self.open_saves: dict[tuple[int, int], Seen] = {}
        """By (rank, job)."""
        self.submitted = self.unpaired = self.failed = self.unlike = 0
        """Of saves."""

    KEPT = (
        "engine_started",
        "engine_stopped",
        "engine_killed",
        "kernels_selected",
        "environment_observed",
        "storages_digested",
        "operation_started",
        "scheduler_configured",
        "plan_resolved",
        "service_started",
        "service_stopped",
        "intervention_applied",
        "modules_listed",
    )
    BY_OP = ("operation_output", "operation_ended", "cache_reset", "counters_read", "step_traced")

    def take(self, seen: Seen) -> None:
        """Index a record. Raises OverflowError for a number beyond 2^63 where numbers are compared."""
        rec, kind = seen.rec, seen.rec["kind"]
        if kind in self.KEPT:
            self.all[kind].append(seen)
        elif kind in self.BY_OP:
            self.by_op[kind, rec["op"]].append(seen)
        elif kind in ("lookup", "allocated"):
            self.date(rec["request"], seen.t)
            (self.lookups if kind == "lookup" else self.allocated)[rec["request"]].append(rec)
        elif kind == "request_finished":
            self.date(rec["request"], seen.t)
            self.finished.add(rec["request"])
        elif kind == "blocks_assigned":
            if any(seen.rec["audit_level"] in PAGE_LEVELS for seen in self.all["engine_started"][-1:]):
                self.assigned.add(rec["request"])
        elif kind == "rank_registered":
            if rec["rank"] in self.ranks:
                self.ranks_again.add(rec["rank"])
            else:
                self.ranks[rec["rank"]] = rec
        elif kind == "batch_scheduled":
            if rec["source"] == "scheduler":
                array("q", (seen.t, seen.n))
            for request, start, scheduled, drafted in rec["rows"]:
                rows = self.rows.get((request, rec["source"]))
                if rows is None:
                    rows = self.rows[request, rec["source"]] = Rows()
                rows.add(seen.t, seen.n, start, scheduled, drafted)
            self.preempted.update(rec["preempted"])
        elif kind.startswith("load_"):
            self.load(seen)
        elif kind in ("save_submitted", "save_completed"):
            self.save(seen)

    def unwrap(self) -> None:
        """A group whose spec may hold any kind is as the one scheduler has it, for the same layers."""
        schedulers = self.all["scheduler_configured"]
        if len(schedulers) != 1:
            return
        told = {group["group"]: group for group in schedulers[0].rec["engine_groups"]}
        for rank, rec in self.ranks.items():
            groups = []
            for group in rec["engine_groups"]:
                theirs = told.get(group["group"])
                same = theirs is not None and all(theirs[of] == group[of] for of in ("layers", "tokens_per_block"))
                alike = group["spec"] == WRAPPER and same
                said = {"entry_kind": theirs["entry_kind"], "spec": theirs["spec"]} if theirs and alike else {}
                groups.append({**group, **said})
            self.ranks[rank] = {**rec, "engine_groups": groups}

    def load(self, seen: Seen) -> None:
        rec, job = seen.rec, (seen.rec["rank"], seen.rec["job"])
        if rec["kind"] == "load_submitted":
            load = self.open_loads[job] = Load(seen)
            self.loads.setdefault(rec["request"], {}).setdefault(rec["rank"], []).append(load)
            self.date(rec["request"], seen.t)
        elif job in self.open_loads:
            load = self.open_loads.pop(job)
            load.done = rec
            self.date(load.rec["request"], seen.t)
        else:
            self.stray_loads += 1

    def save(self, seen: Seen) -> None:
        rec, job = seen.rec, (seen.rec["rank"], seen.rec["job"])
        submitted = self.open_saves.pop(job, None)
        if rec["kind"] == "save_submitted":
            self.unpaired += submitted is not None
            self.open_saves[job] = seen
            self.submitted += 1
        elif submitted is None:
            self.unpaired += 1
        elif not rec["ok"]:
            self.failed += 1
        else:
            parts = submitted.rec["parts"]
            self.unlike += rec["bytes"] not in (None, sum(part["bytes"] for part in parts))
            if parts:
                request = submitted.rec["request"] or ""
                self.saves[rec["rank"], request] += [Saved(part, seen.n, submitted.t) for part in parts]

    def date(self, request: str, t: int) -> None:
        span = self.times.setdefault(request, [t, t])
        span[:] = min(span[0], t), max(span[1], t)

    def counter(self, op: str, name: str) -> float | None:
        """After less before, around an operation; None: it cannot be read."""
        values: dict[str, float] = {}
        for seen in self.by_op.get(("counters_read", op), ()):
            if name in seen.rec["values"] and name not in seen.rec["missing"]:
                values[seen.rec["when"]] = float(seen.rec["values"][name])
        return values["after"] - values["before"] if len(values) == 2 else None

    def local(self, request: str) -> int:
        """Most tokens that a lookup of the request found in the local cache."""
        return max((one["local_tokens"] for one in self.lookups.get(request, ())), default=0)

    @property
    def connected(self) -> bool:
        return bool(self.all["engine_started"]) and self.engine["connector"] is not None

    @property
    def engine(self) -> dict[str, Any]:
        if not self.all["engine_started"]:
            raise Missing(f"arm {self.name}: no engine_started record")
        return self.all["engine_started"][0].rec

    def output(self, op: str) -> dict[str, Any] | None:
        """The first output of an operation."""
        given = self.by_op.get(("operation_output", op))
        return given[0].rec if given else None

    def schedule(self, op: str, source: str = "scheduler") -> Rows | None:
        output = self.output(op)
        return self.rows.get((output["request"], source)) if output else None


class Attempt:
    """One attempt, as its stream tells it."""

    def __init__(self, rec: dict[str, Any], t: int, opened: str | None) -> None:
        self.rec, self.t, self.opened = rec, t, opened
        self.contacts: list[str] = []
        self.ends: list[dict[str, Any]] = []
        self.strays = 0


class Archive:
    """Reads an archive once: what is wrong with it, and what its records say."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.defects: list[tuple[str, str]] = []
        self.records = 0
        self.attempts: list[Attempt] = []
        self.names: set[str] = set()
        self.scan("")
        self.sums: dict[str, str] = self.seal()
        self.files()
        self.plan = self.model("plan.json", IS_PLAN, needed=True)
        self.resolved = self.model("resolved.json", IS_RESOLVED, needed=True)
        self.inputs = self.read_inputs()
        if "attempts.jsonl" in self.names:
            self.attempt("attempts.jsonl")
        names = {name.split("/")[1] for name in self.names if in_arm(name)}
        self.arms = {name: self.arm(name) for name in sorted(names)}
        self.damaged = {where.split("/")[1] for where, _ in self.defects if re.match("arms/[^/]*/", where)}

    def defect(self, where: str, what: str) -> None:
        self.defects.append((shown(where), what))

    def read(self, name: str) -> bytes | None:
        if name not in self.names:
            return None
        try:
            with open(os.path.join(self.root, name), "rb") as file:
                return file.read()
        except OSError:
            return None

    def scan(self, folder: str) -> None:
        try:
            entries = sorted(os.scandir(os.path.join(self.root, folder)), key=lambda entry: entry.name)
        except OSError as error:
            self.defect(folder or ".", f"cannot be read: {error.strerror}")
            return
        for entry in entries:
            name = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_symlink():
                self.defect(name, "is a symlink")
            elif entry.is_dir(follow_symlinks=False):
                self.scan(name)
            elif not entry.is_file(follow_symlinks=False):
                self.defect(name, "is neither a file nor a folder")
            elif "/" not in name or name.split("/")[0] not in OUTSIDE:
                self.names.add(name)

    def seal(self) -> dict[str, str]:
        """Rules 1, 2 and 6; returns what SHA256SUMS lists."""
        data, self.seal_sha256 = self.read(SEAL_NAME), None
        self.plan_sha256 = None
        plan = self.read("plan.json")
        if plan is not None:
            self.plan_sha256 = sha256(plan)
        if data is None:
            self.defect(SEAL_NAME, "missing: the archive is incomplete")
            listed = self.read(SUMS)
            return self.list_of(listed, SUMS) if listed is not None else {}
        self.seal_sha256 = sha256(data)
        sums, seal = self.pair("", SEAL_NAME, SUMS)
        if seal is not None and plan is not None and seal["plan_sha256"] != self.plan_sha256:
            self.defect("plan.json", "is not the plan that the seal names")
        return sums

    def pair(self, place: str, seal_name: str, sums_name: str) -> tuple[dict[str, str], Any]:
        """A seal and the list that it covers: rules 1 and 2."""
        seal = self.read_seal(place + seal_name)
        data = self.read(place + sums_name)
        if data is None:
            self.defect(place + sums_name, "missing")
            return {}, seal
        sums = self.list_of(data, place + sums_name)
        if seal is not None and sha256(data) != seal["sha256sums_sha256"]:
            self.defect(place + sums_name, "its SHA-256 is not the one in the seal")
        if seal is not None and len(sums) != seal["files"]:
            self.defect(place + sums_name, f"lists {len(sums)} files where the seal counts {seal['files']}")
        return sums, seal

    def read_seal(self, name: str) -> dict[str, Any] | None:
        data = self.read(name)
        if data is None:
            self.defect(name, "missing")
            return None
        try:
            seal = parse(data)
            claimed = seal.get("format") if type(seal) is dict else None
            if type(claimed) is int and claimed > FORMAT:
                raise NewerFormat(f"{name}: format {claimed} is newer than {FORMAT}")
            if not IS_SEAL(seal) or claimed != FORMAT:
                raise ValueError("not the fields of a seal")
            if canonical(seal) != data:
                raise ValueError("not canonical")
        except (ValueError, RecursionError) as error:
            self.defect(name, f"not a seal: {error}")
            return None
        if (
            sha256(canonical({key: value for key, value in seal.items() if key != "self_sha256"}))
            != seal["self_sha256"]
        ):
            self.defect(name, "changed after sealing: self_sha256 does not fit")
        return dict(seal)

    def list_of(self, data: bytes, where: str) -> dict[str, str]:
        sums: dict[str, str] = {}
        last = ""
        *lines, rest = data.decode("utf-8", "replace").split("\n")
        if rest:
            self.defect(where, "cut off: the last line does not end")
        for number, line in enumerate(lines):
            match = SUMS_LINE.fullmatch(line)
            name = match.group(2) if match else ""
            if match is None or not listable(name):
                self.defect(f"{where}:{number + 1}", "not a line that may stand in the list")
                continue
            if name <= last:
                self.defect(f"{where}:{number + 1}", "listed twice or out of order")
            last, sums[name] = name, match.group(1)
        return sums

    def files(self) -> None:
        """Rules 3, 4 and 11."""
        for name in sorted({"plan.json", "attempts.jsonl"} | set(self.sums)):
            if name not in self.names:
                self.defect(name, "missing")
        for name in sorted(self.names - {SUMS, SEAL_NAME}):
            if self.seal_sha256 is not None and SUMS in self.names and name not in self.sums:
                self.defect(name, f"not listed in {SUMS}")
            if name.startswith("arms/") and name.count("/") > 1 and not in_arm(name):
                self.defect(name, "lies in a folder that cannot be an arm's")
        for name, expected in self.sums.items():
            if name in self.names and self.digest(name) != expected:
                self.defect(name, "its SHA-256 is not the listed one")
        copy, own = self.read(VERIFIER), own_bytes()
        if copy is not None and copy != own and sha256(copy) not in OLDER:
            self.defect(VERIFIER, "is not this program: another version's, or changed; do not run it")

    def digest(self, name: str) -> str | None:
        found = hashlib.sha256()
        try:
            with open(os.path.join(self.root, name), "rb") as file:
                for block in iter(lambda: file.read(1 << 20), b""):
                    found.update(block)
        except OSError:
            return None
        return found.hexdigest()

    def model(self, name: str, is_one: Fits, needed: bool = False) -> Any:
        data = self.read(name)
        if data is None:
            if needed:
                self.defect(name, "missing")
            return None
        try:
            value = parse(data)
            if is_one(value):
                return value
        except (ValueError, RecursionError):
            pass
        self.defect(name, "does not hold exactly its fields")
        return None

    def read_inputs(self) -> dict[str, list[int]]:
        """Rule 8; returns the inputs that are true to their digest."""
        true: dict[str, list[int]] = {}
        for digest, ids in (self.model("inputs.json", fits("int[]{}")) or {}).items():
            try:
                right = sha256(struct.pack(f"<{len(ids)}i", *ids)) == digest
            except struct.error:
                right = False
            if right:
                true[digest] = ids
            else:
                self.defect("inputs.json", f"{digest[:12]!a} is not the digest of its token ids")
        return true

    def lines(self, name: str) -> Iterator[Seen]:
        """Rule 7: the readable records of a stream; what is wrong with it becomes defects."""
        told, opened = 0, os.path.join(self.root, name)
        process = name.rpartition("/")[2][: -len(".jsonl")]

        def tell(where: str, what: str) -> None:
            nonlocal told
            told += 1
            if told <= MOST:
                self.defect(where, what)

        n, due, prev, clock = -1, 0, "0" * 64, 0
        last: dict[str, Any] | None = None
        try:
            with open(opened, "rb") as file:
                for n, raw in enumerate(file):
                    where, body = f"{name}:{n + 1}", raw.rstrip(b"\n")
                    if not raw.endswith(b"\n"):
                        tell(where, "cut off: the line does not end")
                    try:
                        line = parse(body)
                        newer(line, name, n)
                        if not IS_LINE(line):
                            raise ValueError("not a record of this format")
                    except (ValueError, RecursionError) as error:
                        tell(where, f"not a record: {error}")
                        due, prev, last = due + 1, sha256(body), None
                        continue
                    rec = line["rec"]
                    if line["n"] != due:
                        tell(where, f"numbered {line['n']} where {due} was due")
                    elif line["prev"] != prev:
                        tell(where, "the chain is broken")
                    if line["t_ns"] < clock:
                        tell(where, "the monotonic clock went back")
                    if (rec["kind"] == "stream_opened") != (n == 0):
                        tell(where, "stream_opened must be the first record, and only the first")
                    elif n == 0 and rec["format"] != FORMAT:
                        tell(where, f"no such format: {rec['format']}")
                    if last is not None and last["kind"] == "stream_closed":
                        tell(where, "a record after stream_closed")
                    due, prev, clock, last = line["n"] + 1, sha256(body), line["t_ns"], rec
                    self.records += 1
                    yield Seen(rec, line["n"], line["t_ns"], process)
        except OSError as error:
            tell(name, f"cannot be read: {error.strerror}")
            return
        if last is None or last["kind"] != "stream_closed":
            tell(name, "no stream_closed at the end")
        elif last["dropped"]:
            tell(f"{name}:{n + 1}", f"incomplete: {last['dropped']} records could not be written")

    def attempt(self, name: str) -> None:
        opened: str | None = None
        for seen in self.lines(name):
            kind, attempt = seen.rec["kind"], self.attempts[-1] if self.attempts else None
            if kind == "stream_opened":
                opened = seen.rec["wall_time"]
                if (seen.rec["arm"], seen.rec["process"]) != ("-", "attempts"):
                    self.defect(f"{name}:{seen.n + 1}", "is another stream, under this name")
            elif kind == "attempt_started":
                self.attempts.append(Attempt(seen.rec, seen.t, opened))
            elif attempt is None or kind == "stream_closed":
                continue
            elif kind == "attempt_ended":
                attempt.ends.append(seen.rec)
            elif kind == "contact_reached" and not attempt.ends:
                attempt.contacts.append(seen.rec["level"])
            else:
                attempt.strays += 1

    def arm(self, name: str) -> Arm:
        arm, place = Arm(name), f"arms/{name}/"
        origins: set[str] = set()
        imported = any(place + one in self.names for one in SOURCES)
        streams = [one for one in self.names if one.startswith(place) and STREAM.fullmatch(one)]
        arm.processes = sorted(stream[len(place) : -len(".jsonl")] for stream in streams)
        for process in arm.processes:
            stream = f"{place}{process}.jsonl"
            for seen in self.lines(stream):
                if seen.rec["kind"] == "stream_opened":
                    origins.add(seen.rec["arm"])
                    if seen.rec["process"] != process or (not imported and seen.rec["arm"] != name):
                        self.defect(f"{stream}:{seen.n + 1}", "is another stream, under this name")
                try:
                    arm.take(seen)
                except OverflowError:
                    self.defect(f"{stream}:{seen.n + 1}", "holds numbers that no run can have")
        if imported:
            self.imported(arm, place, origins)
        arm.unwrap()
        return arm

    def imported(self, arm: Arm, place: str, origins: set[str]) -> None:
        """Rule 9."""
        seal_data = self.read(place + SOURCES[0])
        arm.source = sha256(seal_data) if seal_data is not None else None
        was, seal = self.pair(place, SOURCES[0], SOURCES[1])
        arm.sealed = dated(seal_data)
        plan = self.read(place + SOURCES[2])
        plan_sha256 = sha256(plan) if plan is not None else self.plan_sha256
        if plan is not None:
            arm.source_plan_sha256, arm.source_plan = plan_sha256, self.model(place + SOURCES[2], IS_PLAN)
        if seal is not None and plan_sha256 is not None and seal["plan_sha256"] != plan_sha256:
            self.defect(place + SOURCES[0], "is the seal of another plan")
        if len(origins) != 1:
            self.defect(place, f"its streams name {len(origins)} arms of origin where one was due")
            return
        before, after = f"arms/{origins.pop()}/", {place + one for one in SOURCES}
        then = {name[len(before) :]: digest for name, digest in was.items() if name.startswith(before)}
        now = {n[len(place) :]: d for n, d in self.sums.items() if n.startswith(place) and n not in after}
        for name in sorted(set(then) | set(now)):
            if then.get(name) != now.get(name):
                self.defect(place + name, f"is not the file that {SOURCES[1]} lists")

    def whole(self, arm: str) -> bool:
        """Sealed and undamaged: only then does it mean anything that a record is not there."""
        return self.seal_sha256 is not None and arm not in self.damaged


def listable(name: str) -> bool:
    return bool(NAME.fullmatch(name)) and name not in (SUMS, SEAL_NAME) and name.partition("/")[0] not in OUTSIDE


def in_arm(name: str) -> bool:
    parts = name.split("/")
    return len(parts) > 2 and parts[0] == "arms" and SLUG.fullmatch(parts[1]) is not None


def newer(line: Any, name: str, n: int) -> None:
    """Refuse a stream whose first record names a newer format."""
    rec = line.get("rec") if n == 0 and type(line) is dict else None
    claimed = rec.get("format") if type(rec) is dict else None
    if type(claimed) is int and claimed > FORMAT:
        raise NewerFormat(f"{name}: format {claimed} is newer than {FORMAT}")


def own_bytes() -> bytes:
    with open(os.path.abspath(__file__), "rb") as file:
        return file.read()


# --- what the plan asks for -----------------------------------------------------------------------

LENGTH = re.compile(r"(?:([1-9][0-9]{0,8})?C([+-][0-9]{1,9})?|([1-9][0-9]{0,8}))", re.ASCII)


class Operation(NamedTuple):
    """One planned step of a case."""

    op: str
    name: str
    role: str
    """Whose tokens are the prompt; empty for a reset."""
    case: str
    tokens: int
    """N."""
    outputs: int
    """Tokens that a generation shall have."""


class Question:
    """The plan at its C: what every arm does, in order. What it is asked and does not know raises Missing."""

    def __init__(self, archive: Archive) -> None:
        self.archive, self.arms = archive, archive.arms
        self.folders: dict[str, str] = {}
        """Of arms that are here under another name."""
        self.known: list[Operation] | None = None
        self.by_id: dict[str, Operation] = {}

    @property
    def plan(self) -> dict[str, Any]:
        return self.present(self.archive.plan, "plan.json")

    @property
    def resolved(self) -> dict[str, Any]:
        return self.present(self.archive.resolved, "resolved.json")

    @property
    def c(self) -> int:
        return int(self.resolved["checkpoint_interval"])

    def present(self, value: Any, name: str) -> dict[str, Any]:
        if value is None:
            raise Missing(f"{name} is missing or cannot be read")
        known: dict[str, Any] = value
        return known

    @property
    def attempt(self) -> Attempt:
        if not self.archive.attempts:
            raise Missing("attempts.jsonl has no attempt_started record")
        return self.archive.attempts[-1]

    @property
    def operations(self) -> list[Operation]:
        if self.known is None:
            plan, _ = self.plan, self.c  # even where no length needs it
            self.known = self.matrix("", plan.get("lengths", ()), plan["output_tokens"])
            for series in plan.get("series", ()):
                self.known += self.matrix(f"{series['name']}-", series["lengths"], series["output_tokens"])
        return self.known

    def operation(self, op: str) -> Operation:
        """A planned one."""
        if not self.by_id:
            self.by_id = {one.op: one for one in self.operations}
        return self.by_id[op]

    def matrix(self, prefix: str, lengths: Sequence[str], outputs: int) -> list[Operation]:
        planned: dict[int, list[Operation]] = {}
        for said in lengths:
            match = LENGTH.fullmatch(said)
            if match is None:
                raise Missing(f"the plan has a length that is none: {said!a}")
            k, d, tokens = match.groups()
            n = int(tokens) if tokens else int(k or 1) * self.c + int(d or 0)
            if n < 1 or n in planned:
                raise Missing(f"the plan's length {said} is {n} tokens at C={self.c}: too few, or as another is")
            planned[n] = list(self.case(f"{prefix}N{n}", n, outputs))
        return [one for case in planned.values() for one in case]

    def case(self, case: str, n: int, outputs: int) -> Iterator[Operation]:
        counted: Counter[str] = Counter()
        for name in self.plan.get("operations", ()):
            counted[name] += 1
            numbered = f"{case}.{name}-{counted[name]}" if name in ("interposer", "repeat") else f"{case}.{name}"
            role = {"reset": "", "interposer": f"interposer-{counted[name]}"}.get(name, "target")
            yield Operation(numbered, name, role, case, n, outputs)

    def generations(self, name: str = "") -> list[Operation]:
        return [one for one in self.operations if one.name != "reset" and name in ("", one.name)]

    def arm(self, name: str) -> Arm:
        if name not in self.arms:
            raise Missing(f"the archive has no arm {name}")
        return self.arms[name]

    def whole(self, arm: str) -> bool:
        return self.archive.whole(self.folders.get(arm, arm))

    @property
    def planned_arms(self) -> list[Arm]:
        return [self.arm(one["name"]) for one in self.plan["arms"]]


# --- the checks -----------------------------------------------------------------------------------

Finding = tuple[str, str]
"""Verdict and one line."""


class Result(NamedTuple):
    """What one check came to."""

    check: str
    verdict: str
    summary: str
    findings: list[Finding]


def conclude(check: str, findings: list[Finding], examined: int, summary: str) -> Result:
    verdicts = {verdict for verdict, _ in findings}
    verdict = next((one for one in (FAIL, UNKNOWN, NOT_EXERCISED) if one in verdicts), PASS)
    if verdict == PASS and not examined:
        verdict, findings = UNKNOWN, [(UNKNOWN, "nothing to examine")]
    return Result(check, verdict, summary, findings)


def integrity(archive: Archive) -> Result:
    findings = [(UNKNOWN, f"{where}: {what}") for where, what in archive.defects]
    if len(archive.attempts) != 1:
        findings.append((UNKNOWN, f"{len(archive.attempts)} attempts, expected 1"))
    for attempt in archive.attempts[-1:]:
        if [level for level in attempt.contacts if level in LEVELS] != LEVELS:
            findings.append((UNKNOWN, f"levels of contact reached: {', '.join(attempt.contacts) or 'none'}"))
        if len(attempt.ends) != 1:
            findings.append((UNKNOWN, f"the attempt ended {len(attempt.ends)} times"))
        if any(end["outcome"] != "completed" or end["reason"] is not None for end in attempt.ends):
            findings.append((UNKNOWN, "the attempt did not complete"))
        if attempt.strays:
            findings.append((UNKNOWN, f"{attempt.strays} records follow the end of the attempt"))
    summary = f"{archive.records} records in {len(archive.sums)} listed files"
    return conclude("integrity", findings, archive.records, summary)


def coverage(question: Question) -> Result:
    planned = [arm["name"] for arm in question.plan["arms"]]
    findings: list[Finding] = []
    examined = 0
    for name in planned + sorted(set(question.arms) - set(planned)):
        if name not in question.arms:
            findings.append((UNKNOWN, f"arm {name} is planned and not in the archive"))
            continue
        arm = question.arms[name]
        examined += len(arm.all["operation_started"])
        found = [*sequence(question, arm), *answers(question, arm), *counters(question, arm), *traces(question, arm)]
        findings += [(verdict, f"arm {name}: {said}") for verdict, said in found]
    return conclude("coverage", findings, examined, f"{examined} operations in {len(question.arms)} arms")


def sequence(question: Question, arm: Arm) -> Iterator[Finding]:
    """The engine started once and stopped; the planned operations came once, in order, with the planned prompts."""
    engines = len(arm.all["engine_started"])
    if engines != 1:
        yield (FAIL if engines else UNKNOWN), f"{engines} engine starts, planned 1"
    if engines and not arm.all["engine_stopped"]:
        yield UNKNOWN, "no engine_stopped record"
    if arm.all["engine_killed"]:
        yield FAIL, "the engine was killed, which no matrix plans"
    if engines and not arm.all["scheduler_configured"]:
        yield UNKNOWN, "no scheduler_configured record"
    order = {one.op: place for place, one in enumerate(question.operations)}
    wanted = {(one.case, one.role) for one in question.operations}
    inputs = {
        (one["case"], one["role"]): one for one in question.resolved["inputs"] if (one["case"], one["role"]) in wanted
    }
    if len({one["sha256"] for one in inputs.values()}) != len(inputs):
        yield FAIL, "resolved.json names one input for two"
    last = -1
    done: set[str] = set()
    for seen in arm.all["operation_started"]:
        rec, op = seen.rec, seen.rec["op"]
        if op not in order:
            yield FAIL, f"{op} is not in the plan"
            continue
        if op in done:
            yield FAIL, f"{op} was done again"
        elif order[op] < last:
            yield FAIL, f"{op} came after its place in the plan"
        done.add(op)
        last = max(last, order[op])
        due = question.operations[order[op]]
        if (rec["case"], rec["name"]) != (due.case, due.name):
            yield FAIL, f"{op} was run as {rec['name']} of {rec['case']}"
        if rec["salt"] or rec["together"] is not None:
            yield FAIL, f"{op} ran with a cache salt or beside another, which no matrix plans"
        prompt = inputs.get((due.case, due.role)) if due.role else {"tokens": 0, "sha256": None}
        if prompt is None:
            yield UNKNOWN, f"resolved.json names no {due.role} of {due.case}"
        elif (rec["prompt_tokens"], rec["prompt_sha256"]) != (prompt["tokens"], prompt["sha256"]):
            yield FAIL, f"{op} had another prompt than resolved.json names"
    if set(order) - done:
        yield UNKNOWN, f"{len(done)} of {len(order)} planned operations done"


def answers(question: Question, arm: Arm) -> Iterator[Finding]:
    """Every operation has one answer and one end, between its start and the next; nothing else was answered."""
    planned = {one.op: one for one in question.operations}
    started = arm.all["operation_started"]
    times = Counter(seen.rec["op"] for seen in started)
    for place, seen in enumerate(started):
        op = seen.rec["op"]
        if op not in planned:
            continue
        answer = "cache_reset" if planned[op].name == "reset" else "operation_output"
        given, ends = arm.by_op.get((answer, op), []), arm.by_op.get(("operation_ended", op), [])
        for what, records in ((answer, given), ("operation_ended", ends)):
            if not records:
                yield UNKNOWN, f"{op} has no {what}"
            if len(records) > max(1, times[op]):
                yield FAIL, f"{op} has {len(records)} of {what}"
        if any(not end.rec["ok"] for end in ends):
            yield UNKNOWN, f"{op} ended with an error"
        for output in arm.by_op.get(("operation_output", op), ()):
            ids = len(output.rec["token_ids"])
            for name in ("logprobs", "margins"):
                values = output.rec.get(name)
                if values is not None and len(values) != ids:
                    yield FAIL, f"{op} has {ids} tokens and {len(values)} {name}"
        lines = [seen.n, *(one.n for one in given), *(one.n for one in ends)]
        following = started[place + 1].n if place + 1 < len(started) else seen.n
        if times[op] == 1 and (lines != sorted(lines) or seen.n < following < lines[-1]):
            yield FAIL, f"{op} did not start, answer and end by itself"
    by_request: dict[str, set[str]] = defaultdict(set)
    for (kind, op), records in arm.by_op.items():
        if kind in ("counters_read", "step_traced") or not records:
            continue
        if op not in planned:
            yield FAIL, f"{op} was answered and is not in the plan"
        elif kind == ("operation_output" if planned[op].name == "reset" else "cache_reset"):
            yield FAIL, f"{op} has a {kind}"
        if kind == "operation_output":
            for seen in records:
                by_request[seen.rec["request"]].add(op)
    for request, ops in by_request.items():
        if len(ops) > 1:
            yield FAIL, f"request {request} answered {', '.join(sorted(ops))}"


def counters(question: Question, arm: Arm) -> Iterator[Finding]:
    """Counters were read once before and once after every operation, and before the next one's."""
    planned, reached = {one.op for one in question.operations}, -1
    first: dict[str, Seen] = {}
    for seen in arm.all["operation_started"]:
        first.setdefault(seen.rec["op"], seen)
    for op, start in first.items():
        if op not in planned:
            continue
        reads, ends = arm.by_op.get(("counters_read", op), []), arm.by_op.get(("operation_ended", op), [])
        if [seen.rec["when"] for seen in reads] != ["before", "after"]:
            yield UNKNOWN, f"{op}: counters were not read once before and once after"
        elif ends:
            lines = [reached, reads[0].n, start.n, ends[-1].n, reads[1].n]
            if lines != sorted(lines):
                yield FAIL, f"{op}: its counters were not read around it and it alone"
            reached = reads[1].n


def traces(question: Question, arm: Arm) -> Iterator[Finding]:
    """What every answered generation leaves behind, within its own time."""
    starts: dict[str, list[int]] = defaultdict(list)
    for seen in arm.all["operation_started"]:
        starts[seen.rec["op"]].append(seen.t)
    for one in question.generations():
        output = arm.output(one.op)
        if output is None:
            continue
        request, reason = output["request"], output["finish_reason"]
        if question.plan["ignore_eos"] and reason != "length":
            yield (FAIL if reason else UNKNOWN), f"{one.op} finished by {reason}, planned by its length"
        if arm.connected:
            if not arm.schedule(one.op, "connector"):
                yield UNKNOWN, f"{one.op}: the connector records no step"
            if request not in arm.finished:
                yield UNKNOWN, f"{one.op}: no request_finished record"
            if arm.engine["audit_level"] in PAGE_LEVELS and request not in arm.assigned:
                yield UNKNOWN, f"{one.op}: no blocks_assigned record"
        ends = [seen.t for seen in arm.by_op.get(("operation_ended", one.op), ())]
        if len(starts[one.op]) != 1 or len(ends) != 1:
            continue
        steps = [arm.rows[request, source] for source in ("scheduler", "connector") if (request, source) in arm.rows]
        within = [*arm.times.get(request, ()), *(t for rows in steps for t in (rows.first, rows.last))]
        saved = [one.t for rank in arm.ranks for one in arm.saves.get((rank, request), ())]
        if min([*within, *saved, ends[0]]) < starts[one.op][0] or max([*within, starts[one.op][0]]) > ends[0]:
            yield UNKNOWN, f"{one.op}: a record of its request is dated outside it"


def apart(reference: Rows | None, subject: Rows | None, whole: bool) -> str:
    """How two schedules part; empty: they agree. Not whole: the reference counts from where the subject starts."""
    if not reference or not subject:
        return "the steps of one side are not recorded"
    rows, others = list(reference), list(subject)
    if not whole:
        rows = list(dropwhile(lambda row: row.start != others[0].start, rows))
        if not rows:
            return f"no step of the reference starts at {others[0].start}"
    step = difference(rows, others)
    return "" if step is None else f"step {step} differs"


def difference(left: Any, right: Any) -> int | None:
    """Index of the first element that differs or is there on one side only; None: equal."""
    for index in range(max(len(left), len(right))):
        if index >= len(left) or index >= len(right) or left[index] != right[index]:
            return index
    return None


def geometry(question: Question) -> Result:
    """Control and candidate computed the same tokens in the same steps, reloads from p on."""
    findings: list[Finding] = []
    for arm in question.arms.values():
        for (request, source), rows in arm.rows.items():
            other = arm.rows.get((request, "connector"))
            if source == "scheduler" and other is not None:
                findings += two_sources(f"arm {arm.name}: request {request}", rows, other)
    generations = question.generations()
    for one in generations:
        findings += in_step(question, one)
    return conclude("geometry", findings, len(generations), f"{len(generations)} generations")


def two_sources(name: str, rows: Rows, other: Rows) -> Iterator[Finding]:
    """Scheduler and connector saw the same steps: unlike ones contradict, lone ones are missing."""
    waiting: dict[int, deque[Row]] = defaultdict(deque)
    for row in other:
        waiting[row.start].append(row)
    differ = lone = 0
    for row in rows:
        if not waiting[row.start]:
            lone += 1
        elif waiting[row.start].popleft() != row:
            differ += 1
    if differ:
        yield FAIL, f"{name}: scheduler and connector record {differ} steps differently"
    elif lone or any(waiting.values()):
        yield UNKNOWN, f"{name}: steps are recorded by one source alone"


def in_step(question: Question, one: Operation) -> Iterator[Finding]:
    control, candidate = question.arm(CONTROL), question.arm(CANDIDATE)
    for arm in (control, candidate):
        output = arm.output(one.op)
        if not unbroken(arm.schedule(one.op), one.tokens + len(output["token_ids"]) - 1 if output else 0):
            yield UNKNOWN, f"arm {arm.name}: {one.op}: not every step is recorded"
            return
    reference, subject = control.schedule(one.op), candidate.schedule(one.op)
    cold = [reference] if one.name == "reload" else [reference, subject]
    if any(rows and rows[0].start for rows in cold):
        yield UNKNOWN, f"{one.op} should compute everything and does not start at 0"
    parted = apart(reference, subject, whole=one.name != "reload")
    if parted:
        yield UNKNOWN, f"{one.op}: {parted} (control against candidate)"


def unbroken(rows: Rows | None, end: int) -> bool:
    """Whether steps reach from the first start to `end` without a gap."""
    if not rows:
        return False
    reached = rows[0].start
    for row in rows:
        if row.start > reached:
            return False
        reached = max(reached, row.end)
    return reached >= end


Pair = tuple[Arm, str, Arm, str]
"""A generation that is the reference, and one that must be equal."""


def paired_equality(question: Question) -> Result:
    control, candidate = question.arm(CONTROL), question.arm(CANDIDATE)
    settled, noisy = controls_equal(question).verdict == PASS, unrepeated(question)
    apart, findings, equal, examined = set[str](), list[Finding](), 0, 0
    for one in sorted(question.generations(), key=lambda one: one.name != "cold"):
        schedules = control.schedule(one.op), candidate.schedule(one.op)
        nothing = all(rows and rows[0].start == 0 for rows in schedules)
        found = list(unequal(question, control, one.op, candidate, one.op, "differ"))
        if one.name == "cold" and nothing and any(verdict == "differ" for verdict, _ in found):
            apart.add(one.case)
        doubtful = noisy or (not settled and (nothing or one.case in apart))
        findings += [((UNKNOWN if doubtful else FAIL) if said == "differ" else said, words) for said, words in found]
        equal, examined = equal + (not found), examined + 1
    return conclude("paired-equality", findings, examined, f"{equal}/{examined} generations equal")


def reload_equality(question: Question) -> Result:
    """Reload against cold within the candidate. A control that does not repeat itself makes it unknown."""
    cold = {one.case: one.op for one in question.generations("cold")}
    reloads = question.generations("reload")
    pairs = {
        name: [(question.arm(name), cold[one.case], question.arm(name), one.op) for one in reloads]
        for name in (CANDIDATE, CONTROL)
    }
    own = [one for pair in pairs[CONTROL] for one in unequal(question, *pair, UNKNOWN)]
    differ = UNKNOWN if unrepeated(question) else FAIL
    return compared("reload-equality", question, pairs[CANDIDATE], own, differ)


def unrepeated(question: Question) -> bool:
    """The control computed a prompt cold twice, in the same steps, and answered differently or computed otherwise."""
    control, cold = question.arm(CONTROL), {one.case: one.op for one in question.generations("cold")}
    for one in question.generations("reload"):
        if one.case not in cold:
            continue
        runs = control.schedule(cold[one.case]), control.schedule(one.op)
        if all(rows and rows[0].start == 0 for rows in runs):
            found = unequal(question, control, cold[one.case], control, one.op, "differ")
            if any(said == "differ" for said, _ in found) or traced_apart(control, cold[one.case], one.op):
                return True
    return False


def traced_apart(arm: Arm, op: str, other: str) -> bool:
    """In the same steps a module's output is not what it was, nor is the step's last; False where traces do not say."""
    ranks = max(
        (one.rec["tensor_parallel"] * one.rec["pipeline_parallel"] for one in arm.all["engine_started"]), default=0
    )
    steps = [
        {(seen.rec["step"], seen.rec["rank"]): seen.rec for seen in arm.by_op.get(("step_traced", name), ())}
        for name in (op, other)
    ]
    if not all(steps) or apart(arm.schedule(op), arm.schedule(other), whole=True):
        return False
    if len({frozenset(rank for _, rank in side) for side in steps}) > 1:
        return False
    names: dict[tuple[int, int], list[str]] = {}
    for seen in arm.all["modules_listed"]:
        names.setdefault((seen.rec["rank"], seen.rec["listing"]), seen.rec["outputs"])
    for key in sorted(steps[0].keys() & steps[1].keys()):
        one, two = steps[0][key], steps[1][key]
        outputs, others = (names.get((rec["rank"], rec["listing"])) for rec in (one, two))
        said = outputs is not None and outputs == others and one["tokens"] == two["tokens"] > 0
        if not said or not 0 <= key[1] < ranks:
            return False
        size = len(outputs or ()) * TRACE_DIGITS
        if any(len(rec["digests"]) != size or not DIGITS.fullmatch(rec["digests"]) for rec in (one, two)):
            return False
        if one["digests"] != two["digests"]:
            return bool(one["digests"][-TRACE_DIGITS:] != two["digests"][-TRACE_DIGITS:])
    return False


def controls_equal(question: Question) -> Result:
    if REFERENCE not in question.arms:
        return conclude("controls-equal", [(NOT_EXERCISED, "no reference control in this archive")], 0, "")
    control, reference = question.arm(CONTROL), question.arm(REFERENCE)
    if control.source is not None and control.source == reference.source:
        return conclude("controls-equal", [(NOT_EXERCISED, "both are copies of one arm")], 0, "")
    pairs = [(reference, one.op, control, one.op) for one in question.generations()]
    return compared("controls-equal", question, pairs)


def compared(
    check: str, question: Question, pairs: list[Pair], more: Sequence[Finding] = (), differ: str = FAIL
) -> Result:
    findings: list[Finding] = []
    equal = 0
    for pair in pairs:
        found = list(unequal(question, *pair, differ))
        equal += not found
        findings += found
    return conclude(check, [*findings, *more], len(pairs), f"{equal}/{len(pairs)} generations equal")


def unequal(question: Question, left: Arm, op: str, right: Arm, other: str, differ: str) -> Iterator[Finding]:
    outputs = left.output(op), right.output(other)
    name = f"{right.name} {other} against {left.name} {op}"
    if outputs[0] is None or outputs[1] is None:
        yield UNKNOWN, f"{name}: no output to compare"
        return
    tokens = [output["token_ids"] for output in outputs if output]
    yield from lengths(question, name, other, tokens)
    index = difference(*tokens)
    if index is None:
        return
    reference, subject = left.schedule(op), right.schedule(other)
    # A start where no checkpoint can end is at fault whatever the steps.
    stray = question.whole(right.name) and subject and subject[0].start % question.c != 0
    parted = "" if stray else apart(reference, subject, whole=False)
    if parted:
        yield UNKNOWN, f"{name}: differs from token {index} on, and cannot be laid to reuse: {parted}"
    else:
        yield differ, f"{name}: differs from token {index} on"


def lengths(question: Question, name: str, op: str, outputs: list[list[int]]) -> Iterator[Finding]:
    planned = question.operation(op).outputs
    for ids in outputs:
        if not ids or len(ids) > planned or (question.plan["ignore_eos"] and len(ids) != planned):
            yield FAIL, f"{name}: {len(ids)} tokens, planned {planned}"


class Repeat(NamedTuple):
    """A repeat of a prompt in the candidate, the local cache kept."""

    op: str
    case: str
    n: int
    """N."""
    earlier: list[str]
    """Operations that had the prompt before, the cold one first."""


def repeats(question: Question) -> tuple[list[Repeat], bool]:
    """The planned repeats, and whether recurrent state lies where steps ended and nowhere else."""
    arm, found = question.arm(CANDIDATE), list[Repeat]()
    aligned = arm.engine["settings"].get("cache_config.mamba_cache_mode") == "align" and any(
        group["entry_kind"] == "recurrent"
        for seen in arm.all["scheduler_configured"]
        if not seen.rec["saves_within_steps"]
        for group in seen.rec["engine_groups"]
    )
    earlier: dict[str, list[str]] = {}
    for one in question.operations:
        if one.name in ("cold", "repeat"):
            same = earlier.setdefault(one.case, [])
            if same:
                found.append(Repeat(one.op, one.case, one.tokens, list(same)))
            same.append(one.op)
    return found, aligned


def local_equality(question: Question) -> Result:
    """Every repeat against the cold run of its prompt."""
    arm, findings = question.arm(CANDIDATE), list[Finding]()
    checked, aligned = repeats(question)
    for one in checked:
        findings += repeated(question, arm, one.earlier, one.op, aligned)
    return conclude("local-equality", findings, len(checked), f"{len(checked)} repeats against cold")


def repeated(question: Question, arm: Arm, earlier: list[str], op: str, aligned: bool) -> Iterator[Finding]:
    outputs = [arm.output(earlier[0]), arm.output(op)]
    tokens = [output["token_ids"] for output in outputs if output]
    if len(tokens) < 2:
        yield UNKNOWN, f"{op}: no output to compare"
        return
    yield from lengths(question, op, op, tokens)
    index = difference(*tokens)
    if index is None:
        return
    reference, subject = arm.schedule(earlier[0]), arm.schedule(op)
    # A hit where no step ended has no state to it, whatever the steps.
    ends = step_ends(arm, earlier) if aligned else None
    stray = ends is not None and subject and subject[0].start and subject[0].start not in ends
    parted = "" if stray else apart(reference, subject, whole=False)
    if parted:
        yield UNKNOWN, f"{op}: differs from cold from token {index} on, and cannot be laid to the hit: {parted}"
    else:
        yield FAIL, f"{op}: differs from cold from token {index} on"


def step_ends(arm: Arm, ops: list[str]) -> set[int] | None:
    """Where steps of these operations ended; None: not all of them are recorded."""
    ends: set[int] = set()
    for op in ops:
        rows = list(arm.schedule(op) or ())
        if not rows or any(after.start > row.end for row, after in zip(rows, rows[1:])):  # noqa: B905, RUF007
            return None
        ends.update(row.end for row in rows)
    return ends


def boundary(question: Question) -> Result:
    """Every reload restored the strict prefix on every rank, and was credited exactly that."""
    arm, findings = question.arm(CANDIDATE), list[Finding]()
    absent = lacking(arm, arm.ranks)
    if absent is not None:
        findings.append((UNKNOWN, f"rank {absent} never registered its cache"))
    reloads = [one for one in question.generations("reload") if not nothing_due(question, arm, one)]
    for one in reloads:
        findings += [(verdict, f"{one.op}: {said}") for verdict, said in restored(question, arm, one)]
    return conclude("boundary", findings, len(reloads), f"{len(reloads)} reloads on {len(arm.ranks)} ranks")


def due(n: int, c: int, arm: Arm) -> int:
    """B that a prompt must be restored to: an engine with drafts of EAGLE or MTP gives up the last whole block."""
    if n < 1 or c < 1:
        raise Missing(f"no boundary for N={n} and C={c}")
    return c * max(n // c - 1, 0) if drops_last_block(arm) else c * ((n - 1) // c)


def drops_last_block(arm: Arm) -> bool:
    return arm.engine["settings"].get(DROPS_LAST_BLOCK) is True


def nothing_due(question: Question, arm: Arm, one: Operation) -> bool:
    """The prompt's only whole block was given up, and nothing was restored: it was computed again."""
    if not drops_last_block(arm) or due(one.tokens, question.c, arm):
        return False
    output, rows = arm.output(one.op), arm.schedule(one.op)
    if output is None or not rows:
        return False
    return rows[0].start == 0 and not arm.loads.get(output["request"])


def lacking(arm: Arm, ranks: Collection[int]) -> int | None:
    """A rank that is not among these, and registered or should have."""
    sizes = [arm.engine["tensor_parallel"] * arm.engine["pipeline_parallel"]]
    sizes += [registered["world_size"] for registered in arm.ranks.values()]
    return next((rank for rank in chain(arm.ranks, range(max(sizes))) if rank not in ranks), None)


def farthest(loads: list[Load]) -> int | None:
    """B of one rank; None: not reported by one of its loads."""
    said = [load.rec["boundary"] for load in loads]
    return None if None in said else max(said)


def restored(question: Question, arm: Arm, one: Operation) -> Iterator[Finding]:
    output, whole = arm.output(one.op), question.whole(CANDIDATE)
    rows, seen = arm.schedule(one.op), arm.schedule(one.op, "connector")
    if not rows or not seen or output is None:
        yield UNKNOWN, "the first step is not recorded by scheduler and connector"
        return
    if rows[0] != seen[0]:
        yield (FAIL if whole or rows[0].start == seen[0].start else UNKNOWN), "scheduler and connector disagree"
    loads = arm.loads.get(output["request"], {})
    if not loads:
        yield UNKNOWN, f"no load is recorded, {rows[0].start} tokens credited"
        return
    if set(arm.ranks) - set(loads):
        yield UNKNOWN, f"only ranks {sorted(loads)} record a load"
    reached = {rank: farthest(mine) for rank, mine in loads.items()}
    if None in reached.values():
        yield UNKNOWN, "not every load reports which prefix it restores"
    distinct = {b for b in reached.values() if b is not None}
    if len(distinct) > 1:
        yield (FAIL if whole else UNKNOWN), f"ranks restored different prefixes: {sorted(distinct)}"
    for rank, mine in loads.items():
        if rank in arm.ranks:
            parts = [part for load in mine for part in load.rec["parts"] if part["pages"]]
            yield from reaching(arm.ranks[rank], parts, reached[rank], whole)
    yield from credited(one.tokens, due(one.tokens, question.c, arm), rows, distinct, whole)


def reaching(registered: dict[str, Any], parts: list[dict[str, Any]], b: int | None, whole: bool) -> Iterator[Finding]:
    """State reaches exactly to B, every other transfer group together as far."""
    kinds = {group["group"]: group["entry_kind"] for group in registered["engine_groups"]}
    groups = {group["group"]: kinds.get(group["engine_group"]) for group in registered["transfer_groups"]}
    rank = registered["rank"]
    for part in parts:
        if groups.get(part["group"]) is None:
            yield UNKNOWN, f"rank {rank} loaded transfer group {part['group']}, which it never registered"
    for group, kind in groups.items():
        ends = [part["boundary"] for part in parts if part["group"] == group]
        if kind in ("recurrent", "conv"):
            if not ends:
                yield UNKNOWN, f"rank {rank} loaded no state of transfer group {group}"
            if b is not None and any(end != b for end in ends):
                yield FAIL, f"rank {rank}: state of transfer group {group} reaches to {ends}, the load to {b}"
        elif ends and max(ends) < (b or 0):
            yield (FAIL if whole else UNKNOWN), f"rank {rank}: pages of group {group} reach to {max(ends)} of {b}"


def credited(n: int, expected: int, rows: Rows, distinct: set[int], whole: bool) -> Iterator[Finding]:
    """B, p and the scheduled tokens against the strict prefix.

    A load or step that is not recorded can only make B seem too small and p too large: these fail in a whole record
    alone.
    """
    p, short = rows[0].start, (FAIL if whole else UNKNOWN)
    if distinct == {n} and rows[0][:2] == (n - 1, 1):
        yield FAIL, f"[0, {n}) restored, {p} tokens credited: the last token is applied twice"
        return
    for b in sorted(distinct):
        if b != p:
            yield (FAIL if b > p else short), f"[0, {b}) restored, {p} tokens credited"
        if b != expected:
            yield (FAIL if b > expected else short), f"[0, {b}) restored, expected [0, {expected})"
        if b >= n:
            yield FAIL, f"[0, {b}) leaves nothing of N={n} to compute"
    if p != expected and p not in distinct:
        yield (FAIL if p < expected else short), f"{p} tokens credited, expected {expected}"
    if rows[0].drafted:
        yield FAIL, f"{rows[0].drafted} draft tokens in the first step"
    at, computed = p, 0
    for row in rows:
        if row.start >= n or row.start != at:
            break
        computed += row.scheduled - row.drafted
        at += row.scheduled - row.drafted
    if computed > n - p:
        yield FAIL, f"{computed} prompt tokens scheduled from {p} on, expected {n - p}"
    elif computed < n - p:
        yield UNKNOWN, f"only {computed} of the {n - p} prompt tokens from {p} on are in a recorded step"


# --- plan, attempt and engines --------------------------------------------------------------------

CONTROL_DECIDERS: dict[str, Any] = {
    "engine": None,
    "lengths": [],
    "operations": [],
    "prompts": [],
    "template": None,
    "output_tokens": None,
    "series": [],
    "seed": None,
    "temperature": None,
    "ignore_eos": None,
}
"""Fields of a plan that decide what its control computes, and what one that is not written stands for."""
ENGINE_DEFAULTS: dict[str, Any] = {"serve_args": [], "core": "here"}
ARM_DEFAULTS: dict[str, Any] = {
    "release": None,
    "options": {},
    "repair": None,
    "follows": None,
    "service": "kept",
    "settings": {},
}


def plan_identity(question: Question) -> Result:
    """What was planned, resolved and run is one thing, and no input shares a checkpoint with another."""
    inputs = question.resolved["inputs"]
    findings = [
        *hashes(question),
        *lenders(question),
        *expansion(question),
        *prompts(question),
        *attempted(question),
    ]
    if question.plan["analyzer"]["source_sha256"] is None:
        findings.append((UNKNOWN, "the plan was not frozen: it pins no analyzer source"))
    return conclude("plan-identity", findings, len(inputs), f"{len(inputs)} inputs, {len(question.arms)} arms")


def hashes(question: Question) -> Iterator[Finding]:
    actual, resolved = question.archive.plan_sha256, question.resolved
    for name, fields in (("attempts.jsonl", question.attempt.rec), ("resolved.json", resolved)):
        if fields["plan_sha256"] != actual:
            yield FAIL, f"{name} is of another plan ({fields['plan_sha256'][:12]})"
    own = sha256(question.archive.read("resolved.json") or b"")
    for arm in question.arms.values():
        if not arm.all["plan_resolved"]:
            yield UNKNOWN, f"arm {arm.name}: no plan_resolved record"
        lent = arm.source_plan_sha256
        due = own if lent is None else sha256(canonical({**resolved, "plan_sha256": lent}))
        first = arm.all["operation_started"][:1]
        for seen in arm.all["plan_resolved"]:
            if seen.rec["resolved_sha256"] != due:
                yield FAIL, f"arm {arm.name} ran another resolved.json ({seen.rec['resolved_sha256'][:12]})"
            if any(one.process == seen.process and one.n < seen.n for one in first):
                yield FAIL, f"arm {arm.name} resolved its plan after its first operation"


def lenders(question: Question) -> Iterator[Finding]:
    """An arm of another plan: that plan may lend it."""
    plan = question.plan
    for arm in question.arms.values():
        lender = arm.source_plan
        if arm.source_plan_sha256 is None:
            continue
        if lender is None:
            yield UNKNOWN, f"arm {arm.name}: the plan that it was recorded under cannot be read"
        elif lender["name"] not in (plan["name"], plan.get("control_from")):
            yield FAIL, f"arm {arm.name} was recorded under plan {lender['name']}, which is not named"
        else:
            ours, theirs = deciders(plan), deciders(lender)
            differing = [name for name in ours if ours[name] != theirs[name]]
            if differing:
                yield FAIL, f"arm {arm.name} was recorded under a plan with other {', '.join(differing)}"


def deciders(plan: dict[str, Any]) -> dict[str, Any]:
    """What decides a plan's control, whatever is left unwritten put in."""
    found = {name: plan.get(name, default) for name, default in CONTROL_DECIDERS.items()}
    found["engine"] = {**ENGINE_DEFAULTS, **plan["engine"]}
    found["arms without a connector"] = [{**ARM_DEFAULTS, **arm} for arm in plan["arms"] if arm["connector"] == "none"]
    return found


def expansion(question: Question) -> Iterator[Finding]:
    """`resolved.json` holds what the plan comes to at its C."""
    resolved, planned = question.resolved, question.operations
    if not question.plan["arms"]:
        raise Missing("the plan has no arm")
    roles = dict.fromkeys((one.case, one.role, one.tokens) for one in planned if one.role)
    targets = [tokens for _, role, tokens in roles if role == "target"]
    if resolved["lengths"] != targets:
        yield FAIL, f"resolved.json has lengths {resolved['lengths']}, the plan gives {targets}"
    if resolved["operations"] != [one.op for one in planned]:
        yield FAIL, "resolved.json has other operations than the plan gives"
    given = [(one["case"], one["role"], one["tokens"]) for one in resolved["inputs"]]
    if set(given) != set(roles) or len(given) != len(roles):
        yield FAIL, f"resolved.json names {len(given)} inputs, other than the {len(roles)} planned"


def prompts(question: Question) -> Iterator[Finding]:
    """Inputs are there as said, and no two have their first C tokens in common."""
    c, owners = question.c, dict[tuple[int, ...], tuple[str, str]]()
    for one in question.resolved["inputs"]:
        name, ids = f"the {one['role']} of {one['case']}", question.archive.inputs.get(one["sha256"])
        if ids is None:
            yield UNKNOWN, f"inputs.json lacks {name}"
            continue
        if len(ids) != one["tokens"]:
            yield FAIL, f"{name} has {len(ids)} tokens, resolved.json says {one['tokens']}"
        mine = one["case"], one["role"]
        if len(ids) >= c and owners.setdefault(tuple(ids[:c]), mine) != mine:
            yield FAIL, f"{name} begins with a whole checkpoint interval of another input"


def attempted(question: Question) -> Iterator[Finding]:
    """Arms are live or imported as the attempt says, and their engines ran at C."""
    live = question.attempt.rec["arms"]
    seals = {
        CONTROL: question.attempt.rec["control_seal_sha256"],
        REFERENCE: question.attempt.rec["reference_seal_sha256"],
    }
    named = [*live, *(name for name, seal in seals.items() if seal)]
    if len(set(named)) < len(named):
        yield FAIL, f"the attempt names an arm twice, or as live and as imported: {', '.join(named)}"
    for planned in in_order(question.plan):
        if planned.name not in named:
            yield UNKNOWN, f"arm {planned.name} is planned, and the attempt does not name it"
    for name in named:
        if name not in question.arms:
            yield UNKNOWN, f"the attempt names arm {name}; it is not in the archive"
    for arm in question.arms.values():
        if arm.name != REFERENCE and arm.name not in {planned.name for planned in in_order(question.plan)}:
            yield FAIL, f"arm {arm.name} is in the archive and not in the plan"
        for seen in arm.all["engine_started"]:
            if seen.rec["checkpoint_interval"] != question.c:
                yield (
                    FAIL,
                    f"arm {arm.name} ran at C={seen.rec['checkpoint_interval']}, resolved.json says {question.c}",
                )
        if arm.name not in named:
            yield FAIL, f"arm {arm.name} is in the archive and not in the attempt"
            continue
        seal = None if arm.name in live else seals[arm.name]
        if seal and arm.source is None:
            yield UNKNOWN, f"arm {arm.name} is imported, and its source's seal is gone"
        elif arm.source != seal:
            yield FAIL, f"arm {arm.name} has another source than the attempt says"


SHAPE = (
    "engine",
    "max_model_len",
    "tensor_parallel",
    "pipeline_parallel",
    "data_parallel",
    "decode_context_parallel",
)


def effective(arm: Arm) -> dict[str, Any]:
    """Every setting, version and size that could make two engines compute differently."""
    engine = arm.engine
    found = {name: engine[name] for name in SHAPE}
    found["eos_token_ids"] = str(sorted(engine["eos_token_ids"]))
    found.update({f"versions.{name}": version for name, version in engine["versions"].items()})
    found.update(engine["settings"])
    return found


def one_value(left: Any, right: Any) -> bool:
    """1, 1.0 and true are three."""
    return type(left) is type(right) and bool(left == right)


SERVED = ("lmcache", "samestate-disk", "samestate-valkey", "samestate-object")
CONNECTOR_CLASSES = {
    "native": "OffloadingConnector",
    "dictionary": "DictionaryConnector",
    "lmcache": "HostLMCacheConnector",
    "samestate-memory": "SamestateConnector",
    "samestate-disk": "SamestateConnector",
    "samestate-valkey": "SamestateConnector",
    "samestate-object": "SamestateConnector",
}
"""What each planned connector runs as on a real engine."""
OTHER_ENGINES = {"sim": "SimConnector", "transformers": "SnapshotCache"}
"""What stands for every planned connector on another engine than vLLM."""


def settings(question: Question) -> Result:
    """Arms ran the planned engine, and the same one but for what the plan declares."""
    plan, findings = question.plan, list[Finding]()
    first = question.arm(plan["arms"][0]["name"])
    due = effective(first)
    declared = [*plan["differing_settings"], *(f"versions.{a['connector']}" for a in plan["arms"] if a.get("release"))]
    for arm in question.arms.values():
        actual = effective(arm)
        for name in sorted(due.keys() | actual.keys()):
            if any(name == one or name.startswith(f"{one}.") for one in declared):
                continue
            if name not in due or name not in actual or not one_value(due[name], actual[name]):
                findings.append((FAIL, f"{name} is another in arm {arm.name} than in arm {first.name}"))
        if arm.engine["data_parallel"] != 1:
            findings.append((FAIL, f"arm {arm.name}: more than one engine (data_parallel)"))
    for planned in plan["arms"]:
        arm = question.arm(planned["name"])
        without, said = planned["connector"] == "none", arm.engine["connector"]
        known = OTHER_ENGINES.get(arm.engine["engine"]) or CONNECTOR_CLASSES.get(planned["connector"])
        if said is not None if without else said != known:
            findings.append((FAIL, f"arm {arm.name}: connector {said or 'none'}, planned {planned['connector']}"))
        level = None if without else plan.get("instruments", {}).get("audit_level", "metadata")
        if arm.engine["audit_level"] != level:
            findings.append((FAIL, f"arm {arm.name}: audit level {arm.engine['audit_level']}, planned {level}"))
        findings += [(UNKNOWN, f"arm {arm.name}: rank {one} registered again") for one in sorted(arm.ranks_again)]
        findings += in_force(arm, {**plan["engine"]["settings"], **planned.get("settings", {})})
    return conclude("settings", findings, len(first.engine["settings"]), f"{len(due)} settings and versions")


def in_force(arm: Arm, planned: dict[str, Any]) -> Iterator[Finding]:
    for reported, actual in effective(arm).items():
        section, _, name = reported.rpartition(".")
        if name not in planned or planned[name] == "auto":
            continue
        if (section == "" or re.fullmatch(r"[^.]*_config", section, re.DOTALL)) and not one_value(
            plain(planned[name]), plain(actual)
        ):
            yield FAIL, f"arm {arm.name}: {reported} is {actual!r}, the plan sets {planned[name]!r}"


def plain(value: Any) -> Any:
    """A dtype without the library that it is named after."""
    return value[len("torch.") :] if type(value) is str and value.startswith("torch.") else value


def preemptions(question: Question) -> Result:
    findings, examined = list[Finding](), 0
    for arm in question.planned_arms:
        for one in question.operations:
            examined += 1
            counted = arm.counter(one.op, PREEMPTIONS)
            if counted is None:
                findings.append((UNKNOWN, f"arm {arm.name}: {one.op}: {PREEMPTIONS} cannot be read"))
            elif counted:
                findings.append((FAIL, f"arm {arm.name}: {one.op}: {counted:.0f} preemptions"))
        findings += [(FAIL, f"arm {arm.name}: request {one} was preempted") for one in sorted(arm.preempted)]
    return conclude("preemptions", findings, examined, f"{examined} operations")


# --- outputs that can show something --------------------------------------------------------------

MIN_DISTINCT = 4


def eos_absent(question: Question) -> Result:
    findings, examined = list[Finding](), 0
    for arm in question.arms.values():
        known = set(arm.engine["eos_token_ids"])
        if not known:
            findings.append((UNKNOWN, f"arm {arm.name}: the engine names no end-of-sequence id"))
        for one in question.generations():
            output = arm.output(one.op)
            if output is None:
                findings.append((UNKNOWN, f"arm {arm.name}: {one.op} has no output"))
                continue
            examined += 1
            if not known.isdisjoint(output["token_ids"]):
                findings.append((FAIL, f"arm {arm.name}: {one.op} holds an end-of-sequence id"))
    return conclude("eos-absent", findings, examined, f"{examined} generations")


def non_vacuity(question: Question) -> Result:
    """Something was reused, by the candidate alone, and outputs depend on their prompts."""
    candidate, findings = question.arm(CANDIDATE), list[Finding]()
    if question.plan["analyzer"]["id"] == "local-hit-v1":
        checked, _ = repeats(question)
        hits = [one for one in checked if (rows := candidate.schedule(one.op)) and rows[0].start]
        if not hits:
            findings.append((UNKNOWN, "no repeat hit the local cache: nothing was tested"))
    else:
        loads = [load for one in question.generations("reload") for load in loads_of(candidate, one.op)]
        if not any(load.bytes for load in loads):
            findings.append((UNKNOWN, "no reload of the candidate moved a byte: nothing was tested"))
        control = question.arm(CONTROL)
        findings += [(UNKNOWN, f"the control loaded for request {request}") for request in control.loads]
        for one in question.generations():
            if control.counter(one.op, EXTERNAL_HITS):
                findings.append((UNKNOWN, f"the control counts external hits in {one.op}"))
    examined = 0
    for arm in question.planned_arms:
        outputs: set[tuple[int, ...]] = set()
        for one in question.generations():
            output = arm.output(one.op)
            if output is None:
                continue
            examined += 1
            outputs.add(tuple(output["token_ids"]))
            short = one.outputs < MIN_DISTINCT <= question.plan["output_tokens"]
            if len(set(output["token_ids"])) < MIN_DISTINCT and not short:
                findings.append((UNKNOWN, f"arm {arm.name}: {one.op} has fewer than {MIN_DISTINCT} distinct tokens"))
        if len(outputs) <= 1 < len({(one.case, one.role) for one in question.generations()}):
            findings.append((UNKNOWN, f"arm {arm.name}: outputs do not depend on the prompt"))
    return conclude("non-vacuity", findings, examined, f"{examined} generations")


def loads_of(arm: Arm, op: str) -> list[Load]:
    output = arm.output(op)
    return [load for mine in arm.loads.get(output["request"], {}).values() for load in mine] if output else []


# --- transfers ------------------------------------------------------------------------------------

ONLY_LAST = ("SlidingWindow", "ChunkedLocal", "CircularBuffer")
"""Specs that need the last pages of a prefix alone."""


class Tables:
    """What one rank registered, by index."""

    def __init__(self, registered: dict[str, Any]) -> None:
        self.groups = {group["group"]: group for group in registered["transfer_groups"]}
        self.engine_groups = {group["group"]: group for group in registered["engine_groups"]}

    def blocks(self, part: dict[str, Any]) -> range:
        """Indices, in the request's block table, of the blocks that a part moves."""
        group = self.groups.get(part["group"])
        return (
            range(part["first_block"], part["first_block"] + part["pages"] // group["entries"]) if group else range(0)
        )

    def size(self, part: dict[str, Any], name: str) -> Iterator[Finding]:
        """A part moves the bytes and pages of whole blocks."""
        group = self.groups.get(part["group"])
        if group is None:
            return
        due = len(self.blocks(part)) * group["bytes_per_block"]
        if part["bytes"] != due or part["pages"] % group["entries"]:
            yield FAIL, f"{name} moves {part['bytes']} bytes of group {part['group']}, {part['pages']} pages are {due}"

    def missing(self, index: int, parts: list[dict[str, Any]], local: int, b: int) -> list[int]:
        """Blocks of a transfer group that [local, b) needs and no part moves."""
        group = self.engine_groups.get(self.groups[index]["engine_group"])
        if group is None:
            return []
        last = b // group["tokens_per_block"] - 1
        state = group["entry_kind"] in ("recurrent", "conv") or any(word in group["spec"] for word in ONLY_LAST)
        moved = [self.blocks(part) for part in parts if part["group"] == index]
        due = range(last if state else local // group["tokens_per_block"], last + 1)
        return [block for block in due if block >= 0 and not any(block in blocks for blocks in moved)]


def transfers(question: Question) -> Result:
    """Every reload came from the external cache on every rank, by all sources, and every save was completed."""
    arm, findings = question.arm(CANDIDATE), list[Finding]()
    tables = {rank: Tables(registered) for rank, registered in arm.ranks.items()}
    twins = same_prompts(arm)
    reloads = list[Operation]()
    for one in question.generations("reload"):
        output = arm.output(one.op)
        request = output["request"] if output else ""
        for lookup in arm.lookups.get(request, ()) if output else ():
            if lookup["local_tokens"]:
                findings.append((UNKNOWN, f"{one.op}: {lookup['local_tokens']} tokens were still in the local cache"))
            if lookup["salt"]:
                findings.append((FAIL, f"{one.op}: the lookup was salted"))
        if nothing_due(question, arm, one) and arm.counter(one.op, EXTERNAL_HITS) == 0:
            continue
        reloads.append(one)
        loads = arm.loads.get(request, {}) if output else {}
        absent = lacking(arm, loads)
        if absent is not None:
            findings.append((UNKNOWN, f"{one.op}: rank {absent} records no load"))
        local = arm.local(request) if output else 0
        for rank, mine in loads.items():
            name = f"{one.op}: rank {rank}"
            findings += [finding for load in mine for finding in moved_all(load, name)]
            if rank in tables:
                findings += parts_fit(tables[rank], mine, name, local, one.tokens)
                findings += saved_before(arm, tables[rank], rank, mine, twins.get(one.op, ()), name)
        findings += external_hits(question, arm, one.op, local)
    for planned in question.planned_arms:
        findings += credits(question, planned)
    for name in (CONTROL, CANDIDATE):
        findings += resets(question, question.arm(name))
    findings += saves(arm, tables)
    return conclude("transfers", findings, len(reloads), f"{len(reloads)} reloads, {arm.submitted} saves")


def same_prompts(arm: Arm) -> dict[str, list[str]]:
    """By operation: the requests that answered one with its prompt."""
    said = {seen.rec["op"]: seen.rec["prompt_sha256"] for seen in arm.all["operation_started"]}
    requests: dict[str, list[str]] = defaultdict(list)
    for op, prompt in said.items():
        requests[prompt] += [seen.rec["request"] for seen in arm.by_op.get(("operation_output", op), ())]
    return {op: requests[prompt] for op, prompt in said.items() if prompt is not None}


def moved_all(load: Load, name: str) -> Iterator[Finding]:
    """A load was completed, and moved what it described."""
    if load.done is None or not load.done["ok"]:
        yield UNKNOWN, f"{name}: load {load.rec['job']} was not completed well"
    elif not load.done["bytes"]:
        yield UNKNOWN, f"{name}: load {load.rec['job']} reports no bytes"
    elif load.done["bytes"] != sum(part["bytes"] for part in load.rec["parts"]):
        yield FAIL, f"{name}: load {load.rec['job']} moved {load.done['bytes']} bytes, and describes others"


def parts_fit(tables: Tables, loads: list[Load], name: str, local: int, n: int) -> Iterator[Finding]:
    parts = [part for load in loads for part in load.rec["parts"]]
    for part in parts:
        yield from tables.size(part, f"{name}: a load")
    b = farthest(loads)
    if b is None or b > n:
        return
    for group in tables.groups:
        missing = tables.missing(group, parts, local, b)
        if missing:
            yield UNKNOWN, f"{name}: {len(missing)} blocks of group {group} that [0, {b}) needs are in no part"


def saved_before(
    arm: Arm, tables: Tables, rank: int, loads: list[Load], requests: Sequence[str], name: str
) -> Iterator[Finding]:
    """Every loaded block was moved by a save of the same prompt that was completed before."""
    done = [saved for request in requests for saved in arm.saves.get((rank, request), ())]
    for load in loads:
        saved = {(one.part["group"], block) for one in done if one.n < load.n for block in tables.blocks(one.part)}
        blocks = [(part["group"], block) for part in load.rec["parts"] for block in tables.blocks(part)]
        absent = [block for block in blocks if block not in saved]
        if absent:
            yield UNKNOWN, f"{name}: no completed save of {len(absent)} of the {len(blocks)} loaded blocks before"


def external_hits(question: Question, arm: Arm, op: str, local: int) -> Iterator[Finding]:
    hits, rows = arm.counter(op, EXTERNAL_HITS), arm.schedule(op)
    if hits is None or hits <= 0:
        yield UNKNOWN, f"{op}: {EXTERNAL_HITS} cannot be read, or counts nothing"
    elif rows and hits != rows[0].start - local:
        short = FAIL if question.whole(CANDIDATE) else UNKNOWN
        yield short, f"{op}: the engine counts {hits:.0f} external tokens, {rows[0].start} are credited"


def credits(question: Question, arm: Arm) -> Iterator[Finding]:
    """p, by the answer, the lookup and the allocation of every generation."""
    short = FAIL if question.whole(arm.name) else UNKNOWN
    for one in question.generations():
        output, rows = arm.output(one.op), arm.schedule(one.op)
        if output is None or not rows:
            continue
        name, p, request = f"arm {arm.name}: {one.op}", rows[0].start, output["request"]
        if output["cached_tokens"] != p:
            verdict = UNKNOWN if output["cached_tokens"] is None else short
            yield verdict, f"{name}: the engine answers {output['cached_tokens']} cached tokens, {p} are credited"
        if not arm.connected:
            continue
        answered = [lookup for lookup in arm.lookups.get(request, ()) if lookup["matched_tokens"] is not None]
        if not answered:
            yield UNKNOWN, f"{name}: no lookup was answered"
        for last in answered[-1:]:
            if last["local_tokens"] + last["matched_tokens"] != p:
                yield short, f"{name}: the lookup found another number of tokens than the {p} credited"
            if last["queried_tokens"] != one.tokens and request not in arm.preempted:
                yield FAIL, f"{name}: the lookup was for {last['queried_tokens']} tokens, the prompt has {one.tokens}"
        if one.name != "reload":
            continue
        allocated = [given["external_tokens"] for given in arm.allocated.get(request, ())]
        external = p - arm.local(request)
        if not allocated and external:
            yield UNKNOWN, f"{name}: no allocation for its load is recorded"
        elif max(allocated, default=0) != external:
            yield short, f"{name}: blocks were allocated for {max(allocated)} external tokens, {p} are credited"


def resets(question: Question, arm: Arm) -> Iterator[Finding]:
    """The local cache was dropped before each reload, and missed."""
    for one in question.operations:
        if one.name == "reload":
            hits = arm.counter(one.op, LOCAL_HITS)
            if hits is None or hits:
                yield UNKNOWN, f"arm {arm.name}: {one.op}: the local miss is not proven ({LOCAL_HITS}: {hits})"
        if one.name == "reset":
            given = [seen.rec for seen in arm.by_op.get(("cache_reset", one.op), ())]
            if not given:
                yield UNKNOWN, f"arm {arm.name}: {one.op} is not recorded"
            if any(not (rec["local_reset"] and rec["external_kept"] and rec["running_kept"]) for rec in given):
                yield UNKNOWN, f"arm {arm.name}: {one.op} did not reset the local cache alone"


def saves(arm: Arm, tables: dict[int, Tables]) -> Iterator[Finding]:
    if not arm.submitted:
        yield UNKNOWN, f"arm {arm.name} records no save"
    lone = len(arm.open_saves) + arm.unpaired
    for count, what in ((lone, "saves unpaired"), (arm.failed, "saves failed"), (arm.stray_loads, "loads unpaired")):
        if count:
            yield UNKNOWN, f"arm {arm.name}: {count} {what}"
    if arm.unlike:
        yield FAIL, f"arm {arm.name}: {arm.unlike} saves moved other bytes than their submissions say"
    for (rank, request), done in arm.saves.items():
        if rank in tables:
            for one in done:
                yield from tables[rank].size(one.part, f"rank {rank}: a save of request {request}")


# --- controls and topology ------------------------------------------------------------------------

CONTROLS = ("tuner-profile", "matched-schedule", "repair")
ENGINE_REPAIRS = ("stable-topk",)
"""Repairs of the engine itself: all arms have them, on every rank."""
AUTOTUNE = "kernel_config.enable_flashinfer_autotune"
ROLE = "kv_transfer_config.kv_role"


def unrecorded(question: Question) -> bool:
    """No arm records controls: the archive is older than they are."""
    started = [seen.rec for arm in question.arms.values() for seen in arm.all["engine_started"][:1]]
    return all(rec.get("controls") is None for rec in started)


def controls(question: Question) -> Result:
    """Every switch is recorded, as planned, and the same in all arms; a profile holds where nothing else tunes."""
    check = "controls"
    if unrecorded(question):
        return conclude(check, [(NOT_EXERCISED, "no arm records controls")], 0, "")
    findings, examined = list[Finding](), 0
    planned = {arm["name"]: arm.get("repair") for arm in question.plan["arms"]}
    declared, theirs = question.plan["differing_settings"], dict[str, dict[str, Any]]()
    for arm in question.arms.values():
        recorded = arm.engine.get("controls")
        if recorded is None:
            findings.append((UNKNOWN, f"arm {arm.name}: its engine records no controls"))
            continue
        names = [one["name"] for one in recorded]
        mine = {one["name"]: one for one in recorded}
        examined += len(mine)
        findings += [(UNKNOWN, f"arm {arm.name}: {name} is not recorded") for name in CONTROLS if name not in names]
        findings += [(FAIL, f"arm {arm.name}: {name} is recorded again") for name in mine if names.count(name) > 1]
        findings += [
            (UNKNOWN, f"arm {arm.name}: {one['name']} is on and has no hash")
            for one in recorded
            if one["on"] and one["sha256"] is None
        ]
        if "repair" in mine and mine["repair"]["on"] != (planned.get(arm.name) is not None):
            findings.append((FAIL, f"arm {arm.name}: the repair is not as planned"))
        findings += profile(arm, mine.get("tuner-profile"))
        if not theirs:
            theirs = mine
        for name in sorted((theirs.keys() & mine.keys()) - {"repair"}):
            same = (theirs[name]["on"], theirs[name]["sha256"]) == (mine[name]["on"], mine[name]["sha256"])
            if not same and "controls" not in declared and f"controls.{name}" not in declared:
                findings.append((FAIL, f"arm {arm.name}: {name} is another than in the first arm"))
    return conclude(check, findings, examined, f"{examined} controls")


def profile(arm: Arm, one: Any) -> Iterator[Finding]:
    """A tuner profile in force: FlashInfer does not tune, and every rank ran what was recorded."""
    if one is None or not one["on"]:
        return
    tunes = arm.engine["settings"].get(AUTOTUNE)
    if tunes is not False:
        yield (FAIL if tunes is True else UNKNOWN), f"arm {arm.name}: a profile is in force, {AUTOTUNE} is {tunes!r}"
    for rank in range(arm.engine["tensor_parallel"] * arm.engine["pipeline_parallel"]):
        there = [seen.rec for seen in arm.all["kernels_selected"] if seen.rec["rank"] == rank]
        if not there:
            yield UNKNOWN, f"arm {arm.name}: rank {rank} does not say which kernels it ran with"
        for rec in there:
            if rec["mode"] != "pin" or rec["profile_sha256"] != one["sha256"]:
                yield FAIL, f"arm {arm.name}: rank {rank} ran under another profile"
            if rec["violations"] or rec["benchmarks"]:
                yield FAIL, f"arm {arm.name}: rank {rank} ran or measured what is not in the profile"
            if not rec["selections"]:
                yield UNKNOWN, f"arm {arm.name}: no autotuned kernel ran on rank {rank}"


def topology(question: Question) -> Result:
    """Every arm is one engine of its own: no replicas, all ranks there, prefill and decode in the same one."""
    check, findings, processes = "topology", list[Finding](), dict[str, Arm]()
    if unrecorded(question):
        return conclude(check, [(NOT_EXERCISED, "no arm records what it would take")], 0, "")
    for arm in question.arms.values():
        engine, size = arm.engine, arm.engine["tensor_parallel"] * arm.engine["pipeline_parallel"]
        if len(arm.all["engine_started"]) > 1 or engine["data_parallel"] != 1:
            findings.append((FAIL, f"arm {arm.name}: more than one engine"))
        if engine["connector"] is not None:
            findings += [
                (UNKNOWN, f"arm {arm.name}: rank {rank} of {size} registered no cache")
                for rank in sorted({*range(size)} - arm.ranks.keys())
            ]
            findings += [
                (FAIL, f"arm {arm.name}: rank {rank} is one of {rec['world_size']}, the engine has {size}")
                for rank, rec in arm.ranks.items()
                if rec["world_size"] != size or rank >= size
            ]
        role, due = engine["settings"].get(ROLE), None if engine["connector"] is None else "kv_both"
        if role != due:
            findings.append((UNKNOWN if role is None else FAIL, f"arm {arm.name}: {ROLE} is {role!r}"))
        if arm.source is None:
            if not engine["process"]:
                findings.append((UNKNOWN, f"arm {arm.name}: its engine does not name its process"))
            elif processes.setdefault(engine["process"], arm) is not arm:
                findings.append((FAIL, f"arm {arm.name} ran in the engine process of another arm"))
    return conclude(check, findings, len(question.arms), f"{len(question.arms)} arms")


def environment(question: Question) -> Result:
    """Every rank says once, before the first operation, what it stands on; the same in all arms."""
    check, findings, examined = "environment", list[Finding](), 0
    arms, first = list(question.arms.values()), dict[int, dict[str, str]]()
    listed, declared = question.plan.get("expected_patched"), question.plan["differing_settings"]
    if listed is None and not any(arm.all["environment_observed"] for arm in arms):
        return conclude(check, [(NOT_EXERCISED, "no arm records what its processes stand on")], 0, "")
    for arm in arms:
        seens = arm.all["environment_observed"]
        said = [seen.rec["rank"] for seen in seens]
        examined += len(set(said))
        for rank in range(arm.engine["tensor_parallel"] * arm.engine["pipeline_parallel"]):
            if said.count(rank) != 1:
                findings.append((UNKNOWN, f"arm {arm.name}: rank {rank} was observed {said.count(rank)} times"))
        begins = min((seen.t for seen in arm.all["operation_started"]), default=None)
        if begins is not None and any(seen.t > begins for seen in seens):
            findings.append((UNKNOWN, f"arm {arm.name}: observed after the first operation had begun"))
        for rank, seen in {one.rec["rank"]: one for one in seens}.items():
            mine = stands_on(seen.rec)
            patched = {f"{one['distribution']}/{one['path']}" for one in seen.rec["patched"]}
            for name in sorted(patched ^ {*listed} if listed is not None else ()):
                if f"environment.patched.{name}" not in declared:
                    said_of_it = "patched and not listed" if name in patched else "listed and as released"
                    findings.append((FAIL, f"arm {arm.name}: rank {rank}: {name} is {said_of_it}"))
            was = first.setdefault(rank, mine)
            for name in sorted(was.keys() | mine.keys()):
                if was.get(name) != mine.get(name) and not {"environment", f"environment.{name}"} & {*declared}:
                    findings.append((FAIL, f"arm {arm.name}: rank {rank}: {name} is another than in the first arm"))
    return conclude(check, findings, examined, f"{examined} ranks")


def stands_on(rec: dict[str, Any]) -> dict[str, str]:
    """What could make two processes compute differently; another card of one kind could not."""
    found = {"device": rec["device"], "driver": rec["driver"] or "none"}
    found.update({f"{part}.{name}": value for part in ("variables", "backends") for name, value in rec[part].items()})
    found.update({f"patched.{one['distribution']}/{one['path']}": one["sha256"] or "gone" for one in rec["patched"]})
    return found


def storages(question: Question) -> Result:
    """Named parameters and buffers are the same in all arms, and at the end as at the start."""
    check, findings, examined = "storages", list[Finding](), 0
    arms, first = list(question.arms.values()), dict[int, dict[str, Any]]()
    if not any(arm.all["storages_digested"] for arm in arms):
        return conclude(check, [(NOT_EXERCISED, "no arm records its parameters and buffers")], 0, "")
    for arm in arms:
        taken = {(seen.rec["rank"], seen.rec["moment"]): seen.rec for seen in arm.all["storages_digested"]}
        for rank in range(arm.engine["tensor_parallel"] * arm.engine["pipeline_parallel"]):
            findings += [
                (UNKNOWN, f"arm {arm.name}: rank {rank} digested nothing at its {moment}")
                for moment in ("start", "end")
                if (rank, moment) not in taken or not taken[rank, moment]["rows"]
            ]
        for (rank, moment), rec in taken.items():
            examined += len(rec["rows"])
            if moment == "end" and (rank, "start") in taken:
                findings += tensors(taken[rank, "start"], rec, f"arm {arm.name}: rank {rank} since its start")
            if moment == "start":
                findings += tensors(first.setdefault(rank, rec), rec, f"arm {arm.name}: rank {rank}")
    return conclude(check, findings, examined, f"{examined} tensors")


def tensors(was: dict[str, Any], now: dict[str, Any], what: str) -> Iterator[Finding]:
    if was["digest"] != now["digest"]:
        yield UNKNOWN, f"{what}: digests of two algorithms"
        return
    ours, theirs = ({row[0]: row for row in side["rows"]} for side in (was, now))
    differing = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if differing:
        yield FAIL, f"{what}: {len(differing)} parameters and buffers differ, the first is {differing[0]}"


def reference(question: Question) -> Result:
    """A recorded arm was sealed before the attempt that names it, and no live arm began before that."""
    check, findings, attempt = "reference", list[Finding](), None
    recorded = [arm for arm in question.arms.values() if arm.source is not None]
    if not recorded:
        return conclude(check, [(NOT_EXERCISED, "all arms ran live")], 0, "")
    attempt = question.attempt
    for arm in question.arms.values():
        if arm.source is not None:
            times = [time if time and TIME.fullmatch(time) else None for time in (arm.sealed, attempt.opened)]
            if times[0] is None or times[1] is None or times[0] > times[1]:
                findings.append((UNKNOWN, f"arm {arm.name}: sealed {arm.sealed}, the attempt began {attempt.opened}"))
        else:
            begun = [seen.t for kind in ("engine_started", "operation_started") for seen in arm.all[kind]]
            if min(begun, default=attempt.t) < attempt.t:
                findings.append((FAIL, f"arm {arm.name} had begun before the attempt named its reference"))
    return conclude(check, findings, len(recorded), f"{len(recorded)} recorded arms")


def dated(data: bytes | None) -> str | None:
    """The time in a seal; None: there is none to read."""
    try:
        seal = parse(data) if data is not None else None
    except (ValueError, RecursionError):
        return None
    return str(seal["wall_time"]) if seal is not None and IS_SEAL(seal) else None


# --- beside the engine ----------------------------------------------------------------------------


def intervention(question: Question) -> Result:
    """Repairs and releases are those that were planned, and one repair is the same everywhere."""
    check, planned = "intervention", {arm["name"]: arm for arm in question.plan["arms"]}
    arms = question.arms.values()
    asked = any(arm.get("repair") or arm.get("release") for arm in planned.values())
    if not asked and not any(arm.all["intervention_applied"] for arm in arms):
        return conclude(check, [(NOT_EXERCISED, "no repair and no release is planned, no repair is recorded")], 0, "")
    findings, replaced = list[Finding](), dict[str, set[tuple[str, str, str]]]()
    of_engines = {arm.get("repair") if arm.get("repair") in ENGINE_REPAIRS else None for arm in planned.values()}
    if len(of_engines) > 1:
        findings.append((FAIL, "a repair of the engine is planned in some arms and not in others"))
    for arm in arms:
        mine = planned.get(arm.name, {})
        findings += repairs(arm, mine.get("repair"))
        for seen in arm.all["intervention_applied"]:
            functions = {(one["module"], one["qualname"], one["source_sha256"]) for one in seen.rec["functions"]}
            if not functions:
                findings.append((FAIL, f"arm {arm.name}: repair {seen.rec['name']} replaced no function"))
            if replaced.setdefault(seen.rec["name"], functions) != functions:
                findings.append((FAIL, f"arm {arm.name}: repair {seen.rec['name']} replaced others than elsewhere"))
        if mine.get("release"):
            version = arm.engine["versions"].get(mine["connector"])
            if version != mine["release"]:
                said = f"arm {arm.name}: {mine['connector']} {version}, planned {mine['release']}"
                findings.append((UNKNOWN if version is None else FAIL, said))
    return conclude(check, findings, len(arms), f"{len(arms)} arms")


def repairs(arm: Arm, planned: str | None) -> Iterator[Finding]:
    applied = arm.all["intervention_applied"]
    for seen in applied:
        if seen.rec["name"] != planned:
            yield FAIL, f"arm {arm.name}: repair {seen.rec['name']} was applied, planned {planned or 'none'}"
    if not planned:
        return
    if planned in ENGINE_REPAIRS:
        for rank in range(arm.engine["tensor_parallel"] * arm.engine["pipeline_parallel"]):
            times = sum(seen.rec["name"] == planned and seen.rec.get("rank") == rank for seen in applied)
            if times != 1:
                yield (FAIL if times else UNKNOWN), f"arm {arm.name}: rank {rank} records {times} repairs, planned 1"
        return
    schedulers = [process for process in arm.processes if process.startswith("scheduler")]
    if not schedulers:
        yield UNKNOWN, f"arm {arm.name}: no scheduler's stream is recorded"
    for process in schedulers:
        times = sum(seen.process == process for seen in applied)
        if times != 1:
            yield (FAIL if times else UNKNOWN), f"arm {arm.name}: {process} records {times} repairs, planned 1"


def services(question: Question) -> Result:
    """The server beside an engine was there from beginning to end, and carried over as planned."""
    check, planned = "services", {arm["name"]: arm for arm in question.plan["arms"]}
    findings, examined = list[Finding](), 0
    for arm in question.arms.values():
        plan, starts, ends = planned.get(arm.name), arm.all["service_started"], arm.all["service_stopped"]
        if starts or ends or (plan and plan["connector"] in SERVED):
            examined += 1
            findings += served(f"arm {arm.name}", plan, starts, ends)
            findings += around(f"arm {arm.name}", arm, starts, ends)
            follows = any(one.get("follows") == arm.name for one in question.plan["arms"])
            if any(seen.rec["kept"] for seen in ends) and not follows:
                findings.append((FAIL, f"arm {arm.name}: its server was left running, and no planned arm follows"))
    if not examined:
        findings.append((NOT_EXERCISED, "no arm needs a server beside its engine, and none is recorded"))
    return conclude(check, findings, examined, f"{examined} arms with a server")


def served(name: str, plan: dict[str, Any] | None, starts: list[Seen], ends: list[Seen]) -> Iterator[Finding]:
    if plan is None or plan["connector"] not in SERVED:
        yield FAIL, f"{name}: a server is recorded, and none is planned"
        return
    for what, records in (("start", starts), ("end", ends)):
        if len(records) != 1:
            yield (FAIL if records else UNKNOWN), f"{name}: its server has {len(records)} {what}s, planned 1"
    kept = plan.get("follows") is not None and plan.get("service", "kept") == "kept"
    for seen in starts:
        if seen.rec["continues"] != kept:
            yield FAIL, f"{name}: its server {'was not' if kept else 'was'} there already"
        if plan.get("release") and seen.rec["version"] != plan["release"]:
            yield FAIL, f"{name}: its server is of {seen.rec['version']}, planned {plan['release']}"
        told = {option.replace("-", "_"): value for option, value in plan.get("options", {}).items()}
        for option, value in told.items():
            given = seen.rec["options"].get(option, told)
            if not option.startswith("lmcache.") and (type(given) is not type(value) or given != value):
                yield FAIL, f"{name}: its server ran with another {option} than planned"
    if not all(seen.rec["alive"] for seen in ends):
        yield UNKNOWN, f"{name}: its server no longer answered when the last operation was over"


def around(name: str, arm: Arm, starts: list[Seen], ends: list[Seen]) -> Iterator[Finding]:
    begun, over = arm.all["operation_started"], arm.all["operation_ended"]
    if any(seen.n < start.n for start in starts for seen in begun):
        yield FAIL, f"{name}: its server was started after an operation"
    if any(seen.n > end.n for end in ends for seen in (*begun, *over)):
        yield FAIL, f"{name}: its server was over before an operation"


# --- reuse within the engine's own cache ----------------------------------------------------------


def block_size(question: Question) -> Result:
    """Steps end where recurrent pages do."""
    arm, c, findings, examined = question.arm(CANDIDATE), question.c, list[Finding](), 0
    for seen in arm.all["scheduler_configured"]:
        groups, size = seen.rec["engine_groups"], seen.rec["block_size"]
        examined += len(groups)
        recurrent = [group["tokens_per_block"] for group in groups if group["entry_kind"] == "recurrent"]
        if any(size % kept for kept in recurrent):
            findings.append((FAIL, f"steps end at multiples of {size}, recurrent groups keep theirs at {recurrent}"))
        largest = max(recurrent or [group["tokens_per_block"] for group in groups], default=c)
        if largest != c:
            findings.append((FAIL, f"C is {c} in resolved.json, the scheduler's groups have blocks of {largest}"))
    if not arm.all["scheduler_configured"]:
        findings.append((UNKNOWN, "no scheduler_configured record: sizes are not known"))
    return conclude("block-size", findings, examined, f"{examined} groups, C={c}")


def local_hits(question: Question) -> Result:
    """What was hit, by the schedule, the answer and the counter; at the first repeat as at later ones."""
    arm, findings = question.arm(CANDIDATE), list[Finding]()
    checked, aligned = repeats(question)
    cases: dict[str, list[Repeat]] = {}
    for one in checked:
        cases.setdefault(one.case, []).append(one)
        findings += hit(arm, one, aligned)
    for same in cases.values():
        cold = arm.schedule(same[0].earlier[0])
        if cold and cold[0].start:
            findings.append((UNKNOWN, f"{same[0].earlier[0]} should compute everything and starts at {cold[0].start}"))
        hits = [rows[0].start for rows in map(arm.schedule, (one.op for one in same)) if rows]
        if len(hits) < len(same):
            continue
        if hits[0] < max(hits):
            findings.append((FAIL, f"{same[0].op} hit {hits[0]} tokens, a later repeat {max(hits)}"))
        elif not max(hits) and due(same[0].n, arm.engine["checkpoint_interval"], arm):
            findings.append((UNKNOWN, f"{same[0].case}: no repeat hit anything"))
    return conclude("local-hits", findings, len(checked), f"{len(checked)} repeats")


def hit(arm: Arm, one: Repeat, aligned: bool) -> Iterator[Finding]:
    rows, output = arm.schedule(one.op), arm.output(one.op)
    if not rows or output is None:
        yield UNKNOWN, f"{one.op}: no step or no output is recorded"
        return
    p = rows[0].start
    for name, value in (("cached_tokens", output["cached_tokens"]), (LOCAL_HITS, arm.counter(one.op, LOCAL_HITS))):
        if value != p:
            yield (UNKNOWN if value is None else FAIL), f"{one.op}: starts at {p}, and {name} says {value}"
    if aligned and p:
        ends = step_ends(arm, one.earlier)
        if ends is None:
            yield UNKNOWN, f"{one.op}: hit of {p}, and not every earlier step of this prompt is recorded"
        elif p not in ends:
            yield FAIL, f"{one.op}: hit of {p}, and no step of this prompt ended there"


# --- repetitions ----------------------------------------------------------------------------------


class Planned(NamedTuple):
    """One arm of one repetition."""

    repetition: int
    """From 1."""
    arm: str
    """As planned."""

    @property
    def name(self) -> str:
        """As the archive calls it."""
        return self.arm if self.repetition == 1 else f"{self.arm}-{self.repetition}"


def in_order(plan: dict[str, Any]) -> list[Planned]:
    """The arms of all repetitions as they run."""
    found, names = list[Planned](), [arm["name"] for arm in plan["arms"]]
    for number, order in enumerate(plan.get("repetitions") or ["forward"], 1):
        found += [Planned(number, name) for name in (names if order == "forward" else reversed(names))]
    return found


def each_alone(question: Question) -> list[Question]:
    """One question a repetition, its arms under their planned names; arms that no plan knows are with the first."""
    planned = in_order(question.plan)
    known = {one.name for one in planned}
    views = []
    for number in sorted({one.repetition for one in planned}):
        view = Question(question.archive)
        view.folders = {one.arm: one.name for one in planned if one.repetition == number}
        names = {name: arm for arm, name in view.folders.items()}
        if number == 1:
            names.update({name: name for name in question.arms if name not in known})
        view.arms = {}
        for name in sorted(names.keys() & question.arms.keys()):
            arm = copy(question.arms[name])
            arm.name = names[name]
            view.arms[arm.name] = arm
        views.append(view)
    return views


def over_all(check: str, views: list[Question]) -> Result:
    """What a check comes to in its worst repetition. One whose question comes up in one alone is unknown."""
    each = [run(check, view) for view in views]
    findings = [(v, f"repetition {at}: {said}") for at, one in enumerate(each, 1) for v, said in one.findings]
    verdicts = {one.verdict for one in each}
    mixed = UNKNOWN if len(verdicts) > 1 else each[0].verdict
    verdict = next((one for one in (FAIL, UNKNOWN) if one in verdicts), mixed)
    summaries = list(dict.fromkeys(one.summary for one in each))
    return Result(check, verdict, f"in each of {len(each)} repetitions: {'; '.join(summaries)}", findings)


def repetitions(question: Question) -> Result:
    """Every repetition in fresh engines, alike, and the arms one after another in the planned order."""
    plan, check = question.plan, "repetitions"
    if plan.get("repetitions", []) in ([], ["forward"]):
        return conclude(check, [(NOT_EXERCISED, "every arm runs once, in the plan's order")], 0, "")
    findings, planned = list[Finding](), in_order(plan)
    findings += [(UNKNOWN, f"arm {one.name} is not in the archive") for one in planned if one.name not in question.arms]
    said, names = question.attempt.rec["arms"], [one.name for one in planned]
    if [name for name in said if name in names] != [name for name in names if name in said]:
        findings.append((FAIL, f"the attempt ran its arms in another order: {', '.join(said)}"))
    live = [question.arms[name] for name in names if name in question.arms and question.arms[name].source is None]
    processes: dict[str, Arm] = {}
    for before, after in zip(live, live[1:]):  # noqa: B905, RUF007
        findings += one_after_another(before, after)
    for arm in live:
        for seen in arm.all["engine_started"][:1]:
            process = seen.rec["process"]
            if not process:
                findings.append((UNKNOWN, f"arm {arm.name}: its engine does not name its process"))
            elif processes.setdefault(process, arm) is not arm:
                findings.append((FAIL, f"arm {arm.name} ran in the engine process of arm {processes[process].name}"))
    for one in planned:
        if one.repetition > 1 and one.name in question.arms and one.arm in question.arms:
            findings += same_again(plan, question.arms[one.arm], question.arms[one.name])
    return conclude(check, findings, len(live), f"{len(live)} arms")


def one_after_another(before: Arm, after: Arm) -> Iterator[Finding]:
    over = [seen.t for kind in ("engine_started", "engine_stopped", "service_stopped") for seen in before.all[kind]]
    over += [seen.t for (kind, _), given in before.by_op.items() if kind == "operation_ended" for seen in given]
    begun = [seen.t for kind in ("engine_started", "service_started", "operation_started") for seen in after.all[kind]]
    if not before.all["engine_stopped"] or not after.all["engine_started"]:
        yield UNKNOWN, f"arms {before.name} and {after.name}: no end of the first or no start of the second is recorded"
    elif min(begun) < max(over):
        yield FAIL, f"arm {after.name} began before arm {before.name}, which it comes after, was over"


def same_again(plan: dict[str, Any], first: Arm, again: Arm) -> Iterator[Finding]:
    was, now, declared = effective(first), effective(again), plan["differing_settings"]
    for name in sorted(was.keys() | now.keys()):
        if any(name == one or name.startswith(f"{one}.") for one in declared):
            continue
        if name not in was or name not in now or not one_value(was[name], now[name]):
            yield FAIL, f"{name} is another in arm {again.name} than in arm {first.name}"
    if first.processes != again.processes:
        yield UNKNOWN, f"arms {first.name} and {again.name} left other streams"


def repetition_equality(question: Question) -> Result:
    """Same input, same tokens: every generation against the same one of the first repetition."""
    check, planned = "repetition-equality", in_order(question.plan)
    if len(question.plan.get("repetitions", [])) < 2:
        return conclude(check, [(NOT_EXERCISED, "the plan has one repetition")], 0, "")
    generations = question.generations()
    findings, inputs = list[Finding](), {(one.case, one.role) for one in generations}
    for arm in [one.arm for one in planned if one.repetition == 1]:
        first, *later = [question.arm(one.name) for one in planned if one.arm == arm]
        for one in generations:
            for again in later:
                if asked(first, one.op) != asked(again, one.op) or len(asked(first, one.op)) != 1:
                    findings.append((UNKNOWN, f"{again.name} {one.op} and {first.name} {one.op} had not one prompt"))
                else:
                    findings += unequal(question, first, one.op, again, one.op, FAIL)
        outputs = {tuple(output["token_ids"]) for one in generations if (output := first.output(one.op))}
        if len(outputs) <= 1 < len(inputs):
            findings.append((UNKNOWN, f"arm {first.name}: outputs do not depend on the prompt"))
    return conclude(check, findings, len(inputs), f"{len(inputs)} inputs")


def asked(arm: Arm, op: str) -> set[str | None]:
    """Digests of the prompts that an operation had."""
    return {seen.rec["prompt_sha256"] for seen in arm.all["operation_started"] if seen.rec["op"] == op}


# --- the verdict ----------------------------------------------------------------------------------

COVERED: dict[str, Callable[[Question], Result]] = {
    "coverage": coverage,
    "plan-identity": plan_identity,
    "settings": settings,
    "controls": controls,
    "topology": topology,
    "environment": environment,
    "storages": storages,
    "reference": reference,
    "geometry": geometry,
    "paired-equality": paired_equality,
    "reload-equality": reload_equality,
    "boundary": boundary,
    "transfers": transfers,
    "block-size": block_size,
    "local-equality": local_equality,
    "local-hits": local_hits,
    "preemptions": preemptions,
    "eos-absent": eos_absent,
    "non-vacuity": non_vacuity,
    "controls-equal": controls_equal,
    "intervention": intervention,
    "services": services,
    "repetitions": repetitions,
    "repetition-equality": repetition_equality,
}
"""Besides integrity."""
OF_THE_RUN = ("plan-identity", "controls-equal", "repetitions", "repetition-equality")
"""Checks that look at all repetitions at once; every other one looks at each alone."""
COMMON = ("integrity", "coverage", "plan-identity", "settings", "preemptions", "eos-absent", "non-vacuity")
RELOADS = (*COMMON, "geometry", "paired-equality", "reload-equality", "boundary", "transfers")
ANALYZERS = {
    "boundary-v1": RELOADS,
    "boundary-instrumented-v1": (
        *RELOADS,
        "layout",
        "page-bytes",
        "page-coverage",
        "poison",
        "save-completion",
        "prefix-identity",
    ),
    "boundary-snapshot-v1": (
        *RELOADS,
        "layout",
        "page-bytes",
        "page-coverage",
        "save-completion",
        "prefix-identity",
    ),
    "local-hit-v1": (*COMMON, "block-size", "local-equality", "local-hits"),
}
"""The checks that decide under each analyzer, whatever the plan requires."""
REPEATED = ("repetitions", "repetition-equality")
RECORDED = ("controls", "topology", "environment", "storages", "reference")
CONDITIONAL = {
    "boundary-v1": ("controls-equal", "intervention", "services", *REPEATED, *RECORDED),
    "boundary-instrumented-v1": ("controls-equal", "intervention", "services", *REPEATED, *RECORDED),
    "boundary-snapshot-v1": ("controls-equal", "intervention", "services", *REPEATED, *RECORDED),
    "local-hit-v1": (*REPEATED, *RECORDED),
}
"""Those that decide only where their question comes up."""


class Judgement(NamedTuple):
    """What this program makes of an archive."""

    verdict: str
    why: str
    analyzer: str | None
    seal_sha256: str | None
    plan_sha256: str | None
    results: list[Result]
    required: list[str]
    not_recomputed: list[str]
    """Required checks that are not among the results."""
    not_compared: str = ""
    """What decides nothing here, and something there."""


def judge(root: str) -> Judgement:
    """Judge the archive at `root`. Damage never raises."""
    try:
        archive = Archive(root)
    except NewerFormat as error:
        refused = Result("integrity", UNKNOWN, "a newer format: nothing is judged", [(UNKNOWN, str(error))])
        return Judgement(UNKNOWN, refused.summary, None, None, None, [refused], [], [])
    plan, results, question = archive.plan, [integrity(archive)], Question(archive)
    seals = archive.seal_sha256, archive.plan_sha256
    if plan is None:
        results += [run(check, question) for check in ("coverage", "boundary")]
        return Judgement(UNKNOWN, "no plan", None, *seals, results, [], [])
    analyzer, pin = plan["analyzer"]["id"], plan["analyzer"]["source_sha256"]
    if analyzer not in ANALYZERS or plan.get("scenario") or plan.get("prompts"):
        why = f"analyzer {analyzer} is not covered" if analyzer not in ANALYZERS else "scenarios are not covered"
        required = list(dict.fromkeys(["integrity", *plan["required_checks"]]))
        return Judgement(UNKNOWN, why, analyzer, *seals, results, required, required[1:])
    floor, conditional = ANALYZERS[analyzer], CONDITIONAL[analyzer]
    views = each_alone(question)
    for check in COVERED:
        if check in floor or check in conditional:
            alone = len(views) < 2 or check in OF_THE_RUN
            results.append(run(check, question) if alone else over_all(check, views))
    verdicts = {result.check: result.verdict for result in results}
    come_up = [check for check in conditional if verdicts[check] != NOT_EXERCISED and check != "controls-equal"]
    if "controls-equal" in conditional and REFERENCE in archive.arms:
        come_up.append("controls-equal")
    required = list(dict.fromkeys([*floor, *plan["required_checks"], *come_up]))
    left = [check for check in required if check not in verdicts]
    decisive = [verdicts[check] for check in required if check in verdicts]
    if FAIL in decisive:
        verdict, why = FAIL, "positive contrary evidence"
    elif left or set(decisive) != {PASS}:
        verdict, why = UNKNOWN, "required checks were not recomputed" if left else "evidence is missing"
    else:
        verdict, why = PASS, "every required check was recomputed and passes"
    pinned = f"the analyzer source that the plan pins ({pin[:12]})" if pin else ""
    return Judgement(verdict, why, analyzer, *seals, results, required, left, pinned)


def run(check: str, question: Question) -> Result:
    try:
        return COVERED[check](question)
    except Missing as missing:
        return conclude(check, [(UNKNOWN, str(missing))], 0, "evidence is missing")
    except Exception as error:  # a broken check must not decide a run
        return conclude(check, [(UNKNOWN, f"crashed: {type(error).__name__}: {error}")], 0, "crashed")


def report(judgement: Judgement, most: int = 5) -> Iterator[str]:
    """One line a check, what it found, what is not recomputed, and the verdict."""
    for result in judgement.results:
        yield f"{result.check:<16} {result.verdict:<8} {shown(result.summary)}"
        for verdict, said in result.findings[:most]:
            yield f"  {verdict}: {shown(said)}"
        if len(result.findings) > most:
            yield f"  and {len(result.findings) - most} more"
    if judgement.not_recomputed:
        yield f"not recomputed   {shown(', '.join(judgement.not_recomputed))}"
    if judgement.not_compared:
        yield f"not compared     {judgement.not_compared}"
    yield f"verdict          {judgement.verdict}: {shown(judgement.why)}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="verify.py", description="Judge a sealed archive a second time.")
    parser.add_argument("archive", nargs="?", default=os.path.dirname(os.path.abspath(__file__)), metavar="ARCHIVE")
    parser.add_argument("--json", action="store_true", help="print the judgement as JSON")
    chosen = parser.parse_args(arguments)
    names = set(os.listdir(chosen.archive)) if os.path.isdir(chosen.archive) else set()
    if not names & {"plan.json", SEAL_NAME, "attempts.jsonl", "arms"}:
        print(f"{shown(chosen.archive)} is not an archive: name the folder that holds plan.json", file=sys.stderr)
        return 2
    judgement = judge(chosen.archive)
    code = EXIT_CODES.get(judgement.verdict, 3)
    if chosen.json:
        tree = {**judgement._asdict(), "results": [result._asdict() for result in judgement.results], "exit_code": code}
        print(json.dumps(tree, indent=2))
    else:
        text = "\n".join(report(judgement))
        print(text.encode(sys.stdout.encoding or "ascii", "backslashreplace").decode(sys.stdout.encoding or "ascii"))
    return code


if __name__ == "__main__":
    sys.exit(main())
