"""``--api-key-env``: a key is read from a variable, so that no list of processes and no history shows it."""

from __future__ import annotations

import os
import re

from samestate.cli.failures import Failure

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def read_key(variable: str | None) -> str | None:
    """The key that `variable` holds, without space around it; None without a variable.

    Raises `Failure`, which never shows what may be a key.
    """
    if variable is None:
        return None
    if not _NAME.fullmatch(variable):
        raise Failure("--api-key-env: takes the name of a variable, not the key; export the key, and name its variable")
    value = os.environ.get(variable, "").strip()
    if not value:
        raise Failure(f"--api-key-env: {variable} is not set, or empty; export it, or name another variable")
    if not (value.isascii() and value.isprintable()):
        raise Failure(
            f"--api-key-env: {variable} holds more than a key: a line break, or a character that is not printable "
            "ASCII; export the key alone"
        )
    return value
