"""The matched schedule clips vLLM's own answer at the next multiple of C, and knows what it wraps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from samestate.evidence.controls import COLD_SPLIT
from samestate.instruments import matched_schedule
from samestate.instruments.matched_schedule import ScheduleError, match_schedule, to_boundary, to_strict_prefix

C = 256


class Scheduler:
    """As much of vLLM's as the switch touches: one step takes all that is left."""

    need_mamba_block_aligned_split = True
    cache_config = SimpleNamespace(block_size=C)

    def _mamba_block_aligned_split(
        self, request: Any, num_new_tokens: int, num_new_local: int = 0, num_external: int = 0
    ) -> int:
        return num_new_tokens


def request(computed: int, prompt: int = 1000, tokens: int = 1000) -> Any:
    return SimpleNamespace(num_computed_tokens=computed, num_prompt_tokens=prompt, num_tokens=tokens)


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    monkeypatch.setattr(matched_schedule, "sha256_hex", lambda _: "0" * 64)
    monkeypatch.setattr(matched_schedule, "KNOWN", {"0" * 64: "0.0"})
    return Scheduler()


def test_a_step_ends_at_the_next_multiple_and_no_step_is_longer(scheduler: Scheduler) -> None:
    assert scheduler._mamba_block_aligned_split(request(0), 1000) == 1000
    sha256 = match_schedule(scheduler)
    assert len(sha256) == 64
    split = scheduler._mamba_block_aligned_split
    assert [split(request(at), 1000 - at) for at in (0, 256, 300, 768)] == [256, 256, 212, 232]
    assert split(request(0), 100) == 100
    assert split(request(0), 600, 0, 512) == 256
    assert split(request(0), 600, 300, 0) == 212


def test_decode_is_left_alone(scheduler: Scheduler) -> None:
    match_schedule(scheduler)
    assert scheduler._mamba_block_aligned_split(request(1000, tokens=1001), 1) == 1
    assert scheduler._mamba_block_aligned_split(request(1020, tokens=1024), 4) == 4


def test_a_cold_split_ends_one_step_at_the_strict_prefix_and_no_other(scheduler: Scheduler) -> None:
    """N = 1000 and C = 256: B = 768. A reload starts there, and is left alone."""
    match_schedule(scheduler, COLD_SPLIT)
    split = scheduler._mamba_block_aligned_split
    assert [split(request(at), 1000 - at) for at in (0, 256, 300, 768)] == [768, 512, 468, 232]
    assert split(request(0), 700) == 700
    assert split(request(0), 232, 0, 768) == 232
    assert split(request(0, prompt=1024, tokens=1024), 1024) == 768
    assert split(request(1000, tokens=1001), 1) == 1


@pytest.mark.parametrize(
    ("prompt", "split"), [(C - 1, C - 1), (C, C), (C + 1, C), (2 * C, C), (2 * C + 1, 2 * C), (1, 1)]
)
def test_a_cold_split_around_a_boundary(prompt: int, split: int) -> None:
    assert to_strict_prefix(0, prompt, prompt, C) == split


def test_each_mode_has_a_hash_of_its_own(scheduler: Scheduler) -> None:
    assert match_schedule(scheduler) != match_schedule(Scheduler(), COLD_SPLIT)


def test_another_mode_is_refused(scheduler: Scheduler) -> None:
    with pytest.raises(ScheduleError, match="SAMESTATE_MATCHED_SCHEDULE: must be 1, cold-split or 0, not 'yes'"):
        match_schedule(scheduler, "yes")


@pytest.mark.parametrize(("start", "tokens"), [(0, C), (1, C - 1), (C - 1, 1), (C, C)])
def test_tokens_to_the_next_multiple(start: int, tokens: int) -> None:
    assert to_boundary(start, C) == tokens


def test_another_source_than_it_was_written_for_is_refused() -> None:
    scheduler = Scheduler()
    with pytest.raises(
        ScheduleError, match=r"unknown source \(sha256 .*\); it was written for vLLM 0\.32\.0, 0\.33\.0"
    ):
        match_schedule(scheduler)
    assert "_mamba_block_aligned_split" not in vars(scheduler)


def test_a_model_without_recurrent_state_is_refused(scheduler: Scheduler) -> None:
    scheduler.need_mamba_block_aligned_split = False
    with pytest.raises(ScheduleError, match="keeps no recurrent state by block"):
        match_schedule(scheduler)


def test_the_installed_vllm_is_known() -> None:
    pytest.importorskip("vllm")
    import inspect

    from vllm.v1.core.sched.scheduler import Scheduler as Installed

    from samestate.evidence.canonical import sha256_hex

    source = inspect.getsource(Installed._mamba_block_aligned_split)
    assert sha256_hex(source.encode()) in matched_schedule.KNOWN
