"""Our models by name, the hashes of their files, and where they lie.

A model is built once, in a child process, into the user's cache folder
(``$SAMESTATE_CACHE``, else ``$XDG_CACHE_HOME/samestate``, else ``~/.cache/samestate``),
and held against its pinned hashes each time it is asked for.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from samestate.evidence.canonical import file_sha256, sha256_hex
from samestate.folders import cache_root
from samestate.models import recipe
from samestate.plans.model import ModelIdentity

PINS: dict[str, dict[str, str]] = {
    "glm5-next-small": {
        "config.json": "abfbcd945b1023ea8812c3c7fe3b8d2baadf1878cc3b91728a8b895a686cc79c",
        "generation_config.json": "0efa599f4f85e12626d22374456920a1d7091d13cfad81cf6f2a283258013bb3",
        "tokenizer.json": "ded144a7c1b2445a7599ef00cdc624e1484b74b7260bb2105a195073a6a4468b",
        "tokenizer_config.json": "d5568f2e633cfb465e4797c86b110544e2f56e3432d40bda3285344c4cfb7e25",
        "weights.json": "41131b1c8971438651fbf878db17ac2c7fb4223c61f18e026f35cce5c040398e",
    },
    "glm5-next-tiny": {
        "config.json": "1a5b293bddd11e9a927b48002bce9eb1ccdf1e4f3aaba3982c335f243e24d6e0",
        "generation_config.json": "0efa599f4f85e12626d22374456920a1d7091d13cfad81cf6f2a283258013bb3",
        "model.safetensors": "94a0bbf8bef17890ef752bc09ceaaf854361f088e7a5ef15e50c39651c9ce92f",
        "tokenizer.json": "ded144a7c1b2445a7599ef00cdc624e1484b74b7260bb2105a195073a6a4468b",
        "tokenizer_config.json": "ffa0c9ec1ab9066a9180ce76a500b3ebdcc2416cc94522865d5665edde0725d5",
    },
    "granite-hybrid-tiny": {
        "config.json": "3b0da00a496f9f6760e75b047d06072f2241bbf0cbd0c2abe1ea93cdadb961f0",
        "generation_config.json": "0efa599f4f85e12626d22374456920a1d7091d13cfad81cf6f2a283258013bb3",
        "model.safetensors": "d43c989faab07bd1bc608b44fb6d49805242ed0ba44b3a73c5da0091df9d1f23",
        "tokenizer.json": "ded144a7c1b2445a7599ef00cdc624e1484b74b7260bb2105a195073a6a4468b",
        "tokenizer_config.json": "ffa0c9ec1ab9066a9180ce76a500b3ebdcc2416cc94522865d5665edde0725d5",
    },
    "kimi-linear-tiny": {
        "config.json": "f40e98fccd862b9bd6b1c528ce72f99741014bbe5c3e6baa2d45089ad0ceeef0",
        "generation_config.json": "0efa599f4f85e12626d22374456920a1d7091d13cfad81cf6f2a283258013bb3",
        "model.safetensors": "6884df1f42511ec15fce575851c03d218c63c21522de56c69baed86e20b2fbf0",
        "tokenizer.json": "ded144a7c1b2445a7599ef00cdc624e1484b74b7260bb2105a195073a6a4468b",
        "tokenizer_config.json": "ffa0c9ec1ab9066a9180ce76a500b3ebdcc2416cc94522865d5665edde0725d5",
    },
    "qwen3-next-small": {
        "config.json": "56a2a874e80c6cabae1294bc6c51e164f3691e572eafe6e8d276312076619adf",
        "generation_config.json": "0efa599f4f85e12626d22374456920a1d7091d13cfad81cf6f2a283258013bb3",
        "tokenizer.json": "ded144a7c1b2445a7599ef00cdc624e1484b74b7260bb2105a195073a6a4468b",
        "tokenizer_config.json": "d5568f2e633cfb465e4797c86b110544e2f56e3432d40bda3285344c4cfb7e25",
        "weights.json": "48093691cd33b507fbc7ea11a92fd70925a28368f0d75bdce193de17594ab9f4",
    },
    "qwen3-next-tiny": {
        "config.json": "de276e109012b45e24c20bbaa2c1794c390c221de93727813d5596be17d45c84",
        "generation_config.json": "0efa599f4f85e12626d22374456920a1d7091d13cfad81cf6f2a283258013bb3",
        "model.safetensors": "58a14667999663757aaf5c6024f69ef65316d18710a9ddcc4cc998d5bf492061",
        "tokenizer.json": "ded144a7c1b2445a7599ef00cdc624e1484b74b7260bb2105a195073a6a4468b",
        "tokenizer_config.json": "ffa0c9ec1ab9066a9180ce76a500b3ebdcc2416cc94522865d5665edde0725d5",
    },
    "qwen3-tiny": {
        "config.json": "283c4edd985c067178645e808f98e953432966f1e943a6a1306afa1ab7af3ca5",
        "generation_config.json": "0efa599f4f85e12626d22374456920a1d7091d13cfad81cf6f2a283258013bb3",
        "model.safetensors": "f2e939da3aebc07c0dfc68781d819b96fbe82b6b5e898802507eee218539a8dc",
        "tokenizer.json": "1a587d3ebad360132f2fe7d3a2990fa13313ef3548a778ca16692ddf8bab7a5e",
        "tokenizer_config.json": "ffa0c9ec1ab9066a9180ce76a500b3ebdcc2416cc94522865d5665edde0725d5",
    },
    "qwen3-tiny-draft": {
        "config.json": "b3dce569f7689786d507c02e9cbc3d95cfa8a823e53d200c0bcf5875f12f4109",
        "generation_config.json": "0efa599f4f85e12626d22374456920a1d7091d13cfad81cf6f2a283258013bb3",
        "model.safetensors": "430e787e30d71597abe382a72d9d5a9681bbe11f07f5344cfb0411d94d0dc8cc",
        "tokenizer.json": "1a587d3ebad360132f2fe7d3a2990fa13313ef3548a778ca16692ddf8bab7a5e",
        "tokenizer_config.json": "ffa0c9ec1ab9066a9180ce76a500b3ebdcc2416cc94522865d5665edde0725d5",
    },
    "qwen3.5-tiny": {
        "config.json": "7a64bfeb76987727730bfc764256f497bc4fb38ac3a56c26e1711c83f3a57c52",
        "generation_config.json": "0efa599f4f85e12626d22374456920a1d7091d13cfad81cf6f2a283258013bb3",
        "model.safetensors": "9b46116158082fe786adbecc486dce7d4494fabdce9ff966ea85d33576076419",
        "tokenizer.json": "ded144a7c1b2445a7599ef00cdc624e1484b74b7260bb2105a195073a6a4468b",
        "tokenizer_config.json": "ffa0c9ec1ab9066a9180ce76a500b3ebdcc2416cc94522865d5665edde0725d5",
    },
}
"""SHA-256 of every file of a model built with seed 0. Those called small hold a recipe in place of weights."""


class Size(NamedTuple):
    """How large a model is, once it is built."""

    parameters: int
    """Counted, those for drafting too."""
    file_bytes: int
    """Of all its files."""


SIZES = {
    "glm5-next-small": Size(13_323_021_040, 19_971),
    "glm5-next-tiny": Size(927_756, 1_887_851),
    "granite-hybrid-tiny": Size(4_088_440, 8_204_339),
    "kimi-linear-tiny": Size(1_168_068, 2_371_305),
    "qwen3-next-small": Size(6_683_618_560, 19_139),
    "qwen3-next-tiny": Size(3_304_024, 6_643_240),
    "qwen3-tiny": Size(3_640_704, 7_354_603),
    "qwen3-tiny-draft": Size(2_705_792, 5_483_603),
    "qwen3.5-tiny": Size(2_660_260, 5_346_103),
}
"""Of the models above, so that they are known without building; a test builds each and counts."""


class ModelError(Exception):
    """A model is unknown, cannot be built, or is not the model it should be; one line that says what to do."""


def names() -> list[str]:
    """Every model that can be built."""
    return sorted(PINS)


def has_recipe(name: str) -> bool:
    """Whether model `name` holds a recipe in place of weights (`recipe`); False for one that is not ours."""
    return recipe.FILE in PINS.get(name, ())


def identity(folder: Path) -> ModelIdentity:
    """This checkpoint: the SHA-256 of every regular file below `folder`, hidden ones left out.

    The name is the catalogue's where the hashes are its own, else the folder's. Raises `ModelError`.
    """
    try:
        files = {
            path.relative_to(folder).as_posix(): file_sha256(path)
            for path in sorted(folder.rglob("*"))
            if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        }
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error.strerror}") from None
    if "config.json" not in files:
        raise ModelError(f"{folder} is not a model folder: it has no config.json")
    name = next((name for name, pins in PINS.items() if pins == files), folder.resolve().name)
    return ModelIdentity(name=name, files=files, sha256=_combined(files))


def ensure(name: str, folder: Path | None = None) -> Path:
    """The folder that holds model `name`, built first where it is absent. Raises `ModelError`."""
    if name not in PINS:
        raise ModelError(f"no model is called {name!r}: choose one of {', '.join(names())}")
    if folder is None:
        folder = cache_root() / f"{name}-{_combined(PINS[name])[:12]}"
    if not folder.is_dir() or not any(folder.iterdir()):
        _build(name, folder)
    _hold_against_pins(name, folder)
    return folder


def _build(name: str, folder: Path) -> None:
    command = [sys.executable, "-m", "samestate.models.build", name, str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    # Another process may have finished the same folder meanwhile: then the pins decide.
    if result.returncode != 0 and not (folder / "config.json").is_file():
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise ModelError(f"model {name} could not be built: {last.removeprefix('error: ')}")


def _hold_against_pins(name: str, folder: Path) -> None:
    pins, found = PINS[name], identity(folder).files
    wrong = sorted(file for file in pins.keys() | found.keys() if pins.get(file) != found.get(file))
    if wrong:
        raise ModelError(
            f"{folder} is not {name}: {', '.join(wrong)} missing, added or with another SHA-256 than the pinned one; "
            "remove the folder and build it again"
        )


def _combined(files: dict[str, str]) -> str:
    """SHA-256 of the sorted ``<sha256>  <name>`` lines."""
    return sha256_hex("".join(sorted(f"{digest}  {file}\n" for file, digest in files.items())).encode())
