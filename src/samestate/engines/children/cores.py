"""Which cores each rank of an engine has, where the device is the host."""

from __future__ import annotations

import os

from vllm.platforms import current_platform

BINDING = "VLLM_CPU_OMP_THREADS_BIND"
"""Left out, vLLM gives each rank a memory node of its own and does not start where there are fewer
(``vllm/utils/ompmultiprocessing.py``). The user's own value wins."""


def bind_ranks(ranks: int) -> None:
    """Tell vLLM, through this process's environment, which cores each of several ranks has; off CPU do nothing."""
    if ranks < 2 or not current_platform.is_cpu() or BINDING in os.environ:
        return
    os.environ[BINDING] = shares(sorted(os.sched_getaffinity(0)), ranks)


def shares(cores: list[int], ranks: int) -> str:
    """`cores` dealt out, as vLLM reads it: ``0,2|1,3``. A rank for which none is left has them all."""
    dealt = [cores[rank::ranks] or cores for rank in range(ranks)]
    return "|".join(",".join(map(str, share)) for share in dealt)
