"""The simulated engine of marker plans: it says what the chain says, closes at the budget, trims as schedulers do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from samestate.engines.base import Ask, EngineError, EngineSpec, ProbeAsk
from samestate.engines.sim.budget import SimBudgetEngine
from samestate.evidence.marker_records import TokensCommitted, TokensDelivered
from samestate.evidence.stream import read_stream
from samestate.models import scripts

SPECULATION = {
    "none": {},
    "draft": {"speculative_config": json.dumps({"method": "draft_model", "num_speculative_tokens": 3})},
    "ngram": {
        "speculative_config": json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2})
    },
}


def engine(folder: Path, speculation: str = "none", fault: str | None = None) -> SimBudgetEngine:
    folder.mkdir(exist_ok=True)
    spec = EngineSpec(
        arm="one",
        model=folder,
        settings=dict(SPECULATION[speculation]),
        serve_args=[],
        connector="none",
        external_cache_bytes=0,
        audit_level="off",
        save_delay_ms=0,
        fault=fault,
        stream_dir=folder,
        log_path=folder / "engine.log",
    )
    return SimBudgetEngine(spec)


def ask(prompt: list[int], budget: int | None = None, max_tokens: int = 64, **more: object) -> ProbeAsk:
    asked = ProbeAsk("probe", prompt, budget, max_tokens, 0.0, 1.0, 42, [], ignore_eos=False)
    return asked._replace(**more)  # type: ignore[arg-type]


@pytest.mark.parametrize("speculation", SPECULATION)
@pytest.mark.parametrize("budget", [None, 0, 3, 9, 10, 11, 40])
def test_drafts_change_no_token(tmp_path: Path, speculation: str, budget: int | None) -> None:
    running = engine(tmp_path, speculation)
    running.start()
    prompt = scripts.chat_prompt("close-after-9")
    result = running.probe(ask(prompt, budget))

    def forced(context: list[int]) -> int | None:
        start = len(context) - 1 - context[::-1].index(scripts.START)
        inside = scripts.END not in context[start:]
        return scripts.END if budget is not None and inside and len(context) - start - 1 >= budget else None

    assert result.token_ids == scripts.expected_continuation(prompt, 64, forced)  # type: ignore[arg-type]
    assert (result.finish_reason, result.stop_reason) == ("stop", None)
    assert result.request.startswith("probe-")


def test_what_lies_past_a_stop_is_committed_and_trimmed(tmp_path: Path) -> None:
    running = engine(tmp_path, "draft")
    running.start()
    stop = scripts.token("Answer")
    result = running.probe(ask(scripts.chat_prompt("close-never"), 8, stop_token_ids=[stop]))
    running.close()
    assert (result.finish_reason, result.stop_reason, result.token_ids[-1]) == ("stop", stop, stop)
    committed = [one.rec for one in read_stream(tmp_path / "budget-0.jsonl") if isinstance(one.rec, TokensCommitted)]
    delivered = [
        one.rec for one in read_stream(tmp_path / "budget-scheduler.jsonl") if isinstance(one.rec, TokensDelivered)
    ]
    assert [one.tokens for one in committed] == [one.before for one in delivered]
    assert delivered[-1].after < len(delivered[-1].before)
    assert sum(one.after for one in delivered) == len(result.token_ids)


def test_the_cap_ends_it(tmp_path: Path) -> None:
    running = engine(tmp_path, "draft")
    running.start()
    result = running.probe(ask(scripts.chat_prompt("close-never"), 8, max_tokens=5))
    assert (len(result.token_ids), result.finish_reason) == (5, "length")


def test_texts_are_read_as_the_tiny_tokenizer_reads_them(tmp_path: Path) -> None:
    running = engine(tmp_path)
    assert running.encode("z\n<think>") == [5 + ord("z"), scripts.NEWLINE, scripts.START]
    assert running.encode("close-after-12") == [scripts.token("close-after-12")]
    assert running.token("Answer") == [scripts.token("Answer")]
    assert running.token("nothing") == []


def test_it_takes_probes_alone_and_no_fault(tmp_path: Path) -> None:
    running = engine(tmp_path)
    with pytest.raises(EngineError, match="not running"):
        running.probe(ask([1]))
    with pytest.raises(EngineError, match="takes probes alone"):
        running.generate([Ask("one", [1])], 1, 0, ignore_eos=True)
    with pytest.raises(EngineError, match="has none; use vLLM"):
        engine(tmp_path / "other", fault="double-force").start()
