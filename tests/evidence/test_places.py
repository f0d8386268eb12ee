from __future__ import annotations

import pytest

from samestate.evidence.places import Place, place, read_place


def test_lines_count_from_one_and_records_from_zero() -> None:
    assert place("arms/control/client.jsonl", 3) == "arms/control/client.jsonl:4"
    assert read_place("arms/control/client.jsonl:4") == Place("arms/control/client.jsonl", 3)
    assert read_place("a:b:1") == Place("a:b", 0)


@pytest.mark.parametrize(
    "where", ["", ":", "a", "a:", ":1", "a:0", "a:-1", "a:x", "a:²", "a:٣", "a: 1", f"a:{'9' * 5000}"]
)
def test_what_is_no_place_with_a_line(where: str) -> None:
    assert read_place(where) is None
