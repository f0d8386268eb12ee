"""A repair of vLLM itself is told to all processes of an engine; one of a connector to none."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestate.engines.base import EngineError, EngineSpec
from samestate.engines.vllm import VllmEngine
from samestate.evidence.marker_records import REPAIRS


def spec(folder: Path, repair: str | None, model: Path | None = None) -> EngineSpec:
    return EngineSpec(
        arm="control",
        model=model or folder,
        settings={"block_size": 256, "max_model_len": 1024, "num_gpu_blocks_override": 16, "enforce_eager": True},
        serve_args=[],
        connector="none",
        external_cache_bytes=0,
        audit_level="off",
        save_delay_ms=0,
        fault=None,
        stream_dir=folder,
        log_path=folder / "engine.log",
        repair=repair,
    )


@pytest.mark.parametrize(
    ("before", "repair", "told"),
    [
        (None, "stable-topk", "stable-topk"),
        ("cpu-draft-rows", "stable-topk", "cpu-draft-rows,stable-topk"),
        ("stable-topk", "stable-topk", "stable-topk"),
        (None, "strict-prefix", None),
        (None, None, None),
    ],
)
def test_what_an_engines_processes_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None, repair: str | None, told: str | None
) -> None:
    monkeypatch.delenv(REPAIRS, raising=False)
    if before is not None:
        monkeypatch.setenv(REPAIRS, before)
    assert VllmEngine(spec(tmp_path, repair))._environment().get(REPAIRS) == told


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.deep
def test_an_engine_whose_model_has_no_such_indexer_does_not_start(tiny_model: Path, tmp_path: Path) -> None:
    engine = VllmEngine(spec(tmp_path, "stable-topk", tiny_model))
    try:
        with pytest.raises(EngineError, match="repair 'stable-topk': rank 0: Qwen3NextForCausalLM has no SparseAttn"):
            engine.start()
    finally:
        engine.close()
