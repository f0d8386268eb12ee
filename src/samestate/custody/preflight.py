"""What is refused before anything is touched: a swap that could not be undone, or not be proven undone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from samestate.custody.base import CustodyError, Router, Supervisor
from samestate.custody.processes import PlainProcess, api_key
from samestate.custody.smokes import require_kept, require_validator
from samestate.custody.snapshot import PROC, declared, snapshot
from samestate.custody.spec import IdentitySpec, Spec
from samestate.custody.supervisors import supervisor
from samestate.engines.openai_client import OpenAIClient
from samestate.evidence.custody_records import PRIVATE, Field

_INHERITED = ("user", "umask", "cgroup", "mount_namespace", "affinity", "nice", "oom_score_adj")
"""What a plain process has of whoever starts it."""


_OF_A_SHELL = {"PWD", "OLDPWD", "SHLVL", "_", "LC_CTYPE"}
"""What shells, and Python in the locale C, add by themselves."""


class Found(NamedTuple):
    """The incumbent as it serves now."""

    fields: list[Field]
    router: list[Field]


def examine(spec: Spec, incumbent: Supervisor, router: Router) -> Found:
    """Read everything, touch nothing. Raises `CustodyError`."""
    require_validator(spec.smokes)
    required = spec.probe.required_before if spec.probe else []
    require_kept(spec.smokes, required)
    if not incumbent.alive():
        raise CustodyError(
            "incumbent: is not running, so there is nothing to restore; start it, or resume the swap that stopped it"
        )
    if spec.candidate is not None and spec.candidate.process is not None and supervisor(spec.candidate.process).alive():
        raise CustodyError(
            "candidate.process: runs already, and no swap started it; end it, or take a stale pid_file away"
        )
    with OpenAIClient(spec.incumbent.url, seconds=10.0) as client:
        if not client.healthy():
            raise CustodyError(f"incumbent.url: {spec.incumbent.url} says that it is not ready; wait, or name another")
    if not router.admission().admitting:
        raise CustodyError(
            "router: does not admit the incumbent before the swap, so nobody could say that it came back; "
            "see its health checks"
        )
    seen = snapshot(incumbent.pid, spec.incumbent.url, spec.identity, api_key(spec.incumbent))
    found = Found([*seen, *incumbent.fields()], router.fields())
    _require_declared(spec.identity, seen)
    _require_produced(required, [*found.fields, *found.router])
    if isinstance(incumbent, PlainProcess):
        _require_inheritable(spec, found.fields)
        _require_command(spec, incumbent)
        _require_environment(spec, incumbent)
    return found


def _require_declared(spec: IdentitySpec, fields: Sequence[Field]) -> None:
    """Each field that the spec's identity asks for has a value now: missing on both sides, it would prove nothing."""
    for name in declared(spec):
        found = [one for one in fields if one.name == name or one.name.startswith(f"{name}.")]
        if not found:
            raise CustodyError(f"identity: {name} has no producer; let identity name what it is read from")
        if lacking := next((one for one in found if one.value is None), None):
            raise CustodyError(f"identity: {lacking.name} is missing, {lacking.missing}; mend that before the swap")


def _require_produced(required: Sequence[str], fields: Sequence[Field]) -> None:
    """Each artefact that the plan needs from before has a value now."""
    seen = {one.name: one for one in fields}
    for name in required:
        if name.startswith("smoke."):
            continue
        if name not in seen:
            raise CustodyError(
                f"probe.required_before: {name} has no producer, and after the swap it is too late; "
                "let identity or router.config record it"
            )
        if seen[name].value is None:
            raise CustodyError(f"probe.required_before: {name} {seen[name].missing}; mend that before the swap")


def _require_inheritable(spec: Spec, fields: Sequence[Field]) -> None:
    """The incumbent has what it would get from us when we start it again."""
    ours = {one.name: one.value for one in snapshot(os.getpid(), spec.incumbent.url, IdentitySpec(environment=[]))}
    for one in fields:
        if one.name not in _INHERITED or _may_differ(spec, one.name):
            continue
        if one.value != ours.get(one.name):
            raise CustodyError(
                f"incumbent: has {one.name} {one.value}, and started from here it would have {ours.get(one.name)}; "
                "run samestate as it was started, or keep it by systemd"
            )


def _require_command(spec: Spec, incumbent: PlainProcess) -> None:
    """The spec's command is the one that the incumbent runs; a program may stand before it, or have its place."""
    home, argv = PROC / str(incumbent.pid), spec.incumbent.argv
    words = (home / "cmdline").read_bytes().decode(errors="surrogateescape").split("\0")[:-1]
    if not _may_differ(spec, "argv") and words[len(words) - len(argv[1:]) :] != argv[1:]:
        raise CustodyError(
            "incumbent.argv: is not what the process runs with; say that there, a launcher and its own in a script"
        )
    plain = words[-len(argv) :] == argv  # anything between may have changed the folder, and will again
    if plain and not _may_differ(spec, "cwd") and Path(os.readlink(home / "cwd")) != Path(spec.incumbent.cwd).resolve():
        raise CustodyError("incumbent.cwd: is not the folder that the process runs in; say that one there")


def _may_differ(spec: Spec, name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in [*spec.policy.expected_change, *spec.policy.ignore])


def _require_environment(spec: Spec, incumbent: PlainProcess) -> None:
    """The spec's environment is the one that the incumbent runs with; only names are told."""
    if _may_differ(spec, "environment"):
        return
    words = (PROC / str(incumbent.pid) / "environ").read_bytes().decode(errors="surrogateescape").split("\0")
    has = dict(word.split("=", 1) for word in words if "=" in word)
    given = incumbent.environment()
    # A shell that executed another program added its own, and will again.
    names = (has.keys() - _OF_A_SHELL) | given.keys()
    if differing := sorted(name for name in names if has.get(name) != given.get(name)):
        raise CustodyError(
            f"incumbent.environment: is not what the process runs with, in {', '.join(differing[:8])}; "
            "say there, or in environment_file, all that it was started with"
        )


def free_folder(folder: Path) -> None:
    """Raise `CustodyError` where records already lie, or cannot."""
    # A tool that died before its journal left its own folder alone.
    if folder.exists() and (not folder.is_dir() or any(one.name != PRIVATE for one in folder.iterdir())):
        raise CustodyError(f"records: {folder} is not empty; resume that swap with --resume, or name another folder")
