"""``samestate models``: small deterministic checkpoints of real architectures."""

from __future__ import annotations

import json
from pathlib import Path

import click

from samestate.cli.failures import Failure
from samestate.models import catalogue
from samestate.models.recipe import load_flags
from samestate.plans.errors import nearest


@click.group("models")
def models() -> None:
    """Small deterministic checkpoints of real architectures."""


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
    """Build model NAME into DIR, byte for byte the same everywhere.

    Models called small are for GPUs of data centres. They hold a recipe in place of weights, which vLLM follows when it
    loads them: plans know that, a server that you start yourself must be told (--load-format samestate).
    """
    known = catalogue.names()
    if name not in known:
        raise Failure(f"no model {name!r}{nearest(name, known)}; known: {', '.join(known)}")
    identity = catalogue.identity(catalogue.ensure(name, folder))
    flags = load_flags(str(folder))
    if as_json:
        told = {"folder": str(folder), "serve_args": flags}
        click.echo(json.dumps(identity.model_dump(mode="json") | told, indent=2))
        return
    click.echo(f"{name} in {folder}\nsha256 {identity.sha256} over {len(identity.files)} files")
    if flags:
        click.echo(f"its weights are made in place: start vLLM, with samestate beside it, with {' '.join(flags)}")
