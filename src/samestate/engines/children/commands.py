"""What every engine program does with its driver: it answers one command after another."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from pydantic import ValidationError

from samestate.engines.children.protocol import AnyCommand, AnyReply, Close, Failed
from samestate.instruments import recorder

Handlers = Mapping[type, Callable[[Any], AnyReply]]


def answer_commands(read_fd: int, write_fd: int, handlers: Handlers) -> None:
    """Answer commands until `Close`, or until the driver is gone.

    A command that fails, that nobody handles, or whose records could not be written is answered by `Failed`, whose
    message is one line; the traceback goes to stderr.
    """
    decoder = msgspec.json.Decoder(AnyCommand)
    with os.fdopen(read_fd, "rb") as commands, os.fdopen(write_fd, "wb", buffering=0) as replies:
        for line in commands:
            command = decoder.decode(line)
            replies.write(msgspec.json.encode(_reply(command, handlers)) + b"\n")
            if isinstance(command, Close):
                return


def _reply(command: Any, handlers: Handlers) -> AnyReply:
    if type(command) not in handlers:
        return Failed(message=f"this engine knows no {type(command).__name__}")
    try:
        reply = handlers[type(command)](command)
        recorder.flush()
    except Exception as error:
        _print_traceback()
        return Failed(message=f"{type(error).__name__}: {_telling_line(error)}")
    problem = recorder.failure()
    return Failed(message=problem) if problem else reply


def _telling_line(error: Exception) -> str:
    """The first line; pydantic's own only counts the mistakes, and the first of them is what tells."""
    text = str(error)
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        text = f"{place}: {first['msg']}" if place else first["msg"]
    return next(iter(text.strip().splitlines()), "")


def _print_traceback() -> None:
    import traceback

    traceback.print_exc()
    sys.stderr.flush()
