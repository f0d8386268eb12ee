"""The installed vLLM is one that the recorder knows, and another is refused before it serves."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm")

from samestate.evidence.marker_records import (
    CPU_DRAFT_ROWS,
    REPLACES,
    SPLIT_TOP_P,
    TRACE_ARM,
    TRACE_FOLDER,
    WRAPS,
)
from samestate.instruments import budget_scheduler, budget_shutdown, budget_v1, budget_v2, expand_repair, top_p_guard
from samestate.instruments.budget_sources import Sources, require


def named(sources: Sources) -> set[str]:
    return {f"{owner.__module__}.{owner.__qualname__}.{name}" for owner, name in sources}


def test_what_is_wrapped_is_what_the_trace_s_contract_declares() -> None:
    assert named(budget_v1.WRAPPED) == WRAPS["v1"]
    assert named(budget_v2.WRAPPED) == WRAPS["v2"]
    assert named(budget_scheduler.WRAPPED) | named(budget_shutdown.WRAPPED) == WRAPS["scheduler"]


def test_what_guard_and_repair_replace_is_what_the_contract_declares() -> None:
    rows = f"{expand_repair.MODULE}.{expand_repair.FUNCTION}"
    assert {
        SPLIT_TOP_P: {f"{top_p_guard.MODULE}.{top_p_guard.KERNEL}", rows},
        CPU_DRAFT_ROWS: {rows},
    } == REPLACES


def test_every_function_is_known_as_it_is_installed() -> None:
    for side in (budget_scheduler, budget_shutdown, budget_v1, budget_v2):
        assert [found.qualname for found in require(side.WRAPPED)] == [
            f"{owner.__qualname__}.{name}" for owner, name in side.WRAPPED
        ]
    for runner in (budget_v1, budget_v2):
        assert len(require(runner.RELIED_ON)) == len(runner.RELIED_ON)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "method"),
    [
        ("vllm.v1.core.sched.scheduler", "Scheduler.update_from_output"),
        pytest.param("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._sample", marks=pytest.mark.deep),
        pytest.param("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.sample", marks=pytest.mark.deep),
    ],
)
def test_a_vllm_of_other_source_does_not_start(module: str, method: str) -> None:
    owner, _, name = method.partition(".")
    program = (
        f"import {module} as module\n"
        f"from samestate.evidence import canonical\n"
        f"module.{owner}.{name} = canonical.sha256_hex\n"
        "from samestate.instruments.budget_plugin import register; register()"
    )
    environ = os.environ | {TRACE_FOLDER: "/nowhere", TRACE_ARM: "candidate"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    last = done.stderr.splitlines()[-1]
    assert f"{module}.{method} has unknown source" in last
    assert "0.32.0 and 0.33.0" in last or "0.32.0, 0.33.0" in last
