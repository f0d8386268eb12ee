"""A serving house: stub servers, and a real HAProxy before them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from custody.house import HAPROXY, House, serving


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which(HAPROXY) or os.environ.get("SAMESTATE_REQUIRE_HAPROXY"):
        return
    for item in items:
        if "house" in getattr(item, "fixturenames", ()) or "lasting_house" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason="haproxy is not installed"))


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    """One that serves; its incumbent answers JSON."""
    with serving(tmp_path) as house:
        yield house


@pytest.fixture(scope="module")
def lasting_house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One for swap after swap, each with records of its own."""
    with serving(tmp_path_factory.mktemp("house")) as house:
        yield house
