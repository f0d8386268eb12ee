"""vLLM's class for a folder's layer of multi-token prediction, loaded by the folder's recipe, in a process of its own.

Standard output: class, parameters and values filled. Which class it is, vLLM's `SpeculativeConfig` says. Nothing is
computed: where this platform has no kernel for the layer's attention, the kernel's object is left out, which holds no
parameter.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import vllm.model_executor.layers.mla as latent
from vllm.config import (
    CacheConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform

from samestate.engines.children.in_place import InPlaceLoader

TOKENS = 1024


class NoKernel(torch.nn.Module):
    """In the place of sparse attention's kernel, which CPUs do not have."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


def described(folder: Path) -> tuple[VllmConfig, ModelConfig]:
    model = ModelConfig(model=str(folder), dtype="bfloat16", max_model_len=TOKENS)
    ranks = ParallelConfig()
    drafting = SpeculativeConfig(
        method="mtp", num_speculative_tokens=1, target_model_config=model, target_parallel_config=ranks
    )
    scheduler = SchedulerConfig(
        max_num_batched_tokens=TOKENS, max_num_seqs=4, max_model_len=TOKENS, is_encoder_decoder=False
    )
    whole = VllmConfig(
        model_config=drafting.draft_model_config,
        parallel_config=ranks,
        cache_config=CacheConfig(block_size=256),
        scheduler_config=scheduler,
        speculative_config=drafting,
    )
    return whole, model


def main(folder: Path) -> None:
    # Would refuse to serve, and nothing is served here.
    type(current_platform).check_and_update_config = classmethod(lambda cls, config: None)  # type: ignore[method-assign]
    latent.MLAAttention = NoKernel  # type: ignore[misc]
    config, model = described(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, address, 0, "gloo")
        initialize_model_parallel(1, 1)
        torch.set_default_dtype(torch.bfloat16)
        chosen, name = ModelRegistry.resolve_model_cls(config.model_config.architectures, config.model_config)
        layer = chosen(vllm_config=config)
        InPlaceLoader(LoadConfig()).load_weights(layer, model)
    filled = sum(value.numel() for value in layer.parameters())
    print(json.dumps([name, sorted(dict(layer.named_parameters())), filled]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
