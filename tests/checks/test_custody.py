"""``custody-v1``: each check fires on its fault, and is silent on a swap without one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from checks.custody_run import (
    GIB,
    PERIOD_NS,
    Records,
    changed,
    composed,
    fields,
    gone,
    good,
    host,
    idle,
    sealed,
    seen,
    smoke,
    value,
)
from samestate.checks.base import Verdict
from samestate.checks.custody_analyzer import CustodyJudgement, failing, judge_custody
from samestate.checks.custody_fields import MANDATORY
from samestate.evidence import custody_records as c
from samestate.reports.custody_documents import differing

replace = msgspec.structs.replace
Change = Callable[[list[c.CustodyRecord]], list[c.CustodyRecord]]


def judged(folder: Path, records: list[c.CustodyRecord], **more: Any) -> CustodyJudgement:
    return judge_custody(Records(records, **more).write(folder))


def test_a_whole_swap_passes_and_claims_everything(tmp_path: Path) -> None:
    judgement = judged(tmp_path, good())
    assert {one.check: one.verdict for one in judgement.results if one.verdict is not Verdict.PASS} == {}
    assert judgement.verdict is judgement.operational is judgement.functional is Verdict.PASS
    assert judgement.suppressed == [] and len(judgement.claims) == 7
    assert (judgement.disposition, judgement.incumbent, judgement.resumed) == ("held", "restored", 0)
    memory = next(one for one in judgement.results if one.check == "custody-memory")
    assert f"at least {GIB // 2:,} bytes" in memory.summary and memory.examined == 4


def snapshot(when: str, change: Callable[[list[c.Field]], list[c.Field]]) -> Change:
    """Change the fields of the snapshot at a time."""

    def made(records: list[c.CustodyRecord]) -> list[c.CustodyRecord]:
        return [
            replace(rec, fields=change(rec.fields)) if isinstance(rec, c.SnapshotTaken) and rec.when == when else rec
            for rec in records
        ]

    return made


def field(when: str, name: str, text: str | None) -> Change:
    """Set a field; None: it could not be read."""
    new = gone(name) if text is None else value(name, text)
    return snapshot(when, lambda lot: [*(one for one in lot if one.name != name), new])


def without(when: str, name: str) -> Change:
    return snapshot(when, lambda lot: [one for one in lot if one.name != name])


def router(when: str, **update: Any) -> Change:
    def made(records: list[c.CustodyRecord]) -> list[c.CustodyRecord]:
        return [
            replace(rec, **update) if isinstance(rec, c.RouterSeen) and rec.when == when else rec for rec in records
        ]

    return made


def first(kind: type, change: Callable[[Any], Any]) -> Change:
    return lambda records: changed(records, kind, change)


def last(kind: type, change: Callable[[Any], Any]) -> Change:
    return lambda records: changed(records, kind, change, last=True)


def router_field(name: str, text: str | None) -> list[c.Field]:
    rest = [one for one in seen("after", admitting=True).fields if one.name != name]
    return [*rest, gone(name) if text is None else value(name, text)]


def ignoring(*patterns: str) -> Change:
    """The policy ignores these."""
    return first(c.SwapStarted, lambda rec: replace(rec, ignore=list(patterns)))


def both(name: str) -> Change:
    """A field that no snapshot of the incumbent has."""
    return lambda records: without("after", name)(without("before", name)(records))


def dropped(kind: type, **having: object) -> Change:
    """Without the records of a kind, or those of them with these values."""
    return lambda records: [
        rec
        for rec in records
        if not (isinstance(rec, kind) and all(getattr(rec, name) == one for name, one in having.items()))
    ]


def moved(step: c.Step, behind: c.Step) -> Change:
    """A step with its records comes after another."""

    def made(records: list[c.CustodyRecord]) -> list[c.CustodyRecord]:
        bounds = {
            one.step: (
                at,
                next(i for i, end in enumerate(records) if isinstance(end, c.StepEnded) and end.step is one.step),
            )
            for at, one in enumerate(records)
            if isinstance(one, c.StepBegan)
        }
        (low, high), (_, end) = bounds[step], bounds[behind]
        return [*records[:low], *records[high + 1 : end + 1], *records[low : high + 1], *records[end + 1 :]]

    return made


def resumed(step: c.Step, boot: str = "boot") -> Change:
    """Died as this step was to begin, and was taken over."""

    def made(records: list[c.CustodyRecord]) -> list[c.CustodyRecord]:
        at = next(i for i, rec in enumerate(records) if isinstance(rec, c.StepBegan) and rec.step is step)
        return [*records[:at], c.Resumed(step=None, torn=False, boot_id=boot), *records[at:]]

    return made


def chained(*changes: Change) -> Change:
    def made(records: list[c.CustodyRecord]) -> list[c.CustodyRecord]:
        for change in changes:
            records = change(records)
        return records

    return made


F, U = Verdict.FAIL, Verdict.UNKNOWN
FAULTS: dict[str, tuple[Change, str, Verdict, str]] = {
    "required field unread": (field("before", "template", None), "custody-required", U, "template: required"),
    "required smoke not kept": (
        first(c.SmokeDone, lambda rec: replace(rec, response=None)),
        "custody-required",
        U,
        "smoke.strict: required",
    ),
    "argv": (field("after", "argv", '["other"]'), "custody-restored", F, "argv:"),
    "environment": (field("after", "environment.OMP_NUM_THREADS", "0" * 64), "custody-restored", F, "OMP_NUM_THREADS"),
    "a new variable": (field("after", "environment.LD_PRELOAD", "0" * 64), "custody-restored", F, "LD_PRELOAD"),
    "a lost variable": (without("after", "environment.OMP_NUM_THREADS"), "custody-restored", F, "is not there after"),
    "template": (field("after", "template", "0" * 64), "custody-restored", F, "template:"),
    "mount": (field("after", "mount./models", "inode 8"), "custody-restored", F, "mount./models:"),
    "source": (field("after", "sources.vllm", "0" * 64), "custody-restored", F, "sources.vllm:"),
    "unread after": (field("after", "template", None), "custody-restored", U, "template: missing after"),
    "unread before": (field("before", "template", None), "custody-restored", U, "template: missing before"),
    "no field before": (without("before", "template"), "custody-restored", U, "no record from before"),
    "the same process": (field("after", "pid", "1"), "custody-restored", F, "pid: was to change"),
    "a patch left": (
        field("after", "environment.SAMESTATE_BUDGET_TRACE", "0" * 64),
        "custody-unpatched",
        F,
        "SAMESTATE_BUDGET_TRACE",
    ),
    "environment unread": (field("after", "environment", None), "custody-unpatched", U, "was not read after"),
    "router restarted": (
        router("after", fields=router_field("router.process", "9@90")),
        "custody-router",
        F,
        "router.process:",
    ),
    "router bytes": (
        router("after", fields=router_field("router.config.haproxy.cfg", "0" * 64)),
        "custody-router-bytes",
        F,
        "router.config.haproxy.cfg:",
    ),
    "router bytes unread before": (
        router("before", fields=router_field("router.config.haproxy.cfg", None)),
        "custody-router-bytes",
        U,
        "missing before",
    ),
    "router bytes only after": (
        router("before", fields=[value("router.process", "7@70"), value("router.weight", "1")]),
        "custody-router-bytes",
        U,
        "no record from before",
    ),
    "closed after": (router("after", admitting=False), "custody-route", F, "does not admit"),
    "open sessions": (router("restored", sessions=2), "custody-route", F, "2 sessions"),
    "failed requests": (router("after", failed=5), "custody-route", F, "2 requests failed"),
    "counters set back": (router("after", failed=0), "custody-route", U, "set back"),
    "not drained": (router("drained", sessions=1), "custody-steps", F, "while its route was in use"),
    "candidate admitted": (router("candidate", admitting=True), "custody-steps", F, "open beside the candidate"),
    "no drain seen": (
        lambda lot: [one for one in lot if getattr(one, "when", "") != "drained"],
        "custody-steps",
        U,
        "closed",
    ),
    "a stop that left something": (
        first(c.ProcessStopped, lambda rec: replace(rec, left=[77])),
        "custody-steps",
        F,
        "[77]",
    ),
    "candidate not stopped": (last(c.ProcessStopped, lambda rec: None), "custody-steps", U, "candidate ended"),
    "not ended": (last(c.SwapEnded, lambda rec: None), "custody-steps", U, "has not ended"),
    "a failed step": (
        last(c.StepEnded, lambda rec: replace(rec, outcome="failed", note="why")),
        "custody-steps",
        U,
        "done: why",
    ),
    "busy after": (last(c.IdleSeen, lambda rec: idle("after", 1)), "custody-idle", U, "1 running"),
    "one reading after": (last(c.IdleSeen, lambda rec: None), "custody-idle", U, "1 of 2 readings"),
    "memory unread": (
        last(c.HostSeen, lambda rec: replace(rec, memory_available=None)),
        "custody-memory",
        U,
        "MemAvailable",
    ),
    "watched to early": (last(c.HostSeen, lambda rec: None), "custody-memory", U, "before the readmission"),
    "watched too late": (first(c.HostSeen, lambda rec: None), "custody-memory", U, "after the first change"),
    "host kill": (last(c.HostSeen, lambda rec: host(kills=6)), "custody-oom", F, "the host: 1"),
    "host unread": (first(c.HostSeen, lambda rec: replace(rec, oom_kills=None)), "custody-oom", U, "host's OOM kills"),
    "cgroup kill": (last(c.HostSeen, lambda rec: host(groups=((11, 2),))), "custody-oom", F, "cgroup 11: 2"),
    "cgroup silent": (last(c.HostSeen, lambda rec: host(groups=((11, None),))), "custody-oom", U, "does not say"),
    "cgroup gone": (last(c.HostSeen, lambda rec: host(groups=((12, 0),))), "custody-oom", U, "cgroup 11: was gone"),
    "no cgroup": (
        lambda lot: [host(groups=()) if isinstance(one, c.HostSeen) else one for one in lot],
        "custody-oom",
        U,
        "no memory cgroup",
    ),
    "everything ignored": (ignoring("*"), "custody-restored", U, "no field was held"),
    "a mandatory field ignored": (ignoring("argv"), "custody-restored", U, "argv: the policy ignores it"),
    "all settings ignored": (ignoring("config*"), "custody-restored", U, "config: the policy ignores it"),
    "argv never recorded": (both("argv"), "custody-restored", U, "argv: no record from before, and none"),
    "limits never recorded": (both("limits"), "custody-restored", U, "limits: no record"),
    "affinity never recorded": (both("affinity"), "custody-restored", U, "affinity: no record"),
    "model never recorded": (
        both("model.files"),
        "custody-restored",
        U,
        "model.files: no record from before, and none",
    ),
    "template never recorded": (both("template"), "custody-restored", U, "template: no record from before, and none"),
    "source never recorded": (both("sources.vllm"), "custody-restored", U, "sources: no record from before, and none"),
    "source never recorded, so nobody says unpatched": (
        both("sources.vllm"),
        "custody-unpatched",
        U,
        "sources: no record",
    ),
    "source unread on both sides": (
        chained(field("before", "sources.vllm", None), field("after", "sources.vllm", None)),
        "custody-unpatched",
        U,
        "sources.vllm: was not read before",
    ),
    "a declared mount never recorded": (
        chained(
            first(c.SwapStarted, lambda rec: replace(rec, identity=["model.files", "mount./models", "config"])),
            both("mount./models"),
        ),
        "custody-restored",
        U,
        "mount./models: no record from before, and none",
    ),
    "no setting recorded": (both("config.models"), "custody-restored", U, "config: no record"),
    "affinity": (field("after", "affinity", "Cpus_allowed_list: 0"), "custody-restored", F, "affinity:"),
    "nice": (field("after", "nice", "10"), "custody-restored", F, "nice:"),
    "oom_score_adj": (field("after", "oom_score_adj", "1000"), "custody-restored", F, "oom_score_adj:"),
    "a field recorded twice": (
        snapshot("after", lambda lot: [value("argv", "other"), *lot]),
        "custody-restored",
        U,
        "argv: recorded 2 times after",
    ),
    "two files of one name": (
        router("after", fields=[value("router.config.haproxy.cfg", "0" * 64), *seen("after", admitting=True).fields]),
        "custody-router-bytes",
        U,
        "recorded 2 times after",
    ),
    "failed requests uncounted": (router("after", failed=None), "custody-route", U, "does not count"),
    "failed requests uncounted before": (router("before", failed=None), "custody-route", U, "does not count"),
    "a gate shut": (
        last(c.GateSeen, lambda rec: replace(rec, ok=False, reason="differs")),
        "custody-steps",
        F,
        "gate composition: was shut (differs)",
    ),
    "a gate opened again": (
        last(c.GateSeen, lambda rec: replace(rec, name="route", ok=False, reason="open")),
        "custody-steps",
        F,
        "gate route: was shut",
    ),
    "a gate unseen": (dropped(c.GateSeen, name="incumbent-gone"), "custody-steps", U, "gate incumbent-gone: nobody"),
    "no gate": (dropped(c.GateSeen), "custody-steps", U, "gate route: nobody saw it"),
    "a candidate after the readmission": (
        moved(c.Step.CANDIDATE_START, c.Step.READMIT),
        "custody-steps",
        F,
        "candidate-start: towards the candidate",
    ),
    "a candidate stopped late": (
        moved(c.Step.CANDIDATE_STOP, c.Step.VERIFY),
        "custody-steps",
        F,
        "candidate-stop after verify",
    ),
    "a candidate after a resumption": (
        resumed(c.Step.CANDIDATE_START),
        "custody-steps",
        F,
        "gates: towards the candidate, on the way back",
    ),
    "no step ended": (dropped(c.StepEnded), "custody-steps", U, "restore: nobody says how it ended"),
    "the last step did not end": (dropped(c.StepEnded, step=c.Step.DONE), "custody-steps", U, "done: nobody says"),
    "an end of nothing": (dropped(c.StepBegan, step=c.Step.VERIFY), "custody-steps", U, "verify: ended, and had not"),
    "no word of the probe": (dropped(c.ProbeEnded), "custody-steps", U, "nobody says what it came to"),
    "another probe": (
        first(c.ProbeEnded, lambda rec: replace(rec, plan="boundary")),
        "custody-steps",
        U,
        "reasoning-close was asked for",
    ),
    "route unseen beside the candidate": (
        dropped(c.RouterSeen, when="candidate"),
        "custody-steps",
        U,
        "route beside the candidate",
    ),
    "route unseen before it was opened": (
        dropped(c.RouterSeen, when="restored"),
        "custody-steps",
        U,
        "between the restoration and the readmission",
    ),
    "stop of nothing": (
        first(c.ProcessStopped, lambda rec: replace(rec, process=None)),
        "custody-steps",
        U,
        "incumbent: was gone",
    ),
    "ended by itself": (
        chained(dropped(c.StepBegan, step=c.Step.STOP), dropped(c.StepEnded, step=c.Step.STOP)),
        "custody-steps",
        U,
        "the incumbent ended before it was to be stopped",
    ),
    "another seal": (
        first(c.ProbeEnded, lambda rec: replace(rec, seal_sha256="6" * 64)),
        "custody-probe",
        U,
        "probe: cannot be read",
    ),
    "an archive elsewhere": (
        first(c.ProbeEnded, lambda rec: replace(rec, archive="../probe", seal_sha256="6" * 64)),
        "custody-probe",
        U,
        "no archive is named",
    ),
    "candidate's cgroup alone": (
        lambda lot: [host(groups=((12, 0),)) if isinstance(one, c.HostSeen) else one for one in lot],
        "custody-oom",
        U,
        "cgroup 11, the incumbent's (before): was not observed",
    ),
    "candidate's cgroup unseen": (
        field("candidate", "cgroup", "/other (inode 12)"),
        "custody-oom",
        U,
        "cgroup 12, the candidate's",
    ),
    "cgroup not known": (field("before", "cgroup", None), "custody-oom", U, "memory cgroup is not known (before)"),
    "candidate held to nothing": (
        first(c.SwapStarted, lambda rec: replace(rec, candidate_differs=["*"])),
        "custody-composition",
        U,
        "none was held",
    ),
    "candidate's base unread": (
        first(c.CompositionSeen, lambda rec: composed(base_sha256=None)),
        "custody-composition",
        U,
        "the candidate's own hash of it is missing",
    ),
    "failed, asked again, answered": (
        chained(
            resumed(c.Step.READMIT),
            lambda lot: [
                two
                for one in lot
                for two in (
                    [smoke("after", ok=False, error="no JSON"), one]
                    if isinstance(one, c.SmokeDone) and one.when == "after"
                    else [one]
                )
            ],
        ),
        "custody-smokes",
        F,
        "answered before, and after: no JSON",
    ),
    "candidate beyond": (field("candidate", "template", "0" * 64), "custody-composition", F, "candidate, template:"),
    "another base": (
        first(c.CompositionSeen, lambda rec: composed(base_sha256="0" * 64)),
        "custody-composition",
        F,
        "runs on",
    ),
    "reference as base": (
        first(c.CompositionSeen, lambda rec: composed(base_sha256="4" * 64)),
        "custody-composition",
        F,
        "the reference prior-image",
    ),
    "another layer": (
        first(
            c.CompositionSeen, lambda rec: composed(layers=[c.Layer(name="trace", declared="9" * 64, seen="8" * 64)])
        ),
        "custody-composition",
        F,
        "layer trace",
    ),
    "unread layer": (
        first(c.CompositionSeen, lambda rec: composed(layers=[c.Layer(name="trace", declared="9" * 64, seen=None)])),
        "custody-composition",
        U,
        "layer trace",
    ),
    "no composition": (
        lambda lot: [one for one in lot if not isinstance(one, c.CompositionSeen)],
        "custody-composition",
        U,
        "nobody says",
    ),
    "regressed": (
        last(c.SmokeDone, lambda rec: smoke("after", ok=False, error="no JSON")),
        "custody-smokes",
        F,
        "answered before",
    ),
    "failed alike": (
        lambda lot: [smoke(one.when, ok=False, error="e") if isinstance(one, c.SmokeDone) else one for one in lot],
        "custody-smokes",
        U,
        "before and after alike",
    ),
    "no baseline": (
        first(c.SmokeDone, lambda rec: smoke("before", ok=False, error="e")),
        "custody-smokes",
        U,
        "failed before",
    ),
    "retried": (lambda lot: [*lot[:6], smoke("before"), *lot[6:]], "custody-smokes", U, "sent again"),
    "other request": (
        last(c.SmokeDone, lambda rec: replace(rec, request_sha256="0" * 64)),
        "custody-smokes",
        U,
        "other bytes were sent",
    ),
    "raw not kept": (last(c.SmokeDone, lambda rec: replace(rec, response=None)), "custody-smokes", U, "raw response"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_by_its_check_and_named(tmp_path: Path, name: str) -> None:
    change, check, verdict, words = FAULTS[name]
    judgement = judged(tmp_path, change(good()))
    result = next(one for one in judgement.results if one.check == check)
    assert result.verdict is verdict, result
    assert any(words in finding.message for finding in result.findings), result.findings
    assert judgement.verdict is not Verdict.PASS
    assert bool(failing(tmp_path, check)) is (verdict is Verdict.FAIL)


def test_identity_that_is_declared_and_recorded_raises_no_alarm_nor_does_a_mount_that_nobody_declared(
    tmp_path: Path,
) -> None:
    named = ["model.files", "template", "sources.vllm", "mount./models", "config"]
    declared = first(c.SwapStarted, lambda rec: replace(rec, identity=named))
    assert judged(tmp_path / "declared", declared(good())).verdict is Verdict.PASS
    assert (
        judged(tmp_path / "bare", chained(both("mount./models"), without("candidate", "mount./models"))(good())).verdict
        is Verdict.PASS
    )


def test_a_gap_longer_than_the_period_is_unknown(tmp_path: Path) -> None:
    records = good()
    at = max(index for index, rec in enumerate(records) if isinstance(rec, c.HostSeen))
    judgement = judged(tmp_path, records, pauses={at: PERIOD_NS})
    assert {one.check for one in judgement.results if one.verdict is Verdict.UNKNOWN} == {"custody-memory"}
    assert "least available host memory over the window" in judgement.suppressed


def test_what_a_spec_does_not_ask_is_not_exercised_and_not_claimed(tmp_path: Path) -> None:
    """Without the router's files no parity of bytes is claimed, and nothing fails for it."""
    bare = [value("router.process", "7@70"), value("router.weight", "1")]
    records = [replace(rec, fields=bare) if isinstance(rec, c.RouterSeen) else rec for rec in good()]
    records[0] = replace(records[0], required_before=[])
    judgement = judged(tmp_path, records)
    result = next(one for one in judgement.results if one.check == "custody-router-bytes")
    assert result.verdict is Verdict.NOT_EXERCISED
    assert judgement.operational is Verdict.PASS
    assert judgement.suppressed == ["parity of the router's configuration bytes"]


def test_an_incumbent_that_was_never_stopped_must_be_the_same_process(tmp_path: Path) -> None:
    records: list[c.CustodyRecord] = [
        rec
        for rec in good()
        if not (isinstance(rec, c.StepBegan | c.StepEnded) and rec.step in (c.Step.STOP, c.Step.RESTORE))
    ]
    result = next(one for one in judged(tmp_path, records).results if one.check == "custody-restored")
    assert result.verdict is Verdict.FAIL
    assert {finding.message.partition(":")[0] for finding in result.findings} == {"pid", "process_start"}


def test_what_a_policy_ignores_is_named_in_summary_and_claim(tmp_path: Path) -> None:
    def more(lot: list[c.Field]) -> list[c.Field]:
        return [*lot, value("config.instance_id", str(lot))]

    records = snapshot("after", more)(snapshot("before", more)(good()))
    judgement = judged(tmp_path, records)
    result = next(one for one in judgement.results if one.check == "custody-restored")
    assert result.verdict is Verdict.PASS
    assert (
        result.summary
        == f"{result.examined}/{result.examined} fields as before, 2 meant to change, 1 ignored (config.instance_id)"
    )
    assert result.examined == len(fields(1)) - 2, "what is ignored or must change is not counted as equal"
    assert "exact restoration of the incumbent, but for fields ignored: config.instance_id" in judgement.claims


def test_what_another_boot_gives_anew_is_unknown_and_all_else_still_fails(tmp_path: Path) -> None:
    """A swap across a start of the machine can be resumed: nothing of a boot is contrary evidence."""
    again = resumed(c.Step.RESTORE, "another boot")
    changes = [("boot_id", "another"), ("cgroup", "/serving (inode 12)"), ("mount_namespace", "mnt:[2]"), ("pid", "1")]
    records = chained(again, *(field("after", name, text) for name, text in changes))(good())
    judgement = judged(tmp_path / "a", records)
    result = next(one for one in judgement.results if one.check == "custody-restored")
    assert result.verdict is Verdict.UNKNOWN
    assert {one.message.partition(":")[0] for one in result.findings} == {name for name, _ in changes}
    assert failing(tmp_path / "a", "custody-restored") == []
    judged(tmp_path / "b", field("after", "argv", "other")(records))
    assert failing(tmp_path / "b", "custody-restored") == ['argv: ["serve"] before, other after']
    judged(tmp_path / "c", chained(*(field("after", name, text) for name, text in changes))(good()))
    assert len(failing(tmp_path / "c", "custody-restored")) == 4, "without another boot each is contrary evidence"


def test_a_tool_that_died_in_a_step_leaves_no_step_unended(tmp_path: Path) -> None:
    records = good()
    at = next(i for i, rec in enumerate(records) if isinstance(rec, c.StepEnded) and rec.step is c.Step.RESTORE)
    took_over = [c.Resumed(step=c.Step.RESTORE, torn=False, boot_id="boot"), c.StepBegan(step=c.Step.RESTORE)]
    judgement = judged(tmp_path, [*records[:at], *took_over, *records[at:]])
    result = next(one for one in judgement.results if one.check == "custody-steps")
    assert result.verdict is Verdict.PASS, result.findings


def test_an_archive_that_is_another_or_was_changed_is_no_probe_of_this_swap(tmp_path: Path) -> None:
    for name in ("seal", "stream"):
        folder = Records(good()).write(tmp_path / name)
        if name == "seal":
            shutil.rmtree(folder / "probe")
            sealed(folder / "probe", plan=b"[]")
        else:
            stream = next((folder / "probe").glob("arms/*/client.jsonl"))
            stream.write_bytes(stream.read_bytes().replace(b"vllm", b"vlln"))
        judgement = judge_custody(folder)
        assert judgement.probe is not None and judgement.probe.verdict is None
        result = next(one for one in judgement.results if one.check == "custody-probe")
        words = "not under the seal" if name == "seal" else "client.jsonl"
        assert result.verdict is Verdict.UNKNOWN and any(words in one.message for one in result.findings)
        assert any(words in line for line in differing(folder)), "held against the records, it is found too"


def test_no_records_are_no_pass(tmp_path: Path) -> None:
    for folder, data in ((tmp_path / "none", None), (tmp_path / "empty", b""), (tmp_path / "noise", b"noise\n")):
        folder.mkdir()
        if data is not None:
            (folder / c.JOURNAL).write_bytes(data)
        judgement = judge_custody(folder)
        assert judgement.operational is not Verdict.PASS and judgement.verdict is not Verdict.PASS
        assert judgement.claims == []


def test_the_order_of_steps_is_held(tmp_path: Path) -> None:
    records = good()
    at = next(i for i, rec in enumerate(records) if isinstance(rec, c.StepBegan) and rec.step is c.Step.READMIT)
    early = [*records[:at], c.StepBegan(step=c.Step.DRAIN), *records[at:]]
    result = next(one for one in judged(tmp_path, early).results if one.check == "custody-steps")
    assert result.verdict is Verdict.FAIL and "drain after verify" in result.findings[0].message
    assert {one.name for one in fields(1)} >= set(MANDATORY)
