from __future__ import annotations

import os
from pathlib import Path

import pytest

from samestate.models.cache_shape import cache_shape
from samestate.models.catalogue import names
from samestate.models.configs import model_config, shipped
from samestate.models.fields import ConfigError
from samestate.models.layer_states import Target


def test_every_shipped_config_says_where_it_is_public_and_has_a_shape() -> None:
    assert {"glm-5.3-flash", "granite-4.0-h-small", "kimi-linear-48b-a3b", "qwen3-next-80b-a3b"} <= set(shipped())
    for name, checkpoints in shipped().items():
        found = model_config(name)
        assert "https://" in found.source, name
        assert found.folder is None
        assert cache_shape(found.config, Target()).max_model_len
        for checkpoint in checkpoints:
            assert model_config(checkpoint.upper()) == found


def test_tiny_models_are_found_by_name_without_being_built() -> None:
    for name in names():
        assert model_config(name).config["model_type"]


def test_a_folder_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "glm-5.3-flash").mkdir()
    (tmp_path / "glm-5.3-flash" / "config.json").write_text('{"model_type": "mine"}')
    monkeypatch.chdir(tmp_path)
    found = model_config("glm-5.3-flash")
    assert (found.config, found.folder) == ({"model_type": "mine"}, Path("glm-5.3-flash"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no config.json; name a checkpoint's folder"),
        ("{", "is no JSON .*; copy it again"),
        ("[]", "is no JSON object; copy it again"),
        ('{"a":' * 200_000, "is nested too deep; copy it again"),
        (" " * (2**24 + 1), "has more than 16,777,216 bytes; copy it again"),
    ],
)
def test_a_folder_without_a_config_is_one_line(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=f"--model: .*{message}"):
        model_config(str(tmp_path))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match=r"--model: .*config\.json is no regular file; copy it again"):
        model_config(str(tmp_path))


def test_neither_folder_nor_name_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--model: no folder mystery, and no config of that name here .*glm-5\.3-flash"
    ):
        model_config("mystery")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file; name the folder"):
        model_config(str(tmp_path / "file"))
