"""Times to a first token by the path that was really taken, as bars on one axis. A path that nothing took has none."""

from __future__ import annotations

from typing import NamedTuple

from samestate.checks.latency_study import UNAVAILABLE, Study
from samestate.reports.latency import BAR_HEIGHT, CASE_GAP, Axis, axis_to
from samestate.reports.latency_tables import seconds

MS_PER_S = 1000.0


class PathBar(NamedTuple):
    """One path to one length."""

    y: int
    """Of its top, pixels."""
    length: str
    """``N 3,584`` before the first bar of a length; else empty."""
    path: str
    whole: float
    """In parts of the axis; 0 without a time."""
    text: str
    """``0.110 s, suffix 1,791``, or ``unavailable``."""


class PathPlot(NamedTuple):
    """All bars."""

    axis: Axis
    bars: list[PathBar]
    height: int
    """Pixels."""


def path_plot(study: Study) -> PathPlot:
    """Medians over all requests that took a path to a length, whatever was attempted."""
    longest = max((one.first_token or 0.0 for one in study.paths), default=0.0) * MS_PER_S
    axis = axis_to(longest)
    bars, y, before = list[PathBar](), 0, None
    for one in study.paths:
        if before not in (None, one.tokens):
            y += CASE_GAP
        suffix = ", ".join(f"{value:,}" for value in one.suffix)
        timed = one.first_token is not None
        text = f"{seconds(one.first_token)} s, suffix {suffix}" if timed else UNAVAILABLE
        length = f"N {one.tokens:,}" if before != one.tokens else ""
        bars.append(PathBar(y, length, one.path, (one.first_token or 0.0) * MS_PER_S / axis.end, text))
        y, before = y + BAR_HEIGHT, one.tokens
    return PathPlot(axis, bars, y)
