"""`qwen3-tiny` on a real vLLM: it generates what `scripts` says, alone and with both kinds of speculation."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from samestate.evidence.marker_records import REPAIRS
from samestate.models.catalogue import ensure
from samestate.models.scripts import STOP, chat_prompt, expected_continuation, resident_prompt, token
from samestate.models.tokenizer import FIRST_BYTE

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

GREEDY: dict[str, float] = {"temperature": 0.0}
SAMPLED: dict[str, float] = {"temperature": 0.6, "top_p": 0.95}
DRAFTS = 4
ODD_TEXT = [FIRST_BYTE + byte for byte in b"why not? " * 40]
PROMPTS = {
    "close": chat_prompt("close-after-37"),
    "close at once": chat_prompt("close-after-0"),
    "long": ODD_TEXT + chat_prompt("close-after-200"),
    "never": chat_prompt("close-never"),
    "again": chat_prompt("close-after-5", "again-after-7"),
    "again, never": ODD_TEXT + chat_prompt("close-after-3", "again-never"),
    "resident": resident_prompt("close-after-20", resident=9),
    "opens itself": [token("close-after-3"), token("open-think")],
}
LIMIT = 220


def answers(speculation: dict[str, Any] | None, jobs: list[dict[str, Any]], repairs: str = "") -> list[dict[str, Any]]:
    told = {"model": str(ensure("qwen3-tiny")), "speculation": speculation, "jobs": jobs}
    child = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("marker_child.py"))],
        input=json.dumps(told),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {REPAIRS: repairs},
    )
    line = next((line for line in child.stdout.splitlines() if line.startswith("ANSWERS")), None)
    assert line, child.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(line.removeprefix("ANSWERS"))
    return found


def job(prompt: list[int], sampling: dict[str, float], limit: int = LIMIT) -> dict[str, Any]:
    return {"prompt": prompt, "limit": limit, "sampling": sampling}


def draft_model() -> dict[str, Any]:
    return {"method": "draft_model", "model": str(ensure("qwen3-tiny-draft")), "num_speculative_tokens": DRAFTS}


def ngram() -> dict[str, Any]:
    return {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 3, "prompt_lookup_min": 2}


def assert_as_expected(found: list[dict[str, Any]], jobs: list[dict[str, Any]]) -> None:
    for answer, asked in zip(found, jobs, strict=True):
        assert answer["ids"] == expected_continuation(asked["prompt"], asked["limit"])


def test_generates_what_the_script_says_greedy_and_sampled() -> None:
    jobs = [job(prompt, GREEDY | {"logprobs": 2}) for prompt in PROMPTS.values()]
    jobs += [job(PROMPTS[name], SAMPLED, 60) for name in ("close", "again", "resident", "never")]
    jobs += [job([*ODD_TEXT, *PROMPTS["never"]], GREEDY | {"logprobs": 2}, 20)]
    found = answers(None, jobs)
    assert_as_expected(found, jobs)
    assert min(answer["gap"] for answer in found[: len(PROMPTS)]) >= 20
    # The context counts: the same tokens after another prompt have other log-probabilities.
    other = found[-1]
    assert other["ids"] == found[3]["ids"][:20]
    assert other["logprobs"] != found[3]["logprobs"]


@pytest.mark.deep
def test_the_draft_model_is_accepted_in_every_number() -> None:
    jobs = [job(prompt, GREEDY) for prompt in PROMPTS.values()]
    found = answers(draft_model(), jobs)
    assert_as_expected(found, jobs)
    drafts, *places = found[2]["drafts"]
    assert drafts > places[0] > places[1] > places[2] > places[3] > 0


@pytest.mark.deep
def test_ngrams_are_accepted_and_rejected_in_one_request() -> None:
    jobs = [job(prompt, GREEDY) for prompt in PROMPTS.values()]
    # The prompt leads an n-gram astray: it holds the beginning of the reasoning, gone on with otherwise.
    beginning = expected_continuation(PROMPTS["never"], 3)
    jobs.append(job([*beginning, STOP, *PROMPTS["never"]], GREEDY))
    found = answers(ngram(), jobs)
    assert_as_expected(found, jobs)
    drafts, *places = found[-1]["drafts"]
    assert drafts > places[0] > 0 and places[-1] > 0


@pytest.mark.deep
@pytest.mark.parametrize("speculation", [draft_model, ngram])
def test_sampled_drafts_follow_the_script_once_repaired(speculation: Any) -> None:
    jobs = [job(PROMPTS[name], SAMPLED, 100) for name in ("close", "never", "again", "resident")]
    assert_as_expected(answers(speculation(), jobs, "cpu-draft-rows"), jobs)
