"""The one run behind all marked tests of a session, and the live engine beside it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, get_args

import pytest

from samestate.checks.analyzers import Judgement, judge
from samestate.checks.history import History
from samestate.cli.connectors import Choice
from samestate.cli.failures import LOG_LINES, explain
from samestate.cli.plan import EXTERNAL, frozen
from samestate.cli.run import engine_maker, model_folder, require_free, require_simulated, whole_request
from samestate.engines.base import Engine, EngineError, EngineSpec
from samestate.evidence.archive import Archive
from samestate.lab.run import RunError, run_plan
from samestate.plans.errors import PlanError
from samestate.plans.lengths import parse
from samestate.plans.load import load, with_engine
from samestate.plans.model import Connector, Plan
from samestate.plans.scenarios import CANDIDATE

PLAN = "boundary"
ENGINES = ("vllm", "sim")


class Wanted(NamedTuple):
    """What the session's options say."""

    engine: str
    model: Path | None
    connector: str | None
    serve_args: str
    out: Path | None
    fault: str | None


class Judged(NamedTuple):
    """A run that was judged."""

    archive: Path
    judgement: Judgement
    interval: int
    """C."""


def lengths_of(test: str, mark: pytest.Mark) -> list[str]:
    """The lengths that a mark names; the plan's own where it names none. Raises `pytest.UsageError`."""
    if mark.kwargs:
        raise pytest.UsageError(f"{test}: mark boundary takes lengths only, not {next(iter(mark.kwargs))}=")
    lengths = [str(length) for length in mark.args] or load(PLAN).lengths
    for length in lengths:
        try:
            parse(length)
        except PlanError as error:
            raise pytest.UsageError(f"{test}: mark boundary: {error}") from None
    return lengths


class Reloads:
    """Runs and judges once, when the first test asks; a run that could not be made is not tried again."""

    def __init__(self, wanted: Wanted, lengths: list[str]) -> None:
        self._wanted = wanted
        self._lengths = lengths
        self._judged: Judged | None = None
        self._failure: str | None = None

    @property
    def summary(self) -> str:
        """One line for the end of the session; empty where nothing ran."""
        if self._judged is None:
            return ""
        return f"{self._judged.judgement.verdict}: {self._judged.archive} (samestate check shows why)"

    def run(self, folder: Path) -> Judged:
        """The judged run; its archive lies in `folder` unless the options say where. Fails the test otherwise."""
        if self._judged is None and self._failure is None:
            try:
                self._judged = self._run(self._wanted.out or folder / "archive")
            except Exception as error:
                self._failure = _line(error)
        if self._judged is None:
            pytest.fail(f"samestate could not run: {self._failure}", pytrace=False)
        return self._judged

    def _run(self, out: Path) -> Judged:
        wanted = self._wanted
        plan = _plan(wanted, self._lengths)
        require_free(out)
        request = whole_request(plan, wanted.model, out, wanted.engine)
        run_plan(request._replace(fault=wanted.fault), _Quiet())
        archive = Archive.open(out)
        judgement = judge(archive)
        return Judged(out, judgement, History.read(archive).resolved.checkpoint_interval)


class _Quiet:
    """pytest says itself how it goes on."""

    def stage(self, name: str) -> None:
        pass

    def operation(self, arm: str, done: int, total: int, op: str) -> None:
        pass


def _plan(wanted: Wanted, lengths: list[str] | None) -> Plan:
    """The plan at these lengths, frozen. Raises `PlanError` and `Failure`."""
    if wanted.engine not in ENGINES:
        raise PlanError(f"--samestate-engine: {wanted.engine!r} is none; use one of {', '.join(ENGINES)}")
    try:
        arguments = shlex.split(wanted.serve_args)
    except ValueError as error:
        raise PlanError(f"--samestate-serve-args: {error}; balance its quotes") from None
    plan = load(PLAN)
    plan = with_engine(plan, model=plan.engine.model if wanted.model is None else EXTERNAL, serve_args=arguments)
    plan = Choice(_connector(wanted.connector), None, (), None).put_into(plan)
    if wanted.engine == "sim":
        require_simulated(arguments)
    return frozen(plan.model_copy(update={"lengths": lengths}) if lengths else plan)


def _connector(name: str | None) -> Connector | None:
    known: tuple[Connector, ...] = get_args(Connector)
    if name is None or name in known:
        return next((one for one in known if one == name), None)
    raise PlanError(f"--samestate-connector: {name!r} is none; use one of {', '.join(known)}")


@contextmanager
def live(wanted: Wanted, folder: Path) -> Iterator[Engine]:
    """An engine like the candidate's, started; its streams and its log lie in `folder`. Fails the test otherwise."""
    streams = folder / "engine"
    try:
        plan = _plan(wanted, None)
        arm = next(arm for arm in plan.arms if arm.name == CANDIDATE)
        streams.mkdir()
        spec = EngineSpec(
            arm=arm.name,
            model=model_folder(plan, wanted.model),
            settings=plan.engine.settings,
            serve_args=plan.engine.serve_args,
            connector=arm.connector,
            external_cache_bytes=plan.engine.external_cache_bytes,
            audit_level=plan.instruments.audit_level,
            save_delay_ms=0,
            fault=wanted.fault,
            stream_dir=streams,
            log_path=folder / "engine.log",
        )
        made = engine_maker(wanted.engine, plan)(spec)
        try:
            made.start()
        except BaseException:
            made.close()
            raise
    except Exception as error:
        pytest.fail(f"samestate could not start the engine: {_line(error)}", pytrace=False)
    try:
        yield made
    finally:
        made.close()


def _line(error: Exception) -> str:
    """One line, and the end of the engine's log where there is one."""
    text = str(error if isinstance(error, EngineError | RunError) else explain(error, "pytest"))
    tail = getattr(error, "log_tail", "")
    return "\n".join([text, *(f"    {line}" for line in tail.splitlines()[-LOG_LINES:])])
