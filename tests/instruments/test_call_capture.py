"""Every call of a named module by its arguments: digests of tensors, values of scalars, what was written in place."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("xxhash")

from samestate.instruments.call_capture import Capture, CaptureError


class Mixed(torch.nn.Module):  # type: ignore[misc]
    def forward(self, x: Any, scale: float, into: Any = None, state: Any = None) -> Any:
        if into is not None:
            into.copy_(x * scale)
        return x + 1, [x * scale]


class Model(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Mixed(), Mixed()])
        self.head = torch.nn.Linear(2, 2)


def inputs(capture: Capture, call: int = 0) -> dict[str, str]:
    return {one.name: one.value for one in capture.taken()[0][call].inputs}


def test_tensors_by_digest_and_scalars_by_value() -> None:
    model = Model()
    capture = Capture(model, ["layers.1"], 10)
    model.layers[1](torch.ones(2, 3), 2.0, state={"a": [None, torch.zeros(1)], "b": object()})
    model.layers[0](torch.ones(2, 3), 2.0)
    (record,), (counted,) = capture.taken()
    assert (record.module, record.call, record.rank) == ("layers.1", 0, 0)
    assert (counted.module, counted.calls, counted.captured) == ("layers.1", 1, 1)
    given = {one.name: one for one in record.inputs}
    assert list(given) == ["args[0]", "args[1]", "state['a'][0]", "state['a'][1]", "state['b']"]
    assert given["args[0]"].shape == [2, 3] and given["args[0]"].value.startswith("float32 ")
    assert (given["args[1]"].value, given["state['a'][0]"].value) == ("2.0", "None")
    assert given["state['b']"].value == "<object>"
    assert [one.name for one in record.outputs] == ["output[0]", "output[1][0]"]


def test_the_same_arguments_have_the_same_words() -> None:
    model = Model()
    capture = Capture(model, ["layers.0"], 10)
    for value in (1.0, 1.0, 2.0):
        model.layers[0](torch.full((2,), value), 2.0)
    assert inputs(capture, 0) == inputs(capture, 1)
    assert {name for name, one in inputs(capture, 2).items() if one != inputs(capture)[name]} == {"args[0]"}


def test_what_is_written_in_place_is_an_output_too() -> None:
    model = Model()
    capture = Capture(model, ["layers.0"], 10)
    model.layers[0](torch.ones(2), 3.0, into=torch.zeros(2))
    (record,), _ = capture.taken()
    written = {one.name: one.written for one in record.inputs}
    assert written == {"args[0]": False, "args[1]": False, "into": True}
    before = next(one for one in record.inputs if one.name == "into")
    after = next(one for one in record.outputs if one.name == "into (after)")
    assert before.value != after.value


def test_beyond_the_limit_calls_are_counted_only() -> None:
    model = Model()
    capture = Capture(model, ["head"], 2)
    for _ in range(5):
        model.head(torch.ones(2))
    records, (counted,) = capture.taken()
    assert ([one.call for one in records], counted.calls, counted.captured) == ([0, 1], 5, 2)


@pytest.mark.parametrize(("name", "word"), [("nothing", "no such module"), ("", "no such module")])
def test_a_module_that_is_not_there(name: str, word: str) -> None:
    with pytest.raises(CaptureError, match=word):
        Capture(torch.nn.Sequential(Model(), Model()), [name or "0.none"], 1)
    with pytest.raises(CaptureError, match="2 modules end so"):
        Capture(torch.nn.Sequential(Model(), Model()), ["head"], 1)


def test_a_long_scalar_is_known_whole() -> None:
    """Two that begin alike are two; no text looks like an object that was not captured."""
    model = Model()
    capture = Capture(model, ["layers.1"], 10)
    for word in ("a" * 300 + "b", "a" * 300 + "c", "<object>"):
        model.layers[1](torch.ones(2, 3), 2.0, state=word)
    values = [record.inputs[-1].value for record in capture.taken()[0]]
    assert len(set(values)) == 3 and all(len(value) < 300 for value in values)
    assert values[2] == "'<object>'"
