"""One plan over several releases, on the simulated engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from samestate.engines.base import EngineError, EngineSpec
from samestate.engines.sim import SimEngine
from samestate.evidence.archive import Archive
from samestate.evidence.records import EngineStarted
from samestate.lab.matrix import run_releases
from samestate.lab.run import RunError, RunRequest
from samestate.plans.load import with_connector
from samestate.plans.model import Plan

from .conftest import QuietProgress
from .test_services import Makers

Requests = Callable[..., RunRequest]


def requests(plan: Plan, request_for: Requests, makers: Makers, *releases: str) -> list[RunRequest]:
    return [
        request_for(
            with_connector(plan, "lmcache", release=release),
            release,
            make_engine=makers.engine,
            make_service=makers.service,
            packages=Path("/"),
        )
        for release in releases
    ]


def test_the_first_release_runs_the_control_and_the_others_borrow_it(
    small: Plan, request_for: Requests, progress: QuietProgress
) -> None:
    one, two, three = run_releases(requests(small, request_for, Makers(), "1.0", "2.0", "3.0"), progress)
    assert not isinstance(one, RunError)
    for later in (two, three):
        assert not isinstance(later, RunError)
        archive = Archive.open(later.archive)
        assert archive.verify() == []
        assert archive.imported_from("control") == one.seal_sha256
    assert Archive.open(one.archive).imported_from("control") is None


def test_a_release_that_cannot_run_stops_no_other(small: Plan, request_for: Requests, progress: QuietProgress) -> None:
    class Broken(SimEngine):
        def start(self) -> EngineStarted:
            raise EngineError("arm candidate: this release does not start")

    makers = Makers()
    first, *others = requests(small, request_for, makers, "1.0", "2.0", "3.0")

    def broken(spec: EngineSpec) -> SimEngine:
        return Broken(spec) if spec.arm == "candidate" else makers.engine(spec)

    results = list(run_releases([first._replace(make_engine=broken), *others], progress))
    assert isinstance(results[0], RunError)
    assert "this release does not start" in str(results[0])
    assert [isinstance(result, RunError) for result in results[1:]] == [False, False]
    assert Archive.open(others[0].out).imported_from("control") is None
    assert Archive.open(others[1].out).imported_from("control") is not None
