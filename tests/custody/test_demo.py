"""The demonstration's own judgement, and the spec that it writes; what it starts is seen with ``make swap-demo``."""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from samestate.custody.spec_file import load_spec

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/swap_demo.py"


@cache
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("swap_demo", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GOOD = {"operational": "pass", "functional": "pass", "probe": {"verdict": "pass"}}


def came_to(
    tmp_path: Path, decision: object, code: int = 0, again: int = 0, answered: int = 50, failed: tuple[str, ...] = ()
) -> int:
    (tmp_path / "records").mkdir()
    (tmp_path / "records/decision.json").write_text(json.dumps(decision))
    traffic = SimpleNamespace(answered=answered, failed=list(failed))
    result: int = demo().verdict(code, again, traffic, 1.0)
    return result


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo(), "RUNS", tmp_path)


def test_all_as_it_must_be(tmp_path: Path) -> None:
    assert came_to(tmp_path, GOOD) == 0


@pytest.mark.parametrize(
    ("decision", "more"),
    [
        (GOOD, {"code": 3}),
        (GOOD, {"again": 1}),
        (GOOD, {"failed": ("status 503",)}),
        (GOOD, {"answered": 2}),
        ({**GOOD, "operational": "unknown"}, {}),
        ({**GOOD, "functional": "incomplete"}, {}),
        ({**GOOD, "probe": {"verdict": "unknown"}}, {}),
        ({**GOOD, "probe": None}, {}),
        ({}, {}),
    ],
)
def test_whatever_is_not_is_said(tmp_path: Path, decision: object, more: dict[str, object]) -> None:
    assert came_to(tmp_path, decision, **more) == 1  # type: ignore[arg-type]


def test_its_spec_is_one(tmp_path: Path) -> None:
    made = demo().spec(demo().server("incumbent", 8001, tmp_path / "model"), tmp_path / "model", tmp_path / "package")
    (tmp_path / "swap.toml").write_text(made)
    spec = load_spec(tmp_path / "swap.toml")
    assert spec.candidate is not None and spec.candidate.kind == "plan"
    assert spec.incumbent.url == "http://127.0.0.1:8001"
    assert "server incumbent 127.0.0.1:8001" in demo().haproxy(8000, {"incumbent": 8001})
