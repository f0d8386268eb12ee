"""The shape of a model's cache, calculated from its config.json: C, blocks, pages. For where its vLLM is not installed.

Only sizes are calculated: which blocks exist, are found or are moved is vLLM's own business. The rules are those of
vLLM 0.32.0, `_align_hybrid_block_size` and `_preferred_block_size_for_backends` in ``vllm/platforms/interface.py``, and
`check_and_update_config` in ``vllm/platforms/cpu.py``; tests hold them against values read from running engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm
from typing import Any, NamedTuple

import msgspec

from samestate.models.fields import ConfigError, Fields, UnknownShape
from samestate.models.layer_states import Attention, States, Target, layer_states

DTYPES = ("bfloat16", "float16", "half", "float32", "float")
DEFAULT_BLOCK = {"cuda": 16, "cpu": 128}
"""`CacheConfig.DEFAULT_BLOCK_SIZE`, and what the CPU platform takes where nobody says one."""
LATENT_BLOCK = 128
"""Latent attention beside a recurrent state: blocks are multiples of it."""


class Pages(msgspec.Struct, frozen=True):
    """The pages of layers of one kind, or of one of vLLM's cache groups, on one rank."""

    kind: str
    """``attention``, ``recurrent``, ``indexer`` or ``tail``."""
    layers: int
    tokens_per_block: int
    page_bytes: int
    """Of one layer's page, padding included."""
    effective_bytes: int
    """What later computation reads of it."""
    in_prefix: bool = True
    """Whether a prefix is found by it; a ring of latest tokens is not."""
    group: int | None = None
    """vLLM's number; None where it was not asked."""


class CacheShape(msgspec.Struct, frozen=True):
    """What a model's cache looks like on one rank."""

    interval: int
    """C."""
    pages: list[Pages]
    state_dtype: str | None
    """Of the recurrence; None without one."""
    max_model_len: int | None
    """The context that the model's config states."""
    assumed: list[str]
    """What the calculation takes for granted."""


class TextConfig(NamedTuple):
    """The part of a config.json that the language model has, and what is said around it."""

    fields: Fields
    model_type: str
    dtype: str
    architecture: str | None
    max_model_len: int | None


def text_config(config: Mapping[str, Any], dtype: str = "auto") -> TextConfig:
    """The language model's part of `config`, and its type, unless `dtype` is one. Raises `ConfigError`."""
    own = config.get("text_config")
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError("config.json: model_type is missing; it names the architecture")
    if own is not None and not isinstance(own, Mapping):
        raise ConfigError("config.json: text_config is no object; it holds the language model's fields")
    if own is None and model_type in _COMPOSITE:
        raise ConfigError(
            f"config.json: text_config is missing; for model_type {model_type!r} it holds the language model's fields"
        )
    inner: Mapping[str, Any] = config if own is None else own
    inner_type = inner.get("model_type")
    stated = next(
        (value for part in (inner, config) for name in ("dtype", "torch_dtype") if (value := part.get(name))), None
    )
    if dtype not in ("auto", *DTYPES):
        raise ConfigError(f"--dtype: {dtype!r} is none that vLLM computes in; use one of {', '.join(DTYPES)}")
    stated = dtype if dtype != "auto" else stated
    if stated is None:
        raise ConfigError("config.json: dtype is missing; add the type of its weights, or say --dtype in --serve-args")
    if stated not in DTYPES:
        raise ConfigError(
            f"config.json: dtype {stated!r} is none that vLLM computes in; use one of {', '.join(DTYPES)}"
        )
    architectures = config.get("architectures") or [None]
    fields = Fields(inner)
    length = next((name for name in _LENGTHS if fields.has(name)), None)
    return TextConfig(
        fields,
        inner_type if isinstance(inner_type, str) else model_type,
        str(stated),
        architectures[0] if isinstance(architectures, list) and isinstance(architectures[0], str) else None,
        fields.whole(length) if length else None,
    )


def cache_shape(config: Mapping[str, Any], target: Target) -> CacheShape:
    """The shape of the cache of the model with this config.json.

    Raises:
        ConfigError: a field is missing, or an argument does not fit; one line with the remedy.
        UnknownShape: the architecture, a type or the platform is not one that can be calculated; one line.

    """
    text = text_config(config, target.dtype)
    states = layer_states(text.model_type, text.fields, target, text.dtype)
    if target.platform == "cpu" and states.latent:
        raise UnknownShape("vLLM on CPUs turns prefix caching off for latent attention (without AMX), so there is no C")
    common = lcm(*(attention.kernel_block for attention in states.attention))
    block = _said_or_preferred(target, common)
    interval = _aligned(states, block, common)
    first = states.attention[0]
    page = interval * first.token_bytes
    recurrent = states.recurrent
    pages = [_positional(attention, interval) for attention in states.attention]
    if recurrent is not None:
        pages.append(Pages("recurrent", recurrent.layers, interval, page, recurrent.state_bytes))
    if states.ring is not None:
        ring = states.ring
        pages.append(Pages("tail", ring.layers, ring.tokens, ring.page_bytes, ring.page_bytes, in_prefix=False))
    return CacheShape(
        interval, pages, recurrent.dtype if recurrent else None, text.max_model_len, _assumed(target, states, common)
    )


def _positional(attention: Attention, interval: int) -> Pages:
    size = interval // attention.tokens_per_row * attention.token_bytes
    return Pages(attention.kind, attention.layers, interval, size, size)


def _said_or_preferred(target: Target, common: int) -> int:
    """The block before it is aligned: as said, or the smallest that all kernels take."""
    default = DEFAULT_BLOCK[target.platform]
    if target.block_size is None:
        return default if default % common == 0 else common
    if target.block_size < 1 or target.block_size % common:
        near = max(1, (2 * target.block_size + common) // (2 * common)) * common
        raise ConfigError(
            f"--block-size: {target.block_size} is no multiple of {common}, the attention kernels' block; say {near}"
        )
    return target.block_size


def _aligned(states: States, block: int, common: int) -> int:
    """The block in which attention's page holds a whole state; that is C."""
    if states.recurrent is None:
        return block
    first = states.attention[0]
    step = max(first.kernel_block, block, LATENT_BLOCK if states.latent else 0)
    # Whole numbers throughout: a float is off by one where a state is large.
    needed = step * -(-states.recurrent.state_bytes // (step * first.token_bytes))
    common = lcm(common, states.recurrent.grid)
    return max(block, common * -(-needed // common))


def _assumed(target: Target, states: States, common: int) -> list[str]:
    if target.platform == "cpu":
        fast = "with" if target.fast_bf16 else "without"
        return [f"blocks in multiples of {common} tokens (vLLM's attention on CPUs)", f"a CPU {fast} AVX-512 BF16"]
    kernels = "FlashAttention or Triton; Blackwell's kernels for head size 256 may take more"
    if states.recurrent and states.recurrent.grid > 1:
        common = lcm(common, states.recurrent.grid)
        kernels = "FlashInfer's prefill of gated delta nets; --gdn-prefill-backend triton takes less"
    if states.latent:
        kernels = "latent attention"
        common = max(common, LATENT_BLOCK) if states.recurrent else common
    if len(states.attention) > 1:
        kernels = "sparse latent attention with 32-row indexer pages, as on SM90 and SM100"
    return [f"blocks in multiples of {common} tokens ({kernels})"]


_LENGTHS = ("max_position_embeddings", "model_max_length", "max_sequence_length")
_COMPOSITE = {"qwen3_5", "qwen3_5_moe", "glm5_next"}
"""Types of models with a vision tower: the language model's fields lie in ``text_config``."""
