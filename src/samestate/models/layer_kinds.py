"""Which layers of a model keep tokens, and which a state: by their names, or by the architecture's own rule."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import NamedTuple

from samestate.models.fields import MOST_LAYERS, ConfigError, Fields, UnknownShape


class Words(NamedTuple):
    """What an architecture calls its layers, in vLLM and in ``configuration_utils.py`` of transformers."""

    states: frozenset[str]
    tokens: frozenset[str]
    neither: frozenset[str] = frozenset()

    def kinds(self, named: list[str], field: str) -> tuple[int, int]:
        """How many of them keep tokens, and how many a state. Raises `ConfigError` for another word."""
        for name in named:
            if name not in self.states | self.tokens | self.neither:
                words = ", ".join(sorted(self.states | self.tokens | self.neither))
                raise ConfigError(f"config.json: {field} names {reprlib.repr(name)}, no layer of this model ({words})")
        return sum(name in self.tokens for name in named), sum(name in self.states for name in named)


QWEN = Words(frozenset({"linear_attention"}), frozenset({"full_attention"}))
SPARSE = frozenset({"indexed_attention", "deepseek_sparse_attention"})
"""One kind, in the words of transformers 5.19 and of earlier releases."""
GLM = Words(frozenset({"linear_attention"}), frozenset({"full_attention"}) | SPARSE)
MAMBA = Words(frozenset({"mamba", "linear_attention"}), frozenset({"attention", "full_attention"}))
MIXED = Words(MAMBA.states | {"M"}, MAMBA.tokens | {"*"}, frozenset({"-", "E", "mlp", "moe"}))


def layer_kinds(
    fields: Fields, words: Words, default: Callable[[int], bool] | None = None, decided_by: str = "num_hidden_layers"
) -> tuple[int, int]:
    """How many layers keep tokens, and how many a state; `default` says which keep a state where nothing is named.

    Raises `ConfigError` for names that do not fit, `UnknownShape` where no layer attends.
    """
    layers = fields.whole("num_hidden_layers", most=MOST_LAYERS)
    field = next((name for name in ("layer_types", "layers_block_type") if fields.has(name)), None)
    if field is not None:
        named = fields.names(field) or []
        if len(named) != layers:
            raise ConfigError(
                f"config.json: {field} names {len(named)} layers, num_hidden_layers is {layers}; make them equal"
            )
        tokens, states = words.kinds(named, field)
    elif default is None:
        raise ConfigError("config.json: layer_types is missing; it says which layers keep a state")
    else:
        states = sum(default(layer) for layer in range(layers))
        tokens = layers - states
    require_attention(tokens, field or decided_by)
    return tokens, states


def require_attention(layers: int, field: str) -> None:
    """The state is aligned to attention's pages. Raises `UnknownShape` where there are none."""
    if not layers:
        raise UnknownShape(f"config.json: by {field} no layer attends; such a cache is not calculated here")
