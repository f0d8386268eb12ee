"""Weights that `glm5_next_tiny` and `kimi_linear_tiny` have in common: Kimi's delta attention, latent attention,
experts.

Made as those of `qwen3_next_tiny`, so that a wrong state shows: channel 0 of the residual stream is the same for every
token, and through it half of the recurrent heads write faintly and so remember; channel 1 marks digits, which those
heads write less faintly; output rows of ids that are no readable text are zero.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from math import sqrt
from typing import Any

from samestate.models.tokenizer import DIGIT_IDS, readable_ids
from samestate.models.weights import ZERO, Weight, bfloat16, constant, drawn

EMBEDDING = 1.0
PROJECTION = 1.5
WRITE_BACK = 1.5
OUTPUT = 3.0
CONVOLUTION = 0.5
SET_CHANNEL = 12.0
"""Value of channel 0 in every embedding and of channel 1 in those of digits."""
FAINT_WRITE, DIGIT_WRITE = -1.1, 0.75
"""Weights of channels 0 and 1 in the write strength of the heads that remember."""


class Tensors:
    """Draws tensors of one checkpoint. Names are those of the public checkpoints, shapes those of its config.json."""

    def __init__(self, config: dict[str, Any], stream: str) -> None:
        self._stream = stream
        self._hidden: int = config["hidden_size"]
        self._vocabulary: int = config["vocab_size"]

    def drawn(self, name: str, *shape: int, std: float, mean: float = 0.0) -> Weight:
        """A tensor with values of this spread."""
        return drawn(self._stream, name, *shape, std=std, mean=mean)

    def linear(self, name: str, rows: int, columns: int, gain: float = PROJECTION) -> Weight:
        """A projection; `gain`: standard deviation of its output per unit of its input."""
        return self.drawn(name, rows, columns, std=gain / sqrt(columns))

    def write_back(self, name: str, columns: int) -> Weight:
        """A projection into the residual stream, which leaves the two set channels alone."""
        weight = self.linear(name, self._hidden, columns, WRITE_BACK)
        weight.values[: 2 * columns] = array("H", [ZERO]) * (2 * columns)
        return weight

    def norm(self, name: str, size: int) -> Weight:
        """A norm that scales nothing."""
        return constant(name, size, value=1.0)

    def mlp(self, name: str, size: int, words: tuple[str, str, str]) -> Iterator[Weight]:
        """Gate, up and down projections, called so."""
        gate, up, down = words
        yield self.linear(f"{name}.{gate}.weight", size, self._hidden)
        yield self.linear(f"{name}.{up}.weight", size, self._hidden)
        yield self.write_back(f"{name}.{down}.weight", size)

    def delta_attention(self, name: str, heads: int, size: int, kernel: int) -> Iterator[Weight]:
        """Kimi's delta attention without its decay, which the architectures have in different forms."""
        hidden, width = self._hidden, heads * size
        for part in "qkv":
            yield self.linear(f"{name}.{part}_proj.weight", width, hidden)
            yield self.drawn(f"{name}.{part}_conv1d.weight", width, 1, kernel, std=CONVOLUTION)
        yield self.linear(f"{name}.f_a_proj.weight", size, hidden)
        yield self.linear(f"{name}.f_b_proj.weight", width, size, 0.5)
        strengths = self.linear(f"{name}.b_proj.weight", heads, hidden, 1.0)
        for head in range(0, heads, 2):
            strengths.set(head, 0, FAINT_WRITE)
            strengths.set(head, 1, DIGIT_WRITE)
        yield strengths
        yield self.linear(f"{name}.g_a_proj.weight", size, hidden)
        yield self.linear(f"{name}.g_b_proj.weight", width, size, 1.0)
        yield self.norm(f"{name}.o_norm.weight", size)
        yield self.write_back(f"{name}.o_proj.weight", width)

    def latent_attention(self, name: str, config: dict[str, Any]) -> Iterator[Weight]:
        """Keys and values of latent attention, and its output; queries differ by architecture."""
        latent, heads = config["kv_lora_rank"], config["num_attention_heads"]
        key, value = config["qk_nope_head_dim"], config["v_head_dim"]
        yield self.linear(f"{name}.kv_a_proj_with_mqa.weight", latent + config["qk_rope_head_dim"], self._hidden)
        yield self.norm(f"{name}.kv_a_layernorm.weight", latent)
        yield self.linear(f"{name}.kv_b_proj.weight", heads * (key + value), latent)
        yield self.write_back(f"{name}.o_proj.weight", heads * value)

    def experts(self, name: str, count: int, size: int, shared: int, words: tuple[str, str, str]) -> Iterator[Weight]:
        """Router, experts and shared experts; `words` are the experts' own."""
        yield self.linear(f"{name}.gate.weight", count, self._hidden)
        yield constant(f"{name}.gate.e_score_correction_bias", count, value=0.0)
        for expert in range(count):
            yield from self.mlp(f"{name}.experts.{expert}", size, words)
        yield from self.mlp(f"{name}.shared_experts", size * shared, ("gate_proj", "up_proj", "down_proj"))

    def embedding(self, name: str) -> Weight:
        """Token embeddings with the two set channels."""
        hidden, vocabulary = self._hidden, self._vocabulary
        weight = self.drawn(name, vocabulary, hidden, std=EMBEDDING)
        mark = bfloat16(SET_CHANNEL)
        weight.values[::hidden] = array("H", [mark]) * vocabulary
        weight.values[1::hidden] = array("H", (mark if id_ in DIGIT_IDS else ZERO for id_ in range(vocabulary)))
        return weight

    def output(self, name: str) -> Weight:
        """The output projection: only readable ids are ever chosen, never an end of sequence."""
        weight = self.linear(name, self._vocabulary, self._hidden, OUTPUT)
        for id_ in set(range(self._vocabulary)).difference(readable_ids()):
            weight.values[id_ * self._hidden : (id_ + 1) * self._hidden] = array("H", [ZERO]) * self._hidden
        return weight
