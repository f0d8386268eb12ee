"""A checkpoint folder and two sealed archives from the simulated engine, made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from pytest import TempPathFactory

from checks.agreement import compared
from samestate.cli import commands

Command = Callable[..., Result]


@pytest.fixture(autouse=True)
def second_opinion() -> Iterator[None]:
    """Every archive that is judged is judged by `verify.py` too: the two must agree."""
    with compared():
        yield


@pytest.fixture(scope="session")
def samestate() -> Command:
    """Run the command line; never raises."""
    return lambda *arguments: CliRunner().invoke(commands.samestate, [str(argument) for argument in arguments])


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture(scope="session")
def sim(samestate: Command, checkpoint: Path) -> Command:
    """`samestate run boundary` on the simulated engine, with further arguments."""
    return lambda *arguments: samestate("run", "boundary", "--engine", "sim", "--model", checkpoint, *arguments)


@pytest.fixture(scope="session")
def clean(sim: Command, tmp_path_factory: TempPathFactory) -> Path:
    archive = tmp_path_factory.mktemp("runs") / "clean"
    result = sim("--out", archive)
    assert result.exit_code == 0, result.output
    return archive


@pytest.fixture(scope="session")
def faulty(sim: Command, clean: Path) -> Path:
    archive = clean.parent / "faulty"
    result = sim("--fault", "full-lookup", "--control", clean, "--out", archive)
    assert result.exit_code == 1, result.output
    return archive
