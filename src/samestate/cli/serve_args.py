"""``samestate serve-args``: a `vllm serve` line with our cache and audit, right for one model."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import click
import msgspec

from samestate.cli.failures import Failure
from samestate.cli.progress import progress
from samestate.cli.sizes import size
from samestate.engines.inquiry import InquiryError
from samestate.lab.serve_line import CONNECTORS, MODULE_SERVER, Line, LineRequest, serve_line
from samestate.models import catalogue
from samestate.models.configs import shipped
from samestate.models.fields import ConfigError

DEV_WARNING = (
    "note: developer mode lets everybody who reaches the server reset its caches and read its settings; "
    "bind it to 127.0.0.1, or to a network that you trust"
)
CPU_NOTE = (
    "note: on a CPU vLLM wants 92 % of a memory node for its own cache, where the memory tier lies too, and does not "
    "start where less is free; say how much in --serve-args, e.g. --kv-cache-memory-bytes 4294967296"
)
_CACHE_SIZES = ("--kv-cache-memory-bytes", "--gpu-memory-utilization")


@click.command("serve-args")
@click.argument("model")
@click.option("--connector", type=click.Choice(CONNECTORS), default="samestate-memory", show_default=True)
@click.option("--store", metavar="URL", help="Behind the memory tier: file:///…, valkey://…; see `samestate cache`.")
@click.option("--memory", default="8GiB", show_default=True, metavar="SIZE", help="Memory tier, over all ranks.")
@click.option("--audit", type=click.Choice(["off", "metadata", "digest"]), default="metadata", show_default=True)
@click.option("--audit-dir", default="/var/log/samestate", show_default=True, metavar="DIR", help="For its records.")
@click.option("--reset", is_flag=True, help="Let caches be reset over HTTP (vLLM's developer mode), as probes may ask.")
@click.option("--serve-args", metavar="ARGS", default="", help="Your own flags of `vllm serve`, one string.")
@click.option("--platform", type=click.Choice(["cuda", "cpu"]), help="As in `samestate doctor`.")
@click.option("--tensor-parallel", type=click.IntRange(1), metavar="N", help="Ranks.")
@click.option("--vllm-version", metavar="X.Y.Z", help="As in `samestate doctor`.")
@click.option("--json", "as_json", is_flag=True, help="Print words, environment and what was found as JSON.")
@click.pass_context
def serve_args(
    ctx: click.Context,
    model: str,
    connector: str,
    store: str | None,
    memory: str,
    audit: str,
    audit_dir: str,
    reset: bool,
    serve_args: str,
    platform: str | None,
    tensor_parallel: int | None,
    vllm_version: str | None,
    as_json: bool,
) -> None:
    """Print the line that serves MODEL with our cache and audit. Nothing is started.

    MODEL is a folder or a name that `samestate doctor` knows. The line stands on standard output alone; what was
    found of it stands on standard error. Exit codes: 0 no obstacle, 1 something is known to be wrong, 2 bad input,
    3 something is unknown.
    """
    try:
        arguments = shlex.split(serve_args)
    except ValueError as error:
        raise Failure(f"--serve-args: {error}; put the whole string in quotes and balance those in it") from None
    if not audit_dir.startswith("/"):
        raise Failure(f"--audit-dir: {audit_dir!r} depends on where the server is started; say a whole path")
    request = LineRequest(
        model=_named(model),
        asked=model,
        connector=connector,
        serve_args=arguments,
        store=store,
        memory_bytes=size("--memory", memory),
        audit=audit,  # type: ignore[arg-type]
        audit_dir=audit_dir,
        reset=reset,
        platform=platform,
        tensor_parallel=tensor_parallel,
        vllm_version=vllm_version,
    )
    try:
        with progress() as shown:
            line = serve_line(request, stage=shown.stage)
    except ConfigError as error:
        raise Failure(str(error).replace("--model:", "MODEL:", 1)) from None
    except InquiryError as error:
        raise Failure(f"{error}; --platform cuda calculates instead of asking", error.log_tail) from None
    if as_json:
        click.echo(json.dumps(_facts(line), indent=2, ensure_ascii=False))
    else:
        _print(line)
    ctx.exit(line.report.exit_code)


def _named(model: str) -> str:
    """As the server must be told: a folder by its whole path, a tiny model by that it is built in, a config by its
    checkpoint's name."""
    if Path(model).is_dir():
        return str(Path(model).resolve())
    if model in catalogue.names():
        return str(catalogue.ensure(model))
    return shipped().get(model, [model])[0]


def _facts(line: Line) -> dict[str, object]:
    report = line.report
    return {
        "environment": line.environment,
        "command": line.words,
        "line": line.shell(),
        "interval": report.interval,
        "smallest_prompt": report.smallest_prompt,
        "values": report.values,
        "engine": report.engine,
        "findings": msgspec.to_builtins(report.findings),
        "exit_code": report.exit_code,
    }


def _print(line: Line) -> None:
    report = line.report
    click.echo(line.shell())
    known = f"C = {report.interval:,}" if report.interval else "C is not known"
    smallest = f"; prompts below {report.smallest_prompt:,} tokens can never hit" if report.smallest_prompt else ""
    source = {"vllm": f"asked of {report.engine}", "calculated": "calculated"}.get(report.values, "not asked")
    click.echo(f"{known} ({source}){smallest}", err=True)
    for finding in report.findings:
        if finding.state in ("wrong", "unknown"):
            remedy = f"; remedy: {finding.remedy}" if finding.remedy else ""
            click.echo(f"{finding.state}: {finding.id}: {finding.says}{remedy}", err=True)
    if line.words[: len(MODULE_SERVER)] == list(MODULE_SERVER) and not _sized(line.words):
        click.echo(CPU_NOTE, err=True)
    if line.environment:
        click.echo(DEV_WARNING, err=True)


def _sized(words: list[str]) -> bool:
    """Whether a flag says how much memory the engine's own cache takes; vLLM reads ``_`` in flags as ``-``."""
    return any(word.partition("=")[0].replace("_", "-") in _CACHE_SIZES for word in words)
