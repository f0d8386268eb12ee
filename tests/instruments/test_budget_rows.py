"""Rows before and after the budget: what changed is a store, whoever says otherwise."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("vllm")

import torch

from samestate.instruments.budget_rows import COLUMNS, Row, compare, resident, row, to_host


def rows(before: torch.Tensor, after: torch.Tensor) -> list[Row]:
    (flat,) = to_host([compare(before, after)])
    return [row(flat[at : at + COLUMNS]) for at in range(0, len(flat), COLUMNS)]


def test_a_row_that_kept_its_bits_is_no_store() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [math.nan, 0.0, 0.0], [-0.0, -1.0, -1.0]])
    assert [found.store for found in rows(logits, logits.clone())] == [False, False, False]


def test_a_store_names_its_token_and_the_argmax_before_it() -> None:
    before = torch.tensor([[0.0, 2.0, 1.0], [5.0, 2.0, 1.0]])
    after = before.clone()
    after[0, 2] = 1e9
    first, second = rows(before, after)
    assert (first.store, first.stored, first.argmax) == (True, 2, 1)
    assert first.logprob == pytest.approx(2 - math.log(math.exp(0) + math.exp(2) + math.exp(1)), abs=1e-6)
    assert (second.store, second.argmax) == (False, 0)


def test_forcing_what_would_have_been_chosen_anyway_is_a_store() -> None:
    before = torch.tensor([[0.0, 9.0]])
    (found,) = rows(before, torch.tensor([[0.0, 1e9]]))
    assert (found.store, found.stored, found.argmax) == (True, 1, 1)


def test_the_smallest_change_is_seen() -> None:
    before = torch.tensor([[0.0, 1.0]])
    (found,) = rows(before, torch.tensor([[-0.0, 1.0]]))
    assert found.store


def test_two_calls_on_one_row_are_one_row() -> None:
    stored, plain = Row(7, -1.0, True, 4), Row(4, 0.0, False, 4)
    assert plain.after(stored) == stored
    assert Row(4, 0.0, True, 9).after(Row(7, -1.0, False, 7)) == Row(7, -1.0, True, 9)


def test_records_leave_out_what_was_not_stored_and_what_was_no_draft() -> None:
    assert Row(7, -1.0, False, 7).beside(0, 5).stored is None
    assert Row(7, -1.0, True, 4).beside(0, 5).stored == 4
    assert Row(7, -1.0, True, 4).beside(0, -1).drafted is None
    assert Row(7, -1.0, True, 4).beside(0, 0).drafted == 0


def test_values_come_to_the_host_unchanged_and_apart() -> None:
    ids, logprobs = torch.tensor([[151_936, 2]]), torch.tensor([-0.1], dtype=torch.float32)
    assert to_host([ids, logprobs, logprobs[:0]]) == [[151_936.0, 2.0], [logprobs.item()], []]


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ([9, 3, 8, 8], 2),
        ([9, 3], 0),
        ([3, 8, 4, 8], None),
        ([3, 8, 4, 3, 8], 1),
        ([9, 9], None),
        ([], None),
    ],
)
def test_resident_reasoning_counts_from_the_last_start(prompt: list[int], tokens: int | None) -> None:
    assert resident(prompt, [3], [4]) == tokens


def test_markers_of_several_tokens() -> None:
    assert resident([1, 3, 5, 8, 8], [3, 5], [6, 7]) == 2
    assert resident([1, 3, 5, 8, 6, 7, 8], [3, 5], [6, 7]) is None
    assert resident([3, 8, 5], [3, 5], [6, 7]) is None
    assert resident([3, 8], [], [4]) is None
