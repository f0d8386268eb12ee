"""How commands fail: one line on stderr that says what to do, exit code 2."""

from __future__ import annotations

import errno
import os
from typing import IO, Any

import click

from samestate.checks.analyzers import AnalyzerError
from samestate.evidence.archive import ArchiveError
from samestate.models.catalogue import ModelError
from samestate.plans.load import PlanError

LOG_LINES = 20


class Failure(click.ClickException):
    """Usage, plan, environment or interruption: a line, and perhaps the end of a log."""

    exit_code = 2

    def __init__(self, message: str, log_tail: str = "") -> None:
        super().__init__(" ".join(message.split()))
        self.log_tail = log_tail

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"samestate: {self.message}", file=file, err=True)
        for line in self.log_tail.splitlines()[-LOG_LINES:]:
            click.echo(f"    {line}", file=file, err=True)


class Household(click.Group):
    """The root group: whatever a command raises becomes a `Failure`."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx else ctx.command_path
            raise Failure(f"{error.format_message()} See `{command} --help`.") from None
        except (click.ClickException, click.exceptions.Exit):
            raise
        except (KeyboardInterrupt, click.Abort):
            raise Failure("interrupted") from None
        except Exception as error:
            if os.environ.get("SAMESTATE_DEBUG"):
                raise
            raise explain(error) from None


def explain(error: Exception) -> Failure:
    """The line for `error`: its own where it was written to be read, else a guess at the remedy."""
    match error:
        case PlanError() | ArchiveError() | ModelError() | AnalyzerError():
            return Failure(str(error))
        case BrokenPipeError():
            return Failure("the reader of the output left early")
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return Failure(f"no space left{_on(error)}; free some and run again")
        case OSError() if error.strerror:
            return Failure(f"{error.strerror}{_on(error)}; check the path and its permissions")
        case _:
            return Failure(f"unexpected {type(error).__name__}: {error}; SAMESTATE_DEBUG=1 shows the traceback")


def _on(error: OSError) -> str:
    return f" on {error.filename}" if error.filename else ""
