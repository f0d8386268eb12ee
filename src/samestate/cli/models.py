"""``samestate models``: small deterministic checkpoints of real architectures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import click
from rich.table import Table

from samestate.cli.failures import Failure
from samestate.cli.judging import stdout_console
from samestate.lab.doctor import Request, examine
from samestate.models import catalogue
from samestate.models.recipe import load_flags
from samestate.plans.errors import nearest

_COLUMNS: dict[str, Literal["left", "right"]] = {
    "model": "left",
    "parameters": "right",
    "bytes": "right",
    "C CUDA": "right",
    "C CPU": "right",
    "layers": "left",
}


@click.group("models")
def models() -> None:
    """Small deterministic checkpoints of real architectures."""


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def list_models(as_json: bool) -> None:
    """List the models that can be built, how large they are, and the C that `samestate doctor` calculates for them.

    C is for one rank on each platform; none where vLLM has no prefix caching for the model there.
    """
    known = [_facts(name) for name in catalogue.names()]
    if as_json:
        click.echo(json.dumps(known, indent=2))
        return
    table = Table(box=None, pad_edge=False, header_style="")
    for heading, justify in _COLUMNS.items():
        table.add_column(heading, justify=justify, no_wrap=heading != "layers")
    for facts in known:
        c = [f"{value:,}" if value else "–" for value in facts["interval"].values()]
        layers = ", ".join(f"{count} {kind}" for kind, count in facts["layers"].items())
        mark = "*" if facts["recipe"] else ""
        table.add_row(facts["name"], f"{facts['parameters']:,}", f"{facts['bytes']:,}{mark}", *c, layers)
    stdout_console().print(table)
    click.echo("* a recipe: weights are made on the device when they are loaded")


def _facts(name: str) -> dict[str, Any]:
    """Of a model that need not be there. Layers are counted as `samestate doctor` does: an indexer is one too."""
    reports = {
        platform: examine(Request(name, platform=platform), release=lambda: None) for platform in ("cuda", "cpu")
    }
    size = catalogue.SIZES[name]
    return {
        "name": name,
        "parameters": size.parameters,
        "bytes": size.file_bytes,
        "recipe": catalogue.has_recipe(name),
        "interval": {platform: report.interval for platform, report in reports.items()},
        "layers": {pages.kind: pages.layers for pages in reports["cuda"].pages},
    }


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
