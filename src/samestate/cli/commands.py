"""All commands of ``samestate``, each loaded when it is asked for: none waits for what another needs."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module

import click

from samestate import __version__
from samestate.cli.failures import Household

COMMANDS = {
    "amend": "amend",
    "archive": "archive",
    "bench": "bench",
    "cache": "cache",
    "case": "case",
    "check": "check",
    "claims": "claims",
    "diff": "diff",
    "doctor": "doctor",
    "explain": "explain",
    "faults": "faults",
    "gate": "gate",
    "matrix": "matrix",
    "models": "models",
    "plan": "plan",
    "probe": "probe",
    "profile": "profile",
    "report": "report",
    "run": "run",
    "schema": "schema",
    "seal": "seal",
    "serve-args": "serve_args",
    "swap": "swap",
    "ticket": "ticket",
    "watch": "watch",
}
"""The module of this room in which a command stands, by its name."""


class Shelf(MutableMapping[str, click.Command]):
    """Commands by name; one that is not taken is not loaded."""

    def __init__(self, modules: dict[str, str]) -> None:
        self._modules = modules
        self._loaded: dict[str, click.Command] = {}

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._loaded:
            module = import_module(f"samestate.cli.{self._modules[name]}")
            [self._loaded[name]] = [
                one for one in vars(module).values() if isinstance(one, click.Command) and one.name == name
            ]
        return self._loaded[name]

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._modules[name], self._loaded[name] = name, command

    def __delitem__(self, name: str) -> None:
        del self._modules[name]
        self._loaded.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._modules

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


@click.group(
    cls=Household,
    commands=Shelf(dict(COMMANDS)),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="samestate")
def samestate() -> None:
    """Prove that an LLM server's reused state is the state it would have computed.

    Exit codes: 0 pass · 1 fail · 2 usage, plan, environment or interrupted · 3 unknown.
    """
