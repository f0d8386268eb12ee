"""The archives in docs/results: unpacked, they are judged to be what stands beside them, by both verifiers."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from checks.agreement import PINNED
from samestate.checks.analyzers import Judgement, judge
from samestate.checks.base import Verdict
from samestate.cli.commands import samestate
from samestate.evidence import verify
from samestate.evidence.archive import Archive

FOLDER = Path(__file__).parents[2] / "docs/results/archives"
EXPECTED: dict[str, dict[str, Any]] = json.loads((FOLDER / "expected.json").read_bytes())["archives"]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every archive, imported as a reader would."""
    root = tmp_path_factory.mktemp("archives")
    for name in EXPECTED:
        tar = root / f"{name}.tar"
        tar.write_bytes(lzma.decompress((FOLDER / f"{name}.tar.xz").read_bytes()))
        imported = CliRunner().invoke(samestate, ["archive", "import", str(tar), str(root / name)])
        assert imported.exit_code == 0, imported.output
    return root


def judged(root: Path) -> Judgement:
    return judge(Archive.open(root))


def test_each_has_its_word_beside_it() -> None:
    assert {path.name.removesuffix(".tar.xz") for path in FOLDER.glob("*.xz")} == EXPECTED.keys()
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 4 << 20


@pytest.mark.parametrize("name", EXPECTED)
def test_it_is_judged_as_is_said(unpacked: Path, name: str) -> None:
    said, judgement = EXPECTED[name], judged(unpacked / name)
    assert judgement.seal_sha256 == said["seal_sha256"]
    found = {one.check: one for one in judgement.results if one.verdict is not Verdict.NOT_EXERCISED}
    assert {finding.code for finding in found.pop("plan-identity").findings} <= PINNED
    assert {check: one.verdict.value for check, one in found.items()} == said["checks"]


@pytest.mark.parametrize("name", EXPECTED)
def test_the_second_verifier_concludes_as_is_said(unpacked: Path, name: str) -> None:
    assert verify.judge(str(unpacked / name)).verdict == EXPECTED[name]["second"]


def test_the_fault_is_wrong_at_the_exact_boundaries_and_nowhere_else(unpacked: Path) -> None:
    c, rows = 4608, judged(unpacked / "glm5-next-full-lookup").table
    wrong = [(row.tokens, row.first_difference, row.boundary, row.credited) for row in rows if not row.equal]
    assert wrong == [(2 * c, 0, 2 * c, 2 * c - 1), (3 * c, 0, 3 * c, 3 * c - 1)]


@pytest.mark.parametrize("model", ["glm5-next", "qwen3-next"])
def test_nothing_is_wrong_under_the_strict_prefix(unpacked: Path, model: str) -> None:
    assert all(row.equal for row in judged(unpacked / f"{model}-boundary").table)


def test_the_bytes_themselves_name_the_boundary(unpacked: Path) -> None:
    rows = judged(unpacked / "glm5-next-instrumented").table
    assert [row.content_boundary for row in rows] == [row.boundary for row in rows]
    assert {row.content_boundary for row in rows} == {4608, 9216, 13824}


def test_the_first_module_that_is_not_repeatable_is_the_sparse_indexer(unpacked: Path) -> None:
    results = {one.check: one for one in judged(unpacked / "glm5-next-as-shipped").results}
    paired = [finding for finding in results["paired-equality"].findings if finding.code == "cold_differs"]
    named = {finding.place.layer for finding in paired if finding.place.op and finding.place.op.endswith(".cold")}
    assert named == {"model.layers.3.self_attn.indexer.indexer_op"}
    assert {finding.code for finding in results["reload-equality"].findings} == {
        "control_not_repeatable",
        "not_repeatable",
    }
