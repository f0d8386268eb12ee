"""Judging an archive, keeping the verdict beside it, showing it."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from samestate.checks.analyzers import ANALYZERS, Judgement, judge
from samestate.checks.base import Verdict
from samestate.cli.failures import Failure
from samestate.evidence.archive import Archive
from samestate.plans.errors import nearest
from samestate.reports.terminal import WIDTH, print_judgement

EXIT_CODES = {Verdict.PASS: 0, Verdict.FAIL: 1}
UNKNOWN = 3


def exit_code(verdict: Verdict) -> int:
    """0 pass, 1 fail, 3 for everything that is neither."""
    return EXIT_CODES.get(verdict, UNKNOWN)


def judge_archive(root: Path, analyzer: str | None) -> Judgement:
    """Judge the archive at `root` and keep the verdict in its `verdicts` folder, where that can be written."""
    if analyzer is not None and analyzer not in ANALYZERS:
        known = ", ".join(sorted(ANALYZERS))
        raise Failure(f"--analyzer: no analyzer {analyzer!r}{nearest(analyzer, ANALYZERS)}; known: {known}")
    require_archive(root, "the archive")
    judgement = judge(Archive.open(root), analyzer)
    with suppress(OSError):
        _keep(judgement, root / "verdicts")
    return judgement


def require_archive(root: Path, what: str) -> None:
    """Fail unless `root` is a folder. `what` names it in the line."""
    if not root.is_dir():
        reason = "is not a folder" if root.exists() else "does not exist"
        raise Failure(f"{what}: {root} {reason}; name the folder that `samestate run` wrote")


def print_json(judgement: Judgement, archive: Path, **more: Any) -> None:
    """The judgement as one JSON object, with the archive's path and whatever else there is to say."""
    shown = judgement.model_dump(mode="json") | {"archive": str(archive)} | more
    stdout_console().out(json.dumps(shown, indent=2, ensure_ascii=False), highlight=False)


def print_report(judgement: Judgement) -> None:
    """The judgement for people, at most `WIDTH` columns wide."""
    print_judgement(judgement, stdout_console())


def stdout_console() -> Console:
    console = _Console(highlight=False)
    if not console.is_terminal or console.width > WIDTH:
        console.width = WIDTH
    return console


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        """A reader that left early: exit code 2, for rich's own 1 would read as a failed run."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(Failure.exit_code)


def _keep(judgement: Judgement, folder: Path) -> None:
    """Write the verdict under a name of its own. One that is there already is never changed.

    ``boundary-v1.json``, and ``boundary-v1.2.json`` when a later judgement came out differently.
    """
    data = (json.dumps(judgement.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n").encode()
    folder.mkdir(exist_ok=True)
    for number in count(1):
        path = folder / (f"{judgement.analyzer}.json" if number == 1 else f"{judgement.analyzer}.{number}.json")
        try:
            with path.open("xb") as file:
                file.write(data)
            return
        except FileExistsError:
            if path.read_bytes() == data:
                return
        except OSError:
            path.unlink(missing_ok=True)
            raise
