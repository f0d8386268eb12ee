"""A plan file's bytes as a tree: JSON or YAML, a few KiB of plain text, and nothing that surprises."""

from __future__ import annotations

import json
from collections.abc import Hashable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from samestate.evidence.text import is_control
from samestate.plans.errors import PlanError, quoted

MAX_BYTES = 1 << 18
"""A hundred times what a plan needs."""


def read_bytes(path: Path) -> bytes:
    """The file's bytes. Raises `PlanError` when it cannot be read or is too large for a plan."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        remedy = "check the path" if isinstance(error, FileNotFoundError) else "check the file's permissions"
        raise PlanError(f"{path}: cannot be read ({error.strerror}); {remedy}") from None
    if len(data) > MAX_BYTES:
        raise PlanError(f"{path}: is larger than {MAX_BYTES // 1024} KiB, so it is no plan; name a plan file")
    return data


def parse(data: bytes) -> Any:
    """The tree in `data`. Raises `PlanError`; in every text and key nothing is left that a terminal would obey."""
    tree = _parse(data)
    _check_text(tree)
    return tree


def to_json(tree: Any) -> str:
    """JSON of a tree from `parse`. Raises `PlanError`."""
    try:
        # A date or another YAML type becomes text; the plan model says which field expected what.
        return json.dumps(tree, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise PlanError(f"the file: holds what JSON cannot ({error}); use text, numbers, lists and mappings") from None


def _parse(data: bytes) -> Any:
    """JSON where it is JSON: to YAML 1.1, ``1e-7`` is a text."""
    if data.lstrip().startswith(b"{"):
        # ValueError: no JSON, no UTF-8, or an integer of thousands of digits.
        with suppress(ValueError, RecursionError):
            return json.loads(data, object_pairs_hook=_unique)
    return _parse_yaml(data)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise PlanError(f"{twice}: is there twice; remove one")
    return tree


def _parse_yaml(data: bytes) -> Any:
    try:
        return yaml.load(data, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}" if mark else "the file"
        raise PlanError(f"{line}: not valid YAML ({error.problem or error.context}); correct it") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PlanError(f"the file: not valid YAML ({reason}); correct it") from None


class _Loader(yaml.SafeLoader):
    """YAML without silent surprises: a key said twice is an error, and nothing stands for something else."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "anchor", None) is not None:
            # Nine lines of them can stand for a billion items.
            raise yaml.composer.ComposerError(None, None, "a plan has no anchors and aliases", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be text", key.start_mark)
            if key.value in seen:
                problem = f"{quoted(key.value)} is there twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _check_text(tree: Any) -> None:
    waiting: list[tuple[str, Any]] = [("", tree)]
    while waiting:
        path, value = waiting.pop()
        match value:
            case dict():
                for key, item in value.items():
                    waiting += [(path or "the plan", key), (f"{path}.{key}".removeprefix("."), item)]
            case list():
                waiting += [(f"{path}[{index}]", item) for index, item in enumerate(value)]
            case str():
                if control := next(filter(is_control, value), None):
                    raise PlanError(f"{path}: holds the control character U+{ord(control):04X}; remove it")
