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
from collections.abc import Callable, Iterator, Sequence
from itertools import dropwhile
from typing import Any, NamedTuple

FORMAT = 1
PASS, FAIL, UNKNOWN, NOT_EXERCISED = "pass", "fail", "unknown", "not_exercised"
EXIT_CODES = {PASS: 0, FAIL: 1}
CONTROL, CANDIDATE, REFERENCE = "control", "candidate", "reference-control"
PREEMPTIONS = "vllm:num_preemptions"
LOCAL_HITS = "vllm:prefix_cache_hits"
EXTERNAL_HITS = "vllm:external_prefix_cache_hits"

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
    "patched_function": "module:text qualname:text source_sha256:hash",
    "arm_plan": "name:slug connector:none|native|dictionary|lmcache release=:text? options=:scalar{} repair=:slug? "
    "follows=:slug? service=:kept|restarted",
    "engine_plan": "model:text settings:scalar{} external_cache_bytes:integer serve_args=:text[] "
    "core=:here|own-process",
    "instrument_plan": "audit_level:metadata|digest|poison save_delay_ms:integer",
    "expected_layout": "transfer_groups:count entries:count",
    "analyzer_pin": "id:slug source_sha256:hash?",
    "prompt_plan": "name:slug tokens:text shares=:slug? shared=:text?",
    "step_plan": "prompts=:slug[] reset=:bool salt=:text? output_tokens=:count? "
    "path=:any|cold|local|external|mixed arm=:slug",
    "series_plan": "name:slug template:slug lengths:text[] output_tokens:count",
    "input": "case:text role:text tokens:int sha256:hash",
    "model": "name:text files:hash{} sha256:hash",
}
PLAN = (
    "format:one name:slug title:text question:text engine:@engine_plan arms:@arm_plan[] lengths=:text[] "
    "operations=:cold|interposer|reset|reload|repeat|prompt[] series=:@series_plan[] prompts=:@prompt_plan[] "
    "scenario=:@step_plan[] "
    "template:slug output_tokens:count seed:int temperature:zero ignore_eos:bool analyzer:@analyzer_pin "
    "required_checks:slug[] differing_settings:text[] scope:text not_shown:text[] instruments=:@instrument_plan "
    "expected_layout=:@expected_layout? allowed_attempts=:count? control_from=:slug?"
)
RESOLVED = (
    "format:one plan_sha256:hash checkpoint_interval:int lengths:int[] model:@model inputs:@input[] operations:text[]"
)
SEAL = (
    "format:int sha256sums_sha256:hash files:integer plan_sha256:hash wall_time:text samestate_version:text "
    "self_sha256:hash"
)
LINE = "n:integer prev:hash t_ns:integer rec:@record"
KINDS = {
    "stream_opened": "format:int arm:text process:text pid:integer wall_time:text",
    "stream_closed": "dropped:integer",
    "attempt_started": "attempt:count plan_sha256:hash samestate_version:text fault:text? arms:text[] "
    "control_seal_sha256:hash? reference_seal_sha256:hash? options:scalar{}",
    "contact_reached": "level:none|host|gpu|model|request",
    "attempt_ended": "outcome:completed|failed|interrupted|excluded reason:text?",
    "engine_started": "engine:vllm|sim versions:text{} checkpoint_interval:count max_model_len:count "
    "tensor_parallel:count pipeline_parallel:count data_parallel:count decode_context_parallel:count connector:text? "
    "audit_level:text? settings:scalar{} eos_token_ids:integer[]",
    "rank_registered": "rank:integer world_size:count num_blocks:count engine_groups:@engine_group[] "
    "transfer_groups:@transfer_group[] entries:@entry[] digest:text",
    "engine_stopped": "",
    "service_started": "service:text version:text options:scalar{} continues:bool",
    "service_stopped": "service:text alive:bool kept:bool leftovers:integer",
    "intervention_applied": "name:text functions:@patched_function[]",
    "plan_resolved": "resolved_sha256:hash",
    "operation_started": "op:text case:text name:cold|interposer|reset|reload|repeat|prompt "
    "prompt_tokens:integer prompt_sha256:hash? salt:text together:text?",
    "operation_output": "op:text request:text token_ids:integer[] logprobs:number[]? finish_reason:text? "
    "cached_tokens:integer?",
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
    "fault_armed": "fault:text parameters:scalar{}",
}

HASH = re.compile(r"[0-9a-f]{64}")
SLUG = re.compile(r"[a-z0-9][a-z0-9.-]*")
Fits = Callable[[Any], bool]
ATOMS: dict[str, Fits] = {
    "int": lambda value: type(value) is int,
    "integer": lambda value: type(value) is int and value >= 0,
    "count": lambda value: type(value) is int and value >= 1,
    "one": lambda value: type(value) is int and value == 1,
    "zero": lambda value: type(value) is int and value == 0,
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
    return lambda value: (
        type(value) is dict
        and needed <= value.keys() <= fields.keys()
        and all(fields[name](one) for name, one in value.items())
    )


IS_LINE, IS_SEAL, IS_PLAN, IS_RESOLVED = table(LINE), table(SEAL), table(PLAN), table(RESOLVED)


def parse(data: bytes) -> Any:
    """One JSON value, strictly. Raises ValueError (RecursionError for absurd depth)."""
    text = data.decode("utf-8")
    value = json.loads(text, parse_constant=no_number, parse_float=finite)
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # refuses half a surrogate pair
    return value


def no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")


def finite(text: str) -> float:
    number = float(text)
    return number if abs(number) < float("inf") else no_number(text)


def canonical(value: Any) -> bytes:
    """RFC 8785 for objects and lists of texts and integers. No float stands in what is hashed here, so none has a form."""
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
MOST = 20
"""Defects told of one stream."""
OLDER: tuple[str, ...] = ()
"""SHA-256 of the copies of this file that earlier releases shipped."""


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
        self.submitted = self.unpaired = self.failed = 0
        """Of saves."""

    KEPT = (
        "engine_started",
        "engine_stopped",
        "operation_started",
        "scheduler_configured",
        "plan_resolved",
        "service_started",
        "service_stopped",
        "intervention_applied",
    )
    BY_OP = ("operation_output", "operation_ended", "cache_reset", "counters_read")

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

    def __init__(self, rec: dict[str, Any]) -> None:
        self.rec = rec
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
        self.damaged = {where.split("/")[1] for where, _ in self.defects if where.startswith("arms/")}

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
                self.defect(f"{where}:{number}", "not a line that may stand in the list")
                continue
            if name <= last:
                self.defect(f"{where}:{number}", "listed twice or out of order")
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
                    where, body = f"{name}:{n}", raw.rstrip(b"\n")
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
            tell(f"{name}:{n}", f"incomplete: {last['dropped']} records could not be written")

    def attempt(self, name: str) -> None:
        for seen in self.lines(name):
            kind, attempt = seen.rec["kind"], self.attempts[-1] if self.attempts else None
            if kind == "stream_opened":
                if (seen.rec["arm"], seen.rec["process"]) != ("-", "attempts"):
                    self.defect(f"{name}:{seen.n}", "is another stream, under this name")
            elif kind == "attempt_started":
                self.attempts.append(Attempt(seen.rec))
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
                        self.defect(f"{stream}:{seen.n}", "is another stream, under this name")
                try:
                    arm.take(seen)
                except OverflowError:
                    self.defect(f"{stream}:{seen.n}", "holds numbers that no run can have")
        if imported:
            self.imported(arm, place, origins)
        return arm

    def imported(self, arm: Arm, place: str, origins: set[str]) -> None:
        """Rule 9."""
        seal_data = self.read(place + SOURCES[0])
        arm.source = sha256(seal_data) if seal_data is not None else None
        was, seal = self.pair(place, SOURCES[0], SOURCES[1])
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
            plan = self.plan
            self.known = self.matrix("", plan.get("lengths", ()), plan["output_tokens"])
            for series in plan.get("series", ()):
                self.known += self.matrix(f"{series['name']}-", series["lengths"], series["output_tokens"])
            for one in self.known:
                self.by_id.setdefault(one.op, one)
        return self.known

    def operation(self, op: str) -> Operation:
        """A planned operation; KeyError for any other."""
        return self.by_id[op] if self.operations else self.by_id[op]

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
        lines = [seen.n, *(one.n for one in given), *(one.n for one in ends)]
        following = started[place + 1].n if place + 1 < len(started) else seen.n
        if times[op] == 1 and (lines != sorted(lines) or seen.n < following < lines[-1]):
            yield FAIL, f"{op} did not start, answer and end by itself"
    by_request: dict[str, set[str]] = defaultdict(set)
    for (kind, op), records in arm.by_op.items():
        if kind == "counters_read" or not records:
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
    pairs = [(control, one.op, candidate, one.op) for one in question.generations()]
    return compared("paired-equality", question, pairs)


def reload_equality(question: Question) -> Result:
    """Reload against cold within the candidate. A control that does not repeat itself makes it unknown."""
    cold = {one.case: one.op for one in question.generations("cold")}
    reloads = question.generations("reload")
    pairs = {
        name: [(question.arm(name), cold[one.case], question.arm(name), one.op) for one in reloads]
        for name in (CANDIDATE, CONTROL)
    }
    own = [one for pair in pairs[CONTROL] for one in unequal(question, *pair, UNKNOWN)]
    return compared("reload-equality", question, pairs[CANDIDATE], own)


def controls_equal(question: Question) -> Result:
    if REFERENCE not in question.arms:
        return conclude("controls-equal", [(NOT_EXERCISED, "no reference control in this archive")], 0, "")
    control, reference = question.arm(CONTROL), question.arm(REFERENCE)
    if control.source is not None and control.source == reference.source:
        return conclude("controls-equal", [(NOT_EXERCISED, "both are copies of one arm")], 0, "")
    pairs = [(reference, one.op, control, one.op) for one in question.generations()]
    return compared("controls-equal", question, pairs)


def compared(check: str, question: Question, pairs: list[Pair], more: Sequence[Finding] = ()) -> Result:
    findings: list[Finding] = []
    equal = 0
    for pair in pairs:
        found = list(unequal(question, *pair, FAIL))
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
    stray = question.archive.whole(right.name) and subject and subject[0].start % question.c != 0
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
    absent = absent_rank(arm)
    if absent is not None:
        findings.append((UNKNOWN, f"rank {absent} never registered its cache"))
    reloads = question.generations("reload")
    for one in reloads:
        findings += [(verdict, f"{one.op}: {said}") for verdict, said in restored(question, arm, one)]
    return conclude("boundary", findings, len(reloads), f"{len(reloads)} reloads on {len(arm.ranks)} ranks")


def absent_rank(arm: Arm) -> int | None:
    """The first rank that should have registered and did not."""
    sizes = [arm.engine["tensor_parallel"] * arm.engine["pipeline_parallel"]]
    sizes += [registered["world_size"] for registered in arm.ranks.values()]
    return next((rank for rank in range(max(sizes)) if rank not in arm.ranks), None)


def farthest(loads: list[Load]) -> int | None:
    """B of one rank; None: not reported by one of its loads."""
    said = [load.rec["boundary"] for load in loads]
    return None if None in said else max(said)


def restored(question: Question, arm: Arm, one: Operation) -> Iterator[Finding]:
    output, whole = arm.output(one.op), question.archive.whole(CANDIDATE)
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
    yield from credited(one.tokens, question.c, rows, distinct, whole)


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


def credited(n: int, c: int, rows: Rows, distinct: set[int], whole: bool) -> Iterator[Finding]:
    """B, p and the scheduled tokens against the strict prefix.

    A load or step that is not recorded can only make B seem too small and p too large: these fail in a whole record
    alone.
    """
    if n < 1 or c < 1:
        raise Missing(f"no boundary for N={n} and C={c}")
    expected, p, short = c * ((n - 1) // c), rows[0].start, (FAIL if whole else UNKNOWN)
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


# --- the verdict ----------------------------------------------------------------------------------

COVERED: dict[str, Callable[[Question], Result]] = {
    "coverage": coverage,
    "geometry": geometry,
    "paired-equality": paired_equality,
    "reload-equality": reload_equality,
    "local-equality": local_equality,
    "boundary": boundary,
    "controls-equal": controls_equal,
}
"""Besides integrity."""
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
    "local-hit-v1": (*COMMON, "block-size", "local-equality", "local-hits"),
}
"""The checks that decide under each analyzer, whatever the plan requires."""
CONDITIONAL = {
    "boundary-v1": ("controls-equal", "intervention", "services"),
    "boundary-instrumented-v1": ("controls-equal", "intervention", "services"),
    "local-hit-v1": (),
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
    not_recomputed: list[str]


def judge(root: str) -> Judgement:
    """Judge the archive at `root`. Damage never raises."""
    try:
        archive = Archive(root)
    except NewerFormat as error:
        refused = Result("integrity", UNKNOWN, "a newer format: nothing is judged", [(UNKNOWN, str(error))])
        return Judgement(UNKNOWN, refused.summary, None, None, None, [refused], [])
    plan, results, question = archive.plan, [integrity(archive)], Question(archive)
    if plan is None:
        results += [run(check, question) for check in ("coverage", "boundary")]
        return Judgement(UNKNOWN, "no plan", None, archive.seal_sha256, archive.plan_sha256, results, [])
    analyzer = plan["analyzer"]["id"]
    decide, where = ANALYZERS.get(analyzer, ("integrity",)), CONDITIONAL.get(analyzer, ())
    required = [*decide, *where, *plan["required_checks"]]
    beyond = [check for check in plan["required_checks"] if check not in decide and check not in where]
    uncovered = f"required and unknown here: {', '.join(beyond)}" if beyond else ""
    if analyzer not in ANALYZERS:
        uncovered = f"analyzer {analyzer} is not covered"
    elif plan.get("scenario") or plan.get("prompts"):
        uncovered = "scenarios are not covered"
    else:
        due = [check for check in COVERED if check in decide or (check in where and REFERENCE in archive.arms)]
        results += [run(check, question) for check in due]
    left = [check for check in dict.fromkeys(required) if check not in COVERED and check != "integrity"]
    verdicts = [result.verdict for result in results]
    if FAIL in verdicts:
        verdict, why = FAIL, "positive contrary evidence"
    elif uncovered or verdicts != [PASS] * len(verdicts):
        verdict, why = UNKNOWN, uncovered or "evidence is missing"
    else:
        verdict, why = PASS, "of what is recomputed here"
    return Judgement(verdict, why, analyzer, archive.seal_sha256, archive.plan_sha256, results, left)


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
        yield f"not recomputed   {', '.join(judgement.not_recomputed)}"
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
