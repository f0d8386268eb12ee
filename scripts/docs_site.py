"""What mkdocs cannot know of the site: pages that are made from the code, and files beside docs/ that pages link to.

A hook of mkdocs.yml. `python scripts/docs_site.py` prints the generated pages.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_args

import click

import samestate.checks as rooms
from samestate.checks.analyzers import ANALYZERS
from samestate.cli.commands import samestate
from samestate.evidence.records import AnyRecord

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
BESIDE = {"CONTRIBUTING.md": "contributing.md", "examples/README.md": "examples.md"}
"""Documents that lie beside docs/, and their names in the site."""
WIDTH = 100
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")


def commands() -> str:
    """Every command with its options, as ``--help`` says it."""
    lines = [
        "# Commands",
        "",
        "As `--help` says it. Exit codes: 0 pass, 1 fail, 2 usage or environment, 3 unknown.",
        "",
    ]
    for path, command in _commands(samestate, ()):
        level = "##" if len(path) == 1 else "###"
        context = click.Context(
            command, info_name=" ".join(("samestate", *path)), max_content_width=WIDTH, terminal_width=WIDTH
        )
        lines += [f"{level} samestate {' '.join(path)}", "", "```text", command.get_help(context), "```", ""]
    return "\n".join(lines)


def _commands(group: click.Group, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in sorted(group.commands.items()):
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from _commands(command, (*path, name))


def checks() -> str:
    """Every check by id: what it does, where it is, which analyzers run it."""
    where: dict[str, list[str]] = {}
    functions: dict[str, Any] = {}
    for analyzer in ANALYZERS.values():
        for check, function in analyzer.checks.items():
            where.setdefault(check, []).append(analyzer.id)
            functions.setdefault(check, function)
    lines = [
        *(
            "# Checks",
            "",
            f"{len(where)} checks in {len(ANALYZERS)} analyzers. A check is a pure function from the records",
        ),
        *("of a run to a verdict, its findings and a count of what it looked at; 0 looked at is never a pass.", ""),
        *("| check | what it does | analyzers |", "|---|---|---|"),
    ]
    for check in sorted(where):
        said = _cell(_first_line(functions[check]) or _of_module(check))
        lines.append(f"| `{check}` | {said} | {', '.join(f'`{one}`' for one in where[check])} |")
    return "\n".join([*lines, ""])


def _first_line(function: Any) -> str:
    if function.__name__ == "<lambda>" or function.__module__ == "samestate.checks.analyzers":
        return ""
    return _paragraph(inspect.getdoc(function) or "")


@cache
def _modules() -> list[ModuleType]:
    names = (module.name for module in pkgutil.iter_modules(rooms.__path__, "samestate.checks."))
    return [importlib.import_module(name) for name in names]


def _of_module(check: str) -> str:
    """What the module says that is named after the check, or whose first line names it first."""
    for module in _modules():
        doc = _paragraph(module.__doc__ or "")
        if doc.startswith(f"``{check}``"):
            return doc.partition(":")[2].strip() or doc
    own = check.replace("-", "_")
    named = [one for module in _modules() for one in (getattr(module, own, None),) if callable(one)]
    return _paragraph(inspect.getdoc(named[0]) or "") if named else ""


def records() -> str:
    """Every type of record with its fields, from the sources."""
    types = get_args(AnyRecord)
    lines = [
        *("# Records", "", f"{len(types)} types of record, as `samestate schema records` has them in JSON Schema;"),
        "[archive-format.md](../archive-format.md) says which process writes which, and when.",
        "",
    ]
    for kind in sorted(types, key=lambda one: one.__struct_config__.tag):
        lines += [f"## {kind.__struct_config__.tag}", "", _prose(_paragraph(inspect.getdoc(kind) or "")), ""]
        rows = list(_fields(kind))
        if rows:
            lines += ["| field | type | meaning |", "|---|---|---|"]
            lines += [f"| `{name}` | `{_cell(of)}` | {_cell(said)} |" for name, of, said in rows]
            lines.append("")
    return "\n".join(lines)


def _fields(kind: type) -> Iterator[tuple[str, str, str]]:
    """Name, type and the docstring below, where there is one."""
    tree = ast.parse(inspect.getsource(sys.modules[kind.__module__]))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__)
    for node, following in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        said = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            said = " ".join(str(following.value.value).split())
        yield node.target.id, ast.unparse(node.annotation), said


def _paragraph(doc: str) -> str:
    return " ".join(doc.partition("\n\n")[0].split())


def _prose(text: str) -> str:
    return text.replace("``", "`")


def _cell(text: str) -> str:
    return _prose(text).replace("|", "\\|")


PAGES = {"reference/cli.md": commands, "reference/checks.md": checks, "reference/records.md": records}
"""Made from the code at every build."""


# --- the hook -------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Pages that the nav does not name yet stand at the end of the guides or the results; titles become anchors as
    GitHub makes them."""
    from pymdownx.slugs import slugify

    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    named = set(re.findall(r"[\w/.-]+\.md", str(config.nav)))
    for section, folder in (("Guides", ""), ("Results", "results/")):
        pages = next(entry[section] for entry in config.nav if section in entry)
        found = sorted(f"{folder}{path.name}" for path in (ROOT / "docs" / folder).glob("*.md"))
        pages += [name for name in found if name not in named]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages and the documents beside docs/."""
    from mkdocs.structure.files import File

    for name, make in PAGES.items():
        files.append(File.generated(config, name, content=make()))
    for source, name in BESIDE.items():
        files.append(File.generated(config, name, content=_inside((ROOT / source).read_text(), source)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links that leave docs/ lead to the site's own page of that document; a folder has none, so it is named."""
    for source, name in BESIDE.items():
        markdown = markdown.replace(f"](../{source})", f"]({name})")
    here = (ROOT / "docs" / page.file.src_uri).parent
    return _LINK.sub(lambda found: f"{found[1]} (`{found[2]}`)" if (here / found[2]).is_dir() else found[0], markdown)


def _inside(text: str, source: str) -> str:
    """A document from beside docs/ as a page: links into docs/ kept, those to other files made plain text."""
    folder = Path(source).parent

    def link(found: re.Match[str]) -> str:
        words, target = found[1], found[2]
        name, hash_, anchor = target.partition("#")
        if "://" in target or not name:
            return found[0]
        place = (ROOT / folder / name).resolve().relative_to(ROOT)
        if place.is_relative_to("docs"):
            return f"[{words}]({place.relative_to('docs')}{hash_}{anchor})"
        inside = BESIDE.get(str(place))
        return f"[{words}]({inside})" if inside else f"{words} (`{place}`)"

    return _LINK.sub(link, text)


if __name__ == "__main__":
    sys.stdout.write("\n".join(make() for make in PAGES.values()))
