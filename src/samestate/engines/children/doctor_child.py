"""Asks vLLM's own objects what a model's cache will look like: no weights, no engine (see `samestate.engines.inquiry`).

``python -m samestate.engines.children.doctor_child DRIVER_PID QUESTION REPLY``, two JSON files. Output is the log.
The order is an engine's: configuration, layers, block sizes, cache specs, layout, groups (``vllm/v1/engine/core.py``).
"""

from __future__ import annotations

import os
import sys
import tempfile
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

os.environ.update(VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import torch
import vllm
from pydantic import ValidationError
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.core.kv_cache_utils import resolve_cache_hit_alignment_tokens, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, MambaSpec, UniformTypeKVCacheSpecs
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_groups  # from 0.33 on
except ImportError:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

from samestate.engines.children.arguments import BadArguments, engine_arguments, server_arguments
from samestate.engines.children.lifetime import end_with
from samestate.engines.inquiry import Answer, Inquiry, Refused
from samestate.instruments.layout import checkpoint_interval, effective_bytes, page_bytes
from samestate.models.cache_shape import Pages

CONNECTORS = (
    "OffloadingConnector",
    "SimpleCPUOffloadConnector",
    "LMCacheMPConnector",
    "LMCacheConnectorV1",
    "MooncakeStoreConnector",
    "NixlConnector",
    "ExampleConnector",
)
"""Of vLLM's own, those that keep a prefix outside of the engine or fetch one."""


def examine(inquiry: Inquiry) -> Answer | Refused:
    """What vLLM would do with this model and these arguments."""
    try:
        args = EngineArgs.from_cli_args(_parsed(inquiry.model, ["--skip-tokenizer-init", *inquiry.serve_args]))
    except BadArguments as error:
        return Refused("arguments", str(error))
    try:
        config = args.create_engine_config()
    except Exception as error:
        return Refused("configuration", _telling_line(error))
    try:
        specs = _cache_specs(config)
    except Exception as error:
        return Refused("model", f"{type(error).__name__}: {_telling_line(error)}")
    return _answer(config, specs)


def _parsed(model: str, arguments: list[str]) -> Namespace:
    """The arguments; those of the frontend alone (``--port``) are read, where there are any. Raises `BadArguments`."""
    try:
        return engine_arguments(model, arguments)
    except BadArguments as error:
        if not str(error).startswith("unrecognized arguments"):
            raise
    return server_arguments(model, arguments)


def _cache_specs(config: VllmConfig) -> dict[str, KVCacheSpec]:
    """The spec of every layer, its block size aligned. The layers have shapes and no values."""
    with tempfile.NamedTemporaryFile() as store, set_current_vllm_config(config):
        init_distributed_environment(
            world_size=1,
            rank=0,
            distributed_init_method=f"file://{store.name}",
            local_rank=0,
            backend="gloo",
        )
        ensure_model_parallel_initialized(1, 1)
    with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
        initialize_model(config)
    current_platform.update_block_size_for_backend(config)
    specs: dict[str, KVCacheSpec] = get_kv_cache_spec(config)
    return specs


def _answer(config: VllmConfig, specs: dict[str, KVCacheSpec]) -> Answer:
    cache, drafts = config.cache_config, config.speculative_config
    layouts = [layout.name for layout in get_supported_kv_cache_layouts(get_current_attn_backends(config))]
    resolve_kv_cache_layout(config, [layouts], list(specs.values()))
    groups = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=get_kv_cache_groups(config, dict(specs)))
    caching = bool(cache.enable_prefix_caching)
    sizes = resolve_kv_cache_block_sizes(groups, config) if caching else None
    block_size = int(cache.block_size)
    states = [spec for spec in specs.values() if isinstance(spec, MambaSpec)]
    answer = Answer(
        version=vllm.__version__,
        platform=str(current_platform.device_type),
        architecture=config.model_config.architecture,
        max_model_len=int(config.model_config.max_model_len),
        prefix_caching=caching,
        chunk_tokens=int(config.scheduler_config.max_num_batched_tokens),
        interval=checkpoint_interval(groups) if caching else None,
        hit_step=int(resolve_cache_hit_alignment_tokens(groups, config, *sizes)) if sizes else None,
        drops_block=bool(drafts and drafts.use_eagle_block_drop()),
        block_size_restarted=_restarted(config),
        block_size=block_size,
        state_dtype=str(states[0].dtypes[-1]).removeprefix("torch.") if states else None,
        pages=[pages for index, group in enumerate(groups.kv_cache_groups) for pages in _pages(index, group)],
        hybrid_connectors=_connectors(),
    )
    return answer


def _restarted(config: VllmConfig) -> int:
    """The block size once more after what a core in a process of its own does (``vllm/v1/engine/core.py``)."""
    config.__post_init__()
    return int(config.cache_config.block_size)


def _pages(index: int, group: Any) -> list[Pages]:
    """A group's pages, one entry for each kind of layer in it."""
    spec = group.kv_cache_spec
    inner = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else dict.fromkeys(group.layer_names, spec)
    found: dict[tuple[str, int, int, int], int] = {}
    for layer in group.layer_names:
        own = inner[layer]
        key = (_kind(own), own.block_size, page_bytes(own), effective_bytes(own))
        found[key] = found.get(key, 0) + 1
    return [
        Pages(kind, layers, tokens, page, effective, in_prefix=bool(spec.prefix_cacheable), group=index)
        for (kind, tokens, page, effective), layers in found.items()
    ]


def _kind(spec: KVCacheSpec) -> str:
    if isinstance(spec, MambaSpec):
        return "recurrent"
    if not spec.prefix_cacheable:
        return "tail"
    return "attention" if spec.tokens_per_state == 1 else "indexer"


def _connectors() -> dict[str, bool]:
    found = {}
    for name in CONNECTORS:
        # What cannot be imported here cannot be used here either.
        with suppress(Exception):
            found[name] = issubclass(KVConnectorFactory.get_connector_class_by_name(name), SupportsHMA)
    return found


def _telling_line(error: Exception) -> str:
    """The first line; pydantic's own only counts the mistakes, and the first of them is what tells."""
    text = str(error)
    if isinstance(error, ValidationError):
        text = error.errors(include_url=False)[0]["msg"]
    return next(iter(text.strip().splitlines()), "").removeprefix("Value error, ")


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    asked = msgspec.json.decode(Path(sys.argv[2]).read_bytes(), type=Inquiry)
    Path(sys.argv[3]).write_bytes(msgspec.json.encode(examine(asked)))
