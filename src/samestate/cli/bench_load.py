"""``samestate bench --concurrency`` and ``--rate``: a load, on engines of our own or on a server that runs already."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import click
from rich.text import Text

from samestate.checks.history import History
from samestate.checks.latency_load import (
    LoadStudy,
    LoadTimes,
    PhaseCounters,
    live_load_study,
    live_taken,
    load_study,
)
from samestate.cli.connectors import beside
from samestate.cli.failures import Failure
from samestate.cli.judging import stdout_console
from samestate.cli.plan import frozen
from samestate.cli.progress import progress
from samestate.cli.run import model_folder, require_free
from samestate.engines.base import EngineError
from samestate.engines.served import StreamingClient
from samestate.engines.server import RunningServer
from samestate.evidence.archive import Archive
from samestate.evidence.canonical import token_digest
from samestate.evidence.latency_records import LoadPhase, StreamEvent
from samestate.evidence.records import EXTERNAL_HITS, LOCAL_HITS, OperationName
from samestate.lab.errors import RunError
from samestate.lab.load_driver import Level, LoadDriver
from samestate.lab.load_engines import LoadRequest, connected, run_load
from samestate.lab.load_run import LoadPlan, Phase, phases
from samestate.plans.model import Plan
from samestate.reports.latency_load import print_load

MOST = 256
"""Requests at once, and of a phase."""
REQUESTS = 8
BLOCKS_EACH = 16
"""Blocks of the pool for every request that may run at once: the shipped plan has so many for one."""
OPEN_LOOP = 8
"""Requests that an engine of our own runs at once where they fall due by a rate."""


class LoadOptions(NamedTuple):
    """What the command line says of a load."""

    levels: list[Level]
    requests: int
    seed: int


def load_options(
    concurrency: str | None, rates: str | None, requests: int | None, seed: int | None
) -> LoadOptions | None:
    """None: no load is asked for. Raises `Failure`."""
    if concurrency is None and rates is None:
        if requests is not None:
            raise Failure("--requests: are those of a load; add --concurrency or --rate, or leave it out")
        return None
    levels = [Level(number, None) for number in _whole_numbers(concurrency)] if concurrency is not None else []
    levels += [Level(None, rate) for rate in _rates(rates)] if rates is not None else []
    names = [level.name for level in levels]
    for index, name in enumerate(names):
        if name in names[:index]:
            option = "--concurrency" if levels[index].concurrency else "--rate"
            raise Failure(f"{option}: {name[1:]} is there twice; leave one out")
    most = max((level.concurrency or 1 for level in levels), default=1)
    return LoadOptions(levels, requests or max(REQUESTS, 2 * most), secrets.randbelow(2**31) if seed is None else seed)


def _whole_numbers(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isascii() and word.strip().isdecimal() and 1 <= int(word) <= MOST for word in words):
        raise Failure(f"--concurrency: {text!r} is no list of whole numbers from 1 to {MOST}; say 1,2,4")
    return [int(word) for word in words]


def _rates(text: str) -> list[float]:
    try:
        rates = [float(word) for word in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0.001 <= rate <= 1000 for rate in rates):
        raise Failure(f"--rate: {text!r} is no list of requests a second from 0.001 to 1000; say 0.5,2")
    return rates


def load_plan(plan: Plan, options: LoadOptions) -> Plan:
    """The plan with room for as many requests as may run at once."""
    at_once = max((level.concurrency or OPEN_LOOP) for level in options.levels)
    settings = plan.engine.settings | {"max_num_seqs": at_once, "num_gpu_blocks_override": BLOCKS_EACH * at_once}
    return plan.model_copy(update={"engine": plan.engine.model_copy(update={"settings": settings})})


def own_load(plan: Plan, options: LoadOptions, model: Path | None, out: Path) -> LoadStudy:
    """The load on engines of our own, one without a cache and one with. Raises `Failure`."""
    require_free(out)
    chosen = frozen(load_plan(plan, options))
    needed = beside(chosen, "vllm")
    request = LoadRequest(
        plan=chosen,
        model=model_folder(chosen, model),
        out=out,
        levels=options.levels,
        requests=options.requests,
        seed=options.seed,
        packages=needed.packages,
        make_service=needed.make_service,
    )
    try:
        with progress() as shown:
            run_load(request, shown)
    except KeyboardInterrupt:
        raise Failure(f"interrupted; what was recorded is in {out}") from None
    except RunError as error:
        raise Failure(f"{error}; what was recorded is in {out}", error.log_tail) from None
    return load_study(History.read(Archive.open(out)))


def live_load(url: str, plan: Plan, lengths: Sequence[int], options: LoadOptions) -> LoadStudy:
    """The load on a server that somebody else started. Raises `Failure`."""
    client = StreamingClient(RunningServer(url))
    try:
        client.connect()
        attempts = [OperationName.COLD, OperationName.REPEAT]
        if _resets(client):
            attempts.append(OperationName.RELOAD)
        asked = LoadPlan(
            levels=options.levels,
            lengths=lengths,
            requests=options.requests,
            attempts=attempts,
            output_tokens=plan.output_tokens,
            template=plan.template,
            seed=options.seed,
            run=secrets.token_hex(4),
        )
        driver = LoadDriver(lambda: connected(url), plan.output_tokens, plan.seed)
        with progress() as shown:
            shown.stage("load")
            told = partial(shown.operation, "server")
            made = [_live_phase(phase) for phase in phases(client, driver, asked, told)]
    except (EngineError, RunError) as error:
        raise Failure(str(error)) from None
    finally:
        client.close()
    return live_load_study(made)


def _resets(client: StreamingClient) -> bool:
    try:
        return client.reset_local_cache().local_reset
    except EngineError:
        return False


def _live_phase(phase: Phase) -> tuple[LoadPhase, list[LoadTimes]]:
    grown = PhaseCounters(_grown(phase, LOCAL_HITS), _grown(phase, EXTERNAL_HITS))
    told = [one.generation.cached_tokens for one in phase.sent.answers if one.generation is not None]
    known = [one for one in told if one is not None]
    all_cached = sum(known) if len(known) == len(phase.sent.answers) else None
    times = []
    for answer in phase.sent.answers:
        generation = answer.generation
        if generation is None or generation.timing is None:
            continue
        timing, tokens = generation.timing, len(answer.ask.token_ids)
        taken = live_taken(tokens, generation.cached_tokens, grown, all_cached)
        cached = generation.cached_tokens
        times.append(
            LoadTimes(
                op=answer.ask.op,
                case=answer.ask.case,
                tokens=tokens,
                output=token_digest(list(generation.token_ids)),
                generated=len(generation.token_ids),
                began_ns=timing.began_ns,
                done_ns=timing.done_ns,
                events=[StreamEvent(at_ns=at_ns, tokens=count) for at_ns, count in timing.events],
                open_at_once=timing.concurrency,
                taken=taken,
                suffix=tokens - (cached or 0) if taken.path is not None else None,
            )
        )
    return phase.rec, times


def _grown(phase: Phase, name: str) -> int | None:
    if name not in phase.before.values or name not in phase.after.values:
        return None
    return int(phase.after.values[name] - phase.before.values[name])


def show_load(study: LoadStudy, options: LoadOptions, out: Path | None, *, as_json: bool) -> None:
    """Print what a load showed, by which seed, and where its records lie."""
    if as_json:
        records = str(out) if out is not None else None
        click.echo(
            json.dumps({"load": study.model_dump(mode="json"), "seed": options.seed, "records": records}, indent=2)
        )
        return
    console = stdout_console()
    print_load(study, console)
    console.print(Text(f"seed {options.seed}"))
    if out is not None:
        console.print(Text(f"records {out} (not sealed)"))
