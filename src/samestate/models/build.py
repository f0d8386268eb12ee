"""Build a small checkpoint of a real architecture: ``python -m samestate.models.build NAME DIR [--seed 0]``.

The bytes depend on name and seed alone (`weights`). `qwen3_next`, `qwen3_5`, `granite_hybrid`, `glm5_next` and
`kimi_linear` say how those hybrids are made, `marker_weights` and `scripts` how the dense pair `qwen3-tiny` and
`qwen3-tiny-draft`. Models called small are for data-centre GPUs: in place of weights they have a recipe (`recipe`), and
the engine makes the weights.
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

from samestate.models import marker_weights, recipe, scripts
from samestate.models.tokenizer import LONGEST, tokenizer_files
from samestate.models.weights import Weight, safetensors


class Plan(NamedTuple):
    """What says a model's weights, by file and stream, and the words its tokenizer has beyond the common ones."""

    file: str
    content: Callable[[dict[str, Any], str], bytes]
    """From config.json and the stream."""
    controls: tuple[str, ...] = ()
    words: tuple[str, ...] = ()


def _in_file(weights: Callable[[dict[str, Any], str], Iterator[Weight]], *words: tuple[str, ...]) -> Plan:
    return Plan("model.safetensors", lambda config, stream: safetensors(weights(config, stream)), *words)


def _drawn(name: str) -> Plan:
    sketches = recipe.SKETCHES[name]
    return _in_file(lambda config, stream: (sketch.weight(stream) for sketch in sketches(config)))


def _in_place(name: str) -> Plan:
    return Plan(recipe.FILE, lambda config, stream: recipe.written(name, config, stream).content())


_SCRIPTED = (scripts.CONTROLS, scripts.WORDS)
PLANS = {
    "glm5-next-small": _in_place("glm5-next"),
    "glm5-next-tiny": _drawn("glm5-next"),
    "granite-hybrid-tiny": _drawn("granite-hybrid"),
    "kimi-linear-tiny": _drawn("kimi-linear"),
    "qwen3-next-small": _in_place("qwen3-next"),
    "qwen3-next-tiny": _drawn("qwen3-next"),
    "qwen3-tiny": _in_file(marker_weights.target, *_SCRIPTED),
    "qwen3-tiny-draft": _in_file(marker_weights.draft, *_SCRIPTED),
    "qwen3.5-tiny": _drawn("qwen3.5"),
}
NAMES = tuple(PLANS)


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
    plan = PLANS[name]
    content = (data / "config.json").read_bytes()
    config = json.loads(content)
    # Configs of models with a vision tower keep the language model's fields apart.
    longest = config.get("text_config", config).get("max_position_embeddings", 0)
    template = (data / "chat_template.jinja").read_text(encoding="utf-8")
    return {
        "config.json": content,
        "generation_config.json": (data / "generation_config.json").read_bytes(),
        **tokenizer_files(template, plan.controls, plan.words, max(LONGEST, longest)),
        plan.file: plan.content(config, f"{name}/{seed}"),
    }


def main(arguments: list[str] | None = None) -> int:
    """The program; the exit code is 2 for bad usage and for a folder that cannot be written."""
    parser = argparse.ArgumentParser(prog="python -m samestate.models.build", description="Build a small checkpoint.")
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
