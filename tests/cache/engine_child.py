"""One engine with our cache, in a process of its own: does what its orders say, prints what came of it, ends or dies.

``python engine_child.py ORDERS``, a JSON object: ``model``, ``type`` and ``url`` of the tier (null: none), ``requests``
(seed, length, salt), and where wanted ``settings``, ``options``, ``reset``, ``kill``, and ``lose``: after so many
requests every page is removed from the folder behind the engine's back.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

OUTPUT_TOKENS = 12
SETTLE_SECONDS = 60.0


def main(orders: dict[str, Any]) -> None:
    if orders.get("settings", {}).get("tensor_parallel_size", 1) > 1:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    tiers = [{"type": orders["type"], "url": orders["url"]}] if orders.get("url") else []
    options = {"cpu_bytes_to_use": 1 << 26, "secondary_tiers": tiers, **orders.get("options", {})}
    settings = {
        "block_size": 256,
        "max_model_len": 2048,
        "max_num_batched_tokens": 2048,
        "num_gpu_blocks_override": 24,
        "gpu_memory_utilization": 0.1,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "seed": 0,
        **orders.get("settings", {}),
    }
    llm = LLM(
        model=orders["model"],
        kv_transfer_config={
            "kv_connector": "SamestateConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "samestate.cache.connector",
            "kv_connector_extra_config": options,
        },
        **settings,
    )
    core = llm.llm_engine.engine_core.engine_core
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)
    answers: list[Any] = []
    for seed, length, salt in orders["requests"]:
        letters = random.Random(seed)
        prompt = TokensPrompt(prompt_token_ids=[letters.randrange(5, 250) for _ in range(length)])
        if salt is not None:
            prompt["cache_salt"] = salt
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        answers.append([list(output.outputs[0].token_ids), output.num_cached_tokens])
        until = time.monotonic() + SETTLE_SECONDS
        while core.scheduler.connector.has_pending_push_work() and time.monotonic() < until:
            core.step_fn()
        if orders.get("lose") == len(answers):
            for page in Path(urlsplit(orders["url"]).path).rglob("*.page"):
                page.unlink()
        if orders.get("reset"):
            llm.reset_prefix_cache(reset_connector=orders["reset"] == "external")
    metrics = {
        " ".join(
            [metric.name, *(metric.labels[label] for label in ("tier", "reason", "what") if label in metric.labels)]
        ): value
        for metric in llm.get_metrics()
        if "kv_offload" in metric.name and (value := getattr(metric, "value", None)) is not None
    }
    print(json.dumps({"answers": answers, "metrics": metrics}), flush=True)
    if orders.get("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
