"""A shrunk `qwen3-next-small` on vLLM, its weights made in place: output varies and remembers the start of a prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from samestate.engines.base import EngineError, EngineSpec
from samestate.engines.vllm import VllmEngine
from samestate.evidence.records import EngineStarted
from samestate.models import recipe
from samestate.models.build import build
from samestate.models.templates import TEMPLATES, render
from samestate.models.tokenizer import DIGIT_IDS, readable_ids

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.deep]

SHRUNK = {
    "head_dim": 64,
    "hidden_size": 256,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 64,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 8,
    "shared_expert_intermediate_size": 64,
}
TOKENS = 3584


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "m"
    build("qwen3-next-small", folder)
    config = json.loads((folder / "config.json").read_bytes()) | SHRUNK
    (folder / "config.json").write_text(json.dumps(config))
    (folder / recipe.FILE).write_bytes(recipe.written("qwen3-next", config, "shrunk/0").content())
    return folder


def engine(folder: Path, logs: Path, *arguments: str) -> VllmEngine:
    return VllmEngine(
        EngineSpec(
            arm="small",
            model=folder,
            settings={
                "block_size": 1792,
                "enable_prefix_caching": True,
                "enforce_eager": True,
                "max_model_len": 8192,
                "max_num_batched_tokens": 8192,
                "max_num_seqs": 4,
                "seed": 0,
            },
            serve_args=list(arguments),
            connector="none",
            external_cache_bytes=1,
            audit_level="off",
            save_delay_ms=0,
            fault=None,
            stream_dir=logs,
            log_path=logs / "engine.log",
        )
    )


@pytest.fixture(scope="module")
def started(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VllmEngine, EngineStarted]]:
    running = engine(folder, tmp_path_factory.mktemp("logs"))
    try:
        yield running, running.start()
    finally:
        running.close()


def continuation(running: VllmEngine, prompt: list[int]) -> list[int]:
    answer = running.generate_one("probe", prompt, 64, 42, True)
    assert running.reset_local_cache().local_reset
    return answer.token_ids


def test_the_engine_is_told_the_load_format_and_records_it(started: tuple[VllmEngine, EngineStarted]) -> None:
    assert started[1].settings["load_config.load_format"] == "samestate"


@pytest.mark.parametrize("template", TEMPLATES)
def test_output_varies_repeats_and_follows_an_early_digit(
    started: tuple[VllmEngine, EngineStarted], template: str
) -> None:
    running, _ = started
    before = render(TEMPLATES[template].parts("target"), running.encode, TOKENS)
    place = next(index for index, id_ in enumerate(before) if id_ in DIGIT_IDS)
    after = list(before)
    after[place] = DIGIT_IDS[(before[place] + 1 - DIGIT_IDS[0]) % 10]
    output = continuation(running, before)
    assert len(set(output)) >= 20
    assert set(output) <= set(readable_ids())
    assert continuation(running, before) == output != continuation(running, after)


def test_a_recipe_of_another_model_stops_the_engine_with_its_reason(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "m"
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = json.loads((other / "config.json").read_bytes()) | {"num_experts": 4}
    (other / "config.json").write_text(json.dumps(config))
    refused = engine(other, tmp_path)
    try:
        with pytest.raises(EngineError) as caught:
            refused.start()
    finally:
        refused.close()
    assert "sketches: config.json or the recipe of this samestate" in (tmp_path / "engine.log").read_text()
    assert "\n" not in str(caught.value)
