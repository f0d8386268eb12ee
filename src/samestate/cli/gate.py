"""``samestate gate``: what must hold of the installed vLLM's sampling code before a probe means anything."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
import msgspec
from rich.table import Table

from samestate.cli.failures import Failure
from samestate.cli.judging import stdout_console
from samestate.cli.progress import progress
from samestate.engines.base import EngineError
from samestate.engines.gates import Gate, examine
from samestate.evidence.gate_report import GateReport
from samestate.evidence.marker_records import SPLIT_TOP_P

EXIT_CODES = {"pass": 0, "fail": 1, "unknown": 3}
_STYLES = {"pass": "green", "fail": "bold red", "unknown": "yellow"}

_guard = click.option(
    "--guard", is_flag=True, help=f"With the opt-in patch {SPLIT_TOP_P} put on, in the gate's process."
)
_out = click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Keep the report there, receipt, versions and hashes, as JSON; a file that exists is refused.",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")


@click.group("gate")
def gate() -> None:
    """Run a gate on the installed vLLM's sampling code. No model, no weights, no engine.

    Exit codes: 0 pass, 1 fail, 2 it cannot run here, 3 unknown.
    """


@gate.command("sampling")
@_guard
@_out
@_json
@click.pass_context
def sampling(ctx: click.Context, guard: bool, out: Path | None, as_json: bool) -> None:
    """8 forced rows must choose the end id; 272 ordinary rows must stay as they are, bit for bit.

    On a GPU by vLLM's real kernels, elsewhere by their code in Triton's interpreter.
    """
    _run(ctx, "sampling", guard, out, as_json)


@gate.command("selftest")
@_guard
@_out
@_json
@click.pass_context
def selftest(ctx: click.Context, guard: bool, out: Path | None, as_json: bool) -> None:
    """Two steps of a made-up request with a budget through vLLM's rejection sampler, before any weights."""
    _run(ctx, "selftest", guard, out, as_json)


def _run(ctx: click.Context, name: Gate, guard: bool, out: Path | None, as_json: bool) -> None:
    if out is not None and out.exists():
        raise Failure(f"--out: {out} exists; name a file that does not")
    if out is not None and not (out.parent.is_dir() and os.access(out.parent, os.W_OK)):
        raise Failure(f"--out: {out.parent} is no folder that can be written to; make it, or name another")
    try:
        with progress() as shown:
            shown.stage(f"gate {name}")
            report = examine(
                name,
                SPLIT_TOP_P if guard else None,
                lambda now, of: shown.operation(f"gate {name}", now, of, f"batch {now}"),
            )
    except EngineError as error:
        raise Failure(str(error), error.log_tail) from None
    written = json.dumps(msgspec.to_builtins(report), indent=2, ensure_ascii=False)
    if out is not None:
        out.write_text(written + "\n", encoding="utf-8")
    if as_json:
        click.echo(written)
    else:
        _show(report)
    ctx.exit(EXIT_CODES[report.verdict])


def _show(report: GateReport) -> None:
    receipt, console = report.receipt, stdout_console()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("temperature", "top-p", "forced rows right", "kept no token", "other rows the same"):
        table.add_column(title, justify="right")
    for group in report.groups:
        table.add_row(
            f"{group.temperature:g}",
            f"{group.top_p:g}",
            f"{group.forced_right}/{group.forced_rows}",
            str(group.forced_empty) if group.forced_empty else "–",
            f"{group.ordinary_same}/{group.ordinary_rows}",
        )
    console.print(table)
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    console.print(f"\n{receipt.kernel} on {report.device}; {versions}", soft_wrap=True, highlight=False)
    if receipt.guard:
        patched = ", ".join(one.qualname for one in report.patched) or "nothing: this release needs none here"
        console.print(f"guard {receipt.guard}: patched {patched}", soft_wrap=True, highlight=False)
    forced = f"{receipt.forced_right}/{receipt.forced_rows} forced rows"
    counts = f"{forced}, {receipt.ordinary_same}/{receipt.ordinary_rows} others"
    console.print(f"[{_STYLES[report.verdict]}]{report.verdict}[/]: {counts}", highlight=False)
    if receipt.reason:
        console.print(receipt.reason, soft_wrap=True, markup=False, highlight=False)
