"""The weights of `qwen3.5-tiny`: Qwen3.5's dense text model (gated delta net, full attention with an output gate), one
period of its layers and its layer of multi-token prediction, made as those of `qwen3_next`: a wrong state shows.

Its config.json has the fields of the public model's own text part (source: see ``data/configs/qwen3.5-27b.json``).
Heads that fill the cache are an eighth of its (key heads 2 of 16, value heads 6 of 48, and for attention 2 of 64 in
place of 4 of 256), so state and token keep their ratio, and C is the public model's on one rank and on two. Kinds of
entries, their order and the types of the state are its too. Widths, layers, query heads, vocabulary and the rotary
sections are scaled down. Left out: the vision tower.

The fields lie in ``text_config``, as the public model's do. With the language model's fields alone (``qwen3_5_text``)
vLLM 0.32 and 0.33 rename ``model_type`` for the drafting layer, and its class then refuses the name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from samestate.models.delta_weights import CONVOLUTION, DIGIT_WRITE, FAINT_WRITE, Tensors
from samestate.models.qwen3_next import DECAY, GATE
from samestate.models.sketch import Sketch

MLP = ("gate_proj", "up_proj", "down_proj")


def weights(config: dict[str, Any]) -> Iterator[Sketch]:
    """Every tensor of the checkpoint under its public name."""
    config = config.get("text_config", config)
    tensors = Tensors(config)
    hidden, drafting = config["hidden_size"], config["mtp_num_hidden_layers"]
    yield tensors.embedding("model.embed_tokens.weight")
    for index, kind in enumerate(config["layer_types"]):
        yield from _layer(tensors, f"model.layers.{index}", kind, config)
    yield _unscaled(tensors, "model.norm.weight", hidden)
    for index in range(drafting):
        yield from _layer(tensors, f"mtp.layers.{index}", "full_attention", config)
    if drafting:
        yield tensors.linear("mtp.fc.weight", hidden, 2 * hidden)
        for part in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
            yield _unscaled(tensors, f"mtp.{part}.weight", hidden)
    yield tensors.output("lm_head.weight")


def _unscaled(tensors: Tensors, name: str, size: int) -> Sketch:
    """A norm whose weight is added to one."""
    return tensors.constant(name, size, value=0.0)


def _layer(tensors: Tensors, name: str, kind: str, config: dict[str, Any]) -> Iterator[Sketch]:
    hidden = config["hidden_size"]
    yield _unscaled(tensors, f"{name}.input_layernorm.weight", hidden)
    yield _unscaled(tensors, f"{name}.post_attention_layernorm.weight", hidden)
    if kind == "full_attention":
        yield from _attention(tensors, f"{name}.self_attn", config)
    else:
        yield from _recurrent(tensors, f"{name}.linear_attn", config)
    yield from tensors.mlp(f"{name}.mlp", config["intermediate_size"], MLP)


def _recurrent(tensors: Tensors, name: str, config: dict[str, Any]) -> Iterator[Sketch]:
    hidden, heads, size = config["hidden_size"], config["linear_num_value_heads"], config["linear_value_head_dim"]
    keys, values = config["linear_num_key_heads"] * config["linear_key_head_dim"], heads * size
    yield tensors.linear(f"{name}.in_proj_qkv.weight", 2 * keys + values, hidden)
    yield tensors.linear(f"{name}.in_proj_z.weight", values, hidden)
    faint = range(0, heads, 2)
    strengths = tensors.linear(f"{name}.in_proj_b.weight", heads, hidden, GATE)
    yield strengths.patched(faint, range(1), FAINT_WRITE).patched(faint, range(1, 2), DIGIT_WRITE)
    yield tensors.linear(f"{name}.in_proj_a.weight", heads, hidden, GATE)
    kernel = config["linear_conv_kernel_dim"]
    yield tensors.drawn(f"{name}.conv1d.weight", 2 * keys + values, 1, kernel, std=CONVOLUTION)
    mean, std = DECAY
    yield tensors.drawn(f"{name}.A_log", heads, std=std, mean=mean)
    yield tensors.drawn(f"{name}.dt_bias", heads, std=0.5)
    yield tensors.norm(f"{name}.norm.weight", size)
    yield tensors.write_back(f"{name}.out_proj.weight", values)


def _attention(tensors: Tensors, name: str, config: dict[str, Any]) -> Iterator[Sketch]:
    hidden, size = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    # Each head's query, then its gate.
    yield tensors.linear(f"{name}.q_proj.weight", 2 * queries, hidden)
    yield tensors.linear(f"{name}.k_proj.weight", keys, hidden)
    yield tensors.linear(f"{name}.v_proj.weight", keys, hidden)
    yield tensors.write_back(f"{name}.o_proj.weight", queries)
    yield _unscaled(tensors, f"{name}.q_norm.weight", size)
    yield _unscaled(tensors, f"{name}.k_norm.weight", size)
