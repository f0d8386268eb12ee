"""Runs a command whose engine records its autotuned kernels, is held to a profile, or has one kernel let go.

The command is the user's: whatever starts an engine in this environment. Its processes find samestate through vLLM's
plug-ins and the environment variables of `samestate.evidence.controls`, and leave a report each.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from samestate.evidence.controls import OTHER_VARIABLE, PROFILE_VARIABLE, RECORD_VARIABLE, RELEASE_VARIABLE
from samestate.evidence.record_base import Scalar
from samestate.evidence.records import KernelsSelected
from samestate.evidence.tuner_profile import TunerProfile, read, shown
from samestate.evidence.tuner_report import TunerReport, read_reports
from samestate.lab.errors import RunError

_VARIABLES = (PROFILE_VARIABLE, RECORD_VARIABLE, RELEASE_VARIABLE, OTHER_VARIABLE)
Say = Callable[[str], None]
_OF_NOTHING = hashlib.sha256(b"").hexdigest()


class Ran(NamedTuple):
    """A command that is over."""

    code: int
    output_sha256: str
    """Of what it wrote to standard output, or of the file that was named."""
    reports: list[TunerReport]
    """Of its processes that ran autotuned kernels, the first one first."""

    @property
    def selected(self) -> list[KernelsSelected]:
        """What each of them ran with."""
        return [one.selected for one in self.reports]

    @property
    def violations(self) -> list[str]:
        """Where a call was not what the profile says."""
        return [f"rank {one.rank}: {line}" for one in self.selected for line in one.violations]

    @property
    def benchmarks(self) -> int:
        """Times that a tuner measured a configuration."""
        return sum(one.benchmarks for one in self.selected)


class Ablated(NamedTuple):
    """A run with one kernel let go, or held to another configuration."""

    kernel: str
    chose_otherwise: bool
    """It ran with another configuration than the recorded one, for a key at least."""
    chosen: list[dict[str, Scalar]]
    """What it ran with, without repetition."""
    bits_changed: bool | None
    """None: it ran with no other configuration than the recorded one, so nothing is shown of it."""


class Ablation(NamedTuple):
    """What each kernel's choice does to the output of a command."""

    repeats: bool
    """The first run and the last, both held to the whole profile, and every run in which nothing else was chosen, gave
    the same output: only then does a change mean anything."""
    pinned_sha256: str
    rows: list[Ablated]

    @property
    def complete(self) -> bool:
        """Whether every row shows something."""
        return self.repeats and all(row.bits_changed is not None for row in self.rows)


def run_watched(
    command: Sequence[str], variables: Mapping[str, str], output: Path | None = None, *, show: bool = True
) -> Ran:
    """Run a command and collect what its processes report. Raises RunError where it cannot be started.

    Its standard output goes to our standard error where `show`, so that ours stays ours.
    """
    with tempfile.TemporaryDirectory(prefix="samestate-tuners-") as folder:
        kept = {name: value for name, value in os.environ.items() if name not in _VARIABLES}
        environment = kept | {RECORD_VARIABLE: folder} | dict(variables)
        before = _stamp(output)
        try:
            process = subprocess.Popen(list(command), env=environment, stdout=subprocess.PIPE)
        except OSError as error:
            raise RunError(f"{command[0]}: {error.strerror or error}; name a program that starts your engine") from None
        digest = hashlib.sha256()
        assert process.stdout is not None
        try:
            for line in process.stdout:
                digest.update(line)
                if show:
                    sys.stderr.write(line.decode(errors="replace"))
            code = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
        sha256 = digest.hexdigest() if output is None else _file_sha256(output, before)
        return Ran(code, sha256, read_reports(Path(folder)))


def broken(ran: Ran, profile: TunerProfile, sha256: str, free: str | None = None) -> list[str]:
    """Where a run was not held to a profile, one line each; `free` is the kernel that need not be.

    Every process that reports ran under this very file, measured nothing, and ran with what the file says.
    """
    found = list(ran.violations)
    for one in ran.selected:
        rank = f"rank {one.rank}"
        if one.mode != ("release" if free else "pin") or one.profile_sha256 != sha256:
            under = f"profile {one.profile_sha256[:12]}" if one.profile_sha256 else "no profile"
            found.append(f"{rank} ran under {under}, in mode {one.mode}")
        if one.benchmarks and not free:
            found.append(f"{rank} measured configurations {one.benchmarks} times")
        if str(one.rank) not in profile.ranks:
            found.append(f"{rank} is not in the profile, which has {', '.join(profile.ranks)}")
            continue
        recorded = profile.choices(one.rank)
        for choice in one.selections:
            was = recorded.get((choice.kernel, tuple(choice.key)))
            if was is None or (choice.kernel != free and was != choice.config):
                ran_with = f"ran with {shown(choice.config)}, recorded is {shown(was) if was else 'nothing'}"
                found.append(f"{rank}: {choice.kernel} ({', '.join(choice.key)}) {ran_with}")
    return found


Stamp = tuple[int, int] | None


def _stamp(path: Path | None) -> Stamp:
    """What every write to a file changes; None: it is not there."""
    try:
        found = path.stat() if path else None
    except OSError:
        return None
    return (found.st_ino, found.st_ctime_ns) if found else None


def _file_sha256(path: Path, before: Stamp) -> str:
    """Raises RunError for a file that was not written since `before`: it would speak for an earlier run."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RunError(f"--output {path}: {error.strerror or error}; the command must write it") from None
    if _stamp(path) == before:
        raise RunError(f"--output {path}: the command left it as it was; it must write it anew in every run")
    return hashlib.sha256(data).hexdigest()


def pinned(profile: Path) -> dict[str, str]:
    """The variables that hold a command to a profile. Raises ProfileError."""
    read(profile)
    return {PROFILE_VARIABLE: str(profile.resolve())}


def ablate(
    command: Sequence[str],
    path: Path,
    kernels: Sequence[str],
    output: Path | None = None,
    *,
    other: bool = False,
    say: Say = lambda _: None,
) -> Ablation:
    """Let one kernel go after another, or with `other` hold it to another of its configurations, and compare outputs.

    The whole profile is run first and last, so that what drifts in between shows. Raises RunError where a run fails,
    prints nothing or is not held to the rest of the profile, and ProfileError.
    """
    profile, sha256 = read(path)
    base = pinned(path)

    def run(what: str, switch: Mapping[str, str], free: str | None = None) -> Ran:
        say(what)
        ran = _ran(command, {**base, **switch}, output, what)
        if lines := broken(ran, profile, sha256, free):
            raise RunError(f"{what}, but {lines[0]}: nothing can be laid to one kernel")
        return ran

    first = run("held to the profile (first run)", {})
    rows, repeats = [], True
    for kernel in kernels:
        switch = {OTHER_VARIABLE if other else RELEASE_VARIABLE: kernel}
        ran = run(f"{kernel} {'replaced' if other else 'released'}", switch, kernel)
        otherwise, changed = _otherwise(ran, profile, kernel), ran.output_sha256 != first.output_sha256
        repeats = repeats and (otherwise or not changed)
        rows.append(Ablated(kernel, otherwise, _chosen(ran, kernel), changed if otherwise else None))
    last = run("held to the profile (last run)", {})
    return Ablation(repeats and first.output_sha256 == last.output_sha256, first.output_sha256, rows)


def _ran(command: Sequence[str], variables: dict[str, str], output: Path | None, what: str) -> Ran:
    ran = run_watched(command, variables, output, show=False)
    if ran.code != 0:
        said = f": {ran.violations[0]}" if ran.violations else ""
        raise RunError(f"the command ended with exit code {ran.code}, {what}{said}; run it alone to see why")
    if not ran.reports:
        why = "is samestate installed where the engine runs, and has that a GPU?"
        raise RunError(f"no process ran an autotuned kernel, {what}: {why}")
    if ran.output_sha256 == _OF_NOTHING:
        place = f"wrote nothing to {output}" if output else "printed nothing; name what it writes with --output"
        raise RunError(f"the command {place}: there is nothing to compare")
    return ran


def _chosen(ran: Ran, kernel: str) -> list[dict[str, Scalar]]:
    found: list[dict[str, Scalar]] = []
    for one in ran.selected:
        for choice in one.selections:
            if choice.kernel == kernel and choice.config not in found:
                found.append(choice.config)
    return found


def _otherwise(ran: Ran, profile: TunerProfile, kernel: str) -> bool:
    for one in ran.selected:
        recorded = profile.choices(one.rank)
        for choice in one.selections:
            if choice.kernel == kernel and recorded.get((kernel, tuple(choice.key))) != choice.config:
                return True
    return False
