"""What a process says of the ground it stands on: patched files by the package's own list, backends by the layers."""

from __future__ import annotations

import base64
import hashlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from samestate.instruments import environment
from samestate.instruments.environment import VARIABLES, backends, observed, patched


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package of three files, one of which is no Python."""
    files = {"tiny/one.py": b"one = 1\n", "tiny/two.py": b"two = 2\n", "tiny/data.bin": b"\0"}
    lines = []
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(content)}")
    info = tmp_path / "tiny-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
    (info / "RECORD").write_text("\n".join([*lines, "tiny-1.0.dist-info/RECORD,,"]) + "\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path / "tiny"


def test_as_released(package: Path) -> None:
    (package / "data.bin").write_bytes(b"\1")
    assert list(patched(("tiny", "not-installed"))) == []


def test_a_patched_and_a_missing_file_are_named(package: Path) -> None:
    (package / "one.py").write_bytes(b"one = 2\n")
    (package / "two.py").unlink()
    found = {one.path: one.sha256 for one in patched(("tiny",))}
    assert found == {"tiny/one.py": hashlib.sha256(b"one = 2\n").hexdigest(), "tiny/two.py": None}


@pytest.mark.parametrize("record", [None, "tiny/one.py,,\ntiny/two.py,sha512=abc,8\n"])
def test_a_package_without_hashes_is_named_as_a_whole(package: Path, record: str | None) -> None:
    (package / "one.py").write_bytes(b"one = 2\n")
    path = package.parent / "tiny-1.0.dist-info" / "RECORD"
    path.write_text(record) if record else path.unlink()
    assert [(one.path, one.sha256) for one in patched(("tiny",))] == [("RECORD", None)]


class Backend:
    pass


def test_backends_are_those_that_layers_name() -> None:
    layer, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    layer.attn_backend, other.quant_method = Backend, SimpleNamespace()
    assert backends(torch.nn.Sequential(layer, other, torch.nn.ReLU())) == {
        "Linear.attn_backend": "Backend",
        "Linear.quant_method": "SimpleNamespace",
    }


def test_variables_are_those_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "PACKAGES", ())
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("HF_TOKEN", "secret")
    said = observed(torch.nn.ReLU())
    assert said.variables["OMP_NUM_THREADS"] == "7"
    assert set(said.variables) <= set(VARIABLES) and "secret" not in str(said)
    assert (said.rank, said.patched) == (0, [])
