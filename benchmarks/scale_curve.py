"""A curve as SVG, logarithmic both ways, from 0.1 to 10."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Series(NamedTuple):
    """What is drawn over the same xs."""

    name: str
    colour: str
    ys: Sequence[float]


def curve(x_name: str, xs: Sequence[int], series: Sequence[Series]) -> str:
    """`series` over `xs`, which are above 0; a y outside 0.1 to 10 stands on the edge."""
    width, height, left, top = 640, 360, 70, 30
    low_x, high_x, low_y, high_y = math.log10(min(xs)), math.log10(max(xs)), -1.0, 1.0
    span = max(high_x - low_x, 1e-9)

    def at(x: float, y: float) -> tuple[float, float]:
        inside = min(max(math.log10(y), low_y), high_y)
        return (
            left + (math.log10(x) - low_x) / span * (width - left - 30),
            top + (high_y - inside) / (high_y - low_y) * (height - top - 60),
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for value in (0.1, 0.2, 0.5, 1, 2, 5, 10):
        _, y = at(max(xs), value)
        parts.append(f'<line x1="{left}" x2="{width - 30}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for x_value in xs:
        x, _ = at(x_value, 1)
        parts.append(f'<text x="{x:.1f}" y="{height - 38}" text-anchor="middle">{x_value:,}</text>')
    parts.append(f'<text x="{width / 2}" y="{height - 15}" text-anchor="middle">{x_name}</text>')
    for index, (name, colour, ys) in enumerate(series):
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(x, y) for x, y in zip(xs, ys, strict=True)))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
            for x, y in (at(x, y) for x, y in zip(xs, ys, strict=True))
        ]
        parts.append(f'<text x="{left + 10}" y="{top + 4 + 16 * index}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
