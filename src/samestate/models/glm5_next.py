"""The weights of `glm5-next-tiny` and `glm5-next-small`: GLM-5.3-Flash's text model (delta attention, sparse attention
with a pooled indexer, hyper-connections, mixture of experts).

Their config.json has the fields of the public model's own, `Glm5NextTextConfig` of transformers 5.19 (source: see
``data/configs/glm-5.3-flash.json``), and those that vLLM reads and that class does not set: ``mhc``, ``mla_use_nope``,
``indexer_rope_interleave``, ``num_nextn_predict_layers``, ``scoring_func``, ``topk_method``. The tiny one is one period
of layers; its widths, heads, experts, vocabulary and ``index_topk`` are scaled down. The small one has the public
model's widths, heads, head sizes and ``index_topk``, so its C; layers, experts and vocabulary are fewer. Kinds of
entries, their order, the pool of 16 and the four streams are the public model's in both.
Left out: the vision tower, and in the tiny one the layer of multi-token prediction.

The small one's fields lie in ``text_config``, as the public model's do: vLLM looks for such layers only where
``model_type`` is ``glm5_next``. They draft, and are loaded only where ``speculative_config`` asks for them. A layer of
multi-token prediction is one of sparse attention past the last, without hyper-connections, with its own norms and
projection; vLLM shares the model's embedding and output with it, and wants the former named in its place too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from samestate.models.delta_weights import Tensors
from samestate.models.sketch import Sketch

DECAY_BIAS = (-9.5, 0.5)
"""Mean and standard deviation of ``dt_bias``: five times its sigmoid is the decay rate per token."""
MIXING = 0.3
"""Gain of the hyper-connections' projection."""
MLP = ("gate_proj", "up_proj", "down_proj")


def weights(config: dict[str, Any]) -> Iterator[Sketch]:
    """Every tensor of the checkpoint under its public name."""
    config = config.get("text_config", config)
    tensors = Tensors(config)
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    yield tensors.embedding("model.embed_tokens.weight")
    for index, (kind, mlp) in enumerate(zip(config["layer_types"], config["mlp_layer_types"], strict=True)):
        layer = f"model.layers.{index}"
        for place in ("attn", "ffn"):
            yield from _hyper_connection(tensors, f"{layer}.hc_{place}", config["hc_mult"], hidden)
        yield from _layer(tensors, layer, kind, mlp, config)
    yield tensors.norm("model.norm.weight", hidden)
    for index in range(config["num_nextn_predict_layers"]):
        layer = f"model.layers.{layers + index}"
        yield tensors.embedding(f"{layer}.embed_tokens.weight")
        for part in ("enorm", "hnorm", "shared_head.norm"):
            yield tensors.norm(f"{layer}.{part}.weight", hidden)
        yield tensors.linear(f"{layer}.eh_proj.weight", hidden, 2 * hidden)
        yield from _layer(tensors, layer, "indexed_attention", config["mlp_layer_types"][-1], config)
    yield tensors.output("lm_head.weight")


def _layer(tensors: Tensors, layer: str, kind: str, mlp: str, config: dict[str, Any]) -> Iterator[Sketch]:
    yield tensors.norm(f"{layer}.input_layernorm.weight", config["hidden_size"])
    yield tensors.norm(f"{layer}.post_attention_layernorm.weight", config["hidden_size"])
    attention = _recurrent if kind == "linear_attention" else _sparse
    yield from attention(tensors, f"{layer}.self_attn", config)
    if mlp == "dense":
        yield from tensors.mlp(f"{layer}.mlp", config["intermediate_size"], MLP)
    else:
        size, shared = config["moe_intermediate_size"], config["n_shared_experts"]
        yield from tensors.experts(f"{layer}.mlp", config["n_routed_experts"], size, shared, MLP)


def _hyper_connection(tensors: Tensors, name: str, streams: int, hidden: int) -> Iterator[Sketch]:
    mixed = (2 + streams) * streams
    yield tensors.linear(f"{name}_fn", mixed, streams * hidden, MIXING)
    # Streams begin alike: without a bias of its own each would stay the others' copy.
    yield tensors.drawn(f"{name}_base", mixed, std=1.0)
    yield tensors.constant(f"{name}_scale", 3, value=1.0)


def _recurrent(tensors: Tensors, name: str, config: dict[str, Any]) -> Iterator[Sketch]:
    heads, size = config["linear_num_heads"], config["linear_head_dim"]
    yield from tensors.delta_attention(name, heads, size, config["linear_conv_kernel_dim"])
    mean, std = DECAY_BIAS
    yield tensors.drawn(f"{name}.dt_bias", heads * size, std=std, mean=mean)
    yield tensors.constant(f"{name}.A_log", heads, value=0.0)


def _sparse(tensors: Tensors, name: str, config: dict[str, Any]) -> Iterator[Sketch]:
    hidden, rank = config["hidden_size"], config["q_lora_rank"]
    yield tensors.linear(f"{name}.q_a_proj.weight", rank, hidden)
    yield tensors.norm(f"{name}.q_a_layernorm.weight", rank)
    queries = config["num_attention_heads"] * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    yield tensors.linear(f"{name}.q_b_proj.weight", queries, rank)
    yield from tensors.latent_attention(name, config)
    heads, size, pool = config["index_n_heads"], config["index_head_dim"], config["index_kpool"]
    yield tensors.linear(f"{name}.indexer.wq_b.weight", heads * size, rank)
    yield tensors.linear(f"{name}.indexer.wk.weight", size, hidden)
    yield tensors.norm(f"{name}.indexer.k_norm.weight", size)
    yield tensors.constant(f"{name}.indexer.k_norm.bias", size, value=0.0)
    yield tensors.linear(f"{name}.indexer.weights_proj.weight", heads, hidden)
    yield tensors.drawn(f"{name}.indexer.index_kpool_compress_ape", pool, size, std=0.5)
    yield tensors.linear(f"{name}.indexer.index_kpool_compress_gate", size, hidden)
