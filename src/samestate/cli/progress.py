"""Progress of a run on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


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
        self._bar.reset(self._task, description=name, total=None, op="")

    def operation(self, arm: str, done: int, total: int, op: str) -> None:
        self._bar.update(self._task, description=arm, completed=done, total=total, op=op)


class LineProgress:
    """A line a stage and a line a case, with the seconds since the start. A context manager."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._case = ("", "")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def stage(self, name: str) -> None:
        self._say(name)

    def operation(self, arm: str, done: int, total: int, op: str) -> None:
        case = (arm, op.partition(".")[0])
        if case != self._case:
            self._case = case
            self._say(f"{arm}: {case[1]} ({done} of {total} operations)")

    def _say(self, text: str) -> None:
        click.echo(f"{time.monotonic() - self._started:7.1f} s  {text}", err=True)


def progress() -> BarProgress | LineProgress:
    """A bar when stderr is a terminal, else lines."""
    console = Console(stderr=True)
    return BarProgress(console) if console.is_terminal else LineProgress()
