"""``samestate probe URL``: is what a running server reuses the state that it would have computed?"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.text import Text

from samestate.checks.analyzers import PROBE_V1, Judgement, source_sha256
from samestate.cli.api_key import read_key
from samestate.cli.failures import Failure
from samestate.cli.judging import exit_code, judge_archive, print_json, print_report, stdout_console
from samestate.cli.progress import progress
from samestate.cli.run import require_free
from samestate.engines.base import EngineError
from samestate.engines.black_box import BlackBox
from samestate.engines.black_box_budget import Budget
from samestate.engines.black_box_facts import Facts
from samestate.engines.openai_client import COMPLETIONS, ClientError
from samestate.lab.black_box import Found, ProbeRequest, probe, require_reset
from samestate.plans import black_box as b
from samestate.plans.errors import PlanError
from samestate.plans.lengths import check_lengths, evaluate
from samestate.plans.model import AnalyzerPin, Plan

AUTO = "auto"
LARGEST = 1 << 17
"""Tokens of a length that is said."""
OUTPUT_TOKENS = 32


@click.command("probe")
@click.argument("url", metavar="URL")
@click.option("--model", metavar="NAME", help="As the server names it. Default: the first that it serves.")
@click.option("--api-key-env", metavar="VAR", help="Environment variable that holds the server's API key.")
@click.option(
    "--lengths",
    default=AUTO,
    show_default=True,
    metavar="auto|N,…",
    help="Prompt lengths: 2C-1, 3584, …, with commas. auto: around the boundaries, as the budget allows.",
)
@click.option(
    "--output-tokens",
    type=click.IntRange(2, 4096),
    default=OUTPUT_TOKENS,
    show_default=True,
    help="Of each answer that is compared.",
)
@click.option(
    "--budget-requests",
    type=click.IntRange(1),
    default=250,
    show_default=True,
    help="Completions and resets, never more.",
)
@click.option(
    "--budget-tokens",
    type=click.IntRange(1),
    default=400_000,
    show_default=True,
    help="Of prompts and answers together, never more.",
)
@click.option("--allow-reset", is_flag=True, help="Drop the server's local cache once, everybody's (dev mode).")
@click.option("--allow-evict", is_flag=True, help="Fill the server's local cache with prompts of our own once.")
@click.option(
    "--timeout", type=click.FloatRange(0.1), default=60.0, show_default=True, metavar="SECONDS", help="Of one request."
)
@click.option("--stream", is_flag=True, help="Ask for streams, as chat clients do.")
@click.option("--dry-run", is_flag=True, help="Ask what costs no tokens, say what would be sent, and send none of it.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Keep the sealed archive there.")
@click.option("--json", "as_json", is_flag=True, help="Print the judgement as JSON.")
@click.pass_context
def probe_command(
    ctx: click.Context,
    url: str,
    model: str | None,
    api_key_env: str | None,
    lengths: str,
    output_tokens: int,
    budget_requests: int,
    budget_tokens: int,
    allow_reset: bool,
    allow_evict: bool,
    timeout: float,
    stream: bool,
    dry_run: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Ask a server that runs already whether what it reuses is right.

    Each prompt is asked cold, cold in company, again, and again after another one; with --allow-reset or --allow-evict
    once more from outside. Nothing of other clients is read or changed without these two.

    Exit codes: 0 pass · 1 fail · 2 usage or server · 3 unknown.
    """
    if allow_reset and allow_evict:
        raise Failure("--allow-evict: a reset leaves nothing to evict; leave one of the two out")
    if out is not None:
        require_free(out)
    said = _lengths(lengths)
    means = b.Means(allow_reset, allow_evict)
    plan = b.probe_plan(
        said or b.AUTO, output_tokens, means, AnalyzerPin(id=PROBE_V1, source_sha256=source_sha256(PROBE_V1))
    )
    budget = Budget(budget_requests, budget_tokens)
    try:
        box = BlackBox(url, budget, api_key=read_key(api_key_env), seconds=timeout, stream=stream)
        try:
            if dry_run:
                facts = box.survey(model)
                require_reset(facts, means)
                _show_dry(plan, facts, means, said, budget, as_json=as_json)
                return
            with _folder(out) as root:
                request = ProbeRequest(plan, said, model, means, root)
                with progress() as shown:
                    shown.stage("probe: asking")
                    found = probe(request, box, lambda done, total, op: shown.operation("server", done, total, op))
                judgement = judge_archive(root, None)
                _show(judgement, found, budget, out, as_json=as_json)
        finally:
            box.close()
    except ClientError as error:
        raise Failure(_remedy(error)) from None
    except EngineError as error:
        raise Failure(str(error)) from None
    ctx.exit(exit_code(judgement.verdict))


def _lengths(said: str) -> list[str] | None:
    """None: auto. Raises `Failure`."""
    if said.strip() == AUTO:
        return None
    lengths = [word.strip() for word in said.split(",")]
    try:
        check_lengths(lengths)
        for length in lengths:
            if "C" not in length and evaluate(length, 1) > LARGEST:
                raise Failure(f"--lengths: {length} is more than {LARGEST:,} tokens; say a shorter prompt")
    except PlanError as error:
        raise Failure(f"--lengths: {error}") from None
    return lengths


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """Where the archive goes: kept only where somebody asked for it."""
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="samestate-probe-") as scratch:
        yield Path(scratch) / "archive"


def _remedy(error: ClientError) -> str:
    """The same line, with this command's options."""
    line = str(error)
    if error.status in (401, 403):
        return line.replace("give the right one", "name the variable that holds it with --api-key-env VAR")
    if error.status == 404 and COMPLETIONS in line:
        return line.replace("check the address", f"the probe needs {COMPLETIONS}: check the address")
    return line.replace("or allow more time", "or allow more time with --timeout")


# --- what is shown --------------------------------------------------------------------------------


def _show(judgement: Judgement, found: Found, budget: Budget, out: Path | None, *, as_json: bool) -> None:
    told = {
        "server": found.facts._asdict(),
        "interval": found.interval,
        "interval_from": found.interval_from,
        "left_out": found.left_out,
        "notes": found.notes,
        "spent": {"requests": budget.requests_spent, "tokens": budget.tokens_spent},
    }
    if as_json:
        print_json(judgement, out or Path("-"), probe=told)
        return
    console = stdout_console()
    for line in _about(found, budget):
        console.print(Text(line))
    console.print()
    print_report(judgement)
    if out is not None:
        console.print(Text(f"archive {out}"))


def _about(found: Found, budget: Budget) -> Iterator[str]:
    facts = found.facts
    yield f"server {facts.called}, model {facts.model}"
    known = f"C = {found.interval:,}" if found.interval else "C is not known"
    known += ": state goes on from any token" if found.interval == 1 else ""
    yield f"{known} ({found.interval_from})"
    yield (
        f"spent {budget.requests_spent} of {budget.requests} requests, {budget.tokens_spent:,} of {budget.tokens:,} "
        "tokens"
    )
    yield from (f"left out {line}" for line in found.left_out)
    yield from (f"note: {line}" for line in found.notes)


def _show_dry(
    plan: Plan, facts: Facts, means: b.Means, said: list[str] | None, budget: Budget, *, as_json: bool
) -> None:
    wanted = said or list(b.around(facts.interval) if facts.interval else plan.lengths)
    whole = b.Cost(budget.requests, budget.tokens)
    tree: dict[str, object] = {"server": facts._asdict(), "budget": whole._asdict(), "sent": 0}
    lines = [
        f"server {facts.model}, {facts.called}{'' if facts.version else ' of unknown version'}",
        f"token ids by its tokenizer: {_yes(facts.tokenizer)} · counters: {_yes(facts.counters)} · can be reset: "
        f"{_yes(facts.can_reset)}",
    ]
    if facts.interval is None:
        lines.append("C: not said; prompts of growing length would be repeated until one is reused")
    else:
        lines.append(f"C: {facts.interval:,} by {facts.interval_from}, to be tried first")
    c = facts.interval
    per = 1 if facts.tokenizer else b.TEXT_BYTES  # a text is taken for as many tokens as it has bytes
    first = b.hello_cost() + (b.trial_cost(c) if c is not None else b.Cost(0, 0))
    left = b.Cost(max(0, whole.requests - first.requests), max(0, whole.tokens - first.tokens) // per)
    if c is not None or not any("C" in length for length in wanted):
        kept, left_out = b.fitting(wanted, c, facts.max_model_len, plan.output_tokens, means, left)
        colds = b.cold_runs(len(kept))
        costs = [b.case_cost(n, plan.output_tokens, c, colds, means) for _, n in kept]
        total = sum(costs, first)
        lines += [
            f"lengths: {', '.join(f'{name} = {n:,}' for name, n in kept) or 'none fits'}",
            *(f"left out {line}" for line in left_out),
            f"{'at most' if facts.tokenizer else 'about'} {total.requests} requests and {total.tokens:,} tokens: "
            f"{first.requests} requests before, {total.requests - first.requests} to compare",
        ]
        tree |= {"lengths": dict(kept), "left_out": left_out, "requests": total.requests, "tokens": total.tokens}
    uncounted = _uncounted(facts, means) + ([] if "requests" in tree else ["all that is compared, as C is not known"])
    tree["not_counted"] = uncounted
    lines += [
        f"not counted, but within the budget: {'; '.join(uncounted)}",
        f"reset of the local cache: {'once' if means.reset else 'never'} · eviction by own prompts: "
        f"{'once' if means.evict else 'never'}",
        f"never more than {budget.requests} requests and {budget.tokens:,} tokens; nothing was sent",
    ]
    if as_json:
        click.echo(json.dumps(tree, indent=2))
        return
    console = stdout_console()
    for line in lines:
        console.print(Text(line))


def _uncounted(facts: Facts, means: b.Means) -> list[str]:
    """What may be sent beside what was foreseen."""
    c = f"a search for C, where {facts.interval:,} is not seen" if facts.interval else "the search for C"
    lines = ["a request for each field or form of prompt that the server refuses", c]
    lines += ["up to 25 requests to reset its cache"] if means.reset else []
    lines += ["prompts that fill its cache"] if means.evict else []
    return lines


def _yes(value: bool) -> str:
    return "yes" if value else "no"
