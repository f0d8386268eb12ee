"""Waterfalls as bars: one line a reload, its pieces one after another, all on one axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from samestate.reports.latency import BAR_HEIGHT, CASE_GAP, Axis, axis_to
from samestate.reports.latency_waterfall import Piece, Waterfall


class PieceBar(NamedTuple):
    """A piece on the axis, in parts of it."""

    piece: Piece
    left: float
    width: float


class WaterfallRow(NamedTuple):
    """One reload as bars in one line."""

    y: int
    waterfall: Waterfall
    bars: list[PieceBar]
    whole: float
    """Until the first token, in parts of the axis."""


class WaterfallPlot(NamedTuple):
    """All of them."""

    axis: Axis
    rows: list[WaterfallRow]
    names: list[str]
    """Of the pieces, in order."""
    height: int
    """Pixels."""


def waterfall_plot(found: Sequence[Waterfall]) -> WaterfallPlot:
    """One line a reload, all on one axis."""
    axis = axis_to(max((one.first_token for one in found), default=0.0))
    rows, y = list[WaterfallRow](), 0
    for one in found:
        bars = [
            PieceBar(piece, piece.begins / axis.end, (piece.ends - piece.begins) / axis.end) for piece in one.pieces
        ]
        rows.append(WaterfallRow(y, one, bars, one.first_token / axis.end))
        y += BAR_HEIGHT + CASE_GAP
    names = list(dict.fromkeys(piece.name for one in found for piece in one.pieces))
    return WaterfallPlot(axis, rows, names, y)
