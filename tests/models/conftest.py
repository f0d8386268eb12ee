"""One real engine for the whole room."""

from collections.abc import Iterator
from typing import Any

import pytest

from samestate.models.catalogue import ensure


@pytest.fixture(scope="session")
def tiny_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """vLLM in this process with `qwen3-next-tiny`, C = 1792, prefix caching on, no connector."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        vllm = pytest.importorskip("vllm")
        yield vllm.LLM(
            model=str(ensure("qwen3-next-tiny", tmp_path_factory.mktemp("models") / "tiny")),
            max_model_len=8192,
            max_num_batched_tokens=8192,
            max_num_seqs=4,
            block_size=1792,
            enable_prefix_caching=True,
            enforce_eager=True,
            seed=0,
        )
