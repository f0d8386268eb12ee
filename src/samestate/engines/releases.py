"""Releases of vLLM and of connectors: what is known of each, and where a connector's are kept.

A connector's release has a folder of its own beside the engine's environment, made once with pip and found again ever
after, without a network. `releases.toml` says what is known of each.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Literal

import msgspec

from samestate.evidence.records import Scalar
from samestate.folders import cache_root

_VERSION = re.compile(r"\d+(\.\d+)*([a-z]+\d*)?(\.(post|dev)\d+)?")
_NO_NETWORK = re.compile(r"NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError|Max retries")


class ReleaseError(Exception):
    """A release is unknown or cannot be had; one line with the remedy."""


class KnownFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault that a release was seen with, or that was read in its source or in a public report."""

    id: str
    what: str
    settings: Mapping[str, Scalar]
    """Options under which it shows; empty: under all that were tried."""
    shown_by: str
    """The command; empty where none shows it here."""
    avoided_by: str
    sources: list[str]
    """Files of the release, and public reports with their number."""
    known_by: Literal["run", "read", "report"] = "run"
    """Seen in a run of this project, read in the release's source, or somebody's public report."""
    model_types: list[str] = msgspec.field(default_factory=list)
    """It concerns these architectures only; empty: all."""
    said: list[str] = msgspec.field(default_factory=list)
    """Settings of ``vllm serve`` without which it does not show."""
    unless_said: list[str] = msgspec.field(default_factory=list)
    """Settings of ``vllm serve`` that avoid it."""
    unless_interval: int | None = None
    """The C at which it does not show."""
    connectors: list[str] = msgspec.field(default_factory=list)
    """It concerns these connectors only; empty: all, and none."""
    recurrent: bool = False
    """It concerns models with recurrent state only."""
    refuses: bool = False
    """The release does not start with these architectures."""
    beyond_settings: str = ""
    """A condition that no setting tells; one sentence. Such a fault is pointed at, never counted."""


class Release(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A release that was run."""

    package: str
    version: str
    beside: list[str]
    """What must be installed with it, as pip names it; all else comes with the engine."""
    run_with: list[str]
    faults: list[KnownFault] = msgspec.field(name="fault", default_factory=list)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    release: list[Release]


def known(package: str) -> list[Release]:
    """The releases of `package` that were run, oldest first."""
    data = files("samestate.engines").joinpath("releases.toml").read_bytes()
    return [one for one in msgspec.toml.decode(data, type=_File).release if one.package == package]


def faults_of(package: str, version: str) -> list[KnownFault]:
    """What is known to be wrong with that release; a local part of the version (``+cpu``) does not count."""
    public = version.partition("+")[0]
    return [fault for one in known(package) if one.version == public for fault in one.faults]


def installed(package: str) -> str | None:
    """The version of `package` in this environment; None: there is none that imports."""
    try:
        return metadata.version(package) if find_spec(package) else None
    except metadata.PackageNotFoundError:
        return None


def folder_of(package: str, version: str) -> Path:
    """Where `ensure` keeps a release for this interpreter; it need not exist."""
    return cache_root() / "releases" / f"{package}-{version}-{sys.implementation.cache_tag}"


def version_in(package: str, folder: Path | None) -> str:
    """The version of `package` in `folder`, or in this environment. Raises `ReleaseError`."""
    if folder is None:
        found = installed(package)
    else:
        found = next((one.version for one in metadata.distributions(name=package, path=[str(folder)])), None)
    if found is None:
        raise ReleaseError(f"{package}: is not in {folder or 'this environment'}; name a release with its version")
    return found


def source_in(package: str, folder: Path | None) -> Path:
    """The folder with the package's own modules. Raises `ReleaseError`."""
    if folder is not None:
        return folder / package
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ReleaseError(f"{package}: is not installed in this environment; name a release with its version")
    return Path(spec.submodule_search_locations[0])


def ensure(package: str, version: str) -> Path:
    """The folder with that release, to be put first on PYTHONPATH; installed first where it is absent.

    Two makers wait for each other; an interrupted one leaves nothing that counts. Raises `ReleaseError`.
    """
    if not _VERSION.fullmatch(version):
        raise ReleaseError(f"{package} {version!r}: is no version; say it as {_example(package)}")
    folder = folder_of(package, version)
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            if not folder.is_dir():
                _make(package, version, folder)
    except OSError as error:
        raise ReleaseError(f"{folder}: {error.strerror or error}; check the path and its permissions") from None
    return folder


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(package: str, version: str, folder: Path) -> None:
    releases = {one.version: one for one in known(package)}
    latest = list(releases.values())[-1:]
    beside = (releases[version] if version in releases else latest[0]).beside if latest else []
    making = Path(mkdtemp(dir=folder.parent, prefix=".making-"))
    try:
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--only-binary=:all:", "--quiet"]
        command += ["--no-input", "--disable-pip-version-check", "--retries", "2", "--target", str(making)]
        done = subprocess.run(
            [*command, f"{package}=={version}", *beside],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise ReleaseError(_why(package, version, list(releases), done.stderr))
        os.rename(making, folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _why(package: str, version: str, known_versions: list[str], said: str) -> str:
    """pip's words in one line, with what can be done."""
    if "No module named pip" in said:
        return f"{package} {version}: this environment has no pip to fetch it with; run `python -m ensurepip`"
    if _NO_NETWORK.search(said):
        return (
            f"{package} {version}: the package index cannot be reached, and this release was never fetched before; "
            "run once with a network, it is kept"
        )
    errors = [line.removeprefix("ERROR: ") for line in said.splitlines() if line.startswith("ERROR: ")]
    word = " ".join((errors or said.strip().splitlines()[-1:] or ["pip failed without a word"])[0].split())
    word = re.sub(r"(from versions: )(?:[^,()]+, ){6,}(?=(?:[^,()]+, ){5})", r"\1…, ", word)
    return f"{package} {version}: cannot be had; known here: {', '.join(known_versions) or 'none'}; pip says: {word}"


def _example(package: str) -> str:
    return known(package)[-1].version if known(package) else "1.2.3"
