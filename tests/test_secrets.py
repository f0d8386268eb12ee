"""Secrets never enter archives: the environment does by an allow-list, and nothing else of the host's."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from samestate.cli.commands import samestate
from samestate.evidence.archive import Archive
from samestate.evidence.records import EngineStarted

ALLOWED_ENVIRONMENT = {
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "PYTHONHASHSEED",
    "VLLM_BATCH_INVARIANT",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
}
SECRET = "s3cr3t-0123456789"


def engines(archive: Archive) -> list[EngineStarted]:
    lines = (line for arm in archive.arms for stream in archive.streams(arm) for line in archive.records(arm, stream))
    return [line.rec for line in lines if isinstance(line.rec, EngineStarted)]


def test_nothing_of_the_environment_enters_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "VLLM_API_KEY", "SAMESTATE_ANYTHING", "OMP_SECRET"):
        monkeypatch.setenv(name, SECRET)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    options = ["--engine", "sim", "--model", str(tmp_path / "model"), "--out", str(tmp_path / "archive")]
    result = CliRunner().invoke(samestate, ["run", "boundary", *options])
    assert result.exit_code == 0, result.output
    files = [path for path in (tmp_path / "archive").rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        assert SECRET.encode() not in path.read_bytes(), path
    assert len(engines(Archive.open(tmp_path / "archive"))) == 2


@pytest.mark.vllm
def test_vllm_s_settings_hold_no_token_path_or_host(short_archive: Path) -> None:
    found = engines(Archive.open(short_archive))
    assert found
    for engine in found:
        environment = {name.removeprefix("env.") for name in engine.settings if name.startswith("env.")}
        assert environment <= ALLOWED_ENVIRONMENT
        assert environment
        texts = {name: value for name, value in engine.settings.items() if isinstance(value, str)}
        assert [name for name, value in texts.items() if value.startswith(("/", "~")) or "://" in value] == []
        assert [name for name, value in texts.items() if value == socket.gethostname()] == []
        assert not [name for name in engine.settings if name.endswith(("hf_token", "api_key", "download_dir"))]
