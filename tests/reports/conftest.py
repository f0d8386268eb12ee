"""Synthetic archives of the judging side's own builder, and one browser for all that open a page."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from samestate.evidence.archive import Archive

from .browser import CHROMIUM, Page, browser


@pytest.fixture(scope="session")
def builder() -> ModuleType:
    """`tests/checks/builder.py`, which lies in another package of tests."""
    path = Path(__file__).parents[1] / "checks/builder.py"
    spec = importlib.util.spec_from_file_location("archive_builder", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def clean(builder: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Archive:
    archive: Archive = builder.build().write(tmp_path_factory.mktemp("built") / "clean")
    return archive


@pytest.fixture(scope="session")
def faulted(builder: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Archive:
    archive: Archive = builder.build(fault="full-lookup").write(tmp_path_factory.mktemp("built") / "faulted")
    return archive


@pytest.fixture(scope="session")
def instrumented(builder: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Archive:
    run = builder.build(builder.instrumented_plan(), ranks=2)
    archive: Archive = run.write(tmp_path_factory.mktemp("built") / "instrumented")
    return archive


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if CHROMIUM is None:
        if os.environ.get("SAMESTATE_REQUIRE_BROWSER"):
            pytest.fail("CI has no Chromium: install Debian's package `chromium`")
        pytest.skip("no Chromium here: install the package `chromium` to have pages opened")
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened
