"""Outputs of every module of the decoder layers, by digest, in the order in which they come."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("xxhash")

from samestate.evidence.ground_records import TRACE_DIGITS, ModulesListed, StepTraced
from samestate.instruments.module_trace import ModuleTrace, TraceError


class Attention(torch.nn.Module):  # type: ignore[misc]
    """Writes into what it is given and returns nothing, as some of vLLM's do."""

    def forward(self, x: Any, output: Any) -> None:
        output.copy_(x * 2)


class Projection(torch.nn.Module):  # type: ignore[misc]
    """Returns a bias beside its output, which there is none of."""

    def forward(self, x: Any) -> Any:
        return x * 1, None


class Layer(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(), Projection()
        self.noise = 0.0

    def forward(self, x: Any) -> Any:
        output = torch.empty_like(x)
        self.attn(x, output=output)
        return self.mlp(output + self.noise)[0], x


class Model(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Identity()
        self.layers = torch.nn.ModuleList([Layer(), Layer()])

    def forward(self, input_ids: Any, positions: Any) -> Any:
        x = self.embed(input_ids)
        for layer in self.layers:
            x, _ = layer(x)
        return x


NAMES = [
    f"layers.{index}{part}" for index in (0, 1) for part in (".attn (x)", ".attn (output)", ".mlp", " [0]", " [1]")
]


def step(model: Model, rows: int = 4, tokens: int | None = None) -> None:
    model(torch.ones(rows, 2), positions=torch.arange(tokens or rows))


def taken(trace: ModuleTrace) -> tuple[dict[int, list[str]], list[StepTraced]]:
    records = trace.taken()
    listings = {rec.listing: rec.outputs for rec in records if isinstance(rec, ModulesListed)}
    return listings, [rec for rec in records if isinstance(rec, StepTraced)]


def digests(rec: StepTraced) -> list[str]:
    return [rec.digests[at : at + TRACE_DIGITS] for at in range(0, len(rec.digests), TRACE_DIGITS)]


def test_every_output_is_listed_in_the_order_in_which_it_came() -> None:
    model = Model()
    trace = ModuleTrace(model, 2, 10)
    step(model)
    trace.attend("N4.cold")
    for _ in range(3):
        step(model)
    trace.attend(None)
    step(model)
    listings, steps = taken(trace)
    names = [name.replace("args[0]", "x") for name in listings[0]]
    assert names == NAMES
    assert [(rec.op, rec.step, rec.tokens, rec.rank, rec.listing) for rec in steps] == [
        ("N4.cold", 0, 4, 0, 0),
        ("N4.cold", 1, 4, 0, 0),
    ]
    assert steps[0].digests == steps[1].digests
    assert len(digests(steps[0])) == len(NAMES)


def test_the_first_output_that_changes_is_that_of_the_module_that_changed() -> None:
    model = Model()
    trace = ModuleTrace(model, 4, 10)
    trace.attend("one")
    step(model)
    model.layers[1].noise = 0.5
    trace.attend("two")
    step(model)
    _, (one, two) = taken(trace)
    differing = [index for index, pair in enumerate(zip(digests(one), digests(two), strict=True)) if len(set(pair)) > 1]
    assert NAMES[differing[0]] == "layers.1.mlp"


def test_rows_beyond_the_tokens_of_a_step_say_nothing_and_a_shape_does() -> None:
    model = Model()
    trace = ModuleTrace(model, 4, 10)
    for op, rows, tokens in (("short", 4, 4), ("padded", 6, 4), ("longer", 6, 6)):
        trace.attend(op)
        step(model, rows, tokens)
    _, (short, padded, longer) = taken(trace)
    assert short.digests == padded.digests
    assert set(digests(short)).isdisjoint(digests(longer))


def test_the_limit_holds_for_all_operations_together() -> None:
    model = Model()
    trace = ModuleTrace(model, 4, 3)
    for op in ("one", "two"):
        trace.attend(op)
        step(model)
        step(model)
    _, steps = taken(trace)
    assert [(rec.op, rec.step) for rec in steps] == [("one", 0), ("one", 1), ("two", 0)]


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(TraceError, match=r"Linear has no module 'layers\.0'"):
        ModuleTrace(torch.nn.Linear(1, 1), 4, 10)
