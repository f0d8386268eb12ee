"""Where a model's config.json comes from: a folder, a tiny model of the catalogue, or a config that is shipped.

Nothing is downloaded. Shipped configs lie in ``data/configs``, each with a line that says where its values are public.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from samestate.models import catalogue
from samestate.models.fields import ConfigError

_MOST_BYTES = 2**24
_DATA = files("samestate.models").joinpath("data")


class ModelConfig(NamedTuple):
    """A model's config.json, read."""

    name: str
    config: dict[str, Any]
    source: str
    """Where it was found, or where its values are public."""
    folder: Path | None
    """The user's own folder; None for what is shipped."""


def shipped() -> dict[str, list[str]]:
    """Configs that come with samestate: short name, and names of the checkpoints that have it."""
    found = sorted(_DATA.joinpath("configs").iterdir(), key=lambda entry: entry.name)
    return {entry.name.removesuffix(".json"): json.loads(entry.read_bytes())["ids"] for entry in found}


def model_config(model: str) -> ModelConfig:
    """The config of a folder, of a tiny model by name, or a shipped one by name or checkpoint. Raises `ConfigError`."""
    folder = Path(model)
    if folder.is_dir():
        return ModelConfig(folder.resolve().name, _read(folder / "config.json"), str(folder / "config.json"), folder)
    if model in catalogue.names():
        config = json.loads(_DATA.joinpath(model, "config.json").read_bytes())
        return ModelConfig(model, config, "shipped with samestate", None)
    for name, checkpoints in shipped().items():
        if model.lower() in (name, *(checkpoint.lower() for checkpoint in checkpoints)):
            entry = json.loads(_DATA.joinpath("configs", f"{name}.json").read_bytes())
            return ModelConfig(name, entry["config"], entry["source"], None)
    if folder.is_file():
        raise ConfigError(f"--model: {model} is a file; name the folder that holds config.json")
    known = ", ".join([*catalogue.names(), *shipped()])
    raise ConfigError(
        f"--model: no folder {model}, and no config of that name here ({known}); name a folder with a config.json"
    )


def _read(path: Path) -> dict[str, Any]:
    if path.exists() and not path.is_file():
        raise ConfigError(f"--model: {path} is no regular file; copy it again from its publisher")
    if path.exists() and path.stat().st_size > _MOST_BYTES:
        raise ConfigError(f"--model: {path} has more than {_MOST_BYTES:,} bytes; copy it again from its publisher")
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"--model: {path.parent} holds no config.json; name a checkpoint's folder") from None
    except OSError as error:
        raise ConfigError(f"--model: {path} cannot be read ({error.strerror}); check its permissions") from None
    except RecursionError:
        raise ConfigError(f"--model: {path} is nested too deep; copy it again from its publisher") from None
    except ValueError as error:
        raise ConfigError(f"--model: {path} is no JSON ({error}); copy it again from its publisher") from None
    if not isinstance(config, dict):
        raise ConfigError(f"--model: {path} is no JSON object; copy it again from its publisher")
    return config
