"""``samestate watch``: a running server's reuse, from its metrics; nothing is sent to its model."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext

import click
from rich.live import Live

from samestate.cli.api_key import read_key
from samestate.cli.failures import Failure
from samestate.cli.judging import stdout_console
from samestate.engines.openai_client import ClientError, OpenAIClient
from samestate.reports.watch import Reading, facts, read, table, view

METRICS = "/metrics"


@click.command("watch")
@click.argument("url")
@click.option("--interval", type=click.FloatRange(0.2, 3600), default=2.0, show_default=True, help="Seconds.")
@click.option("--once", is_flag=True, help="One reading, or with --window two; then end.")
@click.option("--window", type=click.FloatRange(0, 3600), default=0.0, metavar="S", help="With --once: rates over S.")
@click.option("--timeout", type=click.FloatRange(0.1, 600), default=5.0, show_default=True, help="Seconds a reading.")
@click.option("--api-key-env", metavar="VAR", help="Environment variable that holds the server's API key.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: with --once one object, else one a line.")
@click.pass_context
def watch(
    ctx: click.Context,
    url: str,
    interval: float,
    once: bool,
    window: float,
    timeout: float,
    api_key_env: str | None,
    as_json: bool,
) -> None:
    """Show what the server at URL reuses: hits by source, boundaries, faults, refusals, waits.

    It reads /metrics and nothing else. Boundaries, faults and waits are seen where the server has the audit
    (`samestate serve-args`). With --once exit code 1 says that a reload had a boundary that no state has; it is no
    verdict of correctness otherwise.
    """
    if window and not once:
        raise Failure("--window: belongs to --once; say --interval for a view that goes on")
    console = stdout_console()
    if not (once or as_json or console.is_terminal):
        raise Failure("standard output is no terminal; add --once or --json")
    key = read_key(api_key_env)
    try:
        with OpenAIClient(url, api_key=key, seconds=timeout) as client:
            first = _read(client)
            if once:
                ctx.exit(_once(client, first, window, as_json))
            _go_on(client, first, interval, as_json)
    except ClientError as error:
        raise Failure(_remedy(error)) from None


def _remedy(error: ClientError) -> str:
    """The same line, with this command's options."""
    if error.status in (401, 403):
        return str(error).replace("give the right one", "name the variable that holds it with --api-key-env VAR")
    return str(error).replace("or allow more time", "or allow more time with --timeout")


def _read(client: OpenAIClient) -> Reading:
    """Raises `ClientError`, also for metrics that are not vLLM's."""
    reading = read(client.text(METRICS), time.monotonic())
    if not reading.samples:
        raise ClientError(f"{client.url}{METRICS}: names no metric of vLLM; is it a vLLM server, with its metrics on?")
    return reading


def _once(client: OpenAIClient, first: Reading, window: float, as_json: bool) -> int:
    shown = view(first)
    if window:
        time.sleep(window)
        shown = view(_read(client), first)
    if as_json:
        click.echo(json.dumps({"url": client.url, **facts(shown)}, indent=2))
    else:
        stdout_console().print(table(shown, client.url))
    return int(shown.wrong)


def _go_on(client: OpenAIClient, first: Reading, interval: float, as_json: bool) -> None:
    """Until Ctrl-C. A server that is silent for a while is said to be, and asked again."""
    before, note, shown = first, "", view(first)
    live = nullcontext() if as_json else Live(console=stdout_console(), auto_refresh=False)
    with live as screen:
        while True:
            if screen is None:
                click.echo(json.dumps({"url": client.url, **facts(shown), "note": note or None}))
            else:
                screen.update(table(shown, client.url, note), refresh=True)
            time.sleep(interval)
            try:
                now = _read(client)
            except ClientError as error:
                note = str(error)
            else:
                shown, before, note = view(now, before), now, ""
