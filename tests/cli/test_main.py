"""The program in a process of its own: signals, pipes, full disks, encodings."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import samestate as package
from samestate.cli.commands import COMMANDS, Shelf, samestate
from samestate.cli.failures import WRITTEN, explain

PATH = {"PYTHONPATH": str(Path(package.__file__).parent.parent)}
PROGRAM = [sys.executable, "-m", "samestate"]

STRUCK_IN_RUN = """
import os, signal, sys
from samestate.cli.main import main
from samestate.engines.sim import SimEngine
generate, done = SimEngine.generate, []
def struck(*arguments):
    done.append(1)
    if len(done) == 5:
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    return generate(*arguments)
SimEngine.generate = struck
main(sys.argv[2:])
"""
STRUCK_IN_IMPORT = """
import os, signal, sys
class Striking:
    def find_spec(self, name, *_):
        if name == "samestate.checks.history":
            os.kill(os.getpid(), getattr(signal, sys.argv[1]))
sys.meta_path.insert(0, Striking())
from samestate.cli.main import main
main(sys.argv[2:])
"""


HEAVY = ("fsspec", "httpx", "lmcache", "numpy", "pyarrow", "torch", "transformers", "valkey", "vllm", "xxhash")
STARTED = f"""
import sys
from importlib import import_module
from samestate.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print(*[name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["plan", "list"], ["cache", "--help"]])
def test_no_command_waits_at_its_start_for_what_it_may_not_need(arguments: list[str]) -> None:
    done = started([sys.executable, "-c", STARTED, *arguments])
    assert done.returncode == 0
    assert done.stderr.decode().strip() == ""


def program(*arguments: object, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """`python -m samestate` with `arguments`."""
    return started([*PROGRAM, *map(str, arguments)], **options)


def started(
    command: list[str], stdout: int = subprocess.PIPE, encoding: str = "utf-8"
) -> subprocess.CompletedProcess[bytes]:
    environment = os.environ | PATH | {"PYTHONIOENCODING": encoding}
    return subprocess.run(command, env=environment, stdout=stdout, stderr=subprocess.PIPE, check=False)


@pytest.mark.parametrize("signal", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_during_a_run_ends_it_in_order(checkpoint: Path, tmp_path: Path, signal: str) -> None:
    archive = tmp_path / "a"
    run = ["run", "boundary", "--engine", "sim", "--model", str(checkpoint), "--out", str(archive)]
    done = started([sys.executable, "-c", STRUCK_IN_RUN, signal, *run])
    assert done.returncode == 2
    assert done.stderr.decode().splitlines()[-1] == f"samestate: interrupted; the unfinished archive is {archive}"
    ended = json.loads((archive / "attempts.jsonl").read_bytes().splitlines()[-2])["rec"]
    assert ended == {"kind": "attempt_ended", "outcome": "interrupted", "reason": "stopped by the user"}
    assert program("check", archive).returncode == 3


@pytest.mark.parametrize("signal", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_while_it_loads_is_one_line(signal: str) -> None:
    done = started([sys.executable, "-c", STRUCK_IN_IMPORT, signal, "plan", "list", "--json"])
    assert (done.returncode, done.stderr) == (2, b"samestate: interrupted\n")
    assert json.loads(done.stdout) == {"error": "interrupted"}


def test_an_import_that_fails_is_one_line() -> None:
    script = "import sys; sys.modules['msgspec'] = None\nfrom samestate.cli.main import main\nmain(['plan', 'list'])"
    done = started([sys.executable, "-c", script])
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["plan", "list"], ["check", "--help"], ["check"]])
@pytest.mark.parametrize("sink", ["closed pipe", "full disk"])
def test_output_that_nobody_gets_is_no_verdict(clean: Path, arguments: list[str], sink: str) -> None:
    if sink == "closed pipe":
        reading, writing = os.pipe()
        os.close(reading)
    else:
        writing = os.open("/dev/full", os.O_WRONLY)
    done = program(*arguments, *([clean] if arguments == ["check"] else []), stdout=writing)
    os.close(writing)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(b"samestate: ")


def test_without_any_output_the_exit_code_is_the_verdict(clean: Path) -> None:
    done = started(["sh", "-c", '"$@" >&- 2>&-', "sh", *PROGRAM, "check", str(clean)])
    assert done.returncode == 0


def test_the_help_is_given_where_a_command_is_missing() -> None:
    for arguments, told in (([], b"check"), (["plan"], b"freeze"), (["models"], b"build")):
        done = program(*arguments)
        assert done.returncode == 2
        assert done.stderr.startswith(b"Usage: samestate ")
        assert told in done.stderr


# --- encodings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_verdict_can_be_read_in_any_encoding(faulty: Path, encoding: str) -> None:
    table = program("check", faulty, encoding=encoding)
    assert (table.returncode, table.stderr) == (1, b"")
    equal = next(line for line in table.stdout.decode(encoding).splitlines() if line.lstrip().startswith("3,583"))
    assert equal.replace("|", " ").split()[1] == ("–" if encoding == "utf-8" else "-")
    as_json = program("check", faulty, "--json", encoding=encoding)
    assert (as_json.returncode, json.loads(as_json.stdout)["verdict"]) == (1, "fail")
    assert as_json.stdout.isascii()


def test_a_path_that_is_no_text(clean: Path, tmp_path: Path) -> None:
    archive = shutil.copytree(clean, tmp_path / "s\udcff")
    done = program("check", archive, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout.decode())["archive"] == f"{tmp_path}/s\\xff"
    missing = program("check", f"{archive}x", "--json")
    assert missing.returncode == 2
    assert json.loads(missing.stdout.decode())["error"] in missing.stderr.decode()


def test_a_run_into_a_path_that_is_no_text(checkpoint: Path, tmp_path: Path) -> None:
    out = f"{tmp_path}/s\udcff"
    run = ("run", "boundary", "--engine", "sim", "--model", checkpoint, "--out")
    assert program(*run, out).returncode == 0
    done = program(*run, f"{out}2", "--json")
    assert json.loads(done.stdout.decode())["archive"] == f"{tmp_path}/s\\xff2"


@pytest.mark.parametrize("arguments", [["--version"], ["nosuch"]])
def test_a_command_waits_for_no_other(arguments: list[str]) -> None:
    """Nor one that is not there."""
    listed = STARTED.replace(repr(HEAVY), repr(("samestate.checks.analyzers", "samestate.cli.run", *HEAVY)))
    done = started([sys.executable, "-c", listed, *arguments])
    assert done.stderr.decode().splitlines()[-1].strip() == ""


@pytest.mark.parametrize("module", WRITTEN)
def test_errors_that_are_written_to_be_read_are_where_it_is_said(module: str) -> None:
    error = getattr(import_module(module), WRITTEN[module])
    assert issubclass(error, Exception) and error.__module__ == module
    assert explain(error("a line"), "").message == "a line"


def test_every_command_is_of_its_own_module() -> None:
    assert {name: command.name for name, command in samestate.commands.items()} == {name: name for name in COMMANDS}
    taken = Shelf(dict(COMMANDS))
    assert taken.pop("check") is samestate.commands["check"] and "check" not in taken
    taken["check"] = samestate.commands["check"]
    assert len(taken) == len(COMMANDS) and taken["check"] is samestate.commands["check"]
