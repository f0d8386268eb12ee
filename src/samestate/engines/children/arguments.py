"""``vllm serve`` flags as vLLM's own parsers read them, whole names alone: the engine's, and the server's with more."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from samestate.engines.children.server_child import moved


class BadArguments(Exception):
    """The serve arguments do not parse; one line."""


class _Parser(FlexibleArgumentParser):
    def __init__(self) -> None:
        # A plan knows settings by their whole names; an abbreviated flag would go unnoticed.
        super().__init__(allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise BadArguments(" ".join(message.split()))

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise BadArguments("a flag among them asks for help; leave it out")


def engine_arguments(model: str, arguments: Sequence[str], defaults: Mapping[str, Any] | None = None) -> Namespace:
    """As an engine that no server stands before reads them. Raises `BadArguments`."""
    parser = EngineArgs.add_cli_args(_Parser())
    parser.set_defaults(**defaults or {})
    return parser.parse_args(["--model", model, *arguments])


def server_arguments(model: str, arguments: Sequence[str]) -> Namespace:
    """As ``vllm serve`` reads them, flags of the frontend among them. Raises `BadArguments`."""
    # The model stands where `vllm serve` has it, so that no value of an unknown flag is taken for one.
    args = moved("make_arg_parser")(_Parser()).parse_args([model, *arguments])
    args.model = args.model_tag
    return args
