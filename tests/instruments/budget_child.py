"""A vLLM that answers requests with reasoning budgets: ``python budget_child.py JOB.json``, answer on the last line.

The recorder gets in as in any vLLM: by its entry point and the environment. With ``in_process`` the engine
runs in this process, and all that sampling saw and the caches hold is hashed. With ``TRITON_INTERPRET=1`` the newer
runner works without a GPU: Triton's interpreter runs its kernels. ``scripts/gpu_budget_check.py`` runs this file too.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

JOB = json.loads(Path(sys.argv[1]).read_text())
os.environ.update(
    {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if JOB["in_process"] else "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "PYTHONHASHSEED": "0",
    }
)

os.environ["VLLM_USE_V2_MODEL_RUNNER"] = {"v1": "0", "v2": "1"}[JOB["runner"]]
if os.environ.get("TRITON_INTERPRET") == "1":
    from samestate.instruments.interpreted import interpret

    interpret()

import torch
from vllm import LLM, SamplingParams

seen: list[str] = []


def digest(tensor: torch.Tensor) -> str:
    return sha256(tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()


def watch_interpreted_logits() -> None:
    """The same for the newer runner."""
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    sample, choose, reject = Sampler.sample, Sampler._sample_random, rejection_sampler.rejection_sample

    def watched_sample(self: Any, logits: torch.Tensor, *args: Any, **options: Any) -> Any:
        seen.append(f"raw {digest(logits)}")
        return sample(self, logits, *args, **options)

    def watched_choose(self: Any, logits: torch.Tensor, *args: Any, **options: Any) -> Any:
        seen.append(f"processed {digest(logits)}")
        return choose(self, logits, *args, **options)

    def watched_reject(logits: torch.Tensor, *args: Any, **options: Any) -> Any:
        seen.append(f"target {digest(logits)}")
        return reject(logits, *args, **options)

    Sampler.sample = watched_sample  # type: ignore[method-assign]
    Sampler._sample_random = watched_choose  # type: ignore[method-assign]
    rejection_sampler.rejection_sample = watched_reject


def watch_logits() -> None:
    """Hash what goes into sampling, before and after the budget."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.sampler import Sampler

    forward, sample, constrain = Sampler.forward, Sampler.sample, rejection_sampler.apply_sampling_constraints

    def watched_forward(self: Any, logits: torch.Tensor, *args: Any, **options: Any) -> Any:
        seen.append(f"raw {digest(logits)}")
        return forward(self, logits, *args, **options)

    def watched_sample(self: Any, logits: torch.Tensor, *args: Any, **options: Any) -> Any:
        seen.append(f"processed {digest(logits)}")
        return sample(self, logits, *args, **options)

    def watched_constrain(logits: torch.Tensor, *args: Any, **options: Any) -> Any:
        seen.append(f"target {digest(logits)}")
        return constrain(logits, *args, **options)

    Sampler.forward = watched_forward  # type: ignore[method-assign]
    Sampler.sample = watched_sample  # type: ignore[method-assign]
    rejection_sampler.apply_sampling_constraints = watched_constrain


class Idle:
    """A stream or an event of a device that has nothing to wait for."""

    def __init__(self, *args: object, **options: object) -> None:
        self.device = torch.device("cpu")

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **options: None


def allow_asynchronous() -> None:
    """vLLM's CPU platform turns asynchronous scheduling off. Leave it on; the code is the same that GPUs run."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def keep(config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        check(config)
        config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = staticmethod(keep)  # type: ignore[assignment,method-assign]
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = cuda.current_stream = Idle
    cuda.stream = contextlib.nullcontext


def caches(llm: LLM) -> list[str]:
    core: Any = llm.llm_engine.engine_core
    runner = core.engine_core.model_executor.driver_worker.worker.model_runner
    parts = (cache if isinstance(cache, list | tuple) else [cache] for cache in runner.kv_caches)
    return [digest(part) for cache in parts for part in cache]


def main() -> None:
    if JOB["asynchronous"] and not torch.cuda.is_available():
        allow_asynchronous()
    llm = LLM(
        model=JOB["model"],
        max_model_len=1024,
        enforce_eager=JOB.get("eager", True),
        load_format=JOB.get("load_format", "auto"),
        num_gpu_blocks_override=JOB.get("blocks"),
        seed=0,
        enable_prefix_caching=False,
        async_scheduling=JOB["asynchronous"],
        speculative_config=JOB["speculative"],
        **({"kv_cache_memory_bytes": 1 << 28} if torch.cuda.is_available() else {}),
        reasoning_config={"reasoning_start_str": "<think>", "reasoning_end_str": JOB.get("end", "</think>")},
    )
    if JOB["in_process"]:
        {"v1": watch_logits, "v2": watch_interpreted_logits}[JOB["runner"]]()
    asked = JOB["requests"]
    answers = llm.generate(
        [{"prompt_token_ids": request["prompt"]} for request in asked],
        [SamplingParams(seed=7, **request["params"]) for request in asked],
        use_tqdm=False,
    )
    result = {
        "outputs": [
            {
                "request": answer.request_id,
                "tokens": list(answer.outputs[0].token_ids),
                "finish": answer.outputs[0].finish_reason,
                "stop": answer.outputs[0].stop_reason,
            }
            for answer in answers
        ],
        "logits": seen,
        "caches": caches(llm) if JOB["in_process"] else [],
    }
    llm.llm_engine.engine_core.shutdown()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
