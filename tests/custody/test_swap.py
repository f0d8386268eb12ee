"""A swap behind a real HAProxy: the whole of it, and what makes its restoration fail."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from custody.dying import swap_and_die
from custody.house import House, Traffic, serving
from samestate.checks.base import Verdict
from samestate.checks.custody_analyzer import judge_custody
from samestate.cli.commands import samestate
from samestate.custody.base import CustodyError
from samestate.custody.haproxy import HAProxy
from samestate.custody.journal import Lock
from samestate.custody.spec_file import load_spec
from samestate.evidence.canonical import sha256_hex
from samestate.evidence.custody_journal import read_journal
from samestate.evidence.custody_records import JOURNAL, HostSeen, SmokeDone, Step, StepBegan


def test_a_swap_under_traffic_passes_on_both_axes_and_fails_no_request(house: House) -> None:
    with Traffic(house) as traffic:
        done = house.swap()
    assert done.returncode == 0, done.stdout + done.stderr
    assert traffic.answered > 50
    assert traffic.failed == []
    judgement = house.judged()
    assert (judgement.operational, judgement.functional, judgement.verdict) == (Verdict.PASS,) * 3
    assert (judgement.disposition, judgement.incumbent, judgement.suppressed) == ("held", "restored", [])
    assert judgement.probe is not None and judgement.probe.verdict == "pass"
    assert house.healthy() and HAProxy(load_spec(house.spec).router).admission().admitting
    assert "transition observations" in done.stdout and "from drain to readmission" in done.stdout
    steps = [one.rec.step for one in read_journal(house.records).entries if isinstance(one.rec, StepBegan)]
    assert steps == list(Step)
    summary = (house.records / "summary.md").read_text()
    for frozen in (
        "model.revision",
        "sources.package",
        "gpus",
        "candidate traced",
        "layer marker-trace",
        "probe boundary",
    ):
        assert f"| {frozen} |" in summary
    assert f"| reference prior-image | {'4' * 64} |" in summary
    assert_reproduced(house)
    assert_no_secret(house)


def assert_reproduced(house: House) -> None:
    """The documents follow from the records, and a changed byte of either is found."""
    command = ["report", str(house.records), "--reproduce"]
    assert CliRunner().invoke(samestate, command).exit_code == 0
    for name in ("summary.md", "decision.json", "artifact-manifest.json", "evidence-index.json"):
        document = house.records / name
        before = document.read_bytes()
        document.write_bytes(before.replace(b"pass", b"fail", 1) if b"pass" in before else before + b" ")
        result = CliRunner().invoke(samestate, command)
        assert (result.exit_code, name in result.output) == (1, True)
        document.write_bytes(before)
    raw = next((house.records / "raw").glob("after-*.response"))
    before = raw.read_bytes()
    raw.write_bytes(before + b" ")
    assert CliRunner().invoke(samestate, command).exit_code == 1
    raw.write_bytes(before)
    stream = next((house.records / "probe").glob("arms/*/client.jsonl"))
    before = stream.read_bytes()
    stream.write_bytes(before.replace(b"1", b"2", 1))
    assert CliRunner().invoke(samestate, command).exit_code == 1
    stream.write_bytes(before)
    assert CliRunner().invoke(samestate, command).exit_code == 0


def assert_no_secret(house: House) -> None:
    for path in house.records.rglob("*"):
        assert not path.is_file() or b"s3cr3t-4711" not in path.read_bytes(), path


# --- tampering: what comes back is not what was -----------------------------------------------------


def tamper_argv(house: House) -> None:
    text = house.launcher.read_text()
    house.launcher.write_text(text.replace('"$@"', "--wait 3"))


def tamper_environment(house: House) -> None:
    path = house.root / "incumbent.env"
    path.write_text(path.read_text().replace("OMP_NUM_THREADS=2", "OMP_NUM_THREADS=3"))


def tamper_hidden_environment(house: House) -> None:
    with (house.root / "incumbent.env").open("a") as file:
        file.write("NOT_ON_THE_LIST=1\n")


def tamper_diagnostic(house: House) -> None:
    with (house.root / "incumbent.env").open("a") as file:
        file.write("SAMESTATE_SAMPLING_GUARD=split-top-p\n")


def tamper_template(house: House) -> None:
    (house.root / "model/chat_template.jinja").write_text("{{ messages[0] }}")


def tamper_model(house: House) -> None:
    (house.root / "model/config.json").write_text('{"layers": 1}')


def tamper_mount(house: House) -> None:
    """The folder is another one under its name."""
    (house.root / "mounted").rename(house.root / "elsewhere")
    (house.root / "mounted").mkdir()


def tamper_source(house: House) -> None:
    (house.root / "package/engine.py").write_text("VALUE = 2\n")


def tamper_router(house: House) -> None:
    with house.config.open("a") as file:
        file.write("# another byte\n")


TAMPERS = {
    tamper_argv: "argv:",
    tamper_environment: "environment.OMP_NUM_THREADS:",
    tamper_hidden_environment: "environment:",
    tamper_diagnostic: "environment.SAMESTATE_SAMPLING_GUARD:",
    tamper_template: "template:",
    tamper_model: "model.files.config.json:",
    tamper_mount: "mount.",
    tamper_source: "sources.package:",
    tamper_router: "router.config.haproxy.cfg:",
}


@pytest.mark.tamper
@pytest.mark.parametrize("tamper", TAMPERS, ids=lambda one: one.__name__)
def test_what_was_changed_meanwhile_fails_the_restoration_by_name(
    house: House, tamper: Callable[[House], None]
) -> None:
    """Killed before the incumbent is started again; changed; resumed."""
    assert swap_and_die(house.spec, "restore", "began") == -signal.SIGKILL
    tamper(house)
    done = house.call("--resume")
    another = tamper is not tamper_router
    assert done.exit_code == (2 if another else 1), done.output
    assert ("the incumbent is not what it was" in done.output) is another
    failed = [one for result in house.judged().results for one in result.findings if one.verdict is Verdict.FAIL]
    assert any(one.message.startswith(TAMPERS[tamper]) for one in failed), failed
    assert house.judged().operational is Verdict.FAIL
    admitting = HAProxy(load_spec(house.spec).router).admission().admitting
    assert admitting is not another, "an incumbent that is another stays out"


@pytest.mark.tamper
def test_once_mended_the_swap_goes_on(house: House) -> None:
    assert swap_and_die(house.spec, "restore", "began") == -signal.SIGKILL
    template = house.root / "model/chat_template.jinja"
    before = template.read_text()
    tamper_template(house)
    assert house.call("--resume").exit_code == 2
    template.write_text(before)
    done = house.call("--resume")
    assert done.exit_code == 3, done.output  # it was cut, so not all of the window was seen
    assert house.result("custody-restored").verdict is Verdict.PASS
    assert HAProxy(load_spec(house.spec).router).admission().admitting


# --- records that are not there ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def swapped(lasting_house: House) -> House:
    done = lasting_house.call()
    assert done.exit_code == 0, done.output
    return lasting_house


@pytest.mark.parametrize(
    ("drop", "check", "claim"),
    [
        ("snapshot_taken", "custody-restored", "exact restoration of the incumbent"),
        ("router_seen", "custody-router-bytes", "parity of the router's configuration bytes"),
        ("smoke_done", "custody-smokes", "functional acceptance of the restoration"),
    ],
)
@pytest.mark.tamper
def test_without_a_record_from_before_nothing_is_claimed(
    swapped: House, tmp_path: Path, drop: str, check: str, claim: str
) -> None:
    """Taken out and the chain mended, as if it had never been written."""
    kept, prev = [], "0" * 64
    for raw in (swapped.records / JOURNAL).read_bytes().splitlines():
        tree = json.loads(raw)
        if tree["rec"]["kind"] == drop and tree["rec"]["when"] == "before":
            continue
        line = json.dumps({**tree, "n": len(kept), "prev": prev}).encode()
        kept.append(line)
        prev = sha256_hex(line)
    copy = tmp_path / "records"
    copy.mkdir()
    (copy / JOURNAL).write_bytes(b"\n".join(kept) + b"\n")
    (copy / "raw").symlink_to(swapped.records / "raw")
    judgement = judge_custody(copy)
    result = next(one for one in judgement.results if one.check == check)
    assert result.verdict is Verdict.UNKNOWN
    assert claim in judgement.suppressed and claim not in judgement.claims
    assert judgement.verdict is Verdict.UNKNOWN


@pytest.mark.tamper
def test_a_lost_line_and_a_changed_one_are_found(swapped: House, tmp_path: Path) -> None:
    lines = (swapped.records / JOURNAL).read_bytes().splitlines(keepends=True)
    for damaged in (lines[:5] + lines[6:], [*lines[:5], lines[5].replace(b"value", b"vAlue"), *lines[6:]], lines[:-1]):
        (tmp_path / JOURNAL).write_bytes(b"".join(damaged))
        assert judge_custody(tmp_path).verdict is not Verdict.PASS


def test_raw_bytes_that_were_changed_are_unknown(swapped: House) -> None:
    raw = swapped.records / "raw/before-strict.response"
    before = raw.read_bytes()
    try:
        raw.write_bytes(before.replace(b"9", b"8"))
        assert swapped.result("custody-smokes").verdict is Verdict.UNKNOWN
        raw.unlink()
        assert swapped.result("custody-smokes").verdict is Verdict.UNKNOWN
    finally:
        raw.write_bytes(before)
    assert swapped.result("custody-smokes").verdict is Verdict.PASS


def test_the_host_was_observed_without_a_gap(swapped: House) -> None:
    seen = [one for one in read_journal(swapped.records).entries if isinstance(one.rec, HostSeen)]
    assert len(seen) >= 2
    assert all(after.t_ns - before.t_ns <= 2_000_000_000 for before, after in pairwise(seen)), "the period of the spec"
    assert all(one.rec.memory_available for one in seen)


# --- functional acceptance --------------------------------------------------------------------------


def test_strict_json_that_fails_before_and_after_is_incomplete(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with serving(tmp_path / "a", "--no-json") as house:
        done = house.call("--json")
        assert done.exit_code == 3, done.output
        judgement = house.judged()
        assert judgement.operational is Verdict.PASS
        assert json.loads((house.records / "decision.json").read_text())["functional"] == "incomplete"
        assert [one.code for one in house.result("custody-smokes").findings] == ["same_failure"]
        smokes = [one.rec for one in read_journal(house.records).entries if isinstance(one.rec, SmokeDone)]
        assert len(smokes) == 4, "each was sent once before and once after"
        assert len({one.error for one in smokes if one.name == "strict"}) == 1
        ticket = house.records / "tickets/custody-smokes.strict.json"
        listed = CliRunner().invoke(samestate, ["ticket", "list", str(house.records)])
        assert (listed.exit_code, "no regression is claimed" in listed.output) == (3, True)
        again = CliRunner().invoke(samestate, ["ticket", "check", str(ticket), str(house.records)])
        assert (again.exit_code, "later run" in again.output) == (2, True)
        kept = ticket.read_bytes()
    (tmp_path / "b").mkdir()
    with serving(tmp_path / "b") as later:  # one that answers
        assert later.call().exit_code == 0
        (tmp_path / "ticket.json").write_bytes(kept)
        arguments = ["ticket", "check", str(tmp_path / "ticket.json"), str(later.records)]
        assert CliRunner().invoke(samestate, arguments).exit_code == 0
        archive = later.records / "probe"
        assert CliRunner().invoke(samestate, [*arguments[:3], str(archive)]).exit_code == 3, "no swap, no smoke"


# --- refusals ---------------------------------------------------------------------------------------


REFUSED = {
    "undeclared pid": (
        ('expected_change = ["pid", "process_start"]', "expected_change = []"),
        "policy.expected_change",
    ),
    "no producer of router bytes": (('config = ["haproxy.cfg"]\n', ""), "router.config.haproxy.cfg has no producer"),
    "no raw response": (('kind = "strict-json"', 'kind = "strict-json"\nraw = false'), "smoke.strict has no producer"),
    "unknown field": (("drain_seconds", "drain_second"), "router.drain_second: is not a field of a spec"),
    "the incumbent's own address": (
        ('pid_file = "candidate.pid"', 'pid_file = "incumbent.pid"'),
        "candidate.process.pid_file: is the incumbent's",
    ),
    "base of nothing": (('base = "package"', 'base = "image"'), "candidate.base: image is no package"),
    "no such server": (('server = "incumbent"', 'server = "third"'), "HAProxy has no engines/third"),
    "another environment": (("incumbent.env", "other.env"), "incumbent.environment: is not what the process runs with"),
    "a model that is not there": (
        ('[identity]\nmodel = "model"', '[identity]\nmodel = "nowhere"'),
        "identity: model.files is missing",
    ),
    "a template that is not there": (
        ('[identity]\nmodel = "model"', '[identity]\nmodel = "model"\ntemplate = "nowhere"'),
        "identity: template is missing",
    ),
    "a source that is not there": (
        ('sources = {package = "package"}\nmounts', 'sources = {package = "nowhere"}\nmounts'),
        "identity: sources.package is missing",
    ),
    "a mount that is not there": (('mounts = ["mounted"]', 'mounts = ["nowhere"]'), "identity: mount."),
    "settings that nobody says": (
        ('mounts = ["mounted"]', 'mounts = ["mounted"]\nconfiguration = "server_info"'),
        "identity: config is missing, the server does not say",
    ),
    "a plan that does not exist": (("probe.yaml", "prob.yaml"), "prob.yaml"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_spec_that_could_not_be_undone_is_refused_before_anything_is_touched(swapped: House, name: str) -> None:
    (old, new), words = REFUSED[name]
    (swapped.root / "other.env").write_text("OMP_NUM_THREADS=7\n")
    text = swapped.spec.read_text()
    who = swapped.process().identity()
    try:
        swapped.change(old, new)
        swapped.change('records = "records"', 'records = "refused"')
        result = CliRunner().invoke(samestate, ["swap", str(swapped.spec)])
    finally:
        swapped.spec.write_text(text)
    assert (result.exit_code, words in result.output) == (2, True), result.output
    assert result.output.count("\n") == 1
    assert swapped.process().identity() == who
    assert not (swapped.root / "refused" / JOURNAL).exists()


def test_records_are_never_written_over(swapped: House) -> None:
    result = CliRunner().invoke(samestate, ["swap", str(swapped.spec)])
    assert (result.exit_code, "is not empty" in result.output) == (2, True)
    resumed = CliRunner().invoke(samestate, ["swap", str(swapped.spec), "--resume"])
    assert (resumed.exit_code, "nothing to resume" in resumed.output) == (2, True)


def test_two_swaps_exclude_each_other(swapped: House) -> None:
    held = Lock(swapped.process().lock)
    try:
        result = CliRunner().invoke(samestate, ["swap", str(swapped.spec)])
        assert (result.exit_code, "another swap of this incumbent runs" in result.output) == (2, True)
    finally:
        held.close()


def test_an_incumbent_that_does_not_run_is_refused(tmp_path: Path) -> None:
    house = House(tmp_path)
    result = CliRunner().invoke(samestate, ["swap", str(house.spec)])
    assert (result.exit_code, "incumbent: is not running" in result.output) == (2, True)


# --- a candidate that will not do -------------------------------------------------------------------


CANDIDATES = {
    "differs beyond what is declared": ('"argv", ', "", "composition"),
    "another layer": ('file = "patch.py"', 'file = "haproxy.cfg"', "composition"),
    "another build than the incumbent's": (
        'base = "package"\nsources = {package = "package"}',
        'base = "package"\nsources = {package = "model"}',
        "base package: is not what the incumbent runs on",
    ),
    "serves another checkpoint": ('model = "model"\nlayers', 'model = "other"\nlayers', "model.files.config.json"),
    "has another chat template": (
        'model = "model"\nlayers',
        'model = "model"\ntemplate = "patch.py"\nlayers',
        "candidate, template: ",
    ),
    "ends at once": ('"--label", "traced"', '"--nothing"', "ended"),
}


@pytest.mark.parametrize("name", CANDIDATES)
def test_a_candidate_that_will_not_do_is_never_probed_and_the_incumbent_comes_back(house: House, name: str) -> None:
    old, new, words = CANDIDATES[name]
    house.change(old, new)
    with Traffic(house) as traffic:
        done = house.call()
    assert done.exit_code in (1, 3), done.output
    assert traffic.failed == []
    assert words in done.output
    assert not (house.records / "probe").exists()
    assert house.result("custody-restored").verdict is Verdict.PASS
    assert house.result("custody-steps").verdict is Verdict.UNKNOWN
    assert house.judged().incumbent == "restored"


def test_a_candidate_whose_own_source_nobody_names_is_not_said_to_be_on_the_base(house: House) -> None:
    """The incumbent's hash, taken twice, would say nothing of it."""
    house.change('base = "package"\nsources = {package = "package"}', 'base = "package"')
    done = house.call()
    assert done.exit_code == 3, done.output
    result = house.result("custody-composition")
    assert result.verdict is Verdict.UNKNOWN
    assert any("candidate.sources names its folder" in one.message for one in result.findings)
    assert house.result("custody-restored").verdict is Verdict.PASS


UNNAMED = "candidate, model.files.config.json: "
OWN: dict[str, tuple[str, str, Verdict, str]] = {
    "the same files at its own place": ('model = "copy"\n', "", Verdict.PASS, ""),
    "what its command line says": ("", ', "--model", "copy"', Verdict.PASS, ""),
    "others on its command line": ("", ', "--model", "other"', Verdict.FAIL, UNNAMED),
    "another template on it": (
        'model = "copy"\n',
        ', "--chat-template=patch.py"',
        Verdict.FAIL,
        "candidate, template: ",
    ),
    "said by nobody": ("", "", Verdict.UNKNOWN, UNNAMED),
    "another than it was told": ('model = "copy"\n', ', "--model", "other"', Verdict.UNKNOWN, UNNAMED),
}


@pytest.mark.parametrize("name", OWN)
def test_a_candidate_s_model_and_template_are_read_where_it_has_them(house: House, name: str) -> None:
    """Never where the incumbent's lie: those would always be the same."""
    declared, told, verdict, words = OWN[name]
    house.change('model = "model"\nlayers', f"{declared}layers")
    house.change('"--label", "traced"]', f'"--label", "traced"{told}]\ncwd = "."')
    house.change('"argv", ', '"argv", "cwd", ')
    done = house.call()
    assert done.exit_code == {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.UNKNOWN: 3}[verdict], done.output
    result = house.result("custody-composition")
    assert result.verdict is verdict
    assert all(one.message.startswith("candidate, ") for one in result.findings)
    assert any(one.message.startswith(words) for one in result.findings) is bool(words)
    assert house.result("custody-restored").verdict is Verdict.PASS


def test_a_candidate_may_serve_another_checkpoint_where_the_spec_says_so(house: House) -> None:
    house.change('model = "model"\nlayers', 'model = "other"\nlayers')
    house.change('"argv", ', '"argv", "model.*", "template", ')
    done = house.call()
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("raised", "steps"),
    [
        (CustodyError("the probe did not run: no room"), Verdict.PASS),
        (RuntimeError("nobody foresaw it"), Verdict.UNKNOWN),
        (KeyboardInterrupt(), Verdict.UNKNOWN),
    ],
    ids=lambda one: type(one).__name__,
)
def test_whatever_stops_the_probe_the_incumbent_comes_back(
    house: House, monkeypatch: pytest.MonkeyPatch, raised: BaseException, steps: Verdict
) -> None:
    def stop(*_: object) -> None:
        raise raised

    monkeypatch.setattr("samestate.custody.candidate.run_probe", stop)
    done = house.call()
    assert done.exit_code == (0 if steps is Verdict.PASS else 3), done.output
    assert house.result("custody-steps").verdict is steps
    judgement = house.judged()
    assert judgement.incumbent == "restored" and judgement.probe is not None and judgement.probe.verdict is None
    assert (house.records / "tickets/probe.boundary.json").is_file()
    assert house.healthy() and HAProxy(load_spec(house.spec).router).admission().admitting
