"""What a process says of the ground it stands on: patched files by the package's own list, backends by the layers."""

from __future__ import annotations

import base64
import hashlib
import sys
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from samestate.instruments import environment
from samestate.instruments.environment import VARIABLES, backends, observed, patched

LOADERS = (
    (ExtensionFileLoader, EXTENSION_SUFFIXES),
    (SourceFileLoader, SOURCE_SUFFIXES),
    (SourcelessFileLoader, BYTECODE_SUFFIXES),
)
"""As Python's own finder has them, in its order."""


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


SHADOWS = {
    "a package": "tiny/one/__init__.py",
    "a package without source": "tiny/one/__init__.pyc",
    "a compiled package": f"tiny/one/__init__{EXTENSION_SUFFIXES[0]}",
    "a compiled module": f"tiny/one{EXTENSION_SUFFIXES[-1]}",
    "a compiled beginning of a package": f"tiny/__init__{EXTENSION_SUFFIXES[0]}",
}


@pytest.mark.regression
@pytest.mark.parametrize("kind", SHADOWS)
def test_what_python_imports_in_place_of_a_listed_file_is_named(package: Path, kind: str) -> None:
    if kind.endswith("of a package"):
        relisted(package, "tiny/__init__.py", b"")
    assert list(patched(("tiny",))) == []
    path = package.parent / SHADOWS[kind]
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"one = 3\n")
    assert [(one.path, one.sha256) for one in patched(("tiny",))] == [
        (SHADOWS[kind], hashlib.sha256(b"one = 3\n").hexdigest())
    ]
    finder = FileFinder(str(package), *LOADERS)
    found = finder.find_spec("__init__" if kind.endswith("of a package") else "one")
    assert found is not None and found.origin == str(path), "Python says so too"


@pytest.mark.parametrize(
    "name", ["three.py", "three/__init__.py", "one/other.py", "data.so", "one.txt", "two.pyc", "sub/one.py", "data/x"]
)
def test_what_python_does_not_import_in_place_of_a_listed_file_is_no_patch(package: Path, name: str) -> None:
    (package / name).parent.mkdir(exist_ok=True)
    (package / name).write_bytes(b"three = 3\n")
    assert list(patched(("tiny",))) == []


def test_a_package_beside_a_module_that_are_both_released_is_no_patch(package: Path) -> None:
    relisted(package, "tiny/one/__init__.py", b"one = 3\n")
    assert list(patched(("tiny",))) == []
    (package / "one" / "__init__.py").write_bytes(b"one = 4\n")
    assert [one.path for one in patched(("tiny",))] == ["tiny/one/__init__.py"]


def relisted(package: Path, name: str, content: bytes) -> None:
    """Release one file more."""
    path = package.parent / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    record = package.parent / "tiny-1.0.dist-info" / "RECORD"
    record.write_text(f"{name},sha256={digest},{len(content)}\n" + record.read_text())


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
