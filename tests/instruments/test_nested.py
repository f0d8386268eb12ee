"""What lies inside arguments and outputs of modules, and what each part is called."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from samestate.instruments.nested import given, parts, tensors

ONE, TWO = torch.zeros(1), torch.ones(2)


def test_each_part_has_the_name_by_which_python_finds_it() -> None:
    value = [ONE, {"key": (TWO, 3)}, None]
    found = dict(parts("value", value))
    assert list(found) == ["value[0]", "value[1]['key'][0]", "value[1]['key'][1]", "value[2]"]
    assert all(eval(name, {"value": value}) is one for name, one in found.items())


def test_tensors_are_found_among_other_things() -> None:
    assert [name for name, _ in tensors("", [ONE, 1, {"a": TWO}])] == ["[0]", "[2]['a']"]
    assert list(tensors("output", ONE)) == [("output", ONE)]
    assert list(tensors("output", "text")) == []


def test_arguments_of_a_call_by_place_and_by_name() -> None:
    assert [name for name, _ in given((ONE, [TWO]), {"scale": 2})] == ["args[0]", "args[1][0]", "scale"]


def test_what_lies_too_deep_stays_whole() -> None:
    assert list(parts("v", [[[[ONE]]]])) == [("v[0][0][0][0]", ONE)]
    assert list(parts("v", [[[[[ONE]]]]])) == [("v[0][0][0][0]", [ONE])]
    assert list(tensors("v", [[[[[ONE]]]]])) == []
