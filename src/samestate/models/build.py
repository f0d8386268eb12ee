"""Build a tiny checkpoint of a real architecture: ``python -m samestate.models.build NAME DIR [--seed 0]``.

The bytes depend on name and seed alone. A tensor's values come from SHAKE-256 over
``<name>/<seed>/<tensor name>``, 16 bits each (little-endian), spread evenly over an interval and
rounded to bfloat16. No random stream of torch or numpy takes part.

`qwen3-next-tiny` is Qwen3-Next (gated delta net, full attention, mixture of experts), made so
that a wrong state shows:

- Channel 0 of the residual stream is the same for every token and no layer writes to it: the
  bias that the architecture lacks. Through it half of the recurrent heads write faintly, and
  so remember thousands of tokens; the other half write strongly and follow the latest tokens.
- Channel 1, kept alike, marks digits, which the remembering heads write less faintly: codes at
  the start of a prompt stand out in the state however much filler follows.
- Output rows of ids that are no readable text are zero: greedy output is always text, and an
  end of sequence is never chosen.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import sys
import tempfile
from array import array
from collections.abc import Iterator
from functools import cache
from hashlib import shake_256
from importlib import resources
from math import prod, sqrt
from pathlib import Path
from typing import NamedTuple

from samestate.models.tokenizer import DIGIT_IDS, readable_ids, tokenizer_files

NAMES = ("qwen3-next-tiny",)

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
ZERO = 0
"""The bits of 0.0."""


class Weight(NamedTuple):
    """One tensor of the checkpoint: its Hugging Face name, its shape, its values as bfloat16 bits."""

    name: str
    shape: tuple[int, ...]
    values: array[int]


def build(name: str, folder: Path, seed: int = 0) -> None:
    """Write the checkpoint into `folder`, which must be absent or empty; all of it or nothing.

    Raises `ValueError` for an unknown name, `FileExistsError` for a folder with something in it, and `OSError`.
    """
    if name not in NAMES:
        raise ValueError(f"no model is called {name!r}: choose one of {', '.join(NAMES)}")
    folder = folder.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is not an empty folder: choose another or empty it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for file, content in _files(name, seed).items():
            (scratch / file).write_bytes(content)
        scratch.chmod(0o755)
        scratch.rename(folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _files(name: str, seed: int) -> dict[str, bytes]:
    data = resources.files("samestate.models") / "data" / name
    config = (data / "config.json").read_bytes()
    template = (data / "chat_template.jinja").read_text(encoding="utf-8")
    return {
        "config.json": config,
        "generation_config.json": (data / "generation_config.json").read_bytes(),
        **tokenizer_files(template),
        "model.safetensors": _safetensors(_weights(json.loads(config), f"{name}/{seed}")),
    }


def _safetensors(weights: Iterator[Weight]) -> bytes:
    """The safetensors format: header length, JSON header padded to eight bytes, data in the same order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data: list[bytes] = []
    start = 0
    for name, shape, values in sorted(weights):
        if sys.byteorder == "big":
            values.byteswap()
        content = values.tobytes()
        end = start + len(content)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
        data.append(content)
        start = end
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return b"".join([struct.pack("<Q", len(head)), head, *data])


def _weights(config: dict[str, int], stream: str) -> Iterator[Weight]:
    """Every tensor of the checkpoint under its Hugging Face name."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]

    def drawn(name: str, *shape: int, std: float, mean: float = 0.0) -> Weight:
        return Weight(name, shape, _draw(f"{stream}/{name}", prod(shape), std, mean))

    def constant(name: str, size: int, value: float) -> Weight:
        return Weight(name, (size,), array("H", [_bfloat16(value)]) * size)

    def linear(name: str, rows: int, columns: int, gain: float = PROJECTION) -> Weight:
        return drawn(name, rows, columns, std=gain / sqrt(columns))

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
            gates.values[first : first + 2] = array("H", map(_bfloat16, (FAINT_WRITE, DIGIT_WRITE)))
        yield gates
        yield drawn(f"{name}.conv1d.weight", 2 * keys + values, 1, config["linear_conv_kernel_dim"], std=CONVOLUTION)
        mean, std = DECAY
        yield drawn(f"{name}.A_log", heads, std=std, mean=mean)
        yield drawn(f"{name}.dt_bias", heads, std=0.5)
        yield constant(f"{name}.norm.weight", config["linear_value_head_dim"], 1.0)
        yield write_back(f"{name}.out_proj.weight", values)

    def attention(name: str) -> Iterator[Weight]:
        size = config["head_dim"]
        queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
        yield linear(f"{name}.q_proj.weight", 2 * queries, hidden)
        yield linear(f"{name}.k_proj.weight", keys, hidden)
        yield linear(f"{name}.v_proj.weight", keys, hidden)
        yield write_back(f"{name}.o_proj.weight", queries)
        yield constant(f"{name}.q_norm.weight", size, 0.0)
        yield constant(f"{name}.k_norm.weight", size, 0.0)

    embedding = drawn("model.embed_tokens.weight", vocabulary, hidden, std=EMBEDDING)
    mark = _bfloat16(SET_CHANNEL)
    embedding.values[::hidden] = array("H", [mark]) * vocabulary
    embedding.values[1::hidden] = array("H", (mark if id_ in DIGIT_IDS else ZERO for id_ in range(vocabulary)))
    yield embedding
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        yield constant(f"{layer}.input_layernorm.weight", hidden, 0.0)
        if (index + 1) % config["full_attention_interval"]:
            yield from recurrent(f"{layer}.linear_attn")
        else:
            yield from attention(f"{layer}.self_attn")
        yield constant(f"{layer}.post_attention_layernorm.weight", hidden, 0.0)
        yield linear(f"{layer}.mlp.gate.weight", config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            yield from mlp(f"{layer}.mlp.experts.{expert}", config["moe_intermediate_size"])
        yield from mlp(f"{layer}.mlp.shared_expert", config["shared_expert_intermediate_size"])
        yield linear(f"{layer}.mlp.shared_expert_gate.weight", 1, hidden)
    yield constant("model.norm.weight", hidden, 0.0)
    output = linear("lm_head.weight", vocabulary, hidden, OUTPUT)
    for id_ in set(range(vocabulary)).difference(readable_ids()):
        output.values[id_ * hidden : (id_ + 1) * hidden] = array("H", [ZERO]) * hidden
    yield output


def _draw(stream: str, count: int, std: float, mean: float) -> array[int]:
    table = _evenly_spread(std, mean)
    raw = array("H", shake_256(stream.encode()).digest(2 * count))
    if sys.byteorder == "big":
        raw.byteswap()
    return array("H", map(table.__getitem__, raw))


@cache
def _evenly_spread(std: float, mean: float) -> array[int]:
    """The 65536 equally likely values, bfloat16."""
    half_width = sqrt(3.0) * std
    return array("H", (_bfloat16(mean + half_width * ((2 * n + 1) / 65536 - 1)) for n in range(65536)))


def _bfloat16(value: float) -> int:
    """The bits of `value`, rounded to nearest, ties to even."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def main(arguments: list[str] | None = None) -> int:
    """The program; the exit code is 2 for bad usage and for a folder that cannot be written."""
    parser = argparse.ArgumentParser(prog="python -m samestate.models.build", description="Build a tiny checkpoint.")
    parser.add_argument("name", metavar="NAME", help=f"one of: {', '.join(NAMES)}")
    parser.add_argument("folder", metavar="DIR", type=Path, help="where to build; absent or empty")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        build(options.name, options.folder, options.seed)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
