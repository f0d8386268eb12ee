"""How commands fail: one line on stderr that says what to do, exit code 2."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

import click

from samestate.evidence.text import printable

LOG_LINES = 20
WRITTEN = {
    "samestate.checks.analyzers": "AnalyzerError",
    "samestate.evidence.archive": "ArchiveError",
    "samestate.models.catalogue": "ModelError",
    "samestate.models.recipe": "RecipeError",
    "samestate.plans.errors": "PlanError",
}
"""Errors whose line was written to be read, by module: to import them takes longer than most commands."""
_AS_JSON = "samestate.as_json"


class Failure(click.ClickException):
    """Usage, plan, environment or interruption: a line, and perhaps the end of a log."""

    exit_code = 2
    as_json = False
    """Say it on stdout too, as ``{"error": …}``: whoever asked for JSON gets JSON."""

    def __init__(self, message: str, log_tail: str = "") -> None:
        super().__init__(printable(" ".join(message.split())))
        self.log_tail = log_tail

    def show(self, file: IO[Any] | None = None) -> None:
        with suppress(OSError):
            click.echo(f"samestate: {self.message}", file=file, err=True)
            for line in self.log_tail.splitlines()[-LOG_LINES:]:
                click.echo(f"    {printable(line)}", file=file, err=True)
        if self.as_json:
            with suppress(OSError):
                click.echo(json.dumps({"error": self.message}))


class Household(click.Group):
    """The root group: whatever a command raises becomes a `Failure`."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        as_json = "--json" in args
        with _failing(info_name or "", as_json):
            made = super().make_context(info_name, args, parent, **extra)
        made.meta[_AS_JSON] = as_json
        return made

    def invoke(self, ctx: click.Context) -> Any:
        with _failing(ctx.command_path, ctx.meta[_AS_JSON]):
            return super().invoke(ctx)


@contextmanager
def _failing(command: str, as_json: bool) -> Iterator[None]:
    try:
        yield
    except (click.exceptions.NoArgsIsHelpError, click.exceptions.Exit):
        raise
    except BaseException as error:
        failure = explain(error, command)
        failure.as_json = as_json
        raise failure from None


def explain(error: BaseException, command: str) -> Failure:
    """The line for `error`: its own where it was written to be read, else a guess at the remedy.

    Raises again what is no failure, and under SAMESTATE_DEBUG what nobody foresaw.
    """
    match error:
        case Failure():
            return error
        case click.UsageError():
            where = error.ctx.command_path if error.ctx else command
            return Failure(f"{error.format_message()} See `{where} --help`.")
        case click.ClickException():
            return Failure(error.format_message())
        case KeyboardInterrupt() | click.Abort():
            return Failure("interrupted")
        case Exception() if _is_written(error):
            return Failure(str(error))
        case BrokenPipeError():
            return Failure("the reader of the output left early")
        case Exception() if os.environ.get("SAMESTATE_DEBUG"):
            raise error
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return Failure(f"no space left{_on(error)}; free some and run again")
        case OSError() if error.strerror:
            return Failure(f"{error.strerror}{_on(error)}; check the path and its permissions")
        case Exception():
            return Failure(f"unexpected {type(error).__name__}: {error}; SAMESTATE_DEBUG=1 shows the traceback")
        case _:
            raise error


def _is_written(error: Exception) -> bool:
    """Whether its line was written to be read. No error is of a module that is not loaded."""
    modules = ((sys.modules.get(module), name) for module, name in WRITTEN.items())
    return any(isinstance(error, getattr(module, name, ())) for module, name in modules)


def _on(error: OSError) -> str:
    return f" on {error.filename}" if error.filename else ""
