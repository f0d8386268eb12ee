"""`samestate check` of a marker archive: both verdicts are kept beside it, each of the same seal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from checks import marker_run as k

Command = Callable[..., Result]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return k.build().write(tmp_path / "archive").root


def test_both_verdicts_are_kept_and_name_one_seal(samestate: Command, archive: Path) -> None:
    assert samestate("check", archive).exit_code == 0
    frozen = samestate("check", archive, "--analyzer", "marker-frozen-v1")
    assert frozen.exit_code == 3
    assert "76 trace tokens, 75 API tokens" in frozen.stdout
    kept = {path.stem: json.loads(path.read_bytes()) for path in (archive / "verdicts").iterdir()}
    assert {name: tree["verdict"] for name, tree in kept.items()} == {
        "marker-post-stop-v1": "pass",
        "marker-frozen-v1": "unknown",
    }
    assert len({tree["seal_sha256"] for tree in kept.values()}) == 1
    assert samestate("check", archive).exit_code == 0  # and the archive is as whole as before


def test_no_bundle_is_made_of_a_probe(samestate: Command, archive: Path) -> None:
    result = samestate("case", "export", archive, "exact-answer")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "asks probes, of which no bundle is made; send the archive" in result.stderr


def test_json(samestate: Command, archive: Path) -> None:
    tree = json.loads(samestate("check", archive, "--json").stdout)
    assert (tree["verdict"], tree["comparison_kind"]) == ("pass", "trace_vs_api")
    assert tree["table"][0]["marker"] | {"classes": ""} == {
        "budget": 64,
        "position": 64,
        "marker_class": "forced",
        "observed": None,
        "closes": 1,
        "ranks": 2,
        "ranks_agree": True,
        "trace_tokens": [76, 76],
        "api_tokens": 75,
        "tail": 1,
        "tail_known": True,
        "finish_reason": "stop",
        "stop_reason": None,
        "stores": 1,
        "stores_committed": 1,
        "drafted": 57,
        "accepted": 56,
        "classes": "",
    }
