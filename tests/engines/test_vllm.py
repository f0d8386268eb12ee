"""The child process is started, driven and always reaped."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from samestate.engines.base import EngineError, EngineSpec
from samestate.engines.vllm import VllmEngine
from samestate.evidence.records import EngineStopped, Line
from samestate.evidence.stream import Defect, read_stream

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def spec(model: Path, folder: Path, **changes: object) -> EngineSpec:
    plain = EngineSpec(
        arm="candidate",
        model=model,
        settings={"block_size": 256, "max_model_len": 1024, "num_gpu_blocks_override": 16, "enforce_eager": True},
        serve_args=[],
        connector="native",
        external_cache_bytes=1 << 26,
        audit_level="metadata",
        save_delay_ms=0,
        fault=None,
        stream_dir=folder,
        log_path=folder / "engine.log",
    )
    return plain._replace(**changes)  # type: ignore[arg-type]


def alive(session: int) -> list[int]:
    """Processes of a session that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (OSError, NotADirectoryError):
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(entry.name))
    return found


def test_a_killed_engine_is_one_clear_line_and_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    engine = VllmEngine(spec(tiny_model, tmp_path))
    try:
        started = engine.start()
        assert started.checkpoint_interval == 256
        session = os.getsid(engine.pid)
        prompt = engine.encode("a b c " * 40)
        assert len(engine.generate_one("one", prompt, 4, 42, True).token_ids) == 4
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"^arm candidate: the engine's process died \(exit code -9\)$"):
            engine.generate_one("two", prompt, 4, 42, True)
    finally:
        engine.close()
    assert alive(session) == []
    with pytest.raises(EngineError, match="the engine is not running"):
        engine.counters()
    engine.close()


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_kill_that_is_asked_for_leaves_whole_streams_and_nothing_else(
    tiny_model: Path, tmp_path: Path, ranks: int
) -> None:
    settings = {"block_size": 256, "max_model_len": 1024, "num_gpu_blocks_override": 16, "enforce_eager": True}
    engine = VllmEngine(spec(tiny_model, tmp_path, settings={**settings, "tensor_parallel_size": ranks}))
    try:
        started = engine.start()
        session = os.getsid(engine.pid)
        engine.generate_one("one", engine.encode("a b c " * 100), 4, 42, True)
        killed = engine.kill()
    finally:
        engine.close()
    assert (killed.process, alive(session)) == (started.process, [])
    assert killed.processes >= ranks
    streams = sorted(tmp_path.glob("*.jsonl"))
    assert [path.stem for path in streams] == ["scheduler", *(f"worker-{rank}" for rank in range(ranks))]
    for path in streams:
        items = list(read_stream(path))
        assert not [item for item in items if isinstance(item, Defect)]
        assert not [item for item in items if isinstance(item, Line) and isinstance(item.rec, EngineStopped)]


@pytest.mark.deep
def test_an_engine_that_died_cannot_be_killed(tiny_model: Path, tmp_path: Path) -> None:
    engine = VllmEngine(spec(tiny_model, tmp_path))
    try:
        engine.start()
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"^arm candidate: the engine's process died \(exit code -9\)$"):
            engine.kill()
    finally:
        engine.close()


def test_an_engine_that_cannot_start_shows_why(tmp_path: Path) -> None:
    engine = VllmEngine(spec(tmp_path, tmp_path))
    try:
        with pytest.raises(EngineError) as failure:
            engine.start()
    finally:
        engine.close()
    assert "\n" not in str(failure.value)
    assert failure.value.log_tail


@pytest.mark.deep
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reply_seconds": 0.1}, "the engine gave no answer in 0 s"),
        ({"service": "127.0.0.1:9"}, "the service at 127.0.0.1:9 is gone, and the engine still waits for it"),
    ],
)
def test_an_engine_that_waits_for_ever_is_given_up(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], message: str
) -> None:
    monkeypatch.setattr("samestate.engines.vllm.POLL_SECONDS", 0.05)
    monkeypatch.setattr("samestate.engines.vllm.SERVICE_GONE_SECONDS", 0.2)
    engine = VllmEngine(spec(tiny_model, tmp_path, **changes))
    try:
        with pytest.raises(EngineError) as caught:
            engine.start()
        assert str(caught.value) == f"arm candidate: {message}"
        session = engine.pid
    finally:
        engine.close()
    assert alive(session) == []
