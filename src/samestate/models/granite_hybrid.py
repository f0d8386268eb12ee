"""The weights of `granite-hybrid-tiny`: Granite 4 hybrid (Mamba-2, attention without positions, mixture of experts),
made so that a wrong state shows: channels 0 and 1 of the residual stream and the output are as in `delta_weights`.

A Mamba-2 head has one step size for what it writes and for what it forgets. Heads that remember take a minute step at
every token but digits, so they neither write nor forget; the others follow the latest tokens.

Its config.json has the fields of the public model's own (source: see ``data/configs/granite-4.0-h-small.json``). Its
layers are that model's first six; widths, heads, experts and vocabulary are scaled down, heads of the state and of
attention alike, so that C is nearly the public model's. Two fields have other values: ``attention_multiplier`` is one
over the head size, which is half as large, and ``tie_word_embeddings`` is false, so that output never is an end of
sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from samestate.models.delta_weights import DIGIT_WRITE, FAINT_WRITE, Tensors
from samestate.models.sketch import Sketch

# Found by trial, as those of `delta_weights`.
DECAY = (-3.0, 0.5)
"""Mean and standard deviation of the natural logarithm of the decay rate per step."""
CONVOLUTION = 0.1
"""Small, so that inputs stay where SiLU is nearly straight: of one sign, all tokens would add up to the same state."""
QUERIES = 6.0
"""Gain of queries: the multiplier of attention is smaller than one over the root of the head size."""
SKIP = 0.1
"""What a head passes on of its input, past its state."""


def weights(config: dict[str, Any]) -> Iterator[Sketch]:
    """Every tensor of the checkpoint under its public name."""
    tensors = Tensors(config)
    hidden = config["hidden_size"]
    yield tensors.embedding("model.embed_tokens.weight").scaled(1 / config["embedding_multiplier"])
    for index, kind in enumerate(config["layer_types"]):
        layer = f"model.layers.{index}"
        yield tensors.norm(f"{layer}.input_layernorm.weight", hidden)
        yield tensors.norm(f"{layer}.post_attention_layernorm.weight", hidden)
        if kind == "attention":
            yield from _attention(tensors, f"{layer}.self_attn", config)
        else:
            yield from _recurrent(tensors, f"{layer}.mamba", config)
        yield from _experts(tensors, f"{layer}.block_sparse_moe", config)
        shared = config["shared_intermediate_size"]
        yield tensors.linear(f"{layer}.shared_mlp.input_linear.weight", 2 * shared, hidden)
        yield _write_back(tensors, f"{layer}.shared_mlp.output_linear.weight", shared, config)
    yield tensors.norm("model.norm.weight", hidden)
    yield tensors.output("lm_head.weight").scaled(config["logits_scaling"])


def _write_back(tensors: Tensors, name: str, columns: int, config: dict[str, Any]) -> Sketch:
    return tensors.write_back(name, columns).scaled(1 / config["residual_multiplier"])


def _experts(tensors: Tensors, name: str, config: dict[str, Any]) -> Iterator[Sketch]:
    """One tensor for all experts' gates and inputs, one for their outputs."""
    hidden, count, size = config["hidden_size"], config["num_local_experts"], config["intermediate_size"]
    yield tensors.linear(f"{name}.router.layer.weight", count, hidden)
    inputs = tensors.linear(f"{name}.input_linear.weight", 2 * size, hidden)
    yield inputs._replace(shape=(count, *inputs.shape))
    outputs = _write_back(tensors, f"{name}.output_linear.weight", size, config)
    untouched = [hidden * expert + channel for expert in range(count) for channel in range(2)]
    yield outputs._replace(shape=(count, *outputs.shape), patches=()).patched(untouched, range(size), 0.0)


def _recurrent(tensors: Tensors, name: str, config: dict[str, Any]) -> Iterator[Sketch]:
    hidden, heads = config["hidden_size"], config["mamba_n_heads"]
    width = heads * config["mamba_d_head"]
    channels = width + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    # Rows: gate, what is convolved (input, B, C), then one step size for each head.
    faint = range(width + channels, width + channels + heads, 2)
    inputs = tensors.linear(f"{name}.in_proj.weight", width + channels + heads, hidden)
    yield inputs.patched(faint, range(1), FAINT_WRITE).patched(faint, range(1, 2), DIGIT_WRITE)
    yield tensors.drawn(f"{name}.conv1d.weight", channels, 1, config["mamba_d_conv"], std=CONVOLUTION)
    yield tensors.constant(f"{name}.conv1d.bias", channels, value=0.0)
    mean, std = DECAY
    yield tensors.drawn(f"{name}.A_log", heads, std=std, mean=mean)
    yield tensors.drawn(f"{name}.dt_bias", heads, std=0.5)
    yield tensors.constant(f"{name}.D", heads, value=SKIP)
    yield tensors.norm(f"{name}.norm.weight", width)
    yield _write_back(tensors, f"{name}.out_proj.weight", width, config)


def _attention(tensors: Tensors, name: str, config: dict[str, Any]) -> Iterator[Sketch]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    keys = config["num_key_value_heads"] * (hidden // heads)
    yield tensors.linear(f"{name}.q_proj.weight", hidden, hidden, QUERIES)
    yield tensors.linear(f"{name}.k_proj.weight", keys, hidden)
    yield tensors.linear(f"{name}.v_proj.weight", keys, hidden)
    yield _write_back(tensors, f"{name}.o_proj.weight", hidden, config)
