"""The site: built strictly without network, generated pages whole, and every command that a page shows can be typed."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import get_args
from xml.etree import ElementTree

import click
import pytest
import yaml
from click.testing import CliRunner, Result

from samestate.checks.analyzers import ANALYZERS
from samestate.cli.commands import samestate
from samestate.evidence.records import AnyRecord

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/results").glob("*.md"))]


@cache
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "scripts/docs_site.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- the build --------------------------------------------------------------------------------------


def build(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The site, with a network that leads nowhere."""
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder), *options],
        cwd=ROOT,
        env=os.environ | nowhere | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site") / "site"
    done = build(folder)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_the_site_is_built_and_needs_nobody_else(built: Path) -> None:
    for name in ("index", "concepts", "howto-watch", "reference/cli", "contributing"):
        text = (built / f"{name}.html").read_text()
        loaded = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?(https?://[^\" >]+)", text)
        assert [url for url in loaded if "canonical" not in url] == [], name


def test_every_page_is_in_the_nav(built: Path) -> None:
    pages = {path.relative_to(built).with_suffix(".md").as_posix() for path in built.rglob("*.html")}
    links = set(re.findall(r'href="([\w/.-]+)\.html"', (built / "index.html").read_text()))
    assert pages - {"404.md", "sample-report.md"} == {f"{name}.md" for name in links}
    named = set(re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert named <= pages, "the nav names nothing that is gone"


def test_a_link_that_leads_nowhere_stops_the_build(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("# Page\n\n[gone](gone.md)\n")
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert settings["strict"] is True
    kept = {name: settings[name] for name in ("site_name", "strict", "theme", "validation")}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(kept))
    done = build(tmp_path / "site", "--config-file", str(tmp_path / "mkdocs.yml"))
    assert done.returncode != 0
    assert "gone.md" in done.stderr


# --- drawings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("drawing", sorted((ROOT / "docs/drawings").glob("*.svg")), ids=lambda path: path.stem)
def test_a_drawing_reads_alike_on_light_and_dark_and_without_eyes(drawing: Path) -> None:
    tree = ElementTree.parse(drawing).getroot()
    names = [one.tag.rpartition("}")[2] for one in tree]
    assert {"title", "desc"} <= set(names)
    paper = next(one for one in tree if one.tag.endswith("rect"))
    width, height = map(float, tree.attrib["viewBox"].split()[2:])
    assert float(paper.attrib["width"]) >= width - 2
    assert float(paper.attrib["height"]) >= height - 2
    assert paper.attrib["fill"].startswith("#f"), "a paper of its own, light"
    assert f"drawings/{drawing.name})" in (ROOT / "docs/concepts.md").read_text()


# --- what is made from the code -----------------------------------------------------------------------


def test_all_commands_are_in_the_reference() -> None:
    text = site().commands()
    for path, command in site()._commands(samestate, ()):
        assert f"# samestate {' '.join(path)}\n" in text
        for option in (one for one in command.params if isinstance(one, click.Option) and not one.hidden):
            assert option.opts[-1] in text


def test_all_checks_are_in_the_reference_with_what_they_do() -> None:
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (.*?) \| `", site().checks(), re.M))
    assert set(rows) == {check for analyzer in ANALYZERS.values() for check in analyzer.checks}
    assert [check for check, said in rows.items() if len(said) < 10] == []


def test_all_records_are_in_the_reference_with_all_fields() -> None:
    text = site().records()
    for kind in get_args(AnyRecord):
        part = text.partition(f"\n## {kind.__struct_config__.tag}\n")[2].partition("\n## ")[0]
        assert part.strip()
        assert re.findall(r"^\| `(\w+)`", part, re.M) == list(kind.__struct_fields__)


def test_a_document_from_beside_docs_keeps_its_links_or_says_the_path() -> None:
    inside = site()._inside
    assert inside("[a](docs/plans.md#x)", "CONTRIBUTING.md") == "[a](plans.md#x)"
    assert inside("[a](../docs/plans.md)", "examples/README.md") == "[a](plans.md)"
    assert inside("[a](disk.sh)", "examples/README.md") == "a (`examples/disk.sh`)"
    assert inside("[a](https://example.org)", "CONTRIBUTING.md") == "[a](https://example.org)"


# --- commands that pages show -------------------------------------------------------------------------


def shown(text: str) -> list[str]:
    """Lines after ``$`` in console blocks, continued ones joined."""
    blocks = re.findall(r"^(?:```console\n(.*?)^```|((?:    \$ .*\n(?:     .*\n)*)+))", text, re.M | re.S)
    lines = re.sub(r"\\\n\s*", "", "\n".join(block or indented for block, indented in blocks)).splitlines()
    return [line.strip().removeprefix("$ ") for line in lines if line.strip().startswith("$ ")]


def ours(text: str) -> Iterator[list[str]]:
    """Words of every command of samestate, and of those that follow a ``--``."""
    for line in shown(text):
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        while words and words[0] == "samestate":
            yield words[1:]
            words = words[words.index("--") + 1 :] if "--" in words else []


def refusal(words: list[str]) -> str | None:
    """Why click does not take these words; None: it does. No command is run."""
    command: click.Command = samestate
    context, rest = click.Context(samestate, info_name="samestate"), list(words)
    try:
        while isinstance(command, click.Group):
            if not rest:
                return None if command.invoke_without_command else "no subcommand"
            _, found, rest = command.resolve_command(context, rest)
            assert found is not None
            command = found
            context = command.make_context(command.name, rest, parent=context)
            rest = [*getattr(context, "_protected_args", []), *context.args]
    except click.exceptions.Exit:
        return None
    except click.ClickException as error:
        # A file of the reader's need not be here.
        return None if "does not exist" in error.format_message() else error.format_message()
    return None


COMMANDS = [(page.name, words) for page in PAGES for words in ours(page.read_text())]


def test_pages_show_commands() -> None:
    assert len(COMMANDS) > 60
    assert {name for name, _ in COMMANDS} >= {
        "index.md",
        "README.md",
        "howto-debug.md",
        "howto-roll-out.md",
        "doctor.md",
    }


@pytest.mark.parametrize("page", sorted({name for name, _ in COMMANDS}))
def test_every_command_of_a_page_is_taken(page: str) -> None:
    refused = {shlex.join(words): why for name, words in COMMANDS if name == page and (why := refusal(words))}
    assert refused == {}


@pytest.mark.parametrize(
    "words",
    [["nothing"], ["run"], ["run", "boundary", "--nothing"], ["run", "boundary", "--engine", "gpu"], ["plan", "sow"]],
)
def test_a_command_that_is_wrong_is_refused(words: list[str]) -> None:
    assert refusal(words)


CHEAP = [
    "check",
    "report",
    "explain",
    "diff schedule",
    "diff env",
    "plan list",
    "plan show",
    "plan freeze",
    "models list",
    "case export faulty",
    "seal",
    "schema",
    "faults --only",
]
"""Beginnings of commands that take no engine and leave nothing outside of their folder."""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the archives that pages talk of, from the simulated engine."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "my-checkpoint").mkdir()
    (folder / "my-checkpoint/config.json").write_text("{}")
    run = ("run", "boundary", "--engine", "sim", "--model", str(folder / "my-checkpoint"))
    for name in ("my-run", "clean", "first", "gate", "rollout", "other-run"):
        assert typed(folder, *run, "--out", name).exit_code == 0
    assert typed(folder, *run, "--fault", "full-lookup", "--control", "clean", "--out", "faulty").exit_code == 1
    return folder


def typed(folder: Path, *words: str) -> Result:
    with chdir(folder):
        return CliRunner().invoke(samestate, list(words))


READERS = re.compile(r"ARCHIVE|close|records|.*\.(key|pub|yaml|lock)|.*/.*")
"""Words that name a file or an archive of the reader's own."""


def cheap(words: list[str]) -> bool:
    return any(shlex.join(words).startswith(beginning) for beginning in CHEAP) and not any(
        map(READERS.fullmatch, words)
    )


RUN = sorted({tuple(words) for _, words in COMMANDS if cheap(words)})


def test_many_commands_are_cheap() -> None:
    assert len(RUN) > 12


@pytest.mark.parametrize("words", RUN, ids=" ".join)
def test_cheap_commands_of_pages_run(workplace: Path, words: tuple[str, ...]) -> None:
    done = typed(workplace, *words)
    assert done.exit_code in (0, 1, 3), done.output
    assert "unexpected" not in done.output


@pytest.mark.parametrize("page", ["index.md"])
def test_the_first_steps_lead_to_a_verdict(page: str, tmp_path: Path) -> None:
    """A newcomer's path: three commands from the page, the first of which installs."""
    install, run, check = shown((ROOT / "docs" / page).read_text())[:3]
    assert install == "pip install ."
    for line in (run, check):
        done = typed(tmp_path, *shlex.split(line)[1:])
        assert done.exit_code == 0, done.output
    assert "pass" in done.output
