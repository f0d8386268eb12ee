"""The transfers of a connector inside a `MultiConnector` are read as if it stood alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorMetadata

from samestate.evidence.records import (
    LoadCompleted,
    LoadSubmitted,
    PagesDigested,
    RankRegistered,
    Record,
    SaveCompleted,
    SaveSubmitted,
    StreamClosed,
)
from samestate.evidence.stream import Defect, read_stream
from samestate.instruments.adapters import NestedAdapter

C = 256
TOKENS = 2 * C + 1

PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams

model, out = sys.argv[1:]
native = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
    "spec_name": "HostOffloadingSpec", "spec_module_path": "samestate.cache.spec", "cpu_bytes_to_use": 1 << 26}}
nested = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"connectors": [native]}}
audit = {"kv_connector": "AuditConnector", "kv_connector_module_path": "samestate.instruments.connector",
    "kv_role": "kv_both", "kv_connector_extra_config": {"connectors": [nested],
    "samestate": {"stream_dir": out, "arm": "live", "level": "poison"}}}
llm = LLM(model=model, skip_tokenizer_init=True, block_size=256, max_model_len=1024, num_gpu_blocks_override=24,
    enforce_eager=True, enable_prefix_caching=True, kv_transfer_config=audit)
core = llm.llm_engine.engine_core.engine_core
greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
tokens = []
for _ in range(2):
    (answer,) = llm.generate([{"prompt_token_ids": [2 + 7 * n % 499 for n in range(513)]}], greedy, use_tqdm=False)
    tokens.append(list(answer.outputs[0].token_ids))
    while core.scheduler.has_requests():
        core.step_fn()
    assert llm.reset_prefix_cache()
llm.llm_engine.engine_core.shutdown()
print(json.dumps(tokens))
"""


def test_the_wrapping_is_taken_off_the_orders() -> None:
    seen: list[object] = []
    orders = object()
    nested = NestedAdapter(SimpleNamespace(step=seen.append))  # type: ignore[arg-type]
    nested.step(MultiKVConnectorMetadata((MultiKVConnectorMetadata((orders,)),)))  # type: ignore[arg-type]
    assert seen == [orders]


@pytest.mark.deep
@pytest.mark.vllm
@pytest.mark.slow
def test_a_connector_inside_another_is_audited(tiny_model: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tiny_model), str(tmp_path)],
        env=os.environ
        | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    cold, reload = json.loads(done.stdout.splitlines()[-1])
    assert cold == reload
    records: list[Record] = []
    for line in read_stream(tmp_path / "worker-0.jsonl"):
        assert not isinstance(line, Defect), line
        records.append(line.rec)
    assert records[-1] == StreamClosed(dropped=0)
    (registered,) = [one for one in records if isinstance(one, RankRegistered)]
    assert len(registered.transfer_groups) == 4
    (begun,) = [one for one in records if isinstance(one, LoadSubmitted)]
    assert (begun.boundary, len(begun.parts)) == (2 * C, 4)
    assert begun.request, "the scheduler's orders were not found inside"
    assert [one.ok for one in records if isinstance(one, LoadCompleted)] == [True]
    saves = [one.job for one in records if isinstance(one, SaveSubmitted) and one.request]
    assert saves
    assert sorted(saves) == sorted(one.job for one in records if isinstance(one, SaveCompleted))
    arrived = [one for one in records if isinstance(one, PagesDigested) and one.direction == "load"]
    assert sum(row.sentinel for one in arrived for row in one.rows) == 0
