"""Which cores vLLM is told that each rank of an engine has, where the device is the host."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from samestate.engines.children import cores
from samestate.engines.children.cores import BINDING, bind_ranks, shares


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores, 3 and 5, on a CPU platform, and nothing said of them."""
    monkeypatch.setenv(BINDING, "as it was")  # so that what is set below is taken away again
    monkeypatch.delenv(BINDING)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 3})
    monkeypatch.setattr(cores, "current_platform", SimpleNamespace(is_cpu=lambda: True))


@pytest.mark.parametrize(
    ("ranks", "said"),
    [(2, "0,2,4|1,3"), (3, "0,3|1,4|2"), (5, "0|1|2|3|4"), (6, "0|1|2|3|4|0,1,2,3,4")],
)
def test_cores_are_dealt_out_and_no_rank_is_without_one(ranks: int, said: str) -> None:
    assert shares([0, 1, 2, 3, 4], ranks) == said


def test_several_ranks_are_told_of_the_cores_that_this_process_may_use() -> None:
    bind_ranks(4)
    assert os.environ[BINDING] == "3|5|3,5|3,5"


def test_one_rank_is_left_to_vllm() -> None:
    bind_ranks(1)
    assert BINDING not in os.environ


def test_off_cpu_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    bind_ranks(2)
    assert BINDING not in os.environ


def test_the_users_own_word_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BINDING, "nobind")
    bind_ranks(2)
    assert os.environ[BINDING] == "nobind"
