"""What the child makes of an engine's output: a model that computes no number must not end the run."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from samestate.engines.children import vllm_child


def answered(*logprobs: float) -> list[float] | None:
    """The log probabilities of an answer of as many tokens."""
    steps = [{token: SimpleNamespace(logprob=value)} for token, value in enumerate(logprobs)]
    completion = SimpleNamespace(token_ids=range(len(steps)), logprobs=steps, finish_reason="length")
    output = SimpleNamespace(outputs=[completion], num_cached_tokens=0)
    return vllm_child.answer("one", output, 0.0).logprobs


def test_log_probabilities_are_those_of_the_sampled_tokens() -> None:
    assert answered(-0.5, -1.25) == [-0.5, -1.25]


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_what_json_has_no_word_for_is_left_out(value: float) -> None:
    assert answered(-0.5, value) is None
