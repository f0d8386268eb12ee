"""One run, wherever it happens: ``samestate run`` as a child process, its archive where all can read it.

Nothing of samestate is imported, and little else: a task travels by value to nodes of which nobody knows yet what is
installed there. A bucket needs fsspec on the node.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_VERSION = "import samestate; print(samestate.__version__)"
_LEASHED = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: no engine outlives a task that was killed
if os.getppid() != int(sys.argv[1]):
    sys.exit("the task is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""
COULD_NOT_RUN = 2


def on_ray(arguments: list[str], files: dict[str, str], archive: str, version: str) -> dict[str, str | None]:
    """`perform`, as a Ray task: its node is Ray's."""
    import ray

    return perform(arguments, files, archive, version, str(ray.get_runtime_context().get_node_id()))


def perform(
    arguments: list[str], files: dict[str, str], archive: str, version: str, node: str | None = None
) -> dict[str, str | None]:
    """Run ``samestate run`` with `arguments`, and leave the archive at `archive`, a path or an fsspec URL.

    `files`: text by name; an argument of that name becomes the path of such a file here. `version`: of samestate, which
    this node must have too. Returns `outcome`, `reason` and `node`: ``sealed``; ``excluded``: it never ran;
    ``unknown``: it began and did not end.
    """
    host = platform.node()
    where = f"{host} ({node[:12]})" if node else host

    def told(outcome: str, reason: str | None = None) -> dict[str, str | None]:
        return {"outcome": outcome, "reason": reason and f"node {where}: {reason}", "node": where}

    found = subprocess.run([sys.executable, "-c", _VERSION], capture_output=True, text=True, check=False)
    if found.returncode:
        last = (found.stderr.strip().splitlines() or ["it says nothing"])[-1]
        return told("excluded", f"{sys.executable} has no samestate ({last}); install samestate {version} there")
    if (other := found.stdout.strip()) != version:
        return told("excluded", f"has samestate {other}, and {version} asks; install one version on all nodes")
    with tempfile.TemporaryDirectory(prefix="samestate-run-") as scratch:
        for name, text in files.items():
            Path(scratch, name).write_text(text, encoding="utf-8")
        words = [str(Path(scratch, word)) if word in files else word for word in arguments]
        remote = "://" in archive
        out = Path(scratch, "archive") if remote else Path(archive)
        outcome, reason = _run(words, out)
        if remote and out.is_dir():
            reason = reason and reason.replace(str(out), archive)
            try:
                _store(out, archive)  # what was begun and has no seal, too: it says how far it came
            except Exception as error:  # a driver raises whatever it likes
                text = " ".join(str(error).split())
                lost = f"the archive could not be stored at {archive}: {type(error).__name__}: {text}"
                return told("unknown", lost) if outcome == "sealed" else told(outcome, f"{reason}; {lost}")
        return told(outcome, reason)


def _run(arguments: list[str], out: Path) -> tuple[str, str | None]:
    command = [sys.executable, "-m", "samestate", "run", *arguments, "--json", "--out", str(out)]
    leashed = [sys.executable, "-c", _LEASHED, str(os.getpid()), *command]
    with subprocess.Popen(leashed, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            stdout, stderr = child.communicate()
        except BaseException:
            child.terminate()
            raise
    if (out / "seal.json").is_file() and child.returncode != COULD_NOT_RUN:
        return "sealed", None
    last = (stderr.strip().splitlines() or [""])[-1]
    if child.returncode == COULD_NOT_RUN:
        return "excluded", _error_in(stdout) or last or "could not run"
    how = f"by signal {-child.returncode}" if child.returncode < 0 else f"with exit code {child.returncode}"
    return "unknown", f"`samestate run` ended {how} and left no sealed archive{last and f' ({last})'}"


def _error_in(stdout: str) -> str | None:
    try:
        return str(json.loads(stdout)["error"])
    except (ValueError, KeyError, TypeError):
        return None


def _store(folder: Path, url: str) -> None:
    """Put an archive there, its seal last: without it an archive counts as incomplete."""
    import fsspec

    where: tuple[Any, str] = fsspec.core.url_to_fs(url)
    files, root = where
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    for name in sorted(names, key=lambda one: (one == "seal.json", one)):
        target = f"{root}/{name}"
        files.makedirs(target.rpartition("/")[0], exist_ok=True)
        files.put_file(str(folder / name), target)
