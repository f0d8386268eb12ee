"""What each layer of a known architecture keeps: read from a model's config.json, in bytes, for one rank. No torch.

Sources, all of vLLM 0.32.0: state shapes and their types are those of
``vllm/model_executor/layers/mamba/mamba_utils.py``, called as each model's ``get_mamba_state_shape_from_config`` does;
pages of attention are those of ``vllm/v1/kv_cache_interface.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from samestate.models.fields import MOST_LAYERS, MOST_RANKS, ConfigError, Fields, UnknownShape, divide
from samestate.models.layer_kinds import GLM, MAMBA, MIXED, QWEN, layer_kinds, require_attention

DTYPE_BYTES = {"float32": 4, "float16": 2, "half": 2, "bfloat16": 2, "float": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Bytes of one value, by vLLM's names of types; packed formats are not here, their pages are a kernel's own."""


GDN_CHUNK = 64
"""`FLASHINFER_GDN_CHECKPOINT_ALIGNMENT` in vLLM 0.33: seen in the blocks that it then chooses."""


class Target(NamedTuple):
    """Where and how a model is to be served. ``auto``: as vLLM decides."""

    platform: str = "cuda"
    """``cuda`` or ``cpu``."""
    tensor_parallel: int = 1
    block_size: int | None = None
    """None: not said."""
    dtype: str = "auto"
    cache_dtype: str = "auto"
    conv_dtype: str = "auto"
    """``--mamba-cache-dtype``."""
    state_dtype: str = "auto"
    """``--mamba-ssm-cache-dtype``."""
    drafts: int = 0
    """Speculative tokens a step."""
    fast_bf16: bool = False
    """Of a CPU: it has AVX-512 BF16."""
    checkpointing_gdn: bool = False
    """On CUDA: gated delta nets are prefilled by a kernel that hands out states within a step, FlashInfer's, which
    vLLM takes from 0.33 on (`_resolve_gdn_prefill_backend` in its ``qwen_gdn_linear_attn.py``)."""


class Attention(NamedTuple):
    """Layers whose pages hold something for every token."""

    kind: str
    """``attention`` or ``indexer``."""
    layers: int
    token_bytes: int
    """Of one stored row in one layer on one rank."""
    tokens_per_row: int
    kernel_block: int
    """The smallest block, in tokens, that its kernels take; blocks are multiples of it."""


class Recurrent(NamedTuple):
    """Layers with a state of one size, however many tokens it has seen."""

    layers: int
    state_bytes: int
    """Convolution and recurrence of one layer on one rank."""
    dtype: str
    """Of the recurrence."""
    grid: int = 1
    """Blocks are multiples of it, so that states within a step fall on their ends."""


class Ring(NamedTuple):
    """Layers that keep the last few tokens of a running request; nothing of it is found by a prefix."""

    layers: int
    tokens: int
    page_bytes: int


class States(NamedTuple):
    """All of a model's layers that keep something."""

    attention: list[Attention]
    """The first is what vLLM aligns the state to."""
    recurrent: Recurrent | None
    ring: Ring | None
    latent: bool
    """Multi-head latent attention."""


def layer_states(model_type: str, fields: Fields, target: Target, dtype: str) -> States:
    """What the layers of the model keep on one rank, `dtype` being the model's own type.

    Raises `ConfigError` for fields that are missing or do not fit, `UnknownShape` for other architectures.
    """
    if not 1 <= target.tensor_parallel <= MOST_RANKS:
        raise ConfigError(f"--tensor-parallel: {target.tensor_parallel} ranks; say 1 to {MOST_RANKS:,}")
    reader = _READERS.get(model_type)
    if reader is None:
        raise UnknownShape(f"model_type {model_type!r}: its cache is not calculated here")
    if target.cache_dtype not in ("auto", *DTYPE_BYTES):
        raise UnknownShape(f"--kv-cache-dtype {target.cache_dtype}: pages of packed types are not calculated here")
    return reader(fields, target, dtype)


# --- parts ----------------------------------------------------------------------------------------


def _bytes(dtype: str, flag: str) -> int:
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"{flag}: dtype {dtype!r}: unknown; use one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def _stated_type(fields: Fields, name: str) -> str | None:
    """The recurrence's type as the config states it."""
    stated = fields.text(name)
    if stated is not None:
        _bytes(stated, f"config.json: {name}")
    return stated


def _cache_bytes(target: Target, dtype: str) -> int:
    return _bytes(dtype if target.cache_dtype == "auto" else target.cache_dtype, "--kv-cache-dtype")


def _grouped(fields: Fields, target: Target, dtype: str, layers: int) -> Attention:
    """`FullAttentionSpec`: keys and values of the rank's heads. Fewer heads than ranks are replicated."""
    heads, ranks = fields.whole("num_attention_heads"), target.tensor_parallel
    divide("num_attention_heads", heads, ranks)
    kv_heads = fields.whole("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"config.json: num_key_value_heads is {kv_heads}, which does not divide num_attention_heads = {heads}; "
            "each is shared by as many heads"
        )
    if ranks % kv_heads:
        divide("num_key_value_heads", kv_heads, ranks)
    size = fields.whole("head_dim") if fields.has("head_dim") else fields.whole("hidden_size") // heads
    if size < 1:
        raise ConfigError(f"config.json: hidden_size is less than num_attention_heads = {heads}; say head_dim")
    # Multiples of 16 for FlashAttention and Triton, of 32 for CPUs (v1/attention/backends/flash_attn.py, cpu_attn.py).
    kernel = 32 if target.platform == "cpu" else 16
    return Attention("attention", layers, max(1, kv_heads // ranks) * 2 * size * _cache_bytes(target, dtype), 1, kernel)


def _latent(fields: Fields, target: Target, dtype: str, layers: int) -> Attention:
    """`MLAAttentionSpec`: one latent row a token, whole on every rank. Kernels take multiples of 64."""
    divide("num_attention_heads", fields.whole("num_attention_heads"), target.tensor_parallel)
    row = (fields.whole("kv_lora_rank") + fields.count("qk_rope_head_dim")) * _cache_bytes(target, dtype)
    return Attention("attention", layers, row, 1, 64)


def _state(target: Target, dtype: str, conv: int, recurrence: int, layers: int, default: str | None) -> Recurrent:
    """`MambaStateDtypeCalculator`: values of the convolution and of the recurrence, each in its type.

    `default` is the recurrence's type where nobody says one and it is not the convolution's.
    """
    conv_type = dtype if target.conv_dtype == "auto" else target.conv_dtype
    state_type = target.state_dtype
    if target.platform == "cpu" and target.fast_bf16:
        # vllm/platforms/cpu.py:300-321 of 0.32.0.
        state_type = "float32"
    elif state_type == "auto":
        state_type = default or conv_type
    size = conv * _bytes(conv_type, "--mamba-cache-dtype") + recurrence * _bytes(state_type, "--mamba-ssm-cache-dtype")
    return Recurrent(layers, size, state_type)


def _mamba2(fields: Fields, target: Target, dtype: str, layers: int, names: Mapping[str, str]) -> Recurrent:
    """`mamba2_state_shape`. Groups that the ranks do not divide are replicated."""
    ranks = target.tensor_parallel
    heads, size = fields.whole(names["heads"]), fields.whole(names["head"])
    width, groups = fields.whole(names["state"]), fields.whole(names["groups"])
    groups += 0 if groups % ranks == 0 else ranks - groups
    conv = divide("the convolution's channels", heads * size + 2 * groups * width, ranks)
    rows = fields.whole(names["kernel"]) - 1 + target.drafts
    default = "float32" if names is _NEMOTRON else None
    stated = _stated_type(fields, "mamba_ssm_cache_dtype") if names is _NEMOTRON else None
    return _state(
        target, dtype, conv * rows, divide(names["heads"], heads, ranks) * size * width, layers, stated or default
    )


_GRANITE = {
    "heads": "mamba_n_heads",
    "head": "mamba_d_head",
    "state": "mamba_d_state",
    "groups": "mamba_n_groups",
    "kernel": "mamba_d_conv",
}
_NEMOTRON = {
    "heads": "mamba_num_heads",
    "head": "mamba_head_dim",
    "state": "ssm_state_size",
    "groups": "n_groups",
    "kernel": "conv_kernel",
}


def _delta(target: Target, dtype: str, heads: int, size: int, kernel: int, layers: int) -> Recurrent:
    """`kda_state_shape`; the recurrence is float32 where nobody says another (`kda_state_dtype`)."""
    conv = divide("3·heads·head size of linear attention", 3 * heads * size, target.tensor_parallel)
    own = divide("heads of linear attention", heads, target.tensor_parallel)
    return _state(target, dtype, conv * (kernel - 1 + target.drafts), own * size * size, layers, "float32")


# --- architectures --------------------------------------------------------------------------------


def _gated_delta_net(fields: Fields, target: Target, dtype: str) -> States:
    """Qwen3-Next, Qwen3.5: `gated_delta_net_state_shape`. Qwen3.5 states the recurrence's type, ``mamba_ssm_dtype``."""
    every = fields.whole("full_attention_interval", 4)
    tokens, states = layer_kinds(fields, QWEN, lambda layer: bool((layer + 1) % every), "full_attention_interval")
    attention = [_grouped(fields, target, dtype, tokens)]
    if not states:
        return States(attention, None, None, latent=False)
    keys, values = fields.whole("linear_num_key_heads"), fields.whole("linear_num_value_heads")
    key, value = fields.whole("linear_key_head_dim"), fields.whole("linear_value_head_dim")
    own = divide("linear_num_value_heads", values, target.tensor_parallel)
    divide("linear_num_key_heads", keys, target.tensor_parallel)
    conv = (2 * keys * key + values * value) // target.tensor_parallel
    rows = fields.whole("linear_conv_kernel_dim", 4) - 1 + target.drafts
    recurrent = _state(target, dtype, conv * rows, own * value * key, states, _stated_type(fields, "mamba_ssm_dtype"))
    if target.checkpointing_gdn and target.platform == "cuda":
        recurrent = recurrent._replace(grid=GDN_CHUNK)
    return States(attention, recurrent, None, latent=False)


def _kimi_linear(fields: Fields, target: Target, dtype: str) -> States:
    linear = fields.within("linear_attn_config")
    if linear is None:
        raise ConfigError(
            "config.json: linear_attn_config is missing; vLLM reads heads and layers of linear attention there"
        )
    layers = fields.whole("num_hidden_layers", most=MOST_LAYERS)
    delta, full = linear.numbers("kda_layers"), linear.numbers("full_attn_layers")
    if sorted(delta + full) != list(range(1, layers + 1)):
        raise ConfigError(
            "config.json: linear_attn_config: kda_layers and full_attn_layers do not name each of the "
            f"{layers} layers (num_hidden_layers), counted from 1, once; mend them"
        )
    require_attention(len(full), "full_attn_layers")
    latent = _latent(fields, target, dtype, len(full))
    if not delta:
        return States([latent], None, None, latent=True)
    heads, size = linear.whole("num_heads"), linear.whole("head_dim")
    recurrent = _delta(target, dtype, heads, size, linear.whole("short_conv_kernel_size"), len(delta))
    return States([latent], recurrent, None, latent=True)


def _glm5_next(fields: Fields, target: Target, dtype: str) -> States:
    """GLM-5.3-Flash: ``vllm/models/glm5next/common/attention.py``. The indexer keeps one row of 8-bit keys and their
    scales a pool of tokens, its kernels take pages of 32 rows (``get_paged_mqa_page_sizes``; 64 on SM120); the tail of
    an unfinished pool is a ring of 16-bit keys and gates."""
    tokens, states = layer_kinds(fields, GLM, lambda layer: layer % 4 != 3)
    linear = fields.within("linear_attn_config")
    heads = linear.whole("num_heads") if linear else fields.whole("linear_num_heads")
    size = linear.whole("head_dim") if linear else fields.whole("linear_head_dim")
    kernel = linear.whole("short_conv_kernel_size") if linear else fields.whole("linear_conv_kernel_dim")
    pool, width = fields.whole("index_kpool"), fields.whole("index_head_dim")
    indexer = Attention("indexer", tokens, width + width // 128 * 4, pool, 32 * pool)
    ring = pool * (1 << (-(-(pool + target.drafts) // pool) - 1).bit_length())
    return States(
        [_latent(fields, target, dtype, tokens), indexer],
        _delta(target, dtype, heads, size, kernel, states) if states else None,
        Ring(tokens, ring, 2 * ring * width * 2),
        latent=True,
    )


def _granite(fields: Fields, target: Target, dtype: str) -> States:
    tokens, states = layer_kinds(fields, MAMBA)
    recurrent = _mamba2(fields, target, dtype, states, _GRANITE) if states else None
    return States([_grouped(fields, target, dtype, tokens)], recurrent, None, latent=False)


def _nemotron(fields: Fields, target: Target, dtype: str) -> States:
    pattern = fields.text("hybrid_override_pattern")
    named = list(pattern) if pattern else fields.names("layers_block_type") or fields.names("layer_types") or []
    if len(named) > MOST_LAYERS:
        raise ConfigError(f"config.json: hybrid_override_pattern names {len(named):,} layers; at most {MOST_LAYERS:,}")
    tokens, states = MIXED.kinds(named, "hybrid_override_pattern" if pattern else "layers_block_type")
    if not states or not tokens:
        raise ConfigError(
            "config.json: hybrid_override_pattern is missing or names no attention and state; give one letter a layer"
        )
    return States(
        [_grouped(fields, target, dtype, tokens)], _mamba2(fields, target, dtype, states, _NEMOTRON), None, latent=False
    )


def _dense(fields: Fields, target: Target, dtype: str) -> States:
    if fields.flag("use_sliding_window") or set(fields.names("layer_types") or []) - {"full_attention"}:
        raise UnknownShape("layer_types, use_sliding_window: pages of windows are not calculated here")
    return States(
        [_grouped(fields, target, dtype, fields.whole("num_hidden_layers", most=MOST_LAYERS))], None, None, latent=False
    )


_READERS: Mapping[str, Callable[[Fields, Target, str], States]] = {
    "qwen3_next": _gated_delta_net,
    "qwen3_5_text": _gated_delta_net,
    "qwen3_5_moe_text": _gated_delta_net,
    "kimi_linear": _kimi_linear,
    "glm5_next_text": _glm5_next,
    "granitemoehybrid": _granite,
    "nemotron_h": _nemotron,
    "llama": _dense,
    "qwen3": _dense,
    "qwen3_moe": _dense,
}
KNOWN_TYPES = tuple(_READERS)
"""Values of ``model_type`` whose cache can be calculated."""
