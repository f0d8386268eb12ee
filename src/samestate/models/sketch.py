"""A tensor of a checkpoint before its values are there: name, shape, spread, and the places that are set.

One recipe serves two ends: tiny checkpoints, whose bits lie in a file (`Sketch.weight`), and large ones, whose bits are
made on the device that uses them (`samestate.models.recipe`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

from samestate.models.weights import Weight, bfloat16, constant, drawn


class Patch(NamedTuple):
    """Cells of a matrix that have one value: all of `columns` in all of `rows`. Rows of several are counted on."""

    rows: tuple[int, ...]
    columns: range
    """Without gaps: its step is 1."""
    value: float


class Sketch(NamedTuple):
    """One tensor: its Hugging Face name, its shape, how its values are spread, and what is set after they are drawn."""

    name: str
    shape: tuple[int, ...]
    std: float
    """Standard deviation; 0: `mean` everywhere."""
    mean: float = 0.0
    patches: tuple[Patch, ...] = ()
    """Of a matrix, or of several one upon another; in order, later ones win."""

    def patched(self, rows: Iterable[int], columns: range, value: float) -> Sketch:
        """This one with these cells set to `value`."""
        return self._replace(patches=(*self.patches, Patch(tuple(rows), columns, value)))

    def scaled(self, factor: float) -> Sketch:
        """This one with every value `factor` times as large."""
        patches = tuple(patch._replace(value=patch.value * factor) for patch in self.patches)
        return self._replace(std=self.std * factor, mean=self.mean * factor, patches=patches)

    def weight(self, stream: str) -> Weight:
        """Its values, drawn from ``<stream>/<name>`` as `samestate.models.weights` draws."""
        weight = (
            drawn(stream, self.name, *self.shape, std=self.std, mean=self.mean)
            if self.std
            else constant(self.name, *self.shape, value=self.mean)
        )
        for rows, columns, value in self.patches:
            filled = array("H", [bfloat16(value)]) * len(columns)
            for row in rows:
                first = row * self.shape[-1] + columns.start
                weight.values[first : first + len(columns)] = filled
        return weight
