"""`qwen3.5-tiny` on vLLM: output varies and remembers the start of a prompt; a reload continues, a fault is found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

from samestate.engines.base import EngineSpec
from samestate.engines.vllm import VllmEngine
from samestate.models.catalogue import ensure
from samestate.models.templates import TEMPLATES, render
from samestate.models.tokenizer import DIGIT_IDS, readable_ids

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.deep]
MODEL, TOKENS = "qwen3.5-tiny", 3584
NINE = "lengths: [2C-1, 2C, 2C+1, 2C+3, 2C+4, 2C+5, 3C-1, 3C, 3C+1]"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, beside_torchvision: dict[str, str]) -> Iterator[VllmEngine]:
    logs = tmp_path_factory.mktemp("logs")
    engine = VllmEngine(
        EngineSpec(
            arm="tiny",
            model=ensure(MODEL),
            settings={
                "block_size": 1792,
                "enable_prefix_caching": True,
                "enforce_eager": True,
                "max_model_len": 8192,
                "max_num_batched_tokens": 8192,
                "max_num_seqs": 4,
                "seed": 0,
            },
            serve_args=[],
            connector="none",
            external_cache_bytes=1,
            audit_level="off",
            save_delay_ms=0,
            fault=None,
            stream_dir=logs,
            log_path=logs / "engine.log",
            environment=beside_torchvision,
        )
    )
    try:
        engine.start()
        yield engine
    finally:
        engine.close()


def continuation(engine: VllmEngine, prompt: list[int]) -> list[int]:
    answer = engine.generate_one("probe", prompt, 64, 42, True)
    assert engine.reset_local_cache().local_reset
    return answer.token_ids


@pytest.mark.parametrize("template", TEMPLATES)
def test_output_varies_repeats_and_follows_an_early_digit(started: VllmEngine, template: str) -> None:
    before = render(TEMPLATES[template].parts("target"), started.encode, TOKENS)
    place = next(index for index, id_ in enumerate(before) if id_ in DIGIT_IDS)
    after = list(before)
    after[place] = DIGIT_IDS[(before[place] + 1 - DIGIT_IDS[0]) % 10]
    output = continuation(started, before)
    assert len(set(output)) >= 20
    assert set(output) <= set(readable_ids())
    assert continuation(started, before) == output != continuation(started, after)


@pytest.mark.parametrize(("fault", "code"), [((), 0), (("--fault", "full-lookup"), 1)])
def test_a_reload_continues_exactly_and_a_full_lookup_does_not(
    tmp_path: Path, beside_torchvision: dict[str, str], fault: tuple[str, ...], code: int
) -> None:
    shipped = files("samestate.plans").joinpath("shipped/boundary.yaml").read_text()
    assert NINE in shipped
    (tmp_path / "plan.yaml").write_text(shipped.replace(NINE, "lengths: [2C, 2C+1]"))
    command = ["run", tmp_path / "plan.yaml", "--model", MODEL, "--out", tmp_path / "archive", *fault]
    done = subprocess.run(
        [sys.executable, "-m", "samestate", *map(str, command)],
        env={**os.environ, **beside_torchvision},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
