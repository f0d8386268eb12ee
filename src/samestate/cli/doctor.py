"""``samestate doctor``: what a model's cache can do under given arguments, before anything is served."""

from __future__ import annotations

import json
import shlex

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from samestate.cli.connectors import parse_option
from samestate.cli.failures import Failure
from samestate.cli.judging import stdout_console
from samestate.cli.progress import progress
from samestate.engines.inquiry import InquiryError
from samestate.lab.doctor import CONTROL_BYTES, Request, examine
from samestate.lab.doctor_report import Finding, Report
from samestate.lab.obstacles import CONNECTORS
from samestate.models.cache_shape import Pages
from samestate.models.catalogue import names
from samestate.models.configs import shipped
from samestate.models.fields import ConfigError

DEFAULT_MODEL = "qwen3-next-tiny"
MOST_BYTES = 2**60
_MARKS = {
    "ok": ("ok", "green"),
    "wrong": ("wrong", "bold red"),
    "unknown": ("unknown", "yellow"),
    "note": ("note", "cyan"),
}
_FITS = {"yes": "green", "no": "red", "unknown": "yellow"}
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


@click.command("doctor")
@click.option(
    "--model",
    metavar="DIR|ID",
    default=DEFAULT_MODEL,
    show_default=True,
    help=f"A folder with a config.json, or one of {', '.join([*names(), *shipped()])}. Weights are not read.",
)
@click.option("--serve-args", metavar="ARGS", default="", help="The flags of `vllm serve`, one string.")
@click.option("--platform", type=click.Choice(["cuda", "cpu"]), help="Default: the installed vLLM's, else cuda.")
@click.option(
    "--tensor-parallel", type=click.IntRange(1), metavar="N", help="Ranks. Default: as the flags say, else 1."
)
@click.option("--vllm-version", metavar="X.Y.Z", help="The release that will serve. Default: the installed one.")
@click.option(
    "--external-cache-bytes", type=click.IntRange(1, MOST_BYTES), default=CONTROL_BYTES, show_default=True, metavar="N"
)
@click.option("--connector", type=click.Choice(CONNECTORS), help="The one you mean to use.")
@click.option("--lmcache-version", metavar="X.Y.Z", help="Default: the one installed beside vLLM.")
@click.option(
    "--connector-option",
    "connector_options",
    metavar="NAME=VALUE",
    multiple=True,
    help="An option of LMCache's server, e.g. chunk_size=1792 or separate_object_groups=on. Repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_context
def doctor(
    ctx: click.Context,
    model: str,
    serve_args: str,
    platform: str | None,
    tensor_parallel: int | None,
    vllm_version: str | None,
    external_cache_bytes: int,
    connector: str | None,
    lmcache_version: str | None,
    connector_options: tuple[str, ...],
    as_json: bool,
) -> None:
    """Say what can hit at all, before anything is served: C, pages, the smallest prompt, what is known to be wrong.

    Exit codes: 0 no obstacle, 1 something is known to be wrong, 2 bad input, 3 something is unknown.
    """
    if (lmcache_version or connector_options) and connector != "lmcache":
        raise Failure("--lmcache-version, --connector-option: are LMCache's; add --connector lmcache or leave them out")
    try:
        arguments = shlex.split(serve_args)
    except ValueError as error:
        raise Failure(f"--serve-args: {error}; put the whole string in quotes and balance those in it") from None
    request = Request(
        model,
        arguments,
        platform,
        tensor_parallel,
        vllm_version,
        external_cache_bytes,
        connector,
        lmcache_version,
        dict(map(parse_option, connector_options)),
    )
    try:
        with progress() as shown:
            report = examine(request, stage=shown.stage)
    except ConfigError as error:
        raise Failure(str(error)) from None
    except InquiryError as error:
        raise Failure(f"{error}; --platform cuda calculates instead of asking", error.log_tail) from None
    if as_json:
        facts = msgspec.to_builtins(report) | {"exit_code": report.exit_code}
        click.echo(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        print_report(report, stdout_console())
    ctx.exit(report.exit_code)


def print_report(report: Report, console: Console) -> None:
    """Facts, pages, connectors, findings."""
    console.print(_facts(report))
    if report.pages:
        console.print()
        console.print(_pages(report))
    console.print()
    console.print(_connectors(report))
    console.print()
    console.print(_findings(report.findings))


def _facts(report: Report) -> Table:
    ranks = f", {report.tensor_parallel} ranks" if report.tensor_parallel > 1 else ""
    where = {
        "vllm": f"asked of {report.engine}, nothing was started",
        "calculated": "calculated" + (f" from {'; '.join(report.assumed)}" if report.assumed else ""),
        "unknown": "unknown",
    }[report.values]
    facts = {
        "model": f"{report.model} ({report.model_type}; {report.config_source})",
        "served on": f"{report.platform}{ranks}",
        "values": where,
        "C": f"{report.interval:,} tokens" if report.interval else "unknown",
        "hits at": _hits(report),
        "smallest prompt": f"prompts below {report.smallest_prompt:,} tokens can never hit"
        if report.smallest_prompt
        else "",
        "context": f"{report.max_model_len:,} tokens" if report.max_model_len else "unknown",
        "recurrent state": report.state_dtype or "",
        "external tier": _tier(report),
    }
    table = Table.grid(padding=(0, 2))
    for name, fact in facts.items():
        if fact:
            table.add_row(name, Text(fact, overflow="fold"))
    return table


def _hits(report: Report) -> str:
    if report.hit_step is None or report.hit_step == report.interval:
        return ""
    return f"multiples of {report.hit_step:,} tokens in the engine's own cache; of C outside"


def _tier(report: Report) -> str:
    held = report.tier
    if held is None:
        return ""
    longest = "any length" if held.longest_prefix is None else f"{held.longest_prefix:,} tokens"
    return (
        f"{_size(held.bytes)}: at most {held.prefixes:,} prefixes of C tokens ({_size(held.prefix_bytes)} each in "
        f"whole pages, {_size(held.moved_bytes)} without padding), or one prefix of {longest}"
    )


def _pages(report: Report) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("group", "kind", "layers", "block", "page", "used of it", "padding"):
        table.add_column(title, justify="left" if title == "kind" else "right")
    for pages in report.pages:
        table.add_row(*_row(pages))
    return table


def _row(pages: Pages) -> list[str]:
    padding = 1 - pages.effective_bytes / pages.page_bytes
    return [
        "–" if pages.group is None else str(pages.group),
        pages.kind,
        str(pages.layers),
        f"{pages.tokens_per_block:,}",
        f"{pages.page_bytes:,}",
        f"{pages.effective_bytes:,}",
        f"{padding:.1%}" if padding else "–",
    ]


def _connectors(report: Report) -> Table:
    table = Table.grid(padding=(0, 2))
    for fit in report.connectors:
        table.add_row(fit.connector, Text(fit.can, style=_FITS[fit.can]), Text(fit.why))
    return table


def _findings(found: list[Finding]) -> Table:
    table = Table.grid(padding=(0, 2))
    for finding in found:
        word, style = _MARKS[finding.state]
        said = Text(finding.says, overflow="fold")
        if finding.remedy and finding.state != "ok":
            said.append(f"\nremedy: {finding.remedy}", style="bold")
        for source in finding.sources if finding.state != "ok" else []:
            said.append(f"\n{source}", style="dim")
        table.add_row(Text(word, style=style), finding.id, said)
    return table


def _size(number: int) -> str:
    value = float(number)
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            return f"{value:.1f} {unit}" if unit != "bytes" else f"{number} bytes"
        value /= 1024
    raise AssertionError(number)
