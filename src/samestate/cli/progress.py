"""Progress of a run on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from types import TracebackType
from typing import Self

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

STILL_SECONDS = 10.0
"""How often plain lines say that an engine is still starting."""
_START = ": start"


def said(stage: str) -> str:
    """A stage in words: ``control: start`` is an engine that starts, which takes longest without a sign of life."""
    return f"{stage.removesuffix(_START)}: starting engine" if stage.endswith(_START) else stage


class BarProgress:
    """One line: what stage, how far, how long. A context manager."""

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[op]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=None, op="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def stage(self, name: str) -> None:
        self._bar.reset(self._task, description=said(name), total=None, op="")

    def operation(self, arm: str, done: int, total: int, op: str) -> None:
        self._bar.update(self._task, description=arm, completed=done, total=total, op=op)


class LineProgress:
    """A line a stage and a line a case, with the seconds since the start. A context manager.

    While an engine starts, a further line every `still` seconds.
    """

    def __init__(self, still: float = STILL_SECONDS) -> None:
        self._started = time.monotonic()
        self._case = ("", "")
        self._still = still
        self._over = Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()

    def stage(self, name: str) -> None:
        self._over.set()
        self._say(said(name))
        if name.endswith(_START):
            self._over = Event()
            Thread(target=self._repeat, args=(said(name), self._over), daemon=True).start()

    def _repeat(self, text: str, over: Event) -> None:
        began = time.monotonic()
        while not over.wait(self._still):
            self._say(f"{text}, {time.monotonic() - began:.0f} s")

    def operation(self, arm: str, done: int, total: int, op: str) -> None:
        case = (arm, op.partition(".")[0])
        if case != self._case:
            self._case = case
            self._say(f"{arm}: {case[1]} ({done} of {total} operations)")

    def _say(self, text: str) -> None:
        click.echo(f"{time.monotonic() - self._started:7.1f} s  {text}", err=True)


@contextmanager
def bytes_read(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar over `total` bytes on a terminal's stderr, nothing elsewhere; what it gives is told of every byte read."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=30), DownloadColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda size: bar.advance(task, size)


def progress() -> BarProgress | LineProgress:
    """A bar when stderr is a terminal, else lines."""
    console = Console(stderr=True)
    return BarProgress(console) if console.is_terminal else LineProgress()
