"""Layers of multi-token prediction: vLLM finds their class by our config, and our recipe fills every value of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from samestate.models import recipe
from samestate.models.configs import model_config

pytest.importorskip("vllm")
pytestmark = [pytest.mark.slow, pytest.mark.deep]

CHILD = Path(__file__).with_name("drafting_child.py")


def glm(drafting: int = 1) -> dict[str, Any]:
    """`glm5-next-small`'s config with the sizes of `glm5-next-tiny`."""
    small, tiny = model_config("glm5-next-small").config, model_config("glm5-next-tiny").config
    language = small["text_config"] | tiny | {"num_nextn_predict_layers": drafting}
    return {**small, "text_config": language}


def run(folder: Path, program: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *program, str(folder)]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


def laid(folder: Path, name: str, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / recipe.FILE).write_bytes(recipe.written(name, config, "drafting/0").content())
    return folder


@pytest.mark.parametrize(
    ("name", "config", "cls", "some"),
    [
        (
            "glm5-next",
            glm(),
            "Glm5NextMTPModel",
            {"model.layers.4.mtp_block.self_attn.indexer.wk_weights_proj.weight", "model.layers.4.eh_proj.weight"},
        ),
        (
            "qwen3.5",
            model_config("qwen3.5-tiny").config,
            "Qwen3_5MTP",
            {"model.fc.weight", "model.layers.0.self_attn.qkv_proj.weight", "lm_head.weight"},
        ),
    ],
)
def test_the_layer_is_found_and_filled(
    tmp_path: Path, beside_torchvision: dict[str, str], name: str, config: dict[str, Any], cls: str, some: set[str]
) -> None:
    done = run(laid(tmp_path, name, config), [str(CHILD)], beside_torchvision)
    assert done.returncode == 0, done.stderr[-2000:]
    chosen, parameters, filled = json.loads(done.stdout.splitlines()[-1])
    assert chosen == cls and filled > 100_000
    assert {*some, "model.embed_tokens.weight"} <= set(parameters)


def test_a_recipe_that_forgets_a_tensor_is_refused(
    tmp_path: Path, beside_torchvision: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = recipe.SKETCHES["qwen3.5"]
    monkeypatch.setitem(
        recipe.SKETCHES, "qwen3.5", lambda config: (one for one in whole(config) if one.name != "mtp.fc.weight")
    )
    folder = laid(tmp_path, "qwen3.5", model_config("qwen3.5-tiny").config)
    program = (
        "import runpy; from samestate.models import recipe; whole = recipe.SKETCHES['qwen3.5'];"
        "recipe.SKETCHES['qwen3.5'] = lambda config: (s for s in whole(config) if s.name != 'mtp.fc.weight');"
        f"runpy.run_path({str(CHILD)!r}, run_name='__main__')"
    )
    done = run(folder, ["-c", program], beside_torchvision)
    assert done.returncode == 1
    assert "only a part of this vLLM's model: model.fc.weight not whole" in done.stderr
