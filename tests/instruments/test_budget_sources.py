"""The budget recorder wraps what it knows, and refuses the rest in one line."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from samestate.evidence.canonical import sha256_hex
from samestate.instruments.budget_sources import BudgetRecorderError, require, when_imported, wrap


class Sampler:
    """Stands for a class of vLLM."""

    def sample(self, logits: int) -> int:
        return logits + 1

    @staticmethod
    def parse(logits: int) -> int:
        return logits + 2


def sha(function: Callable[..., Any]) -> str:
    return sha256_hex(inspect.getsource(function).encode())


def test_known_sources_are_named_with_their_hashes() -> None:
    known = {(Sampler, "sample"): {sha(Sampler.sample): "0.32.0"}, (Sampler, "parse"): {sha(Sampler.parse): "0.32.0"}}
    assert [(found.module, found.qualname, found.source_sha256) for found in require(known)] == [
        (__name__, "Sampler.sample", sha(Sampler.sample)),
        (__name__, "Sampler.parse", sha(Sampler.parse)),
    ]


def test_unknown_source_is_refused_in_one_line() -> None:
    with pytest.raises(BudgetRecorderError) as refused:
        require({(Sampler, "sample"): {"0" * 64: "0.32.0", "1" * 64: "0.33.0"}})
    line = str(refused.value)
    assert "\n" not in line
    assert "Sampler.sample has unknown source" in line
    assert "0.32.0, 0.33.0" in line
    assert "unset SAMESTATE_BUDGET_TRACE" in line


def test_a_function_that_is_not_there_is_refused() -> None:
    with pytest.raises(BudgetRecorderError, match=r"has no .*Sampler\.verify"):
        require({(Sampler, "verify"): {"0" * 64: "0.32.0"}})


def test_a_function_that_was_replaced_is_refused() -> None:
    class Patched:
        @wraps(Sampler.sample)
        def sample(self, logits: int) -> int:
            return logits

    with pytest.raises(BudgetRecorderError, match="was replaced already"):
        require({(Patched, "sample"): {sha(Sampler.sample): "0.32.0"}})


def test_a_wrapped_method_is_seen_by_every_object() -> None:
    class Wrapped(Sampler):
        def sample(self, logits: int) -> int:
            return super().sample(logits)

    early = Wrapped()
    wrap(Wrapped, "sample", lambda original: lambda self, logits: 10 * original(self, logits))
    assert early.sample(1) == Wrapped().sample(1) == 20
    assert Sampler().sample(1) == 2


@pytest.fixture
def late_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "imported_late.py").write_text("answer = 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "imported_late", raising=False)
    return "imported_late"


def test_an_action_waits_for_the_import_and_runs_once(late_module: str) -> None:
    seen: list[int] = []
    when_imported(late_module, lambda: seen.append(sys.modules[late_module].answer))
    assert seen == []
    assert late_module not in sys.modules
    importlib.import_module(late_module)
    importlib.import_module(late_module)
    assert seen == [42]
    when_imported(late_module, lambda: seen.append(0))
    assert seen == [42, 0]


def test_two_actions_may_wait_for_one_module(late_module: str) -> None:
    seen: list[str] = []
    when_imported(late_module, lambda: seen.append("first"))
    when_imported(late_module, lambda: seen.append("second"))
    importlib.import_module(late_module)
    assert sorted(seen) == ["first", "second"]


def test_what_an_action_raises_is_raised_by_the_import(late_module: str) -> None:
    def refuse() -> None:
        raise BudgetRecorderError("budget recorder: unknown source")

    when_imported(late_module, refuse)
    with pytest.raises(BudgetRecorderError, match="unknown source"):
        importlib.import_module(late_module)
