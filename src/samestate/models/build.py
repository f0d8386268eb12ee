"""Build a tiny checkpoint of a real architecture: ``python -m samestate.models.build NAME DIR [--seed 0]``.

The bytes depend on name and seed alone (`weights`). `qwen3_next_tiny`, `glm5_next_tiny` and `kimi_linear_tiny` say how
those hybrids are made, `marker_weights` and `scripts` how the dense pair `qwen3-tiny` and `qwen3-tiny-draft`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from samestate.models import glm5_next_tiny, kimi_linear_tiny, marker_weights, qwen3_next_tiny, scripts
from samestate.models.tokenizer import tokenizer_files
from samestate.models.weights import Weight, safetensors


class Recipe(NamedTuple):
    """How a model's weights come from its config and stream, and the words its tokenizer has beyond the common ones."""

    weights: Callable[[dict[str, Any], str], Iterator[Weight]]
    controls: tuple[str, ...] = ()
    words: tuple[str, ...] = ()


_SCRIPTED = (scripts.CONTROLS, scripts.WORDS)
RECIPES = {
    "glm5-next-tiny": Recipe(glm5_next_tiny.weights),
    "kimi-linear-tiny": Recipe(kimi_linear_tiny.weights),
    "qwen3-next-tiny": Recipe(qwen3_next_tiny.weights),
    "qwen3-tiny": Recipe(marker_weights.target, *_SCRIPTED),
    "qwen3-tiny-draft": Recipe(marker_weights.draft, *_SCRIPTED),
}
NAMES = tuple(RECIPES)


def build(name: str, folder: Path, seed: int = 0) -> None:
    """Write the checkpoint into `folder`, which must be absent or empty; all of it or nothing.

    Raises `ValueError` for an unknown name and for weights that would not do what they should, `FileExistsError` for a
    folder with something in it, and `OSError`.
    """
    if name not in NAMES:
        raise ValueError(f"no model is called {name!r}: choose one of {', '.join(NAMES)}")
    folder = folder.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is not an empty folder: choose another or empty it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for file, content in _files(name, seed).items():
            (scratch / file).write_bytes(content)
        scratch.chmod(0o755)
        scratch.rename(folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _files(name: str, seed: int) -> dict[str, bytes]:
    data = resources.files("samestate.models") / "data" / name
    recipe = RECIPES[name]
    config = (data / "config.json").read_bytes()
    template = (data / "chat_template.jinja").read_text(encoding="utf-8")
    return {
        "config.json": config,
        "generation_config.json": (data / "generation_config.json").read_bytes(),
        **tokenizer_files(template, recipe.controls, recipe.words),
        "model.safetensors": safetensors(recipe.weights(json.loads(config), f"{name}/{seed}")),
    }


def main(arguments: list[str] | None = None) -> int:
    """The program; the exit code is 2 for bad usage and for a folder that cannot be written."""
    parser = argparse.ArgumentParser(prog="python -m samestate.models.build", description="Build a tiny checkpoint.")
    parser.add_argument("name", metavar="NAME", help=f"one of: {', '.join(NAMES)}")
    parser.add_argument("folder", metavar="DIR", type=Path, help="where to build; absent or empty")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        build(options.name, options.folder, options.seed)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
