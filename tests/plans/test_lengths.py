from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestate.plans.errors import PlanError
from samestate.plans.lengths import check_lengths, evaluate

intervals = st.integers(min_value=1, max_value=10_000)
offsets = st.integers(min_value=-5_000, max_value=5_000)


@given(k=intervals, d=offsets, c=intervals)
def test_k_c_plus_d_is_arithmetic(k: int, d: int, c: int) -> None:
    text = f"{k}C{d:+d}"
    if k * c + d >= 1:
        assert evaluate(text, c) == k * c + d
    else:
        with pytest.raises(PlanError, match=f"at C={c}; a prompt has at least 1"):
            evaluate(text, c)


@given(n=st.integers(min_value=1, max_value=10**9 - 1), c=intervals)
def test_a_plain_number_does_not_depend_on_c(n: int, c: int) -> None:
    assert evaluate(str(n), c) == n


@pytest.mark.parametrize("length", ["9" * 5000, "C+" + "9" * 5000, "9" * 5000 + "C"])
def test_a_length_of_thousands_of_digits_is_one_short_line(length: str) -> None:
    with pytest.raises(PlanError, match="is no prompt length") as caught:
        evaluate(length, 16)
    assert len(str(caught.value)) < 200


@given(text=st.text(max_size=8))
def test_any_text_is_a_length_or_a_plan_error(text: str) -> None:
    try:
        assert evaluate(text, 256) >= 1
    except PlanError as error:
        assert len(str(error).splitlines()) == 1


@pytest.mark.parametrize("text", ["", "0", "-1", "2D", "2 C", "2C+", "0C+5", "2c", "1.5C", "2C-1-1", "٣C", "2C\n"])
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="is no prompt length; write"):
        evaluate(text, 1792)


def test_the_bare_interval_is_a_length() -> None:
    assert evaluate("C", 272) == 272


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "lengths: is empty; name at least one prompt length"),
        (["2C", "3C", "2C"], "lengths[2]: '2C' repeats '2C'; remove one"),
        (["C", "1C+0"], "lengths[1]: '1C+0' repeats 'C'; remove one"),
        (["C", "C*2"], "lengths[1]: 'C*2' is no prompt length; write '2C-1', 'C', '3C+1' or a number of tokens"),
    ],
)
def test_bad_lists_name_the_place(lengths: list[str], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        check_lengths(lengths)
    assert str(caught.value) == message


def test_a_good_list_is_left_alone() -> None:
    check_lengths(["2C-1", "2C", "3584"])
