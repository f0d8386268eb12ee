"""``samestate bench``: does reuse pay? Cold, repeated and reloaded prompts, with the path that each really took."""

from __future__ import annotations

import json
import secrets
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.text import Text

from samestate.checks.latency_live import LiveTimes, live_study
from samestate.checks.latency_load import LoadStudy
from samestate.checks.latency_study import Study
from samestate.cli.bench_load import MOST, LoadOptions, live_load, load_options, own_load, show_load
from samestate.cli.bench_side import side_plan
from samestate.cli.failures import Failure
from samestate.cli.judging import exit_code, judge_archive, print_json, print_report, stdout_console
from samestate.cli.plan import EXTERNAL, frozen
from samestate.cli.progress import progress
from samestate.cli.run import RUNS, require_free, run_request, whole_request
from samestate.engines.base import EngineError
from samestate.engines.served import StreamingClient
from samestate.engines.server import RunningServer
from samestate.evidence.latency_records import StreamEvent
from samestate.evidence.records import EXTERNAL_HITS, LOCAL_HITS, LOCAL_QUERIES
from samestate.lab.errors import RunError
from samestate.lab.live_latency import LivePlan, LiveRequest, measure
from samestate.plans.errors import PlanError
from samestate.plans.lengths import evaluate
from samestate.plans.load import load, with_connector, with_engine
from samestate.plans.model import Connector, LatencyPlan, Plan
from samestate.reports.terminal import print_study

PLAN = "latency"
QUICK = {"lengths": ["C+1", "2C+1"], "output_tokens": 32, "repetitions": ["forward"]}
"""What the quick variant has instead: one pair of engines, the shortest prompts that can hit."""
QUICK_TRIALS = 2
SEEDS = 2**31
NO_VERDICT = (
    "No verdict and no archive: a server that somebody else started shows its counters, and nothing of its engine."
)


@click.command("bench")
@click.option("--plan", "name", metavar="PLAN", help="A whole latency plan, e.g. latency. Default: a quick variant.")
@click.option("--url", metavar="URL", help="Measure a server that runs already, instead of engines of our own.")
@click.option("--model", type=click.Path(path_type=Path), metavar="DIR", help="Your own checkpoint.")
@click.option(
    "--connector",
    type=click.Choice(["native", "samestate-memory", "samestate-disk", "samestate-valkey", "samestate-object"]),
    help="Instead of the plan's.",
)
@click.option(
    "--connectors",
    metavar="NAMES",
    help="Side by side in one run: none,native,samestate-memory,samestate-disk,lmcache-X.Y.Z. Engines take turns.",
)
@click.option("--trials", type=click.IntRange(1, 1000), help="Measured, of every length.")
@click.option(
    "--length", "lengths", multiple=True, metavar="N", help="2C-1, 3584, … Repeatable; instead of the plan's."
)
@click.option("--interval", type=click.IntRange(1), metavar="C", help="C of a live server, for lengths said in C.")
@click.option("--randomize", is_flag=True, help="Shuffle the trials; the seed is recorded, and printed.")
@click.option("--concurrency", metavar="K", help="Under load instead: so many requests at once, e.g. 1,2,4.")
@click.option(
    "--rate", "rates", metavar="R", help="Under load instead: requests a second, in an open loop, e.g. 0.5,2."
)
@click.option("--requests", type=click.IntRange(1, MOST), help="Of every phase of a load.")
@click.option("--seed", type=click.IntRange(0), help="Of --randomize or a load; default: a new one.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="The archive of a run of our own.")
@click.option("--json", "as_json", is_flag=True, help="Print the study as JSON.")
@click.pass_context
def bench(
    ctx: click.Context,
    name: str | None,
    url: str | None,
    model: Path | None,
    connector: Connector | None,
    connectors: str | None,
    trials: int | None,
    lengths: tuple[str, ...],
    interval: int | None,
    randomize: bool,
    concurrency: str | None,
    rates: str | None,
    requests: int | None,
    seed: int | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Time first tokens and whole answers: cold, repeated and reloaded.

    Without --url two engines are served here, one without a cache and one with, and the run is sealed and judged.
    A load, by --concurrency or --rate, is a measurement of its own, without a verdict.
    """
    load_asked = load_options(concurrency, rates, requests, seed)
    if seed is not None and not (randomize or load_asked):
        raise Failure("--seed: is the seed of --randomize or of a load; add one of these, or leave it out")
    if load_asked is not None:
        for option, serial in (("--connectors", connectors), ("--trials", trials), ("--randomize", randomize)):
            if serial:
                raise Failure(f"{option}: is for requests one at a time, not for a load; leave it out")
    order_seed = (secrets.randbelow(SEEDS) if seed is None else seed) if randomize else None
    plan = _plan(name, trials, lengths, order_seed)
    if url is not None:
        options = (("--model", model), ("--connector", connector), ("--connectors", connectors), ("--out", out))
        for option, given in options:
            if given is not None:
                raise Failure(f"{option}: a server that runs already has its own; leave it out, or leave out --url")
        if load_asked is not None:
            show_load(_live_load(url, plan, interval, load_asked), load_asked, None, as_json=as_json)
            return
        _show_live(_live(url, plan, interval), as_json=as_json)
        return
    if interval is not None:
        raise Failure("--interval: an engine of our own says its C itself; leave it out")
    if model is not None:
        plan = with_engine(plan, model=EXTERNAL, serve_args=[])
    if connector is not None and connectors is not None:
        raise Failure("--connector and --connectors: exclude each other; leave one out")
    if connector is not None:
        plan = with_connector(plan, connector)
    if connectors is not None:
        if plan.analyzer.source_sha256 is not None:
            raise Failure(f"{name}: the plan is frozen, and --connectors would change it; leave it out")
        plan = side_plan(plan, connectors)
    if load_asked is not None:
        folder = out or RUNS / f"load-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        show_load(own_load(plan, load_asked, model, folder), load_asked, folder, as_json=as_json)
        return
    archive = out or RUNS / f"bench-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    require_free(archive)
    result = run_request(whole_request(frozen(plan), model, archive, "vllm"))
    judgement = judge_archive(result.archive, None)
    if as_json:
        print_json(judgement, result.archive, stages=result.stages)
    else:
        print_report(judgement)
        stdout_console().print(Text(f"archive {result.archive}"))
    ctx.exit(exit_code(judgement.verdict))


def _plan(name: str | None, trials: int | None, lengths: tuple[str, ...], order_seed: int | None) -> Plan:
    """The plan under the command line. Raises `Failure` and `PlanError`."""
    plan = load(name or PLAN)
    latency = plan.latency
    if latency is None:
        raise Failure(f"--plan: {plan.name} measures no latency; name {PLAN}, or a plan with `latency`")
    changes = dict(QUICK) if name is None else {}
    if lengths:
        changes["lengths"] = list(lengths)
    update: dict[str, int | None] = {}
    if name is None or trials is not None:
        update["trials"] = trials or QUICK_TRIALS
    if order_seed is not None:
        update["order_seed"] = order_seed
    if not (changes or update):
        return plan
    if plan.analyzer.source_sha256 is not None:
        raise Failure(
            f"{name}: the plan is frozen, and --trials, --length or --randomize would change it; leave them out"
        )
    changed = plan.model_copy(update={**changes, "latency": latency.model_copy(update=update)})
    return Plan.model_validate(_sensible(changed).model_dump())


def _sensible(plan: Plan) -> Plan:
    """Raise `PlanError` for lengths that are none."""
    for index, length in enumerate(plan.lengths):
        try:
            evaluate(length, 2**20)
        except PlanError as error:
            raise error.within(f"--length {index + 1}") from None
        if length in plan.lengths[:index]:
            raise Failure(f"--length: {length!r} is there twice; leave one out")
    return plan


# --- a server that runs already -------------------------------------------------------------------


def _live(url: str, plan: Plan, interval: int | None) -> Study:
    latency = plan.latency
    assert latency is not None
    server = RunningServer(url)
    client = StreamingClient(server)
    try:
        client.connect()
        lengths = _live_lengths(plan, interval or client.block_size())
        asked = LivePlan(
            lengths=lengths,
            trials=latency.trials,
            warmups=latency.warmups,
            output_tokens=plan.output_tokens,
            template=plan.template,
            seed=plan.seed,
            order_seed=latency.order_seed,
            run=secrets.token_hex(4),
        )
        with progress() as shown:
            shown.stage("requests")
            answers = list(measure(client, asked, lambda done, total, op: shown.operation("server", done, total, op)))
    except (EngineError, RunError) as error:
        raise Failure(str(error)) from None
    finally:
        client.close()
    return live_study(list(map(_times, answers)), plan.output_tokens, order=_order(latency), seed=plan.seed)


def _live_load(url: str, plan: Plan, interval: int | None, options: LoadOptions) -> LoadStudy:
    client = StreamingClient(RunningServer(url))
    try:
        client.connect()
        lengths = _live_lengths(plan, interval or client.block_size())
    except EngineError as error:
        raise Failure(str(error)) from None
    finally:
        client.close()
    return live_load(url, plan, lengths, options)


def _live_lengths(plan: Plan, interval: int | None) -> list[int]:
    """N of each length. Raises `Failure` where C is needed and nobody said it."""
    if interval is None and any("C" in length for length in plan.lengths):
        raise Failure(
            "--url: the server does not say its block size (start it with VLLM_SERVER_DEV_MODE=1); say C with "
            "--interval, or lengths in tokens with --length"
        )
    return [evaluate(length, interval or 1) for length in plan.lengths]


def _order(latency: LatencyPlan) -> str:
    seed = latency.order_seed
    return "ascending by trial, then by length" if seed is None else f"shuffled by seed {seed}"


def _times(one: LiveRequest) -> LiveTimes:
    timing = one.generation.timing
    assert timing is not None
    return LiveTimes(
        trial=one.trial,
        case=one.case,
        tokens=one.tokens,
        attempted=one.attempted,
        token_ids=one.generation.token_ids,
        began_ns=timing.began_ns,
        done_ns=timing.done_ns,
        events=[StreamEvent(at_ns=at_ns, tokens=tokens) for at_ns, tokens in timing.events],
        queried=one.grown(LOCAL_QUERIES),
        local=one.grown(LOCAL_HITS),
        external=one.grown(EXTERNAL_HITS),
        cached=one.generation.cached_tokens,
    )


def _show_live(study: Study, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"latency": study.model_dump(mode="json"), "note": NO_VERDICT}, indent=2))
        return
    console = stdout_console()
    print_study(study, console)
    console.print(Text(NO_VERDICT))
