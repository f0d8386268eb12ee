"""``samestate profile``: which configurations autotuned kernels run with, recorded, held and let go one by one."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from samestate.cli.failures import Failure
from samestate.cli.judging import stdout_console
from samestate.evidence.text import printable
from samestate.evidence.tuner_profile import (
    ProfileError,
    TunerProfile,
    installed,
    misfits,
    read,
    shown,
    write,
)
from samestate.evidence.tuner_report import profile_of
from samestate.lab.errors import RunError
from samestate.lab.tuning import Ablation, Ran, ablate, broken, pinned, run_watched

T = TypeVar("T")
FAIL, UNKNOWN = 1, 3
LINES = 5
"""Violations shown; --json has all."""
_COMMAND = click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
_PROFILE = click.argument("profile", type=click.Path(path_type=Path, dir_okay=False))
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group("profile")
def profile() -> None:
    """Which configurations autotuned kernels run with.

    Triton measures its configurations at every start, and another choice may give other bits. COMMAND is whatever
    starts your engine, e.g. `-- samestate run boundary`; what it prints goes to standard error.
    """


@profile.command("record")
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
@_COMMAND
@_JSON
def record_profile(out: Path, command: tuple[str, ...], as_json: bool) -> None:
    """Run COMMAND and write what its kernels chose to OUT.

    Where several engines ran, the first one's choices are kept, and those of later ones that differ are listed.
    """
    if out.exists():
        raise Failure(f"{out}: exists already; name another file, a profile is never overwritten")
    if not out.parent.is_dir():
        raise Failure(f"{out}: its folder does not exist; make it first, or name another file")
    ran = _run(command, {})
    if ran.code != 0:
        raise Failure(f"the command ended with exit code {ran.code}: nothing was recorded; run it alone to see why")
    made, otherwise = _profile(lambda: profile_of(ran.reports))
    try:
        sha256 = write(out, made)
    except OSError as error:
        raise Failure(f"{out}: {error.strerror or error}; name a file that can be written") from None
    if as_json:
        click.echo(json.dumps({"profile": str(out), "sha256": sha256, "otherwise": otherwise, **_as_json(made)}))
        return
    choices = sum(map(len, made.ranks.values()))
    click.echo(f"{out}: {choices} choices of {len(made.kernels)} kernels on {len(made.ranks)} ranks, {sha256[:12]}")
    for line in otherwise:
        click.echo(f"  chose otherwise: {printable(line)}")


@profile.command("show")
@_PROFILE
@_JSON
def show_profile(profile: Path, as_json: bool) -> None:
    """Print a profile: rank, kernel, key, configuration."""
    made, sha256 = _profile(lambda: read(profile))
    if as_json:
        click.echo(json.dumps({"sha256": sha256, **_as_json(made)}, indent=2))
        return
    versions = ", ".join(f"{name} {version}" for name, version in sorted(made.versions.items()))
    click.echo(printable(f"profile {sha256[:12]}, made on {made.device} with {versions}"))
    table = Table("rank", "kernel", "key", "configuration", box=None, pad_edge=False)
    for rank, choices in made.ranks.items():
        for one in choices:
            cells = (rank, one.kernel, ", ".join(one.key), shown(one.config))
            table.add_row(*(Text(printable(cell)) for cell in cells))
    stdout_console().print(table)


@profile.command("verify")
@_PROFILE
@_JSON
@click.pass_context
def verify_profile(ctx: click.Context, profile: Path, as_json: bool) -> None:
    """Say whether a profile is whole and made for this machine and these versions.

    Exit codes: 0 it is, 1 it was made elsewhere, 2 it is no profile.
    """
    made, sha256 = _profile(lambda: read(profile))
    found = misfits(made, _device(), installed())
    if as_json:
        click.echo(json.dumps({"sha256": sha256, "misfits": found}))
    else:
        click.echo(
            printable(f"profile {sha256[:12]}: {'; '.join(found) or 'made for this machine and these versions'}")
        )
    ctx.exit(FAIL if found else 0)


@profile.command("pin")
@_PROFILE
@_COMMAND
@_JSON
@click.pass_context
def pin_profile(ctx: click.Context, profile: Path, command: tuple[str, ...], as_json: bool) -> None:
    """Run COMMAND with its kernels held to PROFILE, and say whether they were.

    An unrecorded kernel or key is rejected before its launch.

    Exit codes: 0 every kernel ran as recorded and none was measured, 1 one was not, 2 the command failed, 3 no
    autotuned kernel ran.
    """
    made, sha256 = _profile(lambda: read(profile))
    ran = _run(command, _profile(lambda: pinned(profile)))
    missing = sorted(set(made.ranks) - {str(one.rank) for one in ran.selected})
    lines = broken(ran, made, sha256)
    code = FAIL if lines else UNKNOWN if missing else 0
    if code != FAIL and ran.code != 0:
        elsewhere = "; ".join(misfits(made, _device(), installed()))
        why = f"; the profile was made elsewhere ({elsewhere})" if elsewhere else ""
        raise Failure(
            f"the command ended with exit code {ran.code}, and broke nothing of the profile{why}; run it alone"
        )
    if as_json:
        said = [msgspec.to_builtins(one) for one in ran.selected]
        report = {"sha256": sha256, "exit_code": code, "command_exit_code": ran.code, "broken": lines, "selected": said}
        click.echo(json.dumps(report | {"missing_ranks": missing, "output_sha256": ran.output_sha256}))
    else:
        chosen = {(one.rank, it.kernel, tuple(it.key)) for one in ran.selected for it in one.selections}
        words = {0: "held", FAIL: "broken", UNKNOWN: "not exercised"}[code]
        recorded = sum(map(len, made.ranks.values()))
        counts = f"{len(chosen)} of {recorded} recorded choices ran, {ran.benchmarks} measurements"
        click.echo(f"profile {sha256[:12]} {words}: {counts}")
        for line in [*lines, *(f"rank {rank} ran no autotuned kernel" for rank in missing)][:LINES]:
            click.echo(f"  {printable(line)}")
    ctx.exit(code)


@profile.command("ablate")
@_PROFILE
@_COMMAND
@click.option(
    "--kernel", "kernels", multiple=True, help="Only this one; repeatable. Default: every one of the profile."
)
@click.option(
    "--other", is_flag=True, help="Hold the kernel to another of its configurations instead of letting it go."
)
@click.option(
    "--output", type=click.Path(path_type=Path), help="Compare this file that COMMAND writes, not what it prints."
)
@_JSON
@click.pass_context
def ablate_profile(
    ctx: click.Context,
    profile: Path,
    command: tuple[str, ...],
    kernels: tuple[str, ...],
    other: bool,
    output: Path | None,
    as_json: bool,
) -> None:
    """Let one kernel of PROFILE go after another, and say whether what COMMAND prints changes.

    COMMAND runs under the whole profile, once a kernel, and under the whole profile again. It must print what depends
    on its state alone: a hash, token ids, no times.

    Exit codes: 0 the table is complete, 2 a run failed or broke the rest of the profile, 3 the command does not repeat
    itself even under the whole profile, or a kernel chose nothing else: with --other it does.
    """
    made, sha256 = _profile(lambda: read(profile))
    unknown = sorted(set(kernels) - set(made.kernels))
    if unknown:
        raise Failure(f"--kernel {unknown[0]}: not in the profile; it has: {', '.join(made.kernels)}")
    chosen = list(kernels) or made.kernels
    console = Console(stderr=True)
    with console.status("") as status:
        found = _running(lambda: ablate(command, profile, chosen, output, other=other, say=status.update))
    if as_json:
        tree = {**found._asdict(), "rows": [row._asdict() for row in found.rows], "sha256": sha256, "other": other}
        click.echo(json.dumps(tree, indent=2))
    else:
        _print_ablation(found)
    ctx.exit(0 if found.complete else UNKNOWN)


def _print_ablation(found: Ablation) -> None:
    table = Table("kernel", "ran with", "other choice", "bits", box=None, pad_edge=False)
    for row in found.rows:
        ran = "; ".join(map(shown, row.chosen)) or "did not run"
        bits = {True: "changed", False: "the same", None: "not shown"}[row.bits_changed]
        words = ("yes" if row.chose_otherwise else "no", bits)
        table.add_row(*(Text(printable(cell)) for cell in (row.kernel, ran, *words)))
    stdout_console().print(table)
    if not found.repeats:
        click.echo("unknown: two runs with the same choices gave two outputs, so a change says nothing about a kernel")
    elif not found.complete:
        click.echo("unknown: where nothing else was chosen nothing is shown; hold the kernel to another with --other")


def _run(command: tuple[str, ...], variables: dict[str, str]) -> Ran:
    return _running(lambda: run_watched(command, variables))


def _running(step: Callable[[], T]) -> T:
    try:
        return step()
    except (RunError, ProfileError) as error:
        raise Failure(str(error)) from None


def _profile(step: Callable[[], T]) -> T:
    try:
        return step()
    except ProfileError as error:
        raise Failure(str(error)) from None


def _as_json(made: TunerProfile) -> dict[str, Any]:
    tree: dict[str, Any] = msgspec.to_builtins(made)
    return tree


def _device() -> str:
    """The first device as its driver names it; ``cpu`` without one. No CUDA is initialised."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return "cpu"
    return next(iter(answer.stdout.strip().splitlines()), "cpu")
