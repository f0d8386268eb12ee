"""Which samestate ran."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns

import samestate

PRINT = "from samestate.lab.source import *; print(source_sha256(), source_commit())"


def said(root: Path) -> list[str]:
    """Hash and commit of the package that lies in `root`, by a process of its own."""
    command = [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {[str(root), *sys.path]!r}; {PRINT}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=root).stdout.split()


def git(root: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", "-C", root, *who, *words], capture_output=True, text=True, check=True).stdout.strip()


def copied(root: Path) -> Path:
    source = Path(samestate.__file__).parent
    copytree(source, root / "samestate", ignore=ignore_patterns("__pycache__"))
    return root


def test_a_copy_without_a_repository_has_a_hash_and_no_commit(tmp_path: Path) -> None:
    sha256, commit = said(copied(tmp_path))
    assert (len(sha256), commit) == (64, "None")


def test_a_checkout_names_its_commit_and_says_when_it_was_edited(tmp_path: Path) -> None:
    root = copied(tmp_path)
    (root / ".gitignore").write_text("__pycache__/\n")  # As in this project.
    git(root, "init", "-q")
    git(root, "add", ".gitignore", "samestate")
    git(root, "commit", "-qm", "one")
    head = git(root, "rev-parse", "HEAD")
    sha256, commit = said(root)
    assert commit == head
    with (root / "samestate" / "__init__.py").open("a") as file:
        file.write("# edited\n")
    edited, commit = said(root)
    assert (commit, edited != sha256) == (f"{head}+changes", True)


def test_a_copy_in_another_projects_repository_is_not_its_commit(tmp_path: Path) -> None:
    root = copied(tmp_path)
    git(root, "init", "-q")
    git(root, "commit", "-q", "--allow-empty", "-m", "another project")
    assert said(root)[1] == "None"


def test_compiled_files_change_no_hash(tmp_path: Path) -> None:
    root = copied(tmp_path)
    before = said(root)
    (root / "samestate" / "__pycache__" / "more.pyc").parent.mkdir(exist_ok=True)
    (root / "samestate" / "__pycache__" / "more.pyc").write_bytes(b"x")
    assert said(root) == before
