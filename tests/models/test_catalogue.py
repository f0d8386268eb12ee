"""The cache folder, the pins and what happens when they do not hold."""

import json
import struct
from math import prod
from pathlib import Path

import pytest

from samestate.models import catalogue, recipe
from samestate.models.catalogue import PINS, ModelError, Size, ensure, identity, names

NAME = "qwen3-next-tiny"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SAMESTATE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_builds_once_into_the_cache_and_knows_the_model(cache: Path) -> None:
    folder = ensure(NAME)
    assert folder.parent == cache and folder.name.startswith(f"{NAME}-")
    built_at = (folder / "model.safetensors").stat().st_mtime_ns
    assert ensure(NAME) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == built_at
    assert identity(folder).name == NAME
    assert identity(folder).files == PINS[NAME]


def test_builds_into_a_folder_of_ones_own(tmp_path: Path) -> None:
    assert ensure(NAME, tmp_path / "deep" / "m") == tmp_path / "deep" / "m"
    assert identity(tmp_path / "deep" / "m").name == NAME


def test_xdg_cache_comes_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAMESTATE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ensure(NAME).parent == tmp_path / "samestate"


@pytest.mark.parametrize("damage", ["change", "remove", "add"])
def test_a_folder_that_is_not_the_model_is_refused(tmp_path: Path, damage: str) -> None:
    folder = ensure(NAME, tmp_path / "m")
    if damage == "change":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    elif damage == "remove":
        (folder / "model.safetensors").unlink()
    else:
        (folder / "more.safetensors").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"safetensors missing, added or with another SHA-256"):
        ensure(NAME, folder)
    assert identity(folder).name == "m"


def test_a_build_with_other_bytes_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PINS, NAME, {**PINS[NAME], "config.json": "0" * 64})
    with pytest.raises(ModelError, match=r"config\.json missing, added or with another SHA-256"):
        ensure(NAME)


def test_a_half_built_folder_never_counts(cache: Path) -> None:
    folder = ensure(NAME)
    half = cache / f".{folder.name}.half"
    folder.rename(half)
    (half / "model.safetensors").unlink()
    assert ensure(NAME) == folder
    assert identity(folder).files == PINS[NAME]


def test_a_cache_that_cannot_be_written_is_one_clear_line(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(ModelError, match="could not be built") as caught:
        ensure(NAME)
    assert "\n" not in str(caught.value)


def test_unknown_names_list_the_known_ones() -> None:
    small, tiny = ["glm5-next-small", "qwen3-next-small"], ["glm5-next-tiny", "kimi-linear-tiny", NAME]
    tiny += ["granite-hybrid-tiny", "qwen3.5-tiny"]
    assert names() == sorted([*small, *tiny, "qwen3-tiny", "qwen3-tiny-draft"])
    with pytest.raises(ModelError, match=NAME):
        ensure("nosuch")


def test_identity_needs_a_model_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        identity(tmp_path)
    with pytest.raises(ModelError):
        identity(tmp_path / "absent")


def test_identity_sees_every_file_below_but_hidden_ones(tmp_path: Path) -> None:
    for name in ("config.json", "sub/a.bin", ".cache/stamp"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    found = identity(tmp_path)
    assert sorted(found.files) == ["config.json", "sub/a.bin"]
    assert found.name == tmp_path.name
    assert catalogue.identity(tmp_path) == found


@pytest.mark.parametrize("name", names())
def test_sizes_are_those_of_what_is_built(name: str) -> None:
    folder = ensure(name)
    weights = folder / "model.safetensors"
    if weights.is_file():
        content = weights.read_bytes()
        (length,) = struct.unpack_from("<Q", content)
        header = json.loads(content[8 : 8 + length])
        shapes = [tensor["shape"] for key, tensor in header.items() if key != "__metadata__"]
    else:
        shapes = [sketch.shape for sketch in recipe.read(folder).followed(folder)]
    told = Size(sum(map(prod, shapes)), sum(file.stat().st_size for file in folder.iterdir()))
    assert catalogue.SIZES[name] == told


def test_every_model_has_a_size() -> None:
    assert catalogue.SIZES.keys() == PINS.keys()
