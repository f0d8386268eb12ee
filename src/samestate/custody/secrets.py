"""What must not stand in a record in clear: values whose name says so. Their hash stands there, so they compare."""

from __future__ import annotations

import json
import re
from typing import Any

from samestate.evidence.canonical import sha256_hex

_ANYWHERE = {"SECRET", "SECRETS", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS", "APIKEY", "APIKEYS"}
_WITHIN = r"(?<=://)[^/@\s]+(?=@)|(?<=[Bb]earer )\S+"
"""Credentials of an address, and of a header."""
_AT_END = {"KEY", "KEYS", "TOKEN", "AUTH"}
"""Last words alone: ``token_ids`` and ``keyfile`` hold none."""


def secret_name(name: str) -> bool:
    """Whether a flag, a setting or a variable of this name holds a secret."""
    apart = re.sub(r"([a-z])([A-Z])", r"\1_\2", name).upper()
    words = [word for word in re.split(r"[^A-Z0-9]+", apart) if word]
    return bool(words) and (words[-1] in _AT_END or not _ANYWHERE.isdisjoint(words))


def hashed(text: str) -> str:
    """What stands for a secret."""
    return f"sha256:{sha256_hex(text.encode(errors='backslashreplace'))}"


def masked_words(words: list[str]) -> list[str]:
    """A command line without its secrets: ``--api-key X Y``, ``--hf-token=X``, ``API_KEY=X``, settings in JSON."""
    made: list[str] = []
    after, first = False, False
    for word in words:
        if after and (first or not word.startswith("-")):
            made.append(hashed(word))
            first = False
            continue
        name, equals, value = word.partition("=")
        after = first = word.startswith("-") and not equals and secret_name(name)
        made.append(f"{name}={hashed(value)}" if equals and secret_name(name) else _inner(name, equals, value))
    return made


def _inner(name: str, equals: str, value: str) -> str:
    """A word with a secret within: JSON, an address with credentials, a header, or a flag's own ``NAME=VALUE``."""
    if name.startswith("{"):
        return _json(f"{name}{equals}{value}")
    if equals and name.startswith("-"):
        return f"{name}={masked_words([value])[0]}"
    return _address(f"{name}{equals}{value}")


def _json(text: str) -> str:
    try:
        tree = json.loads(text) if text.startswith("{") else None
    except (ValueError, RecursionError):
        return text
    shown = masked(tree)
    return text if shown == tree else json.dumps(shown, ensure_ascii=False, sort_keys=True)


def _address(text: str) -> str:
    return re.sub(_WITHIN, lambda found: hashed(found.group()), text)


def masked(tree: Any, *, secret: bool = False) -> Any:
    """Settings without their secrets: every text under a name that says so, and credentials in addresses."""
    if isinstance(tree, dict):
        return {key: masked(value, secret=secret or secret_name(str(key))) for key, value in tree.items()}
    if isinstance(tree, list):
        return [masked(one, secret=secret) for one in tree]
    if not isinstance(tree, str):
        return tree
    return hashed(tree) if secret and tree else _address(tree)
