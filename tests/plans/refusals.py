"""How a plan file is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestate.plans.load import PlanError, load


def refusal(path: Path, text: str | bytes) -> str:
    """The one line with which `text` is refused, without the file's name in front."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(PlanError) as caught:
        load(str(path))
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(f"{path}: ")
    return line.removeprefix(f"{path}: ")
