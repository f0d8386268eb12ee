"""Which path a request took, from what is recorded of it; what contradicts itself names none."""

from __future__ import annotations

import pytest

from samestate.checks.latency_paths import ActualPath, CachePlace, PathEvidence, classify

MEMORY, DISK, REMOTE = CachePlace.MEMORY, CachePlace.DISK, CachePlace.REMOTE
NOTHING = PathEvidence(tokens=48, credited=0, local=0, moved=0, places={})


@pytest.mark.parametrize(
    ("evidence", "path"),
    [
        (NOTHING, ActualPath.RECOMPUTE),
        (NOTHING._replace(credited=16, local=16), ActualPath.LOCAL),
        (NOTHING._replace(credited=32, moved=100, places={MEMORY: 100}), ActualPath.EXTERNAL_MEMORY),
        (NOTHING._replace(credited=32, moved=100, places={MEMORY: 0, DISK: 100}), ActualPath.EXTERNAL_DISK),
        (NOTHING._replace(credited=32, moved=100, places={MEMORY: 0, REMOTE: 100}), ActualPath.EXTERNAL_REMOTE),
        (NOTHING._replace(credited=32, moved=100, places={MEMORY: 40, DISK: 60}), ActualPath.MIXED),
        (NOTHING._replace(credited=32, local=16, moved=100, places={MEMORY: 100}), ActualPath.MIXED),
        (NOTHING._replace(credited=32, moved=100, places=None), ActualPath.EXTERNAL),
        (NOTHING._replace(credited=32, moved=None, places=None), ActualPath.EXTERNAL),
    ],
)
def test_the_path_is_what_the_records_say(evidence: PathEvidence, path: ActualPath) -> None:
    assert classify(evidence).path is path


@pytest.mark.parametrize(
    ("evidence", "why"),
    [
        (NOTHING._replace(credited=None), "no first batch"),
        (NOTHING._replace(credited=48, local=48), "nothing was left to compute"),
        (NOTHING._replace(credited=16, local=None), "how much of p was local"),
        (NOTHING._replace(credited=16, local=32), "only 16 credited"),
        (NOTHING._replace(credited=32, local=0), "no byte loaded"),
        (NOTHING._replace(moved=100), "no token credited for them"),
    ],
)
def test_what_is_missing_or_contradicts_itself_names_no_path(evidence: PathEvidence, why: str) -> None:
    taken = classify(evidence)
    assert taken.path is None
    assert why in taken.why
