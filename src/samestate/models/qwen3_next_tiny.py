"""The weights of `qwen3-next-tiny`: Qwen3-Next (gated delta net, full attention, mixture of experts), made so that a
wrong state shows.

- Channel 0 of the residual stream is the same for every token and no layer writes to it: the
  bias that the architecture lacks. Through it half of the recurrent heads write faintly, and
  so remember thousands of tokens; the other half write strongly and follow the latest tokens.
- Channel 1, kept alike, marks digits, which the remembering heads write less faintly: codes at
  the start of a prompt stand out in the state however much filler follows.
- Output rows of ids that are no readable text are zero: greedy output is always text, and an
  end of sequence is never chosen.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from math import sqrt

from samestate.models.tokenizer import DIGIT_IDS, readable_ids
from samestate.models.weights import ZERO, Weight, bfloat16, constant, drawn

# Scales, found by trial: with them a state of another request, an older state, an empty one or one
# layer's wrong state changed greedy output within 64 tokens in every trial (templates here, C = 1792).
# Gains are standard deviations of a projection's output per unit of its input.
EMBEDDING = 1.0
PROJECTION = 1.5
WRITE_BACK = 1.5
OUTPUT = 3.0
GATE = 1.0
CONVOLUTION = 0.5
SET_CHANNEL = 12.0
"""Value of channel 0 in every embedding and of channel 1 in those of digits."""
FAINT_WRITE, DIGIT_WRITE = -1.1, 0.75
"""Weights of channels 0 and 1 in the write strength of the heads that remember."""
DECAY = (-10.0, 0.5)
"""Mean and standard deviation of the natural logarithm of the decay rate per token."""


def weights(config: dict[str, int], stream: str) -> Iterator[Weight]:
    """Every tensor of the checkpoint under its Hugging Face name."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]

    def linear(name: str, rows: int, columns: int, gain: float = PROJECTION) -> Weight:
        return drawn(stream, name, rows, columns, std=gain / sqrt(columns))

    def write_back(name: str, columns: int) -> Weight:
        """A projection into the residual stream, which leaves the two set channels alone."""
        weight = linear(name, hidden, columns, WRITE_BACK)
        weight.values[: 2 * columns] = array("H", [ZERO]) * (2 * columns)
        return weight

    def mlp(name: str, size: int) -> Iterator[Weight]:
        yield linear(f"{name}.gate_proj.weight", size, hidden)
        yield linear(f"{name}.up_proj.weight", size, hidden)
        yield write_back(f"{name}.down_proj.weight", size)

    def recurrent(name: str) -> Iterator[Weight]:
        heads = config["linear_num_value_heads"]
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        values = heads * config["linear_value_head_dim"]
        yield linear(f"{name}.in_proj_qkvz.weight", 2 * (keys + values), hidden)
        # One key head a value head: the rows alternate write strength and decay, head by head.
        gates = linear(f"{name}.in_proj_ba.weight", 2 * heads, hidden, GATE)
        for head in range(0, heads, 2):
            first = 2 * head * hidden
            gates.values[first : first + 2] = array("H", map(bfloat16, (FAINT_WRITE, DIGIT_WRITE)))
        yield gates
        yield drawn(
            stream, f"{name}.conv1d.weight", 2 * keys + values, 1, config["linear_conv_kernel_dim"], std=CONVOLUTION
        )
        mean, std = DECAY
        yield drawn(stream, f"{name}.A_log", heads, std=std, mean=mean)
        yield drawn(stream, f"{name}.dt_bias", heads, std=0.5)
        yield constant(f"{name}.norm.weight", config["linear_value_head_dim"], value=1.0)
        yield write_back(f"{name}.out_proj.weight", values)

    def attention(name: str) -> Iterator[Weight]:
        size = config["head_dim"]
        queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
        yield linear(f"{name}.q_proj.weight", 2 * queries, hidden)
        yield linear(f"{name}.k_proj.weight", keys, hidden)
        yield linear(f"{name}.v_proj.weight", keys, hidden)
        yield write_back(f"{name}.o_proj.weight", queries)
        yield constant(f"{name}.q_norm.weight", size, value=0.0)
        yield constant(f"{name}.k_norm.weight", size, value=0.0)

    embedding = drawn(stream, "model.embed_tokens.weight", vocabulary, hidden, std=EMBEDDING)
    mark = bfloat16(SET_CHANNEL)
    embedding.values[::hidden] = array("H", [mark]) * vocabulary
    embedding.values[1::hidden] = array("H", (mark if id_ in DIGIT_IDS else ZERO for id_ in range(vocabulary)))
    yield embedding
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        yield constant(f"{layer}.input_layernorm.weight", hidden, value=0.0)
        if (index + 1) % config["full_attention_interval"]:
            yield from recurrent(f"{layer}.linear_attn")
        else:
            yield from attention(f"{layer}.self_attn")
        yield constant(f"{layer}.post_attention_layernorm.weight", hidden, value=0.0)
        yield linear(f"{layer}.mlp.gate.weight", config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            yield from mlp(f"{layer}.mlp.experts.{expert}", config["moe_intermediate_size"])
        yield from mlp(f"{layer}.mlp.shared_expert", config["shared_expert_intermediate_size"])
        yield linear(f"{layer}.mlp.shared_expert_gate.weight", 1, hidden)
    yield constant("model.norm.weight", hidden, value=0.0)
    output = linear("lm_head.weight", vocabulary, hidden, OUTPUT)
    for id_ in set(range(vocabulary)).difference(readable_ids()):
        output.values[id_ * hidden : (id_ + 1) * hidden] = array("H", [ZERO]) * hidden
    yield output
