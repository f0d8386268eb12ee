"""The pytest plugin: fixtures ``engine`` and ``cold_reload``, mark ``boundary``.

All marked tests of a session are one run of the plan ``boundary`` at the lengths that they name: one archive, sealed
and judged like any other, with one control and one candidate, each started once. A test fails with the finding that
names its length, and where evidence is missing. Loaded by every pytest beside which samestate is installed, so nothing
heavy is imported before a test asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from samestate.engines.base import Engine
    from samestate.testing.session import Wanted
    from samestate.testing.verdict import ColdReload

MARK = "boundary"
FIXTURE = "cold_reload"
OPTIONS = {
    "engine": ("NAME", "vllm", "engine to test: vllm, or sim (simulated: seconds, no model)"),
    "model": ("DIR", "", "your own checkpoint instead of the plan's tiny one"),
    "connector": ("NAME", "", "connector instead of the plan's, e.g. samestate-memory"),
    "serve-args": ("ARGS", "", "further `vllm serve` flags, one string; they win over the plan's"),
    "out": ("DIR", "", "folder for the archive; default: pytest's temporary folder"),
    "fault": ("NAME", "", "inject a fault, to see the tests fail; `samestate faults` lists them"),
}
"""Options ``--samestate-<name>``, with their default and help; in a configuration file ``samestate_<name>``."""
_RELOADS = pytest.StashKey[Any]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("samestate", "reused state against computed state")
    for name, (metavar, default, text) in OPTIONS.items():
        # An empty value on the command line is one too: it overrides the file's.
        group.addoption(f"--samestate-{name}", metavar=metavar, default=None, help=text)
        parser.addini(f"samestate_{name.replace('-', '_')}", text, default=default)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{MARK}(*lengths): one test for each prompt length: '2C-1', '2C', 3584; without any, those of plan boundary",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each length that the mark names."""
    if FIXTURE not in metafunc.fixturenames:
        return
    mark = metafunc.definition.get_closest_marker(MARK)
    if mark is None:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: {FIXTURE} needs @pytest.mark.{MARK}('2C-1', '2C', …)")
    from samestate.testing.session import lengths_of

    lengths = lengths_of(metafunc.definition.nodeid, mark)
    metafunc.parametrize(FIXTURE, lengths, indirect=True, ids=lengths)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Only what is left after every -k and -m is run."""
    lengths = [
        str(item.callspec.params[FIXTURE])
        for item in session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and FIXTURE in item.callspec.params
    ]
    if lengths:
        from samestate.testing.session import Reloads

        session.config.stash[_RELOADS] = Reloads(_wanted(session.config), list(dict.fromkeys(lengths)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Where the archive lies, and what it came to as a whole."""
    reloads = config.stash.get(_RELOADS, None)
    if reloads is not None and (line := reloads.summary):
        terminalreporter.section("samestate")
        terminalreporter.line(line)


def _wanted(config: pytest.Config) -> Wanted:
    from samestate.testing.session import Wanted

    given = {name: config.getoption(f"--samestate-{name}") for name in OPTIONS}
    said = {
        name: config.getini(f"samestate_{name.replace('-', '_')}") if value is None else value
        for name, value in given.items()
    }
    return Wanted(
        engine=said["engine"],
        model=Path(said["model"]) if said["model"] else None,
        connector=said["connector"] or None,
        serve_args=said["serve-args"],
        out=Path(said["out"]) if said["out"] else None,
        fault=said["fault"] or None,
    )


@pytest.fixture(scope="session")
def _samestate_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("samestate")


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest, _samestate_folder: Path) -> Iterator[Engine]:
    """The candidate's engine, started once a session, with its connector; for prompts of your own.

    It starts when the run behind `cold_reload` is over, so that the two never share a device. Nothing judges it.
    """
    from samestate.testing.session import live

    reloads = request.config.stash.get(_RELOADS, None)
    if reloads is not None:
        reloads.run(_samestate_folder)
    with live(_wanted(request.config), _samestate_folder) as started:
        yield started


@pytest.fixture
def cold_reload(request: pytest.FixtureRequest, _samestate_folder: Path) -> ColdReload:
    """Call it: the row of this test's length, where the reload was judged to continue as cold; else the test fails."""
    from samestate.testing.verdict import ColdReload

    return ColdReload(request.config.stash[_RELOADS].run(_samestate_folder), request.param)
