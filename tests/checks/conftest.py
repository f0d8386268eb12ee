"""Every archive that a test of the checks judges is judged a second time, by `verify.py`: the two must agree."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .agreement import compared


@pytest.fixture(autouse=True)
def second_opinion() -> Iterator[None]:
    with compared():
        yield
