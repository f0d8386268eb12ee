"""LMCache's releases beside a real engine: what they come to, and what becomes of a run whose server fails."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import released
from samestate.checks.analyzers import Judgement, judge, source_sha256
from samestate.checks.base import Verdict
from samestate.engines.lmcache_server import LMCacheServer
from samestate.engines.services import ServiceSpec
from samestate.engines.shared_memory import SHARED_MEMORY
from samestate.engines.vllm import VllmEngine
from samestate.evidence.archive import Archive
from samestate.evidence.records import Scalar
from samestate.lab.run import RunError, RunRequest, run_plan
from samestate.plans.load import freeze, load, with_connector

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.lmcache]

FORGOTTEN_SECONDS = 30.0
"""By then torch's own manager has removed what a killed engine shared (ten measured)."""


class Watching:
    """A progress that does something once, when the candidate has done `after` operations."""

    def __init__(self, after: int = 0, act: Callable[[], None] | None = None) -> None:
        self._after = after
        self._act = act

    def stage(self, name: str) -> None:
        pass

    def operation(self, arm: str, done: int, total: int, op: str) -> None:
        if self._act and (arm, done) == ("candidate", self._after):
            self._act()


class Servers:
    """Makes servers and remembers them."""

    def __init__(self) -> None:
        self.made: list[LMCacheServer] = []

    def make(self, spec: ServiceSpec) -> LMCacheServer | None:
        if spec.connector != "lmcache":
            return None
        self.made.append(LMCacheServer(spec))
        return self.made[-1]

    def kill(self) -> None:
        os.kill(self.made[0].pid, signal.SIGKILL)


Run = Callable[..., Archive]


@pytest.fixture
def run(clean_archive: Path, tiny_model: Path, tmp_path: Path) -> Run:
    """The boundary plan through a release, against the control of the native run: one engine start."""

    def run(
        release: str,
        options: dict[str, Scalar] | None = None,
        progress: Watching | None = None,
        servers: Servers | None = None,
        name: str = "boundary",
        control: Path = clean_archive,
        **more: Any,
    ) -> Archive:
        packages = released.lmcache(release)
        plan = with_connector(load(name), "lmcache", release=release, options=options, **more)
        request = RunRequest(
            plan=freeze(plan, source_sha256(plan.analyzer.id)),
            model=tiny_model,
            out=tmp_path / "archive",
            make_engine=VllmEngine,
            fault=None,
            control=control,
            reference=None,
            serve_args=[],
            packages=packages,
            make_service=(servers or Servers()).make,
        )
        return Archive.open(run_plan(request, progress or Watching()).archive)

    return run


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    before = set(SHARED_MEMORY.iterdir())
    yield
    deadline = time.monotonic() + FORGOTTEN_SECONDS
    while (left := set(SHARED_MEMORY.iterdir()) - before) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == set()


def equal(judgement: Judgement) -> str:
    return next(result.summary for result in judgement.results if result.check == "paired-equality")


def test_the_release_that_looks_up_the_last_token_fails_at_the_exact_boundaries(run: Run) -> None:
    judgement = judge(run("0.5.5"))
    assert judgement.verdict is Verdict.FAIL
    assert equal(judgement).startswith("34/36 generations equal")
    wrong = {row.tokens: (row.boundary, row.credited) for row in judgement.table if not row.equal}
    assert wrong == {3584: (3584, 3583), 5376: (5376, 5375)}
    assert all(min(row.rank_bytes) > 0 for row in judgement.table)


def test_the_release_that_leaves_it_out_passes(run: Run) -> None:
    judgement = judge(run("0.5.6"))
    assert judgement.verdict is Verdict.PASS
    assert equal(judgement).startswith("36/36 generations equal")
    assert all(row.boundary == row.credited and min(row.rank_bytes) > 0 for row in judgement.table)


def test_separate_object_groups_are_right_on_shared_prefixes(run: Run, shared_archive: Path) -> None:
    judgement = judge(run("0.5.6", {"separate_object_groups": True}, name="shared-prefix", control=shared_archive))
    findings = [
        found for one in judgement.results if one.verdict is not Verdict.NOT_EXERCISED for found in one.findings
    ]
    # Whose load ends when is up to the server: who of the batch shares a step differs from run to run, and what an
    # answer owes to its company cannot be laid to reuse.
    alone = [found.message for found in findings if "it ran in steps with" not in found.message]
    assert (alone, {found.code for found in findings} <= {"geometry_mismatch"}) == ([], True)
    assert judgement.verdict in {Verdict.PASS, Verdict.UNKNOWN}


def test_the_default_object_group_restores_the_null_block(run: Run, shared_archive: Path) -> None:
    """The prompts whose boundary no step had ended at, from their first token on; seen by four checks of their own."""
    judgement = judge(run("0.5.6", name="shared-prefix", control=shared_archive))
    assert judgement.verdict is Verdict.FAIL
    failing = {result.check for result in judgement.results if result.verdict is Verdict.FAIL}
    assert failing >= {"cold-equality", "provenance", "prefix-identity"}
    wrong = {row.op for row in judgement.table if row.first_difference == 0}
    assert {"two.1", "two.2", "one.1", "one.2"} <= wrong
    codes = {found.code for result in judgement.results for found in result.findings}
    assert codes >= {"null_block_saved", "state_never_computed", "tokens_differ"}


def test_a_server_killed_in_the_middle_ends_the_run_and_nothing_passes(run: Run, tmp_path: Path) -> None:
    servers = Servers()
    with pytest.raises(RunError, match=r"^arm candidate: (its service died|the service at)"):
        run("0.5.6", servers=servers, progress=Watching(7, servers.kill))
    archive = Archive.open(tmp_path / "archive")
    assert archive.seal_sha256 is None
    assert judge(archive).verdict is Verdict.UNKNOWN


def test_a_chunk_that_is_no_multiple_of_c_is_refused_at_start(run: Run, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"LMCache chunk size 256 must be a multiple of 1792"):
        run("0.5.6", {"chunk_size": 256})
    assert Archive.open(tmp_path / "archive").seal_sha256 is None


def test_a_memory_too_small_for_one_checkpoint_is_no_pass(run: Run) -> None:
    judgement = judge(run("0.5.6", {"l1_size_gb": 0.0005}))
    assert judgement.verdict is Verdict.UNKNOWN
    assert not any(any(row.rank_bytes) for row in judgement.table)
