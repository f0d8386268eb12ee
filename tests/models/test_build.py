"""The built bytes: the same every time, and the pinned ones."""

import json
import struct
import subprocess
import sys
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import pytest

from samestate.models import marker_weights
from samestate.models.build import build, main
from samestate.models.catalogue import PINS

NAME = "qwen3-next-tiny"
SCRIPTED = ("qwen3-tiny", "qwen3-tiny-draft")


def hashes(folder: Path) -> dict[str, str]:
    return {file.name: sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    build(NAME, folder)
    return folder


def test_bytes_are_the_pinned_ones(built: Path) -> None:
    assert hashes(built) == PINS[NAME]


@pytest.mark.parametrize("name", ("glm5-next-tiny", "kimi-linear-tiny"))
def test_bytes_of_the_latent_hybrids_are_the_pinned_ones_and_small(tmp_path: Path, name: str) -> None:
    build(name, tmp_path / name)
    assert hashes(tmp_path / name) == PINS[name]
    assert sum(file.stat().st_size for file in (tmp_path / name).iterdir()) < 4_000_000


@pytest.mark.parametrize("name", ("granite-hybrid-tiny", "qwen3.5-tiny"))
def test_bytes_of_the_other_hybrids_are_the_pinned_ones_and_small(tmp_path: Path, name: str) -> None:
    build(name, tmp_path / name)
    assert hashes(tmp_path / name) == PINS[name]
    assert sum(file.stat().st_size for file in (tmp_path / name).iterdir()) < 8_500_000


@pytest.mark.parametrize("name", (*SCRIPTED, "glm5-next-small", "qwen3-next-small"))
def test_bytes_of_the_dense_pair_and_of_recipes_are_the_pinned_ones(tmp_path: Path, name: str) -> None:
    build(name, tmp_path / name)
    assert hashes(tmp_path / name) == PINS[name]


def test_program_builds_the_same_bytes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "samestate.models.build", NAME, str(tmp_path / "a")], check=True)
    assert hashes(tmp_path / "a") == PINS[NAME]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_another_seed_gives_other_weights_and_the_same_rest(built: Path, tmp_path: Path) -> None:
    build(NAME, tmp_path / "other", seed=1)
    changed = {file for file, digest in hashes(tmp_path / "other").items() if digest != hashes(built)[file]}
    assert changed == {"model.safetensors"}


def test_safetensors_is_well_formed_and_small(built: Path) -> None:
    content = (built / "model.safetensors").read_bytes()
    (size,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + size])
    assert header.pop("__metadata__") == {"format": "pt"}
    spans = [tensor["data_offsets"] for tensor in header.values()]
    assert spans[0][0] == 0 and spans[-1][1] == len(content) - 8 - size
    assert all(left[1] == right[0] for left, right in pairwise(spans))
    assert len(content) < 8_000_000


def test_refuses_weights_whose_lead_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marker_weights, "OUTPUT", 0.5)
    with pytest.raises(ValueError, match=r"leads by \d+\.\d nats, less than 60"):
        build("qwen3-tiny", tmp_path / "small")
    assert list(tmp_path.iterdir()) == []


def test_config_is_canonical(built: Path) -> None:
    text = (built / "config.json").read_text()
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"


def test_refuses_a_folder_with_something_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    assert main([NAME, str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "not an empty folder" in message
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_refuses_an_unknown_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nosuch", str(tmp_path / "a")]) == 2
    assert NAME in capsys.readouterr().err


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(self: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    assert main([NAME, str(tmp_path / "a")]) == 2
    assert list(tmp_path.iterdir()) == []
