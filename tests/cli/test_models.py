from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from samestate.models import catalogue

Command = Callable[..., Result]


def test_list(samestate: Command) -> None:
    *lines, note = samestate("models", "list").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:] if not line.startswith(" ")] == catalogue.names()
    assert [line.split()[0] for line in lines if "* " in line] == ["glm5-next-small", "qwen3-next-small"]
    assert note == "* a recipe: weights are made on the device when they are loaded"
    (ours,) = (line for line in lines if line.startswith("qwen3-next-tiny"))
    assert " ".join(ours.split()) == "qwen3-next-tiny 3,304,024 6,643,240 128 256 1 attention, 3 recurrent"


def test_list_tells_sizes_c_and_layers_without_building(
    samestate: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMESTATE_CACHE", str(tmp_path))
    told = {one["name"]: one for one in json.loads(samestate("models", "list", "--json").stdout)}
    assert set(told) == set(catalogue.PINS) and not any(tmp_path.iterdir())
    assert told["glm5-next-small"] == {
        "name": "glm5-next-small",
        "parameters": 13_323_021_040,
        "bytes": 19_971,
        "recipe": True,
        "interval": {"cuda": 4608, "cpu": None},
        "layers": {"attention": 6, "indexer": 6, "recurrent": 18, "tail": 6},
    }
    assert told["qwen3-next-tiny"]["interval"] == {"cuda": 128, "cpu": 256}


def test_an_unknown_model_is_one_line(samestate: Command, tmp_path: Path) -> None:
    result = samestate("models", "build", "qwen3-nexttiny", tmp_path / "m")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("samestate: no model 'qwen3-nexttiny'; did you mean 'qwen3-next-tiny'?; known: ")


def test_build_prints_the_identity(samestate: Command, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "ensure", lambda name, folder: folder)
    identity = catalogue.identity(checkpoint)
    assert identity.sha256 in samestate("models", "build", "qwen3-next-tiny", checkpoint).stdout
    shown = json.loads(samestate("models", "build", "qwen3-next-tiny", checkpoint, "--json").stdout)
    assert (shown["sha256"], shown["folder"]) == (identity.sha256, str(checkpoint))


def test_a_model_whose_weights_are_made_in_place_says_the_flag(samestate: Command, tmp_path: Path) -> None:
    result = samestate("models", "build", "glm5-next-small", tmp_path / "m")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].endswith("start vLLM, with samestate beside it, with --load-format samestate")
    shown = json.loads(samestate("models", "build", "glm5-next-small", tmp_path / "m", "--json").stdout)
    assert shown["serve_args"] == ["--load-format", "samestate"]
    assert {"config.json", "weights.json"} < set(shown["files"])


def test_a_model_in_files_needs_no_flag(samestate: Command, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "ensure", lambda name, folder: folder)
    assert "--load-format" not in samestate("models", "build", "qwen3-next-tiny", checkpoint).stdout
    assert json.loads(samestate("models", "build", "qwen3-next-tiny", checkpoint, "--json").stdout)["serve_args"] == []


def test_a_failed_build_is_one_line(samestate: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ensure(name: str, folder: Path) -> Path:
        raise catalogue.ModelError("torch is missing; install an extra")

    monkeypatch.setattr(catalogue, "ensure", ensure)
    result = samestate("models", "build", "qwen3-next-tiny", tmp_path / "m")
    assert (result.exit_code, result.stderr) == (2, "samestate: torch is missing; install an extra\n")
