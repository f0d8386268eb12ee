"""A running vLLM says which controls are on, and the matched schedule ends its steps at every multiple of C."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from samestate.checks.controls import AUTOTUNE
from samestate.engines.base import EngineSpec
from samestate.engines.vllm import VllmEngine
from samestate.evidence import records as r
from samestate.evidence.controls import (
    CAPTURE_VARIABLE,
    CONTROLS,
    MATCHED_SCHEDULE,
    PROFILE_VARIABLE,
    SCHEDULE_VARIABLE,
    STORAGES_VARIABLE,
    TUNER_PROFILE,
)
from samestate.evidence.tuner_profile import installed, make, write

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.deep]
C, N = 256, 1000


def spec(model: Path, folder: Path, **more: r.Scalar) -> EngineSpec:
    folder.mkdir()
    return EngineSpec(
        arm="control",
        model=model,
        settings={
            "block_size": C,
            "max_model_len": 2048,
            "num_gpu_blocks_override": 32,
            "enforce_eager": True,
            **more,
        },
        serve_args=[],
        connector="none",
        external_cache_bytes=0,
        audit_level="off",
        save_delay_ms=0,
        fault=None,
        stream_dir=folder,
        log_path=folder / "engine.log",
    )


def records(folder: Path) -> list[r.Record]:
    lines = (folder / "scheduler.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=r.Line).rec for line in lines]


def ran(model: Path, folder: Path, **more: r.Scalar) -> tuple[r.EngineStarted, list[int], list[int]]:
    """What the engine says of itself, where the steps of a cold prompt ended, and its tokens."""
    engine = VllmEngine(spec(model, folder, **more))
    try:
        started = engine.start()
        prompt = (engine.encode("a b c d e f g " * 400))[:N]
        tokens = engine.generate_one("one", prompt, 4, 42, True).token_ids
    finally:
        engine.close()
    rows = [row for rec in records(folder) if isinstance(rec, r.BatchScheduled) for row in rec.rows]
    return started, [row.start + row.scheduled for row in rows if row.start < N], list(tokens)


def test_all_are_off_unless_one_is_asked_for(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (PROFILE_VARIABLE, SCHEDULE_VARIABLE, STORAGES_VARIABLE, CAPTURE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    started, ends, _ = ran(tiny_model, tmp_path / "off")
    assert started.controls == [r.Control(name=name, on=False, sha256=None) for name in CONTROLS]
    assert isinstance(started.settings[AUTOTUNE], bool)
    assert started.settings["kv_transfer_config.kv_role"] is None
    assert len(ends) < 4
    (ground,) = [rec for rec in records(tmp_path / "off") if isinstance(rec, r.EnvironmentObserved)]
    assert (ground.rank, ground.device, ground.patched) == (0, "cpu", [])
    assert ground.backends and ground.variables["PYTHONHASHSEED"] == "0"

    choice = r.KernelSelection(kernel="no.such.kernel", key=["64"], config={"BLOCK": 64})
    sha256 = write(tmp_path / "profile.json", make("cpu", installed(), {0: [choice]}))
    monkeypatch.setenv(PROFILE_VARIABLE, str(tmp_path / "profile.json"))
    monkeypatch.setenv(SCHEDULE_VARIABLE, "1")
    monkeypatch.setenv(STORAGES_VARIABLE, "1")
    monkeypatch.setenv(CAPTURE_VARIABLE, "layers.1.input_layernorm")
    matched, clipped, _ = ran(tiny_model, tmp_path / "on")
    on = {control.name: control.sha256 for control in matched.controls or [] if control.on}
    assert on.keys() == {TUNER_PROFILE, MATCHED_SCHEDULE}
    assert on[TUNER_PROFILE] == sha256
    assert matched.settings[AUTOTUNE] is False
    assert clipped == [256, 512, 768, N]
    (read_back,) = [rec for rec in records(tmp_path / "on") if isinstance(rec, r.KernelsSelected)]
    # On CPUs no Triton kernel runs: the profile held nothing, which the check says.
    assert (read_back.mode, read_back.profile_sha256, read_back.selections) == ("pin", sha256, [])

    start, end = [rec for rec in records(tmp_path / "on") if isinstance(rec, r.StoragesDigested)]
    assert (start.moment, end.moment, start.rows) == ("start", "end", end.rows)
    assert len(start.rows) > 20
    calls = [rec for rec in records(tmp_path / "on") if isinstance(rec, r.CallCaptured)]
    (counted,) = [rec for rec in records(tmp_path / "on") if isinstance(rec, r.CallsCounted)]
    assert counted.module.endswith("layers.1.input_layernorm")
    assert counted.calls == counted.captured == len(calls) >= len(clipped) + 3
    assert [one.inputs[0].shape[0] for one in calls if one.inputs[0].shape][:4] == [256, 256, 256, N - 768]


def test_two_prefill_splits_become_one(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PROFILE_VARIABLE, raising=False)
    monkeypatch.delenv(SCHEDULE_VARIABLE, raising=False)
    _, small, _ = ran(tiny_model, tmp_path / "small", max_num_batched_tokens=512)
    _, large, _ = ran(tiny_model, tmp_path / "large", max_num_batched_tokens=2048)
    assert small != large
    monkeypatch.setenv(SCHEDULE_VARIABLE, "1")
    _, small, one = ran(tiny_model, tmp_path / "small-matched", max_num_batched_tokens=512)
    _, large, other = ran(tiny_model, tmp_path / "large-matched", max_num_batched_tokens=2048)
    assert small == large == [256, 512, 768, N]
    assert one == other
