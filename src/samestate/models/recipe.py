"""Weights that are no file: a recipe beside config.json says how each engine makes them where it needs them.

A folder with a ``weights.json`` is a whole checkpoint of a few kilobytes: its files' SHA-256 cover every value. vLLM
makes them with ``--load-format samestate`` (`samestate.engines.children.in_place`). Beside weights in files somebody
else's ``weights.json`` is no recipe, and one of ours is refused: nobody could say which of the two ran. The file::

    {"format": "samestate-weights/1", "recipe": "qwen3-next", "stream": "qwen3-next-small/0", "sketches": "4f…"}

``sketches`` is the SHA-256 of every tensor's name, shape, spread and set cells (`digest`): a samestate whose recipe has
changed since refuses the folder.

Values are counted, not kept. The value of cell ``n`` of a tensor (row by row) is one of the 65,536 that `weights`
draws from, at the place ``mix(mix(n + first) + second) >> 16``, where ``first`` and ``second`` are the first two
little-endian 32-bit words of SHAKE-256 over ``<stream>/<name>``, sums are modulo 2**32, and `mix` is below. Whole
numbers alone take part, so the bits are the same on every device, with every torch, and on every rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256, shake_256
from pathlib import Path
from typing import Any, NamedTuple

from samestate.models import glm5_next, granite_hybrid, kimi_linear, qwen3_5, qwen3_next
from samestate.models.sketch import Sketch

FILE = "weights.json"
FORMAT = "samestate-weights/1"
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Endings of files that vLLM reads weights from."""
_MOST_BYTES = 1 << 16
"""Of a recipe; ours have a few hundred."""
LOAD_FORMAT = "samestate"
"""vLLM's ``--load-format`` for such folders."""
SKETCHES: dict[str, Callable[[dict[str, Any]], Iterator[Sketch]]] = {
    "glm5-next": glm5_next.weights,
    "granite-hybrid": granite_hybrid.weights,
    "kimi-linear": kimi_linear.weights,
    "qwen3-next": qwen3_next.weights,
    "qwen3.5": qwen3_5.weights,
}
WORD = 0xFFFFFFFF
SHIFTS, FACTORS = (16, 15, 15), (0x21F0AAAD, 0x735A2D97)
"""Of `mix`; factors below 2**31, so that no product leaves 63 bits."""


class RecipeError(ValueError):
    """A folder's recipe cannot be followed; one line with the remedy."""


class Recipe(NamedTuple):
    """What a folder says of its weights."""

    recipe: str
    """A key of `SKETCHES`."""
    stream: str
    sketches: str
    """`digest` of what the recipe says of the folder's config.json."""

    def content(self) -> bytes:
        """The file."""
        return (json.dumps({"format": FORMAT, **self._asdict()}, indent=1) + "\n").encode()

    def followed(self, folder: Path) -> list[Sketch]:
        """Every tensor of this folder's model. Raises `RecipeError` unless they are those that the file speaks of."""
        try:
            config = json.loads((folder / "config.json").read_bytes())
            sketches = list(SKETCHES[self.recipe](config))
        except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
            raise RecipeError(
                f"{folder / FILE}: recipe {self.recipe} cannot be followed with this config.json ({error!r}); "
                "build the folder again with `samestate models build`"
            ) from None
        if digest(sketches) != self.sketches:
            raise RecipeError(
                f"{folder / FILE}: sketches: config.json or the recipe of this samestate is not the one that it was "
                "built with; build the folder again with `samestate models build`"
            )
        return sketches


def read(folder: Path) -> Recipe:
    """The recipe of a folder. Raises `RecipeError`."""
    path = folder / FILE
    try:
        said = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise RecipeError(
            f"{folder}: holds no {FILE}, by which load format {LOAD_FORMAT} makes weights; leave --load-format out"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise RecipeError(f"{path}: cannot be read ({error}); build the folder again") from None
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise RecipeError(f"{path}: format is not {FORMAT}; build the folder again with this samestate")
    texts = all(isinstance(value, str) and value.isascii() for value in said.values())
    if set(said) != {"format", *Recipe._fields} or not texts:
        raise RecipeError(
            f"{path}: must have format, {', '.join(Recipe._fields)} as ASCII text and nothing else; "
            "build the folder again"
        )
    if said["recipe"] not in SKETCHES:
        raise RecipeError(f"{path}: recipe is none of {', '.join(SKETCHES)}; build the folder again")
    return Recipe(said["recipe"], said["stream"], said["sketches"])


def written(name: str, config: dict[str, Any], stream: str) -> Recipe:
    """The recipe `name` for a model of this config."""
    return Recipe(name, stream, digest(SKETCHES[name](config)))


def digest(sketches: Iterable[Sketch]) -> str:
    """SHA-256 of one line of JSON for each tensor: name, shape, spread in hexadecimal, set cells."""
    found = sha256()
    for name, shape, std, mean, patches in sketches:
        cells = [[rows, columns.start, columns.stop, value.hex()] for rows, columns, value in patches]
        found.update(json.dumps([name, shape, std.hex(), mean.hex(), cells]).encode() + b"\n")
    return found.hexdigest()


def load_settings(model: str) -> dict[str, str]:
    """What an engine of `model` must be told so that it has weights: nothing, where they are files.

    Raises `RecipeError` for a folder that has both.
    """
    folder = Path(model)
    if not (folder / FILE).is_file():
        return {}
    files = sorted(path.name for path in folder.iterdir() if path.suffix in WEIGHT_FILES)
    if not files:
        return {"load_format": LOAD_FORMAT}
    if _is_ours(folder / FILE):
        raise RecipeError(f"{folder}: holds weights in files ({files[0]}) and a recipe of weights ({FILE}); remove one")
    return {}


def _is_ours(path: Path) -> bool:
    """Whether it says our format, of whatever version; one that cannot be read is not."""
    if path.stat().st_size > _MOST_BYTES:
        return False
    try:
        said = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(said, dict) and str(said.get("format")).startswith(FORMAT.partition("/")[0])


def load_flags(model: str) -> list[str]:
    """`load_settings` as flags of ``vllm serve``. Raises what it raises."""
    return [word for name, value in load_settings(model).items() for word in ("--" + name.replace("_", "-"), value)]


def keys(stream: str, name: str) -> tuple[int, int]:
    """The two words under which a tensor's cells are counted."""
    digest = shake_256(f"{stream}/{name}".encode()).digest(8)
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def mix(word: int) -> int:
    """Spreads 32 bits over 32 bits, one to one (the "lowbias32" form of a multiply-xorshift hash)."""
    word = (word ^ word >> SHIFTS[0]) * FACTORS[0] & WORD
    word = (word ^ word >> SHIFTS[1]) * FACTORS[1] & WORD
    return word ^ word >> SHIFTS[2]


def place(key: tuple[int, int], cell: int) -> int:
    """Which of the 65,536 values a cell has."""
    return mix(mix(cell + key[0] & WORD) + key[1] & WORD) >> 16
