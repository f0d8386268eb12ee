"""Weights that `glm5_next` and `kimi_linear` have in common: Kimi's delta attention, latent attention, experts.

Made as those of `qwen3_next`, so that a wrong state shows: channel 0 of the residual stream is the same for every
token, and through it half of the recurrent heads write faintly and so remember; channel 1 marks digits, which those
heads write less faintly; output rows of ids that are no readable text are zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import Any

from samestate.models.sketch import Sketch
from samestate.models.tokenizer import DIGIT_IDS, readable_ids

EMBEDDING = 1.0
PROJECTION = 1.5
WRITE_BACK = 1.5
"""Of a model of `SHALLOW` layers or fewer."""
SHALLOW = 4
OUTPUT = 3.0
CONVOLUTION = 0.5
SET_CHANNEL = 12.0
"""Value of channel 0 in every embedding and of channel 1 in those of digits."""
FAINT_WRITE, DIGIT_WRITE = -1.1, 0.75
"""Weights of channels 0 and 1 in the write strength of the heads that remember."""


def write_back_gain(layers: int) -> float:
    """Gain of what a layer writes into the residual stream, which then grows as much as over `SHALLOW` layers.

    A stream that grew with depth would drown the set channels, and the last layers would remember nothing.
    """
    return WRITE_BACK * sqrt(min(1.0, SHALLOW / layers))


class Tensors:
    """Sketches tensors of one checkpoint: names are those of the public checkpoints, shapes its config.json."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._hidden: int = config["hidden_size"]
        self._vocabulary: int = config["vocab_size"]
        self._write_back = write_back_gain(config["num_hidden_layers"])

    def drawn(self, name: str, *shape: int, std: float, mean: float = 0.0) -> Sketch:
        """A tensor with values of this spread."""
        return Sketch(name, shape, std, mean)

    def constant(self, name: str, *shape: int, value: float) -> Sketch:
        """A tensor with the same value everywhere."""
        return Sketch(name, shape, 0.0, value)

    def linear(self, name: str, rows: int, columns: int, gain: float = PROJECTION) -> Sketch:
        """A projection; `gain`: standard deviation of its output per unit of its input."""
        return self.drawn(name, rows, columns, std=gain / sqrt(columns))

    def write_back(self, name: str, columns: int) -> Sketch:
        """A projection into the residual stream, which leaves the two set channels alone."""
        weight = self.linear(name, self._hidden, columns, self._write_back)
        return weight.patched(range(2), range(columns), 0.0)

    def norm(self, name: str, size: int) -> Sketch:
        """A norm that scales nothing."""
        return self.constant(name, size, value=1.0)

    def mlp(self, name: str, size: int, words: tuple[str, str, str]) -> Iterator[Sketch]:
        """Gate, up and down projections, called so."""
        gate, up, down = words
        yield self.linear(f"{name}.{gate}.weight", size, self._hidden)
        yield self.linear(f"{name}.{up}.weight", size, self._hidden)
        yield self.write_back(f"{name}.{down}.weight", size)

    def delta_attention(self, name: str, heads: int, size: int, kernel: int) -> Iterator[Sketch]:
        """Kimi's delta attention without its decay, which the architectures have in different forms."""
        hidden, width = self._hidden, heads * size
        for part in "qkv":
            yield self.linear(f"{name}.{part}_proj.weight", width, hidden)
            yield self.drawn(f"{name}.{part}_conv1d.weight", width, 1, kernel, std=CONVOLUTION)
        yield self.linear(f"{name}.f_a_proj.weight", size, hidden)
        yield self.linear(f"{name}.f_b_proj.weight", width, size, 0.5)
        strengths = self.linear(f"{name}.b_proj.weight", heads, hidden, 1.0)
        yield strengths.patched(range(0, heads, 2), range(1), FAINT_WRITE).patched(
            range(0, heads, 2), range(1, 2), DIGIT_WRITE
        )
        yield self.linear(f"{name}.g_a_proj.weight", size, hidden)
        yield self.linear(f"{name}.g_b_proj.weight", width, size, 1.0)
        yield self.norm(f"{name}.o_norm.weight", size)
        yield self.write_back(f"{name}.o_proj.weight", width)

    def latent_attention(self, name: str, config: dict[str, Any]) -> Iterator[Sketch]:
        """Keys and values of latent attention, and its output; queries differ by architecture."""
        latent, heads = config["kv_lora_rank"], config["num_attention_heads"]
        key, value = config["qk_nope_head_dim"], config["v_head_dim"]
        yield self.linear(f"{name}.kv_a_proj_with_mqa.weight", latent + config["qk_rope_head_dim"], self._hidden)
        yield self.norm(f"{name}.kv_a_layernorm.weight", latent)
        yield self.linear(f"{name}.kv_b_proj.weight", heads * (key + value), latent)
        yield self.write_back(f"{name}.o_proj.weight", heads * value)

    def experts(self, name: str, count: int, size: int, shared: int, words: tuple[str, str, str]) -> Iterator[Sketch]:
        """Router, experts and shared experts; `words` are the experts' own."""
        yield self.linear(f"{name}.gate.weight", count, self._hidden)
        yield self.constant(f"{name}.gate.e_score_correction_bias", count, value=0.0)
        for expert in range(count):
            yield from self.mlp(f"{name}.experts.{expert}", size, words)
        yield from self.mlp(f"{name}.shared_experts", size * shared, ("gate_proj", "up_proj", "down_proj"))

    def embedding(self, name: str) -> Sketch:
        """Token embeddings with the two set channels."""
        return embedding(name, self._vocabulary, self._hidden)

    def output(self, name: str) -> Sketch:
        """The output projection: only readable ids are ever chosen, never an end of sequence."""
        return output(name, self._vocabulary, self._hidden)


def embedding(name: str, vocabulary: int, hidden: int) -> Sketch:
    """Token embeddings: channel 0 is set for all, channel 1 for digits."""
    everybody = range(vocabulary)
    return (
        Sketch(name, (vocabulary, hidden), EMBEDDING)
        .patched(everybody, range(1), SET_CHANNEL)
        .patched(everybody, range(1, 2), 0.0)
        .patched(DIGIT_IDS, range(1, 2), SET_CHANNEL)
    )


def output(name: str, vocabulary: int, hidden: int) -> Sketch:
    """An output projection whose rows of unreadable ids are zero."""
    unreadable = sorted(set(range(vocabulary)).difference(readable_ids()))
    return Sketch(name, (vocabulary, hidden), OUTPUT / sqrt(hidden)).patched(unreadable, range(hidden), 0.0)
