"""Runs that are killed with SIGKILL at fifty moments: no archive of theirs passes, and new attempts start cleanly."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from itertools import count
from pathlib import Path
from random import Random

import pytest
import yaml
from click.testing import CliRunner, Result

from samestate.cli.commands import samestate
from samestate.evidence import verify
from samestate.evidence.archive import Archive, verifier
from samestate.evidence.records import AttemptStarted
from samestate.evidence.seal import SEAL_NAME

from .dying import SEALED
from .killing import Run, dying, gone, size_of, start

pytestmark = [pytest.mark.slow, pytest.mark.regression]

IN_START, BY_GROWTH, IN_SETUP, IN_SEALING = 5, 20, 10, 10
"""Moments: before a folder is there, while the archive grows, at lines of the set-up, at lines of the sealing."""
ON_VLLM = 5
AT_ONCE = 2
ALLOWED = 3
SEED = 0


def command(*arguments: object) -> Result:
    return CliRunner().invoke(samestate, list(map(str, arguments)))


def changed(engine: dict[str, object], **changes: object) -> str:
    """The plan `boundary` as YAML, with four tokens a generation and other changes."""
    plan = json.loads(command("plan", "show", "boundary", "--json").stdout)["plan"]
    plan["analyzer"]["source_sha256"] = None
    plan["engine"]["settings"] |= engine.pop("settings")
    plan["engine"] |= engine
    return yaml.safe_dump(plan | {"output_tokens": 4, **changes})


@pytest.fixture
def sim(model: Path) -> list[object]:
    return ["--engine", "sim", "--model", model]


def test_there_are_fifty() -> None:
    assert IN_START + BY_GROWTH + IN_SETUP + IN_SEALING + ON_VLLM >= 50


# --- what is asked of every killed run ------------------------------------------------------------


def holds(run: Run, again: Callable[[Path], Result]) -> None:
    """Nothing passes, nothing is left running, the folder is refused, and a new attempt passes."""
    assert gone(run)
    assert not (run.out / SEAL_NAME).exists()
    says_no_pass(run.out)
    taken = run.out.is_dir() and any(run.out.iterdir())
    left = size_of(run.out)
    same = again(run.out)
    if taken:
        assert same.exit_code == 2 and size_of(run.out) == left
        assert same.stderr.endswith("is not empty; name another folder, archives are never overwritten\n")
    else:
        assert same.exit_code == 0, same.output
    passed = again(run.out.with_name(f"{run.out.name}-again"))
    assert passed.exit_code == 0, passed.output


def says_no_pass(out: Path) -> None:
    """Both verifiers: unknown, or one line where nothing is there that could be judged."""
    begun = any((out / name).exists() for name in ("plan.json", "attempts.jsonl", "arms"))
    checked = command("check", out)
    assert checked.exit_code == (3 if begun else 2), checked.output
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        assert verify.main([str(out)]) == checked.exit_code
    if begun:
        assert "verdict unknown" in checked.stdout
    else:
        assert re.fullmatch(r"samestate: .* (does not exist; name|is not an archive: it has no) .*\n", checked.stderr)
    # Somebody may run the copy: half of a program that ends without a word would be a pass.
    copy = out / "verify.py"
    assert not copy.exists() or copy.read_bytes() == verifier()


# --- from outside ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.deep
def test_killed_while_it_starts_and_while_its_archive_grows(sim: list[object], tmp_path: Path) -> None:
    whole = start(tmp_path / "whole", "boundary", *sim)
    began = time.monotonic()
    while not whole.out.is_dir():
        assert whole.process.poll() is None
        time.sleep(0.001)
    start_seconds = time.monotonic() - began
    assert whole.process.wait() == 0
    size = size_of(whole.out) - size_of(whole.out / "verdicts")
    chance, names = Random(SEED), count()

    def killed(moment: Callable[[Run], bool]) -> Run:
        """A run may be over, or sealed, before its moment came: then another is tried."""
        while True:
            run = start(tmp_path / f"run-{next(names)}", "boundary", *sim)
            if moment(run) and not (run.out / SEAL_NAME).exists():
                return run

    moments: list[Callable[[Run], bool]] = [
        partial(after, seconds=start_seconds * (part + chance.random()) / IN_START) for part in range(IN_START)
    ]
    moments += [
        partial(Run.kill_at_size, size=0.97 * size * (part + chance.random()) / BY_GROWTH) for part in range(BY_GROWTH)
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        runs = list(pool.map(killed, moments))
    sizes = [size_of(run.out) for run in runs]
    # The moments are spread, or less would be looked at than it says above.
    assert min(sizes) < 0 and len({10 * max(0, reached) // size for reached in sizes}) >= 5, sizes
    for run in runs:
        holds(run, lambda out: command("run", "boundary", *sim, "--out", out))


def after(run: Run, seconds: float) -> bool:
    time.sleep(seconds)
    run.kill()
    return True


# --- between two lines ----------------------------------------------------------------------------


@pytest.fixture
def lock(tmp_path: Path) -> Callable[[str], Path]:
    """Makes locks of a small plan, each in a folder of its own: a ledger belongs to one."""
    settings = {"block_size": 16, "max_model_len": 2048, "num_gpu_blocks_override": 600}
    lengths = ["60C-1", "60C", "60C+1"]
    small = changed({"model": "external", "settings": settings}, lengths=lengths, allowed_attempts=ALLOWED)
    (tmp_path / "small.yaml").write_text(small)

    def make(name: str) -> Path:
        path = tmp_path / name / "small.lock"
        path.parent.mkdir()
        assert command("plan", "freeze", tmp_path / "small.yaml", "--out", path).exit_code == 0
        return path

    return make


@pytest.mark.parametrize(
    ("first", "last", "moments"),
    [
        ("Ledger.spend", "_Attempt._operate", IN_SETUP),
        ("ArchiveWriter.seal", SEALED, 3),
        pytest.param("ArchiveWriter.seal", SEALED, IN_SEALING, marks=pytest.mark.deep),
    ],
)
def test_killed_between_two_lines(
    lock: Callable[[str], Path],
    sim: list[object],
    tmp_path: Path,
    first: str,
    last: str,
    moments: int,
) -> None:
    """Of the set-up, the ledger's included, and of the sealing."""
    lines = lines_of(lock("whole"), sim)
    began, over = lines.index(first), lines.index(last)
    chance = Random(f"{SEED} {first}")
    at = [chance.randrange(began + part, over, moments) for part in range(moments)]
    for number, line in enumerate(at):
        mine = lock(f"{number}")
        run = start(mine.parent / "out", mine, *sim, command=dying(line, tmp_path / "unused"))
        assert run.process.wait() == -signal.SIGKILL
        spends_honestly(mine, run, sim)


def test_killed_when_it_is_sealed(lock: Callable[[str], Path], sim: list[object], tmp_path: Path) -> None:
    """Then all of it is there, and passes; the attempt counts, though nobody could say how it ended."""
    at = lines_of(lock("whole"), sim).index(SEALED)
    mine = lock("killed")
    run = start(mine.parent / "out", mine, *sim, command=dying(at, tmp_path / "unused"))
    assert run.process.wait() == -signal.SIGKILL and gone(run)
    assert command("check", run.out).exit_code == verify.main([str(run.out)]) == 0
    assert attempts(mine) == [1] and not list(mine.parent.rglob("*.outcome.json"))


def lines_of(lock: Path, sim: list[object]) -> list[str]:
    """The lines that a run goes through, by `dying.py`."""
    named = lock.parent / "lines"
    whole = start(lock.parent / "out", lock, *sim, command=dying(None, named))
    assert whole.process.wait() == 0, (lock.parent / "out.said").read_text()
    return named.read_text().splitlines()


def spends_honestly(lock: Path, run: Run, sim: list[object]) -> None:
    """The attempt that was killed counts from its first contact on, and no other is lost or counted twice."""
    spent = attempts(lock)
    assert spent == [1] or (spent == [] and not run.out.exists())
    passed: list[Result] = []

    def again(out: Path) -> Result:
        result = command("run", lock, *sim, "--out", out)
        if result.exit_code == 0:
            passed.append(result)
            number = len(spent) + len(passed)
            assert attempts(lock) == list(range(1, number + 1))
            assert [rec.attempt for rec in began(out)] == [number]
        return result

    holds(run, again)
    while len(spent) + len(passed) < ALLOWED:
        assert again(run.out.with_name(f"more-{len(passed)}")).exit_code == 0
    refused = command("run", lock, *sim, "--out", run.out.with_name("beyond"))
    assert refused.exit_code == 2 and f"the plan allows {ALLOWED} attempt(s)" in refused.stderr


def attempts(lock: Path) -> list[int]:
    """Numbers in the ledger."""
    entries = lock.with_name(f"{lock.name}.attempts").glob("[0-9][0-9][0-9][0-9].json")
    return sorted(json.loads(path.read_text())["attempt"] for path in entries)


def began(out: Path) -> list[AttemptStarted]:
    return [line.rec for line in Archive.open(out).attempts() if isinstance(line.rec, AttemptStarted)]


# --- on a real engine -----------------------------------------------------------------------------


def exists(name: str) -> Callable[[Path], bool]:
    return lambda out: (out / name).exists()


def holds_word(name: str, word: bytes) -> Callable[[Path], bool]:
    return lambda out: (out / name).exists() and word in (out / name).read_bytes()


MOMENTS: dict[str, Callable[[Path], bool]] = {
    "the first engine is being imported": exists("arms/control/engine.log"),
    "its model is being loaded": exists("arms/control/scheduler.jsonl"),
    "the first requests run": exists("resolved.json"),
    "the second engine starts": exists("arms/candidate/client.jsonl"),
    "the second engine reuses state": holds_word("arms/candidate/client.jsonl", b"cache_reset"),
}


@pytest.mark.soak
@pytest.mark.vllm
def test_killed_on_a_real_engine(tmp_path: Path) -> None:
    """At five moments, and then a new attempt beside what they left."""
    (tmp_path / "short.yaml").write_text(
        changed({"settings": {"block_size": 256, "max_model_len": 2048}}, lengths=["2C", "2C+1"])
    )
    chance = Random(SEED)
    for name, come in MOMENTS.items():
        run = start(tmp_path / name.replace(" ", "-"), tmp_path / "short.yaml")
        while not come(run.out):
            assert run.process.poll() is None, (name, run.out.with_name(f"{run.out.name}.said").read_text())
            time.sleep(0.002)
        time.sleep(chance.random() / 4)
        run.kill()
        assert len(run.seen) >= 2, name
        assert gone(run), name
        says_no_pass(run.out)
        assert command("run", tmp_path / "short.yaml", "--out", run.out).exit_code == 2
    passed = command("run", tmp_path / "short.yaml", "--out", tmp_path / "again")
    assert passed.exit_code == 0, passed.output
    assert len(MOMENTS) == ON_VLLM
