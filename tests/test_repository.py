"""The repository around the code: what its documents say is there, and the arrows between rooms hold."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import click
import pytest

from samestate.checks.analyzers import ANALYZERS
from samestate.cli.commands import samestate

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "samestate"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")], key=str)
MIB = 1 << 20


# --- the tree -----------------------------------------------------------------------------------


def test_the_tracked_tree_is_small() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    files = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    assert files
    assert sum(file.stat().st_size for file in files if file.is_file()) < 8 * MIB


# --- what the documents say ---------------------------------------------------------------------


def fenced(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.M | re.S)


def commands(document: Path) -> list[str]:
    blocks = "\n".join(fenced(document, "console"))
    return [line.removeprefix("$ ") for line in blocks.splitlines() if line.startswith("$ ")]


@cache
def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))


@cache
def extras() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def fault_of(command: str) -> str | None:
    """Why `command` of a document cannot be typed here, or None. Nothing is run, only looked up."""
    words = shlex.split(command, comments=True)
    while words and re.fullmatch(r"SAMESTATE_[A-Z_]+=.*", words[0]):
        words.pop(0)
    match words:
        case ["make", target, *_]:
            return None if target in make_targets() else f"Makefile has no target {target}"
        case ["samestate", *rest]:
            return samestate_fault(rest)
        case ["python", script] if script.endswith("/verify.py"):
            return None if (PACKAGE / "evidence/verify.py").is_file() else "no verify.py to put into archives"
        case ["python", script, *_] if (ROOT / script).is_file():
            return None
        case [".ci/run"]:
            return None if (ROOT / ".ci/run").stat().st_mode & 0o100 else ".ci/run is not executable"
        case ["pip", "install", target]:
            return None if target in {".", *(f".[{extra}]" for extra in extras())} else f"no extra in {target}"
        case ["vllm", "serve", *_] | ["python", "-m", "vllm.entrypoints.openai.api_server", *_]:
            return None
    return "a command that this test does not know"


def samestate_fault(words: list[str]) -> str | None:
    command: click.Command = samestate
    rest, users = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (list(words), [])
    if users[:1] == ["samestate"]:  # what follows is a command of its own
        return samestate_fault(rest) or samestate_fault(users[1:])
    while isinstance(command, click.Group):
        if command.invoke_without_command and rest and rest[0].startswith("--"):
            break
        name = rest.pop(0) if rest else ""
        if name not in command.commands:
            return f"no subcommand {name!r}"
        command = command.commands[name]
    options = {option for parameter in command.params for option in parameter.opts}
    unknown = [word for word in rest if re.fullmatch("--[a-z-]+", word) and word not in options]
    return f"no option {unknown[0]}" if unknown else None


def test_there_are_documents_with_commands() -> None:
    assert {document.name for document in DOCUMENTS} >= {
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "connectors.md",
    }
    assert len(commands(ROOT / "README.md")) >= 10


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_in_a_document_exists(document: Path) -> None:
    assert {command: fault for command in commands(document) if (fault := fault_of(command))} == {}


@pytest.mark.parametrize(
    "command",
    [
        "make nothing",
        "samestate nothing",
        "samestate plan nothing",
        "samestate run boundary --nothing",
        "samestate profile pin h200.json -- samestate run boundary --nothing",
        "python scripts/nothing.py",
        "rm -r x",
        "pip install .[nothing]",
    ],
)
def test_a_command_that_does_not_exist_is_found(command: str) -> None:
    assert fault_of(command)


def test_the_readme_names_the_two_commands() -> None:
    assert [command.split()[:2] for command in commands(ROOT / "README.md")[:2]] == [["make", "demo"], ["make", "test"]]


def anchors(document: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", document.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(document: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = (document.parent / name).resolve() if name else document
        if not file.exists() or not file.is_relative_to(ROOT) or (anchor and anchor not in anchors(file)):
            yield target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    assert list(broken_links(document)) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("# A title\n[gone](gone.md) [no such part](#nothing) [outside](https://example.org)\n")
    assert list(broken_links(document)) == ["gone.md", "#nothing"]


def classes_named(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """``(module, class)`` of ours in a kv transfer config, those of inner connectors included."""
    extra = config["kv_connector_extra_config"]
    if module := config.get("kv_connector_module_path"):
        yield module, config["kv_connector"]
    if module := extra.get("spec_module_path"):
        yield module, extra["spec_name"]
    for inner in extra.get("connectors", []):
        yield from classes_named(inner)


def test_connectors_named_in_the_documents_exist() -> None:
    named = {pair for text in fenced(ROOT / "docs/connectors.md", "json") for pair in classes_named(json.loads(text))}
    assert named == {
        ("samestate.cache.connector", "SamestateConnector"),
        ("samestate.cache.dictionary", "DictionaryConnector"),
        ("samestate.cache.spec", "HostOffloadingSpec"),
        ("samestate.instruments.connector", "AuditConnector"),
    }
    for module, name in named:
        source = ROOT / "src" / (module.replace(".", "/") + ".py")
        assert name in {node.name for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)}


# --- requirements -------------------------------------------------------------------------------

STATES = {"works", "partly", "not yet"}


class Row(NamedTuple):
    number: int
    item: str
    state: str
    shown_by: str


def rows(text: str) -> list[Row]:
    cells = re.findall(r"^\| (\d+) \| (.*?) \| ([^|]*) \| ([^|]*) \|$", text, re.M)
    return [Row(int(number), item, state, shown_by) for number, item, state, shown_by in cells]


def proves(shown: str) -> bool:
    """Is `shown` a check id, an existing test, or a command that exists?"""
    if shown.startswith("tests/"):
        name, _, test = shown.partition("::")
        file = ROOT / name
        return file.is_file() and (not test or re.search(rf"def {re.escape(test)}\b", file.read_text()) is not None)
    if shown.startswith(("make ", "samestate ")):
        return fault_of(shown) is None
    return any(shown in analyzer.checks for analyzer in ANALYZERS.values())


def test_every_requirement_has_one_row_and_a_state() -> None:
    table = rows((ROOT / "docs/requirements.md").read_text())
    assert [row.number for row in table] == list(range(1, 169))
    assert {row.state for row in table} <= STATES


def test_what_works_is_shown() -> None:
    table = rows((ROOT / "docs/requirements.md").read_text())
    unshown = [
        row for row in table if row.state == "works" and not any(map(proves, re.findall(r"`([^`]+)`", row.shown_by)))
    ]
    assert unshown == []


@pytest.mark.parametrize(
    "shown", ["boundary", "make demo", "samestate check --json", "tests/test_repository.py::test_what_works_is_shown"]
)
def test_a_proof_that_exists(shown: str) -> None:
    assert proves(shown)


@pytest.mark.parametrize(
    "shown", ["nothing", "make nothing", "samestate nothing", "tests/nothing.py", "tests/test_repository.py::nothing"]
)
def test_a_proof_that_does_not_exist(shown: str) -> None:
    assert not proves(shown)


# --- the arrows ---------------------------------------------------------------------------------


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A copy of the source and its contract, to be damaged."""
    copy = tmp_path / "house"
    copy.mkdir()
    shutil.copy(ROOT / "pyproject.toml", copy)
    shutil.copytree(PACKAGE, copy / "src/samestate", ignore=shutil.ignore_patterns("__pycache__", "data"))
    return copy


def lint(house: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=house,
        env={"PYTHONPATH": str(house / "src"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


def broken_contracts(output: str) -> list[str]:
    """Names of broken contracts; the names in `output` may be wrapped."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    text = " ".join(output.split())
    return [contract["id"] for contract in contracts if f"{contract['name']} BROKEN" in text]


def test_the_import_contract_holds(house: Path) -> None:
    done = lint(house)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("importer", "statement", "contract"),
    [
        ("checks/base.py", "import torch", "heavy"),
        ("cli/main.py", "import vllm", "light"),
        ("checks/base.py", "import samestate.engines.base", "judge"),
        ("checks/base.py", "import samestate.faults", "judge"),
        ("checks/base.py", "import samestate.instruments", "inside"),
        ("checks/base.py", "import samestate.lab", "floors"),
        ("evidence/records.py", "import samestate.plans", "floors"),
        ("cache/__init__.py", "import samestate.evidence", "cache"),
        ("cache/__init__.py", "import samestate.instruments", "floors"),
        ("cache/stores/disk.py", "import torch", "stores"),
        ("cache/stores/urls.py", "import samestate.cache.dictionary", "stores"),
        ("cli/main.py", "import samestate.cache.stores.urls", "inside"),
        ("cli/cache.py", "import samestate.cache.dictionary", "inside"),
        ("instruments/__init__.py", "import samestate.plans", "instruments"),
        ("lab/__init__.py", "import samestate.faults", "drivers"),
        ("reports/__init__.py", "import samestate.engines.base", "reports"),
        ("cli/main.py", "import samestate.models.build", "children"),
        ("attic/__init__.py", "import samestate.evidence", "floors"),
    ],
)
def test_an_arrow_the_wrong_way_is_found(house: Path, importer: str, statement: str, contract: str) -> None:
    module = house / "src/samestate" / importer
    module.parent.mkdir(exist_ok=True)
    with module.open("a") as source:
        source.write(f"\n{statement}\n")
    done = lint(house)
    assert done.returncode == 1, done.stdout + done.stderr
    assert contract in broken_contracts(done.stdout)


# --- the set-up ---------------------------------------------------------------------------------

PYTHON_STANDIN = """#!/bin/sh
echo "$*" >>"$CALLS"
case "$*" in
*"-m pip install"*) exit "${INSTALL:-0}" ;;
*torch.version*) exit "${TORCH:-0}" ;;
esac
"""


class Bench(NamedTuple):
    """A checkout whose `.venv` is a stand-in, so that nothing is installed."""

    root: Path
    calls: Path

    def bootstrap(self, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.root / "scripts/bootstrap"],
            env={"PATH": "/usr/bin:/bin", "CALLS": str(self.calls), **environment},
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/bootstrap", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    python = tmp_path / ".venv/bin/python"
    python.write_text(PYTHON_STANDIN)
    python.chmod(0o755)
    return Bench(tmp_path, tmp_path / "calls")


def test_a_second_set_up_does_nothing(bench: Bench) -> None:
    assert bench.bootstrap().returncode == 0
    assert "uninstall" in bench.calls.read_text()
    bench.calls.unlink()
    again = bench.bootstrap()
    assert (again.returncode, again.stdout, bench.calls.exists()) == (0, "", False)


def test_a_changed_pyproject_installs_again(bench: Bench) -> None:
    bench.bootstrap()
    bench.calls.unlink()
    with (bench.root / "pyproject.toml").open("a") as pyproject:
        pyproject.write("# changed\n")
    assert bench.bootstrap().returncode == 0
    assert "pip install" in bench.calls.read_text()


@pytest.mark.parametrize("failing", ["INSTALL", "TORCH"])
def test_a_failed_set_up_names_the_remedy_and_is_not_taken_for_done(bench: Bench, failing: str) -> None:
    for _ in range(2):
        done = bench.bootstrap(**{failing: "1"})
        assert done.returncode == 2
        assert "TORCH_INDEX=https://download.pytorch.org/whl/cpu" in done.stderr


def test_torch_index_reaches_pip(bench: Bench) -> None:
    bench.bootstrap(TORCH_INDEX="https://example.org/cpu")
    assert "--extra-index-url https://example.org/cpu" in bench.calls.read_text()


def test_an_unusable_python_is_named(bench: Bench) -> None:
    shutil.rmtree(bench.root / ".venv")
    done = bench.bootstrap(PYTHON="/bin/false")
    assert done.returncode == 2
    assert "PYTHON=/bin/false is not a Python 3.11" in done.stderr


# --- the demonstration's own judgement ----------------------------------------------------------


@cache
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "scripts/demo.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def judgement(verdict: str, differing: dict[int, tuple[int, int, int]]) -> dict[str, Any]:
    """A judgement as JSON, as far as the demonstration reads it; `differing` gives N its B, p and scheduled tokens."""
    table = []
    for n in (3583, 3584, 3585, 3587, 3588, 3589, 5375, 5376, 5377):
        b = 1792 * ((n - 1) // 1792)
        seen = differing.get(n, (b, b, n - b))
        fields = dict(zip(("boundary", "credited", "scheduled"), seen, strict=True))
        table.append({"tokens": n, "equal": n not in differing, **fields})
    return {"verdict": verdict, "table": table}


BOTH = {3584: (3584, 3583, 1), 5376: (5376, 5375, 1)}


def test_the_demonstration_accepts_what_must_come_out() -> None:
    assert demo().clean_faults(0, judgement("pass", {})) == []
    assert demo().faulty_faults(1, judgement("fail", BOTH)) == []


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        (1, judgement("pass", {})),
        (0, judgement("unknown", {})),
        (0, judgement("pass", BOTH)),
        (0, {"verdict": "pass", "table": []}),
    ],
)
def test_the_demonstration_refuses_another_first_run(code: int, seen: dict[str, Any]) -> None:
    assert demo().clean_faults(code, seen)


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        (0, judgement("fail", BOTH)),
        (1, judgement("unknown", BOTH)),
        (1, judgement("fail", {3584: BOTH[3584]})),
        (1, judgement("fail", {**BOTH, 3585: (1792, 1792, 1793)})),
        (1, judgement("fail", {**BOTH, 5376: (3584, 3584, 1792)})),
        (1, {"verdict": "fail", "table": []}),
    ],
)
def test_the_demonstration_refuses_another_second_run(code: int, seen: dict[str, Any]) -> None:
    assert demo().faulty_faults(code, seen)
