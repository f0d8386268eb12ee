"""Which source runs: a hash of the installed package always, and the commit where that can be known."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import as_file, files
from pathlib import Path

from samestate.evidence.canonical import sha256_hex

GIT_SECONDS = 10.0


@cache
def source_sha256() -> str:
    """SHA-256 of the sorted ``<sha256>  <path>`` lines over every file of the package; of what compiles, the source."""
    with as_file(files("samestate")) as root:
        shipped = [path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        lines = [f"{sha256_hex(path.read_bytes())}  {path.relative_to(root).as_posix()}\n" for path in shipped]
    return sha256_hex("".join(sorted(lines)).encode())


@cache
def source_commit() -> str | None:
    """The commit that the package was installed from or is checked out at; ``+changes`` after it where it was edited.

    None: neither pip nor git tells.
    """
    return _installed() or _checked_out()


def _installed() -> str | None:
    """What pip wrote down of an install from version control (PEP 610)."""
    try:
        origin = json.loads(distribution("samestate").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return None
    commit = origin.get("vcs_info", {}).get("commit_id")
    return commit if isinstance(commit, str) else None


def _checked_out() -> str | None:
    with as_file(files("samestate")) as package:
        commit, tracked = _git(package, "rev-parse", "HEAD"), _git(package, "ls-files", "__init__.py")
        changes = _git(package, "status", "--porcelain", "--", ".")
    if not commit or not tracked or changes is None:  # untracked: a copy that lies in somebody else's repository
        return None
    return f"{commit}+changes" if changes else commit


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", folder, *words], capture_output=True, text=True, timeout=GIT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
