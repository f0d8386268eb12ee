"""Every archive that a test of the checks judges is judged a second time, by `verify.py`: the two must agree."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .agreement import compared
from .tampering import SAID


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """How many edits were refused: the number belongs into the log."""
    for line in config.stash.get(SAID, []):
        terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def second_opinion() -> Iterator[None]:
    with compared():
        yield
