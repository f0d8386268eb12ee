"""Shrunk hybrids keep what decides their cache: kinds of layers, ratio of state and token, fields that engines read."""

from __future__ import annotations

from typing import Any

import pytest

from samestate.models import granite_hybrid, qwen3_5
from samestate.models.cache_shape import CacheShape, cache_shape
from samestate.models.configs import model_config
from samestate.models.delta_weights import SET_CHANNEL
from samestate.models.layer_states import Target
from samestate.models.sketch import Sketch
from samestate.models.weights import bfloat16

QWEN, GRANITE = "qwen3.5-tiny", "granite-hybrid-tiny"
PUBLIC = {QWEN: "qwen3.5-27b", GRANITE: "granite-4.0-h-small"}
EVERYWHERE = [
    Target(),
    Target(checkpointing_gdn=True),
    Target(drafts=1),
    Target(tensor_parallel=2),
    Target(platform="cpu"),
    Target(platform="cpu", fast_bf16=True, block_size=1792),
]


def config(model: str) -> dict[str, Any]:
    """The language model's fields."""
    whole = model_config(model).config
    return {"architectures": whole["architectures"], **whole.get("text_config", whole)}


def shape(model: str, target: Target) -> CacheShape:
    return cache_shape(model_config(model).config, target)


@pytest.mark.parametrize("target", EVERYWHERE)
def test_c_of_the_shrunk_qwen_is_the_public_ones(target: Target) -> None:
    ours, public = shape(QWEN, target), shape(PUBLIC[QWEN], target)
    assert (ours.interval, ours.state_dtype) == (public.interval, public.state_dtype)
    assert [page.kind for page in ours.pages] == [page.kind for page in public.pages] == ["attention", "recurrent"]


def test_c_of_the_shrunk_granite_is_nearly_the_public_ones() -> None:
    assert [shape(name, Target()).interval for name in (GRANITE, PUBLIC[GRANITE])] == [544, 528]


@pytest.mark.parametrize(
    ("model", "changed"),
    [
        (QWEN, {"bos_token_id", "eos_token_id", "pad_token_id", "vocab_size", "max_position_embeddings"}),
        (GRANITE, {"vocab_size", "max_position_embeddings", "attention_multiplier", "tie_word_embeddings"}),
    ],
)
def test_every_field_of_the_public_model_is_there_and_what_is_no_size_is_its_value(
    model: str, changed: set[str]
) -> None:
    ours, public = config(model), config(PUBLIC[model])
    sizes = {"head_dim", "hidden_size", "intermediate_size", "layer_types", "num_attention_heads", "num_hidden_layers"}
    sizes |= {"num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads", "rope_parameters"}
    sizes |= {"mamba_n_heads", "num_experts_per_tok", "num_local_experts", "shared_intermediate_size"}
    assert public.keys() <= ours.keys()
    assert {name for name, value in public.items() if ours[name] != value} - sizes == changed


def test_rotary_sections_fill_half_of_what_is_rotated_as_the_public_ones_do() -> None:
    for name in (QWEN, PUBLIC[QWEN]):
        rope = config(name)["rope_parameters"]
        assert 2 * sum(rope["mrope_section"]) == config(name)["head_dim"] * rope["partial_rotary_factor"]


def test_layers_of_the_shrunk_granite_are_the_public_ones_first_six() -> None:
    ours, public = (config(name)["layer_types"] for name in (GRANITE, PUBLIC[GRANITE]))
    assert ours == public[: len(ours)] and set(ours) == set(public)
    tiny = config(GRANITE)
    assert tiny["mamba_n_heads"] * tiny["mamba_d_head"] == tiny["mamba_expand"] * tiny["hidden_size"]
    assert tiny["attention_multiplier"] == tiny["num_attention_heads"] / tiny["hidden_size"]


def test_the_drafting_layer_of_qwen_has_what_the_public_one_has() -> None:
    names = {sketch.name for sketch in qwen3_5.weights(config(QWEN))}
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"} <= names
    assert not any(name.startswith("mtp.layers.1.") for name in names)
    without = {sketch.name for sketch in qwen3_5.weights(config(QWEN) | {"mtp_num_hidden_layers": 0})}
    assert names - without == {name for name in names if name.startswith("mtp.")}


def test_multipliers_of_granite_are_undone_where_the_stream_is_written() -> None:
    tiny = config(GRANITE)
    sketches = {sketch.name: sketch for sketch in granite_hybrid.weights(tiny)}
    first = sketches["model.embed_tokens.weight"].patches[0]
    assert first.value * tiny["embedding_multiplier"] == pytest.approx(SET_CHANNEL)
    hidden, experts = tiny["hidden_size"], tiny["num_local_experts"]
    outputs = sketches["model.layers.0.block_sparse_moe.output_linear.weight"]
    assert outputs.shape == (experts, hidden, tiny["intermediate_size"])
    (untouched,) = outputs.patches
    assert untouched.value == 0.0 and len(untouched.columns) == tiny["intermediate_size"]
    assert untouched.rows == tuple(hidden * expert + channel for expert in range(experts) for channel in (0, 1))


def test_rows_of_several_matrices_are_counted_through() -> None:
    weight = Sketch("w", (2, 2, 3), 0.0, 1.0).patched([1, 2], range(2, 3), 5.0).weight("a/0")
    one, five = bfloat16(1.0), bfloat16(5.0)
    assert list(weight.values) == [one, one, one, one, one, five, one, one, five, one, one, one]


def test_a_scaled_sketch_has_scaled_cells() -> None:
    scaled = Sketch("w", (2, 3), 1.0, 0.5).patched([0], range(1), 4.0).scaled(0.25)
    assert (scaled.std, scaled.mean, scaled.patches[0].value) == (0.25, 0.125, 1.0)
