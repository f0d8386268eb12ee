"""The audit in production on a real engine, around our cache: counts, files that rotate, and a fault that counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from samestate.evidence.records import StreamClosed
from samestate.evidence.stream import Defect, read_stream

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.deep]

C = 256
PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams
from samestate.instruments import live_faults

model, out = sys.argv[1:]
ours = {"kv_connector": "SamestateConnector", "kv_connector_module_path": "samestate.cache.connector",
    "kv_role": "kv_both", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 27}}
audit = {"kv_connector": "AuditConnector", "kv_connector_module_path": "samestate.instruments.connector",
    "kv_role": "kv_both", "kv_connector_extra_config": {"connectors": [ours],
    "samestate": {"stream_dir": out, "arm": "live", "level": "metadata", "rotate_bytes": 1 << 16, "keep_files": 2}}}
llm = LLM(model=model, skip_tokenizer_init=True, block_size=256, max_model_len=1024, num_gpu_blocks_override=24,
    enforce_eager=True, enable_prefix_caching=True, disable_log_stats=False, kv_transfer_config=audit)
core = llm.llm_engine.engine_core.engine_core
greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)

def ask(tokens):
    prompt = [2 + 7 * n % 499 for n in range(tokens)]
    (answer,) = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
    while core.scheduler.has_requests():
        core.step_fn()
    assert llm.reset_prefix_cache()
    return list(answer.outputs[0].token_ids)

def counts():
    llm.llm_engine.do_log_stats()
    found = {}
    for metric in llm.get_metrics():
        if metric.name.startswith(("vllm:samestate", "vllm:external_prefix_cache_hits")):
            found[metric.name] = found.get(metric.name, 0) + metric.value
    return found

cold, reload = ask(513), ask(513)
right = counts()
for _ in range(150):
    ask(3)
llm.llm_engine.do_log_stats()
ask(512)
live_faults.arm("full-lookup")
ask(512)
live_faults.arm(None)
wrong = counts()
llm.llm_engine.engine_core.shutdown()
print(json.dumps([cold, reload, right, wrong]))
"""


def test_counts_files_and_a_fault(tiny_model: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tiny_model), str(tmp_path)],
        env=os.environ
        | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    cold, reload, right, wrong = json.loads(done.stdout.splitlines()[-1])
    assert cold == reload
    assert right["vllm:samestate_audit_interval_tokens"] == C
    assert right["vllm:samestate_audit_reloads"] == 1
    assert right["vllm:samestate_audit_reloaded_tokens"] == right["vllm:external_prefix_cache_hits"] == 2 * C
    assert right["vllm:samestate_audit_boundary_faults"] == 0
    assert right.get("vllm:samestate_audit_errors", 0) == 0
    assert wrong["vllm:samestate_audit_boundary_faults"] == 1
    assert wrong.get("vllm:samestate_audit_errors", 0) == 0
    assert not (tmp_path / "scheduler.jsonl").exists(), "the first file is gone"
    kept = sorted(tmp_path.glob("scheduler.*.jsonl"))
    assert len(kept) == 2
    for path in kept:
        read = list(read_stream(path))
        assert not [one for one in read if isinstance(one, Defect)]
        assert read[-1].rec == StreamClosed(dropped=0)  # type: ignore[union-attr]
