from __future__ import annotations

import json
from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestate.evidence.canonical import token_digest
from samestate.evidence.inputs import Inputs, packed_digest, read_inputs

IDS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20)


@given(st.lists(IDS, max_size=4))
def test_lists_come_back_as_they_were(lists: list[list[int]]) -> None:
    content = {token_digest(ids): ids for ids in lists}
    inputs, false = read_inputs(json.dumps(content).encode())
    assert (inputs, false) == (content, [])
    assert all(packed_digest(inputs.packed(digest)) == digest for digest in content)


@pytest.mark.parametrize("ids", [[1, 2], [2**31], [2**70]])
def test_what_is_not_its_digest_is_left_out_and_named(ids: list[int]) -> None:
    right = token_digest([5])
    inputs, false = read_inputs(json.dumps({"0" * 64: ids, right: [5]}).encode())
    assert (dict(inputs), false) == ({right: [5]}, ["0" * 64])
    assert "0" * 64 not in inputs
    with pytest.raises(KeyError):
        inputs.packed("0" * 64)


def test_an_unreadable_file_says_where() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"Expected `int`, got `str` - at `\$\[\.\.\.\]\[1\]`"):
        read_inputs(b'{"a": [1, "x"]}')


def test_a_list_is_the_reader_s_own() -> None:
    inputs = Inputs({"a": array("i", [1, 2])})
    inputs["a"].append(3)
    assert inputs["a"] == [1, 2]
