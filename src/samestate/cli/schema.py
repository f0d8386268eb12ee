"""``samestate schema``: JSON Schemas of what samestate reads and writes, for programs of others."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click
import msgspec

from samestate.checks.analyzers import Judgement
from samestate.evidence.records import FORMAT, Line
from samestate.plans.model import Plan

DIALECT = "https://json-schema.org/draft/2020-12/schema"
SCHEMAS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "plan": ("A plan: plan.json of an archive, or a lock", Plan.model_json_schema),
    "records": ("One line of a stream: every .jsonl of an archive", lambda: msgspec.json.schema(Line)),
    "verdict": ("A judgement: verdicts/ANALYZER.json of an archive", Judgement.model_json_schema),
}
"""By name: title, and what makes it."""


def schema_of(name: str) -> dict[str, Any]:
    """The schema called `name`, one of `SCHEMAS`."""
    title, make = SCHEMAS[name]
    made: dict[str, Any] = _portable(make())
    return {"$schema": DIALECT, **made, "title": f"samestate: {title}, format {FORMAT}"}


def _portable(tree: Any) -> Any:
    r"""Patterns as ECMA-262 has them, which JSON Schema asks for: there ``$`` is what ``\Z`` is in Python."""
    if isinstance(tree, dict):
        return {
            key: value.replace(r"\Z", "$") if key == "pattern" and isinstance(value, str) else _portable(value)
            for key, value in tree.items()
        }
    return [_portable(part) for part in tree] if isinstance(tree, list) else tree


@click.command("schema")
@click.argument("name", type=click.Choice(list(SCHEMAS)))
def schema(name: str) -> None:
    """Print the JSON Schema of a plan, of records or of a verdict."""
    click.echo(json.dumps(schema_of(name), indent=2, ensure_ascii=False))
