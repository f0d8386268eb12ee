"""One real engine for the whole room."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from samestate.engines.base import EngineSpec
from samestate.engines.vllm import VllmEngine


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[VllmEngine]:
    """vLLM with `qwen3-next-tiny`, C = 1792, prefix caching on, no connector."""
    folder = tmp_path_factory.mktemp("tiny")
    settings = {
        "max_model_len": 8192,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 4,
        "block_size": 1792,
        "enable_prefix_caching": True,
        "enforce_eager": True,
        "seed": 0,
    }
    engine = VllmEngine(
        EngineSpec(
            arm="tiny",
            model=tiny_model,
            settings=settings,
            serve_args=[],
            connector="none",
            external_cache_bytes=1,
            audit_level="off",
            save_delay_ms=0,
            fault=None,
            stream_dir=folder,
            log_path=folder / "engine.log",
        )
    )
    try:
        engine.start()
        yield engine
    finally:
        engine.close()
