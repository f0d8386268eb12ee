"""The weights of `qwen3-next-tiny` and `qwen3-next-small`: Qwen3-Next (gated delta net, full attention, mixture of
experts), made so that a wrong state shows.

- Channel 0 of the residual stream is the same for every token and no layer writes to it: the
  bias that the architecture lacks. Through it half of the recurrent heads write faintly, and
  so remember thousands of tokens; the other half write strongly and follow the latest tokens.
- Channel 1, kept alike, marks digits, which the remembering heads write less faintly: codes at
  the start of a prompt stand out in the state however much filler follows.
- Output rows of ids that are no readable text are zero: greedy output is always text, and an
  end of sequence is never chosen.

`qwen3-next-small` has the public model's depth, heads, head sizes and widths (source: see
``data/configs/qwen3-next-80b-a3b.json``), so its kinds of entries, groups and C; experts and vocabulary are fewer, and
``layer_types``, ``bos_token_id``, ``eos_token_id`` are written out. ``num_nextn_predict_layers`` is what vLLM reads for
multi-token prediction; such layers draft, and are loaded only where ``speculative_config`` asks for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import Any

from samestate.models.delta_weights import (
    CONVOLUTION,
    DIGIT_WRITE,
    FAINT_WRITE,
    PROJECTION,
    embedding,
    output,
    write_back_gain,
)
from samestate.models.sketch import Sketch

# Scales here and in `delta_weights`, found by trial: with them a state of another request, an older state, an empty
# one or one layer's wrong state changed greedy output within 64 tokens in every trial (tiny model, templates here,
# C = 1792). Gains are standard deviations of a projection's output per unit of its input.
GATE = 1.0
DECAY = (-10.0, 0.5)
"""Mean and standard deviation of the natural logarithm of the decay rate per token."""


def weights(config: dict[str, Any]) -> Iterator[Sketch]:
    """Every tensor of the checkpoint under its Hugging Face name."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    layers = _Layers(config)
    yield embedding("model.embed_tokens.weight", vocabulary, hidden)
    for index in range(config["num_hidden_layers"]):
        attends = (index + 1) % config["full_attention_interval"] == 0
        yield from layers.layer(f"model.layers.{index}", attends)
    yield _constant("model.norm.weight", hidden, 0.0)
    for index in range(config.get("num_nextn_predict_layers", 0)):
        yield from layers.layer(f"mtp.layers.{index}", True)
    if config.get("num_nextn_predict_layers", 0):
        yield layers.linear("mtp.fc.weight", hidden, 2 * hidden)
        for part in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
            yield _constant(f"mtp.{part}.weight", hidden, 0.0)
    yield output("lm_head.weight", vocabulary, hidden)


class _Layers:
    """Sketches what every layer is made of."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._hidden: int = config["hidden_size"]
        self._write_back = write_back_gain(config["num_hidden_layers"])

    def linear(self, name: str, rows: int, columns: int, gain: float = PROJECTION) -> Sketch:
        return Sketch(name, (rows, columns), gain / sqrt(columns))

    def layer(self, name: str, attends: bool) -> Iterator[Sketch]:
        config, hidden = self._config, self._hidden
        yield _constant(f"{name}.input_layernorm.weight", hidden, 0.0)
        yield from self._attention(f"{name}.self_attn") if attends else self._recurrent(f"{name}.linear_attn")
        yield _constant(f"{name}.post_attention_layernorm.weight", hidden, 0.0)
        yield self.linear(f"{name}.mlp.gate.weight", config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            yield from self._mlp(f"{name}.mlp.experts.{expert}", config["moe_intermediate_size"])
        yield from self._mlp(f"{name}.mlp.shared_expert", config["shared_expert_intermediate_size"])
        yield self.linear(f"{name}.mlp.shared_expert_gate.weight", 1, hidden)

    def _write_into_stream(self, name: str, columns: int) -> Sketch:
        """A projection into the residual stream, which leaves the two set channels alone."""
        return self.linear(name, self._hidden, columns, self._write_back).patched(range(2), range(columns), 0.0)

    def _mlp(self, name: str, size: int) -> Iterator[Sketch]:
        yield self.linear(f"{name}.gate_proj.weight", size, self._hidden)
        yield self.linear(f"{name}.up_proj.weight", size, self._hidden)
        yield self._write_into_stream(f"{name}.down_proj.weight", size)

    def _recurrent(self, name: str) -> Iterator[Sketch]:
        config, hidden = self._config, self._hidden
        key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        keys, values = key_heads * config["linear_key_head_dim"], heads * config["linear_value_head_dim"]
        yield self.linear(f"{name}.in_proj_qkvz.weight", 2 * (keys + values), hidden)
        # For each key head: a row of write strength for each of its value heads, then a row of decay for each.
        each = heads // key_heads
        faint = [2 * each * (head // each) + head % each for head in range(0, heads, 2)]
        gates = self.linear(f"{name}.in_proj_ba.weight", 2 * heads, hidden, GATE)
        yield gates.patched(faint, range(1), FAINT_WRITE).patched(faint, range(1, 2), DIGIT_WRITE)
        kernel = config["linear_conv_kernel_dim"]
        yield Sketch(f"{name}.conv1d.weight", (2 * keys + values, 1, kernel), CONVOLUTION)
        mean, std = DECAY
        yield Sketch(f"{name}.A_log", (heads,), std, mean)
        yield Sketch(f"{name}.dt_bias", (heads,), 0.5)
        yield _constant(f"{name}.norm.weight", config["linear_value_head_dim"], 1.0)
        yield self._write_into_stream(f"{name}.out_proj.weight", values)

    def _attention(self, name: str) -> Iterator[Sketch]:
        config, hidden, size = self._config, self._hidden, self._config["head_dim"]
        queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
        yield self.linear(f"{name}.q_proj.weight", 2 * queries, hidden)
        yield self.linear(f"{name}.k_proj.weight", keys, hidden)
        yield self.linear(f"{name}.v_proj.weight", keys, hidden)
        yield self._write_into_stream(f"{name}.o_proj.weight", queries)
        yield _constant(f"{name}.q_norm.weight", size, 0.0)
        yield _constant(f"{name}.k_norm.weight", size, 0.0)


def _constant(name: str, size: int, value: float) -> Sketch:
    return Sketch(name, (size,), 0.0, value)
