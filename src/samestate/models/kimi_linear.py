"""The weights of `kimi-linear-tiny`: Kimi-Linear (delta attention, latent attention, mixture of experts), one period of
its layers.

Its config.json has the fields of the public model's own (source: see ``data/configs/kimi-linear-48b-a3b.json``) and
``moe_router_activation_func``, which vLLM reads. Widths, heads, experts, layers and vocabulary are scaled down. Kinds
of entries and their order are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from samestate.models.delta_weights import Tensors
from samestate.models.sketch import Sketch

DECAY = (-9.0, 0.5)
"""Mean and standard deviation of the natural logarithm of the decay rate per token."""
MLP, EXPERT = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")


def weights(config: dict[str, Any]) -> Iterator[Sketch]:
    """Every tensor of the checkpoint under its public name."""
    tensors = Tensors(config)
    hidden, linear = config["hidden_size"], config["linear_attn_config"]
    yield tensors.embedding("model.embed_tokens.weight")
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        yield tensors.norm(f"{layer}.input_layernorm.weight", hidden)
        yield tensors.norm(f"{layer}.post_attention_layernorm.weight", hidden)
        # Layers are counted from 1 there.
        attention = _recurrent if index + 1 in linear["kda_layers"] else _latent
        yield from attention(tensors, f"{layer}.self_attn", config)
        if index < config["first_k_dense_replace"]:
            yield from tensors.mlp(f"{layer}.mlp", config["intermediate_size"], MLP)
        else:
            size, shared = config["moe_intermediate_size"], config["num_shared_experts"]
            yield from tensors.experts(f"{layer}.block_sparse_moe", config["num_experts"], size, shared, EXPERT)
    yield tensors.norm("model.norm.weight", hidden)
    yield tensors.output("lm_head.weight")


def _recurrent(tensors: Tensors, name: str, config: dict[str, Any]) -> Iterator[Sketch]:
    linear = config["linear_attn_config"]
    heads, size = linear["num_heads"], linear["head_dim"]
    yield from tensors.delta_attention(name, heads, size, linear["short_conv_kernel_size"])
    yield tensors.drawn(f"{name}.dt_bias", heads * size, std=0.5)
    mean, std = DECAY
    yield tensors.drawn(f"{name}.A_log", 1, 1, heads, 1, std=std, mean=mean)


def _latent(tensors: Tensors, name: str, config: dict[str, Any]) -> Iterator[Sketch]:
    queries = config["num_attention_heads"] * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    yield tensors.linear(f"{name}.q_proj.weight", queries, config["hidden_size"])
    yield from tensors.latent_attention(name, config)
