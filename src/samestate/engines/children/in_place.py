"""Load format ``samestate``: every weight is made on the device that uses it, by the recipe beside config.json.

A checkpoint that was never written is read to the model tensor by tensor, under its public names and in full, as vLLM
reads one from files: fusing, sharding over ranks and dtypes are vLLM's own, and two ranks hold shards of one model. The
bits depend on the recipe alone (`samestate.models.recipe`). Nothing passes that a file would not: a parameter with one
element that no tensor reached stops the engine with its name.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override
from vllm.logger import init_logger
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from samestate.models import recipe
from samestate.models.recipe import FACTORS, LOAD_FORMAT, SHIFTS, WORD, RecipeError
from samestate.models.sketch import Sketch
from samestate.models.weights import evenly_spread

CELLS_AT_ONCE = 1 << 24
"""Two buffers of 64 bits a cell."""
NAMED = 4
"""Parameters that a refusal names."""

logger = init_logger(__name__)


def add_to_vllm() -> None:
    """Make the format known to this process's vLLM."""
    register_model_loader(LOAD_FORMAT)(InPlaceLoader)


class InPlaceLoader(BaseModelLoader):
    """Makes a model's weights where they are used."""

    @override
    def download_model(self, model_config: Any) -> None:
        recipe.read(Path(model_config.model))

    @override
    @torch.no_grad()
    def load_weights(self, model: Any, model_config: Any) -> None:
        """Raises `RecipeError`: no recipe, one that does not fit, or a parameter that it does not reach."""
        begun = time.perf_counter()
        folder = Path(model_config.model)
        said = recipe.read(folder)
        parameters = {name: value for name, value in model.named_parameters() if value.is_floating_point()}
        if not parameters:
            raise RecipeError(f"{folder}: the model has no parameters; load format {LOAD_FORMAT} is for plain weights")
        device = next(iter(parameters.values())).device
        for value in parameters.values():
            value.data.fill_(float("nan"))
        tensors = ((sketch.name, made(sketch, said.stream, device)) for sketch in said.followed(folder))
        loaded = model.load_weights(tensors)
        require_whole(parameters, loaded, folder)
        logger.info("Made weights in place in %.1f s (%s)", time.perf_counter() - begun, said.stream)


def require_whole(parameters: dict[str, Any], loaded: set[str] | None, folder: Path) -> None:
    """Raise `RecipeError` unless every element was filled and, where vLLM says what it loaded, nothing is left out."""
    missing = {name for name, value in parameters.items() if bool(torch.isnan(value).any())}
    if loaded is not None:
        missing |= parameters.keys() - loaded
    if missing:
        named = ", ".join(sorted(missing)[:NAMED])
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        raise RecipeError(
            f"{folder}: the recipe fills only a part of this vLLM's model: {named}{more} not whole; "
            "use a vLLM that samestate knows (0.32, 0.33)"
        )


def made(sketch: Sketch, stream: str, device: torch.device | str) -> torch.Tensor:
    """The tensor in bfloat16, shape `sketch.shape`."""
    values = torch.empty(sketch.shape, dtype=torch.bfloat16, device=device)
    if sketch.std:
        _draw(values.view(torch.int16).view(-1), sketch, recipe.keys(stream, sketch.name))
    else:
        values.fill_(sketch.mean)
    for rows, columns, value in sketch.patches:
        values.view(-1, values.shape[-1])[torch.tensor(rows, device=device), columns.start : columns.stop] = value
    return values


def _draw(cells: torch.Tensor, sketch: Sketch, key: tuple[int, int]) -> None:
    """Fill `cells` (int16: bfloat16's bits) with what `recipe.place` chooses for each."""
    spread = torch.tensor(evenly_spread(sketch.std, sketch.mean), dtype=torch.int32)
    # Bits 0x8000 and up are negative as int16.
    table = (spread - ((spread & 0x8000) << 1)).to(torch.int16).to(cells.device)
    for part, first in _parts(cells):
        word = torch.arange(first, first + part.numel(), dtype=torch.int64, device=cells.device)
        for add in key:
            word.add_(add).bitwise_and_(WORD)
            _mix(word)
        part.copy_(table[word.bitwise_right_shift_(16)])


def _mix(word: torch.Tensor) -> None:
    for shift, factor in zip(SHIFTS, FACTORS, strict=False):
        word.bitwise_xor_(word >> shift).mul_(factor).bitwise_and_(WORD)
    word.bitwise_xor_(word >> SHIFTS[-1])


def _parts(cells: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
    for first in range(0, cells.numel(), CELLS_AT_ONCE):
        yield cells[first : first + CELLS_AT_ONCE], first
