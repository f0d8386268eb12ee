from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checks.agreement import compared
from samestate.checks.analyzers import source_sha256
from samestate.engines.sim import SimEngine
from samestate.lab.run import RunRequest
from samestate.plans.load import freeze, load
from samestate.plans.model import Plan


@pytest.fixture(autouse=True)
def second_opinion() -> Iterator[None]:
    """Every archive that is judged is judged by `verify.py` too: the two must agree."""
    with compared():
        yield


@pytest.fixture
def boundary() -> Plan:
    return freeze(load("boundary"), source_sha256("boundary-v1"))


@pytest.fixture
def small(boundary: Plan) -> Plan:
    """Three lengths at C=16: 15 operations an arm, 4 tokens each."""
    engine = boundary.engine.model_copy(update={"settings": {"block_size": 16, "max_model_len": 2048}})
    update = {"engine": engine, "lengths": ["60C-1", "60C", "60C+1"], "output_tokens": 4}
    return boundary.model_copy(update=update)


@pytest.fixture
def watched(small: Plan) -> Plan:
    """The instrumented plan over the same three lengths, for the simulated engine's three groups and five entries."""
    plan = load("boundary-instrumented")
    assert plan.expected_layout is not None
    update = {
        "engine": small.engine,
        "lengths": small.lengths,
        "output_tokens": small.output_tokens,
        "expected_layout": plan.expected_layout.model_copy(update={"transfer_groups": 3, "entries": 5}),
        "instruments": plan.instruments.model_copy(update={"save_delay_ms": 2}),
    }
    return freeze(plan.model_copy(update=update), source_sha256("boundary-instrumented-v1"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def request_for(model: Path, tmp_path: Path) -> Callable[..., RunRequest]:
    def request(plan: Plan, out: str = "archive", **overrides: Any) -> RunRequest:
        fields: dict[str, Any] = {
            "plan": plan,
            "model": model,
            "out": tmp_path / out,
            "make_engine": SimEngine,
            "fault": None,
            "control": None,
            "reference": None,
            "serve_args": plan.engine.serve_args,
        }
        return RunRequest(**{**fields, **overrides})

    return request


class QuietProgress:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.operations: list[tuple[str, int, int, str]] = []

    def stage(self, name: str) -> None:
        self.stages.append(name)

    def operation(self, arm: str, done: int, total: int, op: str) -> None:
        self.operations.append((arm, done, total, op))


@pytest.fixture
def progress() -> QuietProgress:
    return QuietProgress()
