"""Engines that several tests share: each real engine start costs half a minute, so there are few."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from interpreted import Interpreter, interpreting
from quiet import Silent
from samestate.checks.analyzers import source_sha256
from samestate.engines.vllm import VllmEngine, available
from samestate.lab.run import RunRequest, run_plan
from samestate.models.catalogue import ensure
from samestate.plans.load import freeze, load
from samestate.plans.model import Plan

# A shared machine may be slow at any moment; what hangs is pytest-timeout's to find. Without `make explore` the cases
# are the same in every run: a change is red for what it changes, and new cases are looked for on purpose.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("repeatable")


SHORT = 16
"""Tokens of a generation in the short archives; the shipped plan has 64, and what parts here parts among the first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    require_in_sight(items)
    if available():
        return
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))


def require_in_sight(items: Iterable[pytest.Item]) -> None:
    """Raise UsageError where `make test` would run a test on an engine and does not see it in its file's text."""
    run = runpy.run_path(str(Path(__file__).parents[1] / "scripts/run_tests.py"))
    here = [item for item in items if not any(map(item.get_closest_marker, run["ELSEWHERE"]))]
    files = {item.path for item in here if item.get_closest_marker("vllm")}
    if unseen := [path for path in files if not run["is_for_engines"](path.read_text(encoding="utf-8"))]:
        named = ", ".join(map(str, sorted(unseen)))
        raise pytest.UsageError(f"{named}: has tests with the mark vllm; write pytest.mark.vllm in the file itself")


def frozen(name: str, **changes: object) -> Plan:
    """A shipped plan, perhaps with changes, frozen under the analyzer that is running."""
    plan = load(name).model_copy(update=changes)
    return freeze(plan, source_sha256(plan.analyzer.id))


@pytest.fixture(scope="session")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreter]:
    """Runs programs over Triton's interpreter. Needs torch and Triton."""
    with interpreting(tmp_path_factory.mktemp("interpreted")) as interpreter:
        yield interpreter


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The shipped tiny hybrid checkpoint."""
    return ensure("qwen3-next-tiny")


def _run(out: Path, model: Path, name: str = "boundary", plan: Plan | None = None, **options: object) -> Path:
    plan = plan or frozen(name)
    request = RunRequest(
        plan=plan,
        model=model,
        out=out,
        make_engine=VllmEngine,
        serve_args=plan.engine.serve_args,
        **{"fault": None, "control": None, "reference": None, **options},  # type: ignore[arg-type]
    )
    return run_plan(request, Silent()).archive


@pytest.fixture(scope="session")
def short_archive(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The boundary plan with short generations on real vLLM, both arms, no fault: two engine starts."""
    plan = frozen("boundary", output_tokens=SHORT)
    return _run(tmp_path_factory.mktemp("short-boundary") / "clean", tiny_model, plan=plan)


@pytest.fixture(scope="session")
def short_fault(short_archive: Path, tiny_model: Path) -> Path:
    """The same with the full-lookup fault, against the short run's sealed control: one start more."""
    plan = frozen("boundary", output_tokens=SHORT)
    out = short_archive.parent / "full-lookup"
    return _run(out, tiny_model, plan=plan, fault="full-lookup", control=short_archive)


@pytest.fixture(scope="session")
def clean_archive(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The boundary plan on real vLLM, both arms, no fault: two engine starts."""
    return _run(tmp_path_factory.mktemp("boundary") / "clean", tiny_model)


@pytest.fixture(scope="session")
def faulted_archive(clean_archive: Path, tiny_model: Path) -> Path:
    """The same with the full-lookup fault, against the clean run's sealed control: one start more."""
    return _run(clean_archive.parent / "full-lookup", tiny_model, fault="full-lookup", control=clean_archive)


@pytest.fixture(scope="session")
def instrumented_archive(clean_archive: Path, tiny_model: Path) -> Path:
    """The same matrix with digests, poison and delayed saves, against the clean run's control: one start more."""
    return _run(clean_archive.parent / "instrumented", tiny_model, "boundary-instrumented", control=clean_archive)


@pytest.fixture(scope="session")
def instrumented_fault(clean_archive: Path, tiny_model: Path) -> Path:
    """The instrumented matrix with the full-lookup fault: one start more."""
    out = clean_archive.parent / "instrumented-full-lookup"
    return _run(out, tiny_model, "boundary-instrumented", fault="full-lookup", control=clean_archive)


@pytest.fixture(scope="session")
def shared_archive(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The plan of shared prefixes on real vLLM with its own offloading: two engine starts."""
    return _run(tmp_path_factory.mktemp("shared-prefix") / "native", tiny_model, "shared-prefix")


@pytest.fixture
def run_shipped(tmp_path: Path, tiny_model: Path) -> Callable[[str], Path]:
    """Runs a shipped plan on real vLLM with its own offloading: an engine start for each of its arms."""
    return lambda name: _run(tmp_path / name, tiny_model, name)
