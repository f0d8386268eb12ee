"""What a vLLM says of itself: versions, effective settings, end-of-sequence ids."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from typing import Any

import torch
import vllm
from vllm.config import ModelConfig, VllmConfig

from samestate.engines.children.identity import own_process
from samestate.evidence.records import DROPS_LAST_BLOCK, Scalar

RECORDED_ENVIRONMENT = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "PYTHONHASHSEED",
    "VLLM_BATCH_INVARIANT",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
)
"""By allow-list, so that no secret can enter an archive."""


def versions() -> dict[str, str]:
    """Of the packages that decide what an engine computes; those that are not there are left out."""
    found = {"python": sys.version.split()[0], "vllm": vllm.__version__, "torch": str(torch.__version__)}
    for name in ("samestate", "transformers", "triton", "fla-core", "lmcache"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def effective_settings(config: VllmConfig) -> dict[str, Scalar]:
    """Every plain value of vLLM's configuration after its own defaults and overrides."""
    settings: dict[str, Scalar] = {}
    for section in _SECTIONS:
        for name, value in vars(getattr(config, section)).items():
            if name.startswith("_") or name in _LEFT_OUT:
                continue
            plain = str(value) if isinstance(value, torch.dtype) else value
            if plain is None or isinstance(plain, str | int | float | bool):
                settings[f"{section}.{name}"] = plain
    transfer = config.kv_transfer_config
    settings["kv_transfer_config.kv_connector"] = transfer.kv_connector if transfer else None
    settings["kv_transfer_config.kv_role"] = transfer.kv_role if transfer else None
    settings["kv_transfer_config.kv_load_failure_policy"] = transfer.kv_load_failure_policy if transfer else None
    drafts = config.speculative_config
    settings["speculative_config.num_speculative_tokens"] = drafts.num_speculative_tokens if drafts else 0
    settings["speculative_config.method"] = drafts.method if drafts else None
    settings[DROPS_LAST_BLOCK] = drafts.use_eagle_block_drop() if drafts else False
    settings.update({f"env.{name}": os.environ[name] for name in RECORDED_ENVIRONMENT if name in os.environ})
    return settings


_SECTIONS = (
    "cache_config",
    "scheduler_config",
    "parallel_config",
    "model_config",
    "load_config",
    # FlashInfer's own tuner among them: enable_flashinfer_autotune.
    "kernel_config",
)


def identity_values(config: VllmConfig) -> dict[str, Scalar]:
    """What runs: this process, versions, effective settings."""
    named = {f"version.{name}": version for name, version in versions().items()}
    return {"process": own_process(), **named, **effective_settings(config)}


_LEFT_OUT = {
    # A secret.
    "hf_token",
    # Paths, hosts and ports: they differ from run to run and say nothing about the computation.
    "model",
    "tokenizer",
    "served_model_name",
    "download_dir",
    "data_parallel_master_port",
    "data_parallel_rpc_port",
    "master_port",
    "master_addr",
    "data_parallel_master_ip",
    "hf_config_path",
    "allowed_local_media_path",
    "model_weights",
}


def eos_token_ids(model: ModelConfig, tokenizer: Any) -> list[int]:
    """Every known end-of-sequence id: tokenizer, model config, generation config."""
    generation = model.try_get_generation_config()
    found: set[int] = set()
    for value in (
        getattr(tokenizer, "eos_token_id", None),
        getattr(model.hf_config, "eos_token_id", None),
        getattr(model.hf_text_config, "eos_token_id", None),
        generation.get("eos_token_id"),
    ):
        found.update([value] if isinstance(value, int) else value or [])
    return sorted(found)
