"""Judging an archive, keeping the verdict beside it, showing it."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import IO, Any, NoReturn, cast

import click
from rich.console import Console

from samestate.checks.analyzers import ANALYZERS, BOUNDARY_V1, AnalyzerError, Judgement, judge
from samestate.checks.base import Verdict
from samestate.checks.claims import bases
from samestate.checks.known import Running, accept, read_known
from samestate.checks.remarks import with_amendments, with_signatures
from samestate.checks.written import WrittenError
from samestate.cli.failures import Failure
from samestate.evidence.amendments import read_amendments
from samestate.evidence.archive import Archive
from samestate.evidence.outside import keep_verdict
from samestate.evidence.records import AttemptStarted, EngineStarted
from samestate.evidence.signature import read_signatures, trusted_key
from samestate.plans.errors import PlanError, nearest, parse_model
from samestate.plans.model import Plan
from samestate.reports.terminal import WIDTH, print_judgement

_ACCEPTED = files("samestate.checks").joinpath("accepted")
_HEAD = 16
"""Records of a stream among which its engine's start is."""
_PADDING = re.compile(r" +(?=\n)")
EXIT_CODES = {Verdict.PASS: 0, Verdict.FAIL: 1}
UNKNOWN = 3


def exit_code(verdict: Verdict) -> int:
    """0 pass, 1 fail, 3 for everything that is neither."""
    return EXIT_CODES.get(verdict, UNKNOWN)


def judge_archive(
    root: Path, analyzer: str | None, *, known: Path | None = None, trust: Sequence[Path] = ()
) -> Judgement:
    """Judge the archive at `root` and keep the analyzer's verdict in its `verdicts` folder, where that can be written.

    What is returned is that judgement under the accepted findings in the file `known`, amendments and, with the public
    keys in the files `trust`, signatures. The files are read first.
    """
    trusted = [trusted_key(path) for path in trust]
    try:
        entries = read_known(known) if known is not None else []
    except WrittenError as error:
        raise Failure(f"--known: {error}") from None
    if analyzer is not None and analyzer not in ANALYZERS:
        names = ", ".join(sorted(ANALYZERS))
        raise Failure(f"--analyzer: no analyzer {analyzer!r}{nearest(analyzer, ANALYZERS)}; known: {names}")
    require_archive(root, "the archive")
    judgement = _judge(Archive.open(root), analyzer)
    data = json.dumps(judgement.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"
    with suppress(OSError):
        keep_verdict(root, judgement.analyzer, data.encode())
    if entries:
        judgement = accept(judgement, entries, datetime.now(UTC).date(), _running(Archive.open(root)))
    amendments = read_amendments(root, judgement.seal_sha256)
    judgement = with_amendments(judgement, amendments)
    if trusted:
        signatures = read_signatures(root, judgement.seal_sha256, trusted)
        judgement = with_signatures(judgement, signatures, amendments)
    return judgement


def _running(archive: Archive) -> Running:
    """Plan, engines, versions and fault, as far as these can be read."""
    versions: dict[str, dict[str, str]] = {}
    engines: dict[str, str] = {}
    for arm in archive.arms:
        for process in archive.streams(arm):
            for line in islice(archive.records(arm, process), _HEAD):
                if isinstance(line.rec, EngineStarted):
                    versions[arm], engines[arm] = dict(line.rec.versions), line.rec.engine
    started = [line.rec for line in archive.attempts() if isinstance(line.rec, AttemptStarted)]
    fault = next((rec.fault for rec in started if rec.fault is not None), None)
    try:
        plan = parse_model(Plan, (archive.plan_json or b"").decode())
    except (PlanError, UnicodeDecodeError):
        return Running(versions, engines, fault=fault)
    return Running(versions, engines, plan.name, tuple(plan.markers.repairs) if plan.markers else None, fault)


def known_file(name: str) -> Path:
    """The file of accepted findings that is meant: one that lies there, else a shipped one. Raises `Failure`."""
    if not name.strip():
        raise Failure("--known: is empty; name a file, or leave the option out")
    path = Path(name)
    shipped = {file.name.removesuffix(".yaml"): file for file in _ACCEPTED.iterdir() if file.name.endswith(".yaml")}
    if not path.exists() and name in shipped:
        path = Path(str(shipped[name]))
    try:
        read_known(path)
    except WrittenError as error:
        near = nearest(name, shipped)
        raise Failure(f"--known: {error}{near}" if near and not path.exists() else f"--known: {error}") from None
    return path


def _judge(archive: Archive, analyzer: str | None) -> Judgement:
    """A damaged archive may name any analyzer: what this version can say of it then is unknown at best."""
    try:
        return judge(archive, analyzer)
    except AnalyzerError as error:
        if not archive.defects:
            raise
        judgement = judge(archive, BOUNDARY_V1)
        word = f"Judged by {BOUNDARY_V1}, so the verdict is unknown at best: {error}."
        return judgement.model_copy(update={"verdict": Verdict.UNKNOWN, "limitations": [word, *judgement.limitations]})


def require_archive(root: Path, what: str) -> None:
    """Fail unless `root` is a folder. `what` names it in the line."""
    if not root.is_dir():
        reason = "is not a folder" if root.exists() else "does not exist"
        raise Failure(f"{what}: {root} {reason}; name the folder that `samestate run` wrote")


def print_json(judgement: Judgement, archive: Path, **more: Any) -> None:
    """The judgement as one JSON object, with what each result rests on, the archive's path and whatever else."""
    # A path may hold bytes that are no UTF-8; JSON may not.
    path = os.fsencode(archive).decode(errors="backslashreplace")
    rests_on = {"bases": [basis._asdict() for basis in bases(judgement)]}
    click.echo(json.dumps(judgement.model_dump(mode="json") | rests_on | {"archive": path} | more, indent=2))


def print_report(judgement: Judgement) -> None:
    """The judgement for people, at most `WIDTH` columns wide."""
    print_judgement(judgement, stdout_console())


def stdout_console() -> Console:
    """At most `WIDTH` columns; into a file or a pipe no line ends with spaces."""
    console = _Console(highlight=False)
    if not console.is_terminal or console.width > WIDTH:
        console.width = WIDTH
    if not console.is_terminal:
        console.file = cast(IO[str], _Unpadded(console.file))
    return console


class _Unpadded:
    """A text file that drops the spaces which a table pads its last column with."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        """Write whole lines, as a console does."""
        return self._file.write(_PADDING.sub("", text))


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        """A reader that left early is a failure of the command; to rich it is exit code 1, a failed run."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
