"""Sizes as people say them."""

from __future__ import annotations

import re

from samestate.cli.failures import Failure

_MOST = 2**53
"""Bytes; what JSON's readers keep exactly."""
_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def size(option: str, text: str) -> int:
    """Bytes: ``8GiB``, ``512MiB``, ``1073741824``. Raises `Failure`, which names the option."""
    found = re.fullmatch(r"([1-9][0-9]{0,17})(|KiB|MiB|GiB|TiB)", text)
    if found is None:
        raise Failure(f"{option}: {text!r} is no size; say it as 8GiB, 512MiB or a number of bytes")
    count = int(found[1]) * _UNITS[found[2]]
    if count > _MOST:
        raise Failure(f"{option}: {text!r} is more than any machine has; say it as 8GiB or 512MiB")
    return count
