"""Makes docs/sample-report.html: ``.venv/bin/python tests/reports/sample.py``.

A simulated run with the fault full-lookup, made in seconds. The page has no links: its archive is not shipped.
"""

from __future__ import annotations

import sys
import tempfile
from importlib.resources import files
from pathlib import Path

import yaml
from click.testing import CliRunner

from samestate.checks.analyzers import judge
from samestate.checks.history import History
from samestate.cli.commands import samestate
from samestate.evidence.archive import Archive
from samestate.reports.html import html
from samestate.reports.model import report

PAGE = Path(__file__).parents[2] / "docs/sample-report.html"


def sample(folder: Path) -> str:
    """The page, from two runs made in `folder`."""
    checkpoint = folder / "tiny"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    plan = yaml.safe_load((files("samestate.plans") / "shipped/boundary-instrumented.yaml").read_text())
    plan["instruments"]["save_delay_ms"] = 1
    _run(["boundary", "--out", folder / "clean"], checkpoint, expected=0)
    plan["expected_layout"] = {"transfer_groups": 1, "entries": 1}
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))
    _run([folder / "plan.yaml", "--control", folder / "clean", "--out", folder / "once"], checkpoint, expected=3)
    plan["expected_layout"] = _layout(folder / "once")
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))
    fault = ["--fault", "full-lookup", "--control", folder / "clean"]
    _run([folder / "plan.yaml", *fault, "--out", folder / "faulty"], checkpoint, expected=1)
    archive = Archive.open(folder / "faulty")
    return html(report(judge(archive), History.read(archive)), archive.root, None)


def _layout(archive: Path) -> dict[str, int]:
    """That of the simulated engine: the plan's own is a real one's."""
    (registered,) = History.read(Archive.open(archive)).arm("candidate").ranks.values()
    return {"transfer_groups": len(registered.rec.transfer_groups), "entries": len(registered.rec.entries)}


def _run(arguments: list[str | Path], checkpoint: Path, expected: int) -> None:
    command = ["run", *map(str, arguments), "--engine", "sim", "--model", str(checkpoint)]
    done = CliRunner().invoke(samestate, command)
    assert done.exit_code == expected, done.output


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        PAGE.write_text(sample(Path(made)))
    sys.stdout.write(f"{PAGE}\n")
