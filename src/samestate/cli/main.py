"""The program ``samestate``: loads everything inside a guard, so that whatever comes is a line and an exit code.

Nothing that takes time is imported at the top: Ctrl-C then would be a traceback.
"""

import os
import sys

FAILED = 2
"""Usage, plan, environment or interruption; 1 would read as a failed run."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line (default: the process's own) and exit.

    SIGTERM and SIGHUP are Ctrl-C: engines are closed and the archive says so.
    """
    given = sys.argv[1:] if arguments is None else arguments
    try:
        import signal

        for number in (signal.SIGTERM, signal.SIGHUP):
            # Whoever started us may have it ignored (nohup).
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, signal.default_int_handler)
        code = _run(given)
        _ignore_signals()
    except KeyboardInterrupt:
        _ignore_signals()
        code = _say("interrupted", given)
    sys.exit(_delivered(code, given))


def _ignore_signals() -> None:
    """All is said: another Ctrl-C would only change the exit code."""
    import signal

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


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
    """As `samestate.cli.failures.Failure` does, which may be what cannot be imported."""
    import json
    from contextlib import suppress

    from samestate.evidence.text import printable

    text = printable(" ".join(line.split()))
    with suppress(OSError):
        print(f"samestate: {text}", file=sys.stderr, flush=True)
    if "--json" in arguments:
        with suppress(OSError):
            print(json.dumps({"error": text}), flush=True)
    return FAILED
