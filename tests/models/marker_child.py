"""A real vLLM with `qwen3-tiny` in a process of its own: prompts on standard input, output ids on standard output."""

import json
import os
import sys
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt


def accepted(engine: LLM) -> list[int]:
    """Drafts proposed, then how often each place of a draft was accepted, since the start."""
    values = {metric.name: metric for metric in engine.get_metrics()}
    drafted: Any = values.get("vllm:spec_decode_num_drafts")
    places: Any = values.get("vllm:spec_decode_num_accepted_tokens_per_pos")
    return [drafted.value, *places.values] if drafted and places else []


def gap(logprobs: Any) -> float | None:
    """The smallest lead of a generated token over the second best."""
    if not logprobs:
        return None
    pairs = [sorted((entry.logprob for entry in place.values()), reverse=True)[:2] for place in logprobs]
    return min(first - second for first, second in pairs)


def main() -> None:
    """Run the jobs one at a time."""
    told = json.load(sys.stdin)
    engine = LLM(
        told["model"],
        max_model_len=2048,
        max_num_seqs=4,
        gpu_memory_utilization=0.3,
        kv_cache_memory_bytes=256 << 20,
        enforce_eager=True,
        enable_prefix_caching=False,
        seed=0,
        disable_log_stats=False,
        speculative_config=told["speculation"],
    )
    answers, before = [], accepted(engine)
    for job in told["jobs"]:
        params = SamplingParams(max_tokens=job["limit"], seed=7, **job["sampling"])
        output = engine.generate(TokensPrompt(prompt_token_ids=job["prompt"]), params, use_tqdm=False)[0].outputs[0]
        after = accepted(engine)
        answers.append(
            {
                "ids": list(output.token_ids),
                "gap": gap(output.logprobs),
                "drafts": [now - then for now, then in zip(after, before, strict=True)],
                "logprobs": [
                    {id_: entry.logprob for id_, entry in place.items()} for place in (output.logprobs or [])[:8]
                ],
            }
        )
        before = after
    print("ANSWERS" + json.dumps(answers))


if __name__ == "__main__":
    main()
