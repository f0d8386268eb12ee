"""The program ``samestate``: loads the commands inside a guard, so that whatever comes is a line and an exit code."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

FAILED = 2
"""Usage, plan, environment or interruption; 1 would read as a failed run."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line (default: the process's own) and exit.

    SIGTERM and SIGHUP are Ctrl-C: engines are closed and the archive says so.
    """
    given = sys.argv[1:] if arguments is None else arguments
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            # Whoever started us may have it ignored (nohup).
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, signal.default_int_handler)
        code = _run(given)
    except KeyboardInterrupt:
        code = _say("interrupted", given)
    sys.exit(_delivered(code, given))


def _run(arguments: list[str]) -> int:
    try:
        from samestate.cli.commands import samestate
        from samestate.cli.encoding import write_anything

        write_anything()
        samestate.main(arguments, prog_name="samestate")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED
    except Exception as error:
        if os.environ.get("SAMESTATE_DEBUG"):
            raise
        return _say(f"unexpected {type(error).__name__}: {error}; SAMESTATE_DEBUG=1 shows the traceback", arguments)


def _delivered(code: int, arguments: list[str]) -> int:
    """The exit code, once all output is out: a verdict that nobody could read is none."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError as error:
            # Else the interpreter tries again when it ends, and says so in its own words.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if code != FAILED and stream is sys.stdout:
                code = _say(f"the output cannot be written: {error.strerror}", arguments)
    return code


def _say(line: str, arguments: list[str]) -> int:
    from samestate.cli.failures import Failure

    failure = Failure(line)
    failure.as_json = "--json" in arguments
    with suppress(OSError):
        failure.show()
    return FAILED
