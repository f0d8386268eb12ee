"""The budget recorder's way into vLLM: an entry point of ``vllm.general_plugins``, loaded in every process of vLLM.

Without `TRACE_FOLDER` and `REPAIRS` it returns at once and imports nothing of vLLM. With it, the processes that
sample and the one that schedules each write a stream into that folder: ``budget-<rank>.jsonl`` and
``budget-scheduler.jsonl``, of the records in `samestate.evidence.marker_records`::

    SAMESTATE_BUDGET_TRACE=/var/tmp/trace SAMESTATE_BUDGET_ARM=candidate \\
      vllm serve MODEL --reasoning-parser qwen3 ...

=============================  =============================================================
``SAMESTATE_BUDGET_TRACE``     folder of the streams, made where it is missing; turns it on
``SAMESTATE_BUDGET_ARM``       the arm's name in the streams; required beside the folder
``SAMESTATE_BUDGET_CAPACITY``  records that each ring holds between two steps; 4096 if unset
``SAMESTATE_BUDGET_FAULT``     a fault to inject (`budget_armoury`), which the trace must show; needs the folder
``SAMESTATE_VLLM_REPAIRS``     repairs of vLLM to put on, opt-in: ``cpu-draft-rows``, ``stable-topk``; needs no folder
=============================  =============================================================

A stream that exists is not overwritten: the next is ``budget-0.2.jsonl``. A rank's stream begins with
its first step, the scheduler's with the first request. They end, with `RecorderStopped`, when the
engine shuts down in order; a killed process leaves its steps and no end. ``VLLM_PLUGINS``, if set,
must name ``samestate_budget``. A rank's stream names the guard and the repairs that its process put on.

The recorder only reads, and its errors never reach serving; they are counted as dropped records. It wraps
functions of vLLM whose source it knows. Unknown source stops the engine at its start with one line.
It copies the rows of requests with a budget and waits for the device once per step, so a recorded
engine is not for measuring speed. Requests without a budget cost two look-ups per step and leave no records.

Not covered: pipeline parallelism's earlier stages (they do not sample), data parallelism (ranks of its
engines would share names), sampling that is sharded over ranks (each rank then records its own requests), beam search.
"""

from __future__ import annotations

import os
from typing import Literal

from samestate.evidence.controls import STABLE_TOPK
from samestate.evidence.marker_records import BUDGET_FAULT, CPU_DRAFT_ROWS, REPAIRS, TRACE_FOLDER

POOLS_MODULE = "vllm.models.glm5next.nvidia.ops.kpool_compress"
"""Where `topk_repair` replaces a function."""

_registered = False


def register() -> None:
    """Arrange for the recorder to be put on as vLLM imports its runners and its scheduler.

    Raises:
        BudgetRecorderError: the environment is not whole, or a source is unknown; the latter also later, from the
            import of the module in question.

    """
    global _registered  # noqa: PLW0603 (vLLM may load a plugin twice)
    if _registered or not any(map(os.environ.get, (TRACE_FOLDER, REPAIRS, BUDGET_FAULT))):
        return
    from samestate.instruments.budget_recorder import asked
    from samestate.instruments.budget_sources import BudgetRecorderError, when_imported

    trace = asked()
    if trace is None and os.environ.get(BUDGET_FAULT):
        raise BudgetRecorderError(f"{BUDGET_FAULT}: needs the recorder, which sees faults; set {TRACE_FOLDER} too")
    _repair(os.environ.get(REPAIRS, ""))
    _registered = True
    if trace is None:
        return
    when_imported("vllm.v1.core.sched.scheduler", _schedule)
    when_imported("vllm.v1.engine.core", _shut_down)
    when_imported("vllm.v1.worker.gpu_model_runner", _sample_v1)
    when_imported("vllm.v1.worker.gpu.model_runner", _sample_v2)


def _repair(names: str) -> None:
    from samestate.instruments.budget_sources import BudgetRecorderError, when_imported

    known = {CPU_DRAFT_ROWS: ("vllm.utils.cpu_triton_utils", _draft_rows), STABLE_TOPK: (POOLS_MODULE, _stable_topk)}
    for name in filter(None, names.split(",")):
        if name not in known:
            raise BudgetRecorderError(f"{REPAIRS}: no repair is called {name!r}; use {' or '.join(known)}")
        when_imported(*known[name])


def _draft_rows() -> None:
    from samestate.instruments import expand_repair
    from samestate.instruments.interventions import applied

    applied(CPU_DRAFT_ROWS, [expand_repair.ensure().before])


def _stable_topk() -> None:
    from samestate.instruments import topk_repair
    from samestate.instruments.interventions import applied

    applied(STABLE_TOPK, [topk_repair.repair()])


def _schedule() -> None:
    from samestate.instruments import budget_scheduler

    budget_scheduler.install()
    _inject("scheduler", "v1")


def _shut_down() -> None:
    from samestate.instruments import budget_recorder, budget_shutdown

    budget_recorder.beside_scheduler(budget_shutdown.install())


def _sample_v1() -> None:
    from samestate.instruments import budget_v1

    budget_v1.install()
    _inject("sampling", "v1")


def _sample_v2() -> None:
    from samestate.instruments import budget_v2

    budget_v2.install()
    _inject("sampling", "v2")


def _inject(side: Literal["sampling", "scheduler"], runner: Literal["v1", "v2"]) -> None:
    if fault := os.environ.get(BUDGET_FAULT):
        from samestate.instruments import budget_armoury

        budget_armoury.arm_at_start(fault, side, runner)
