"""``samestate models``: tiny deterministic checkpoints of real architectures."""

from __future__ import annotations

import json
from pathlib import Path

import click

from samestate.cli.failures import Failure
from samestate.models import catalogue
from samestate.plans.errors import nearest


@click.group("models")
def models() -> None:
    """Tiny deterministic checkpoints of real architectures."""


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def list_models(as_json: bool) -> None:
    """List the models that can be built."""
    names = catalogue.names()
    click.echo(json.dumps(names) if as_json else "\n".join(names))


@models.command("build")
@click.argument("name")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the model's identity as JSON.")
def build_model(name: str, folder: Path, as_json: bool) -> None:
    """Build model NAME into DIR, byte for byte the same everywhere."""
    known = catalogue.names()
    if name not in known:
        raise Failure(f"no model {name!r}{nearest(name, known)}; known: {', '.join(known)}")
    identity = catalogue.identity(catalogue.ensure(name, folder))
    if as_json:
        click.echo(json.dumps(identity.model_dump(mode="json") | {"folder": str(folder)}, indent=2))
        return
    click.echo(f"{name} in {folder}\nsha256 {identity.sha256} over {len(identity.files)} files")
