"""``samestate matrix`` without a subcommand: models × connectors × releases × plans, each a run of its own."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

import click

from samestate.checks.base import Verdict
from samestate.cli.connectors import Choice
from samestate.cli.failures import Failure
from samestate.cli.judging import judge_archive
from samestate.cli.matrix_table import Cell
from samestate.engines.lmcache_server import PACKAGE
from samestate.lab.errors import RunError
from samestate.lab.executors import SEALED, Done, Planned, Share, here, over_ray
from samestate.plans.load import load
from samestate.plans.model import Connector, Plan

T = TypeVar("T")
LOCAL = "file://"
PLAN_FILE = "plan-of-this-cell.yaml"


class Asked(NamedTuple):
    """What the command line says. Empty: as the plan says."""

    models: Sequence[str]
    connectors: Sequence[Connector]
    releases: Sequence[str]
    plans: Sequence[str]
    engine: str
    serve_args: str | None
    fault: str | None


class Planning(NamedTuple):
    """A cell before it runs."""

    label: str
    plan: str
    facts: dict[str, str | None]
    run: Planned


class Executor(NamedTuple):
    """Where runs happen."""

    name: str
    """``here`` or ``ray``."""
    address: str | None
    share: Share


def is_url(out: str) -> bool:
    """Whether archives go to an object store, and not to a folder."""
    return "://" in out and not out.startswith(LOCAL)


def place(out: str) -> str:
    """A URL as it is; a folder, also as ``file://…``, as an absolute path. Raises `Failure` where it is not free."""
    if not is_url(out):
        folder = Path(out.removeprefix(LOCAL)).absolute()
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise Failure(f"--out: {folder} is not empty; name another folder, archives are never overwritten")
        return str(folder)
    with _store(out) as (files, root):
        if files.exists(root) and files.find(root):
            raise Failure(f"--out: {out} is not empty; name another place, archives are never overwritten")
    return out.rstrip("/")


def plan_cells(asked: Asked, out: str) -> list[Planning]:
    """All of them, in order. Raises `Failure` and `PlanError` for what is known here to be wrong."""
    if asked.releases and PACKAGE not in asked.connectors:
        raise Failure("--release: is LMCache's; add --connector lmcache, or leave it out")
    try:
        shlex.split(asked.serve_args or "")
    except ValueError as error:
        raise Failure(f"--serve-args: {error}; put the whole string in quotes and balance those in it") from None
    plans = {name: _plan(name) for name in dict.fromkeys(asked.plans or ["boundary"])}
    pairs = [
        (connector, release)
        for connector in _each(asked.connectors)
        for release in (_each(asked.releases) if connector == PACKAGE else [None])
    ]
    cells = []
    chosen = product(_each(asked.models), pairs, plans)
    for number, (model, (connector, release), name) in enumerate(chosen, start=1):
        Choice(connector, release, (), None).put_into(plans[name])
        parts = [model and Path(model).name, connector, release]
        label = " ".join(part for part in parts if part) or "as planned"
        archive = f"{out}/{number}-{'-'.join(part for part in [*parts, Path(name).stem] if part)}"
        facts = {"model": model, "connector": connector, "lmcache_version": release}
        cells.append(Planning(label, name, facts, _planned(asked, model, connector, release, name, archive)))
    return cells


def _each(given: Sequence[T]) -> Sequence[T | None]:
    """Each once; where none is said, the plan's own."""
    return list(dict.fromkeys(given)) or [None]


def _plan(name: str) -> Plan:
    plan = load(name)
    if plan.analyzer.source_sha256 is not None:
        raise Failure(f"{name}: the plan is frozen, and each cell makes another plan of it; name its YAML")
    return plan


def _planned(
    asked: Asked, model: str | None, connector: str | None, release: str | None, name: str, archive: str
) -> Planned:
    files = {PLAN_FILE: Path(name).read_text(encoding="utf-8")} if Path(name).is_file() else {}
    arguments = [PLAN_FILE if files else name, "--engine", asked.engine]
    folder = model and (str(Path(model).absolute()) if Path(model).is_dir() else model)
    options = {
        "--model": folder,
        "--connector": connector,
        "--lmcache-version": release,
        "--serve-args": asked.serve_args,
        "--fault": asked.fault,
    }
    for option, value in options.items():
        if value is not None:
            arguments += [f"{option}={value}"]
    return Planned(arguments, files, archive)


def run_cells(cells: Sequence[Planning], executor: Executor) -> list[Cell]:
    """Run and judge all; rows in the order of `cells`. Raises `Failure` where nothing can run."""
    runs = [cell.run for cell in cells]
    found = dict[int, Cell]()
    try:
        ends = here(runs) if executor.name == "here" else over_ray(runs, executor.address, executor.share)
        for done in ends:
            cell = cells[done.number]
            found[done.number] = row = _judged(cell, done)
            verdict = row.judgement.verdict.value if row.judgement else row.outcome
            said = f"{len(found)}/{len(cells)} {cell.label}, {cell.plan}: {verdict}"
            click.echo(said if row.error is None else f"{said}: {row.error}", err=True)
    except RunError as error:
        raise Failure(str(error)) from None
    return [found[number] for number in range(len(cells))]


def _judged(cell: Planning, done: Done) -> Cell:
    """One judge for all, this one, wherever a run was."""
    facts = {**cell.facts, "node": done.node}
    row = Cell(cell.label, cell.plan, cell.run.archive, None, done.reason, done.outcome, facts)
    if done.outcome != SEALED:
        return row
    try:
        with _fetched(cell.run.archive) as root:
            if not root.is_dir():
                error = f"node {done.node} sealed it there, and it is not here; name a folder that all nodes share"
                return row._replace(error=error, outcome=Verdict.UNKNOWN.value)
            return row._replace(judgement=judge_archive(root, None))
    except Exception as error:  # a driver raises whatever it likes
        text = " ".join(str(error).split())
        return row._replace(error=f"cannot be read: {type(error).__name__}: {text}", outcome=Verdict.UNKNOWN.value)


@contextmanager
def _fetched(archive: str) -> Iterator[Path]:
    """The archive as a folder here."""
    if not is_url(archive):
        yield Path(archive)
        return
    with TemporaryDirectory(prefix="samestate-matrix-") as scratch, _store(archive) as (files, root):
        for name in files.find(root):
            target = Path(scratch, "archive", name[len(root) :].lstrip("/"))
            target.parent.mkdir(parents=True, exist_ok=True)
            files.get_file(name, str(target))
        yield Path(scratch, "archive")


@contextmanager
def _store(url: str) -> Iterator[tuple[Any, str]]:
    if find_spec("fsspec") is None:
        raise Failure("--out: a URL needs fsspec; pip install 'samestate[object]', or name a folder")
    import fsspec

    try:
        files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        yield files, str(root).rstrip("/")
    except (ImportError, ValueError, OSError) as error:
        raise Failure(f"--out: {url} cannot be used ({' '.join(str(error).split())}); see fsspec's driver") from None
