"""One engine of a soak, in a process of its own: asks its requests, so many at a time, and keeps what came of it.

ORDERS, a file with a JSON object: ``model``, ``requests`` (how many), ``seed``, ``at_once``, ``salted`` (every request
has a salt of its own, so that nothing is reused), ``known`` (a file with the control's answers, or null), ``resumed``
(ask those of them that were preempted, as they were computed afterwards),
``settings``, ``tiers`` (null: no connector), ``memory_bytes``, ``folder`` (for its answers). Prints ``answered N``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from samestate.engines.children.environment import DEFAULTS, FIXED

os.environ.update({**DEFAULTS, **os.environ, **FIXED, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput

from cache import soak_work
from cache.soak_work import ANSWER_TOKENS, Answered, Request, Resumed, Turns

SETTLE_SECONDS = 60.0
SETTINGS = {
    "block_size": soak_work.C,
    "dtype": "bfloat16",
    "mamba_ssm_cache_dtype": "float32",
    "max_model_len": 2560,
    "max_num_batched_tokens": 1024,
    "long_prefill_token_threshold": soak_work.C,  # cold runs go in the steps that are left after any hit
    "max_num_seqs": 4,
    "gpu_memory_utilization": 0.1,
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "disable_log_stats": False,
    "seed": 0,
}
PARAMS = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False, logprobs=2)


def main(orders: dict[str, Any]) -> None:
    folder = Path(orders["folder"])
    options = {"cpu_bytes_to_use": orders["memory_bytes"], "secondary_tiers": orders["tiers"]}
    transfer = {
        "kv_connector": "SamestateConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "samestate.cache.connector",
        "kv_connector_extra_config": options,
    }
    connector = {} if orders["tiers"] is None else {"kv_transfer_config": transfer}
    llm = LLM(model=orders["model"], **{**SETTINGS, **orders["settings"]}, **connector)
    known = soak_work.read(Path(orders["known"])) if orders["known"] else []
    if orders["resumed"]:
        turns: Turns | Resumed = Resumed(known)
    else:
        turns = Turns(soak_work.conversations(orders["requests"], orders["seed"]), orders["seed"], known)
    began = time.monotonic()
    answers = serve(llm, turns, orders["at_once"], orders["salted"])
    seconds = time.monotonic() - began
    settle(llm)
    soak_work.keep(answers, folder / "answers.jsonl")
    told = {"seconds": seconds, "metrics": metrics(llm), "settings": settings(llm)}
    (folder / "told.json").write_text(json.dumps(told))
    llm.llm_engine.engine_core.shutdown()


def serve(llm: LLM, turns: Turns | Resumed, at_once: int, salted: bool) -> list[Answered]:
    engine = llm.llm_engine
    yield_when_idle(llm)
    asked: dict[str, Request] = {}
    answers: list[Answered] = []
    preempted = watch_preemptions(llm)
    number = 0
    while True:
        while len(asked) < at_once and (request := turns.take()) is not None:
            prompt = TokensPrompt(prompt_token_ids=request.prompt)
            number += 1
            if salted:
                prompt["cache_salt"] = str(number)
            engine.add_request(str(number), prompt, PARAMS)
            asked[str(number)] = request
        if not asked:
            return answers
        for output in engine.step():
            if output.finished:
                assert isinstance(output, RequestOutput)
                request = asked.pop(output.request_id)
                answers.append(answer(request, output, preempted.pop(output.request_id, [])))
                turns.answered(request, answers[-1].tokens)
                print(f"answered {len(answers)}", flush=True)


def answer(request: Request, output: RequestOutput, preempted: list[int]) -> Answered:
    (only,) = output.outputs
    assert only.logprobs is not None
    chosen, margins = [], []
    for token, step in zip(only.token_ids, only.logprobs, strict=True):
        mine = step[token].logprob
        chosen.append(mine)
        margins.append(mine - max(other.logprob for key, other in step.items() if key != token))
    return Answered(*request, list(only.token_ids), chosen, margins, output.num_cached_tokens or 0, preempted)


def yield_when_idle(llm: LLM) -> None:
    """As a served core's loop does (v1/engine/core.py): threads that move pages want the interpreter's lock."""
    core: Any = llm.llm_engine.engine_core.engine_core
    step = core.step_fn

    def yielding() -> Any:
        outputs, executed = step()
        if not executed and core.scheduler.has_requests():
            time.sleep(0.001)
        return outputs, executed

    core.step_fn = yielding


def watch_preemptions(llm: LLM) -> dict[str, list[int]]:
    """By request, how many tokens it had given at each preemption."""
    scheduler: Any = llm.llm_engine.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request
    seen: dict[str, list[int]] = {}

    def watched(request: Any, *arguments: Any, **options: Any) -> None:
        seen.setdefault(request.request_id.partition("-")[0], []).append(request.num_output_tokens)
        preempt(request, *arguments, **options)

    scheduler._preempt_request = watched
    return seen


def settle(llm: LLM) -> None:
    """Until every save is where it goes."""
    core = llm.llm_engine.engine_core.engine_core
    connector = core.scheduler.connector
    until = time.monotonic() + SETTLE_SECONDS
    while connector is not None and connector.has_pending_push_work() and time.monotonic() < until:
        core.step_fn()


def metrics(llm: LLM) -> dict[str, float]:
    """Counters and gauges of the cache and of preemptions, by name and labels."""
    return {
        " ".join([one.name, *(one.labels[label] for label in ("tier", "reason", "what") if label in one.labels)]): value
        for one in llm.get_metrics()
        if ("kv_offload" in one.name or "preempt" in one.name or "prefix_cache" in one.name)
        and (value := getattr(one, "value", None)) is not None
    }


def settings(llm: LLM) -> dict[str, Any]:
    config = llm.llm_engine.vllm_config
    return {
        "dtype": str(config.model_config.dtype),
        "block_size": config.cache_config.block_size,
        "num_gpu_blocks": config.cache_config.num_gpu_blocks,
        "mamba_cache_dtype": str(config.cache_config.mamba_cache_dtype),
        "mamba_ssm_cache_dtype": str(config.cache_config.mamba_ssm_cache_dtype),
    }


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
