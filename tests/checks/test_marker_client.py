"""What was asked and what the server says: `probes`, `attempts`, `gates`, `answer`, `usage`, `echo`, `identity`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from samestate.checks.analyzers import MARKER_POST_STOP_V1, judge
from samestate.checks.base import Verdict
from samestate.evidence import marker_records as m
from samestate.evidence import probe_records as p
from samestate.evidence import records as r
from samestate.evidence.canonical import sha256_hex
from samestate.plans.model import Plan

from . import builder as b
from . import marker_run as k

Spoil = Callable[[b.Run], None]
FAIL, UNKNOWN = Verdict.FAIL, Verdict.UNKNOWN


def changed(kind: type[r.Record], change: dict[str, object], **match: object) -> Spoil:
    return lambda run: b.edit(k.client(run), kind, change, **match)


def without(kind: type[r.Record], **match: object) -> Spoil:
    return lambda run: b.drop(k.client(run), kind, **match)


def moved(kind: type[r.Record], to: int, **match: object) -> Spoil:
    """The first record of a kind now stands at `to`."""

    def spoil(run: b.Run) -> None:
        records = k.client(run)
        found = next(
            one for one in records if type(one) is kind and all(getattr(one, n) == v for n, v in match.items())
        )
        records.remove(found)
        records.insert(to if to >= 0 else len(records), found)

    return spoil


def doubled(kind: type[r.Record]) -> Spoil:
    def spoil(run: b.Run) -> None:
        at = next(at for at, one in enumerate(k.client(run)) if type(one) is kind)
        k.client(run).insert(at + 1, k.client(run)[at])

    return spoil


def failed_probe(run: b.Run) -> None:
    at = next(at for at, one in enumerate(k.client(run)) if isinstance(one, p.ProbeAnswered))
    k.client(run)[at] = p.ProbeFailed(probe="exact-answer", status=None, error="the answer was cut")


def other_body(run: b.Run) -> None:
    """Another cap went out than the record says; its hash is that of the body."""
    sent = next(one for one in k.client(run) if isinstance(one, p.ProbeSent))
    body = sent.body.replace("512", "511")
    b.edit(k.client(run), p.ProbeSent, {"body": body, "body_sha256": sha256_hex(body.encode())})


def silent_body(run: b.Run) -> None:
    sent = next(one for one in k.client(run) if isinstance(one, p.ProbeSent))
    body = sent.body.replace('"temperature": 0.6, ', "")
    b.edit(k.client(run), p.ProbeSent, {"body": body, "body_sha256": sha256_hex(body.encode())})


def other_effort(run: b.Run) -> None:
    sent = next(one for one in k.client(run) if isinstance(one, p.ProbeSent))
    body = sent.body.replace('"max", "seed"', '"low", "seed"')
    b.edit(k.client(run), p.ProbeSent, {"body": body, "body_sha256": sha256_hex(body.encode())})


def no_object(run: b.Run) -> None:
    b.edit(k.client(run), p.ProbeSent, {"body": "[1]", "body_sha256": sha256_hex(b"[1]")})


def usage(**counts: int | None) -> Spoil:
    right = {"prompt": 48, "completion": 75, "reasoning": 64}
    return changed(p.ProbeAnswered, {"usage": p.ProbeUsage(**{**right, **counts})})


def drift(run: b.Run) -> None:
    after = next(one for one in k.client(run) if isinstance(one, p.IdentityRead) and one.when == "after")
    b.edit(k.client(run), p.IdentityRead, {"values": {**after.values, "process": "78@1"}}, when="after")


def lost_value(run: b.Run) -> None:
    after = next(one for one in k.client(run) if isinstance(one, p.IdentityRead) and one.when == "after")
    fewer = {name: value for name, value in after.values.items() if name != "vllm"}
    b.edit(k.client(run), p.IdentityRead, {"values": fewer}, when="after")


def other_source(run: b.Run) -> None:
    functions = [msgspec.structs.replace(k.SOURCE, source_sha256="f" * 64)]
    b.edit(k.client(run), p.GateReceipt, {"functions": functions}, gate="sampling")


def scheduler_says(run: b.Run) -> None:
    b.edit(k.scheduler(run), m.RecorderStarted, {"speculative_tokens": 5})


def repaired(run: b.Run) -> None:
    k.trace(run, 0).insert(1, r.InterventionApplied(name="split-top-p", functions=[k.SOURCE]))


def body_with(**fields: object) -> Spoil:
    """The body says more, or other things, than the plan; record and hash are those of what was sent."""

    def spoil(run: b.Run) -> None:
        sent = next(one for one in k.client(run) if isinstance(one, p.ProbeSent))
        body = json.dumps(json.loads(sent.body) | fields)
        b.edit(k.client(run), p.ProbeSent, {"body": body, "body_sha256": sha256_hex(body.encode())})

    return spoil


def field_twice(run: b.Run) -> None:
    sent = next(one for one in k.client(run) if isinstance(one, p.ProbeSent))
    body = sent.body[:-1] + ', "seed": 42}'
    b.edit(k.client(run), p.ProbeSent, {"body": body, "body_sha256": sha256_hex(body.encode())})


def identity_says(**values: r.Scalar) -> Spoil:
    def spoil(run: b.Run) -> None:
        said = next(one for one in k.client(run) if isinstance(one, p.IdentityRead)).values
        b.edit(k.client(run), p.IdentityRead, {"values": said | values})

    return spoil


def recorders(**change: object) -> Spoil:
    """Every recorder of the run says so."""

    def spoil(run: b.Run) -> None:
        for (_, process), records in run.streams.items():
            if process.startswith("budget-"):
                b.edit(records, m.RecorderStarted, change)

    return spoil


DRAFTS, ASYNCHRONOUS = "speculative_config.num_speculative_tokens", "scheduler_config.async_scheduling"
OTHER_CODE = msgspec.structs.replace(k.SOURCE, module="os")
CASES: list[tuple[str, Spoil, str, Verdict]] = [
    *[
        ("probes", body_with(**{name: value}), "other_body", FAIL)
        for name, value in (
            ("logit_bias", {"154842": 100}),
            ("allowed_token_ids", [154842]),
            ("n", 4),
            ("n", True),
            ("stream", True),
            ("messages", [{"role": "user", "content": "other"}]),
            ("seed", 1),
            ("token_ids", [1, 2, 3]),
        )
    ],
    ("echo", field_twice, "wrong_body", UNKNOWN),
    ("probes", changed(p.ProbeAnswered, {"text_sha256": "0" * 64}), "wrong_text", UNKNOWN),
    ("probes", changed(p.ProbeAnswered, {"content": "forged"}), "wrong_text", UNKNOWN),
    *[
        ("identity", identity_says(**{name: value}), "identity_contradicts", UNKNOWN)
        for name, value in (
            ("model_sha256", "c" * 64),
            ("process", "99@9"),
            ("vllm", "0.99"),
            (DRAFTS, 9),
            (ASYNCHRONOUS, True),
        )
    ],
    ("identity", recorders(functions=[]), "missing_functions", UNKNOWN),
    ("identity", recorders(asynchronous=True), "recorder_contradicts", UNKNOWN),
    ("identity", changed(r.EngineStarted, {"settings": {"cache_config.block_size": b.C}}), "missing_setting", UNKNOWN),
    ("identity", changed(r.EngineStarted, {"engine": "sim"}), "recorder_contradicts", UNKNOWN),
    *[
        ("gates", changed(p.GateReceipt, change), "gate_not_identified", UNKNOWN)
        for change in (
            {"kernel": "banana"},
            {"functions": []},
            {"functions": [OTHER_CODE]},
            {"source_sha256": "0" * 64},
            {"reason": "crashed"},
        )
    ],
    ("gates", changed(p.GateReceipt, {"source_sha256": "e" * 64}, gate="selftest"), "gates_differ", UNKNOWN),
    ("gates", doubled(p.GateReceipt), "gate_repeated", UNKNOWN),
    (
        "gates",
        changed(p.GateReceipt, {"forced_rows": 1, "forced_right": 1}, gate="selftest"),
        "gate_rows",
        UNKNOWN,
    ),
    ("probes", without(p.ProbeSent), "missing_probe", UNKNOWN),
    ("probes", without(p.ProbeAnswered), "missing_answer", UNKNOWN),
    ("probes", failed_probe, "probe_failed", UNKNOWN),
    ("probes", changed(p.ProbeAnswered, {"status": 500}), "probe_failed", UNKNOWN),
    ("probes", doubled(p.ProbeAnswered), "repeated_answer", FAIL),
    ("probes", changed(p.ProbeSent, {"probe": "other"}), "unplanned_probe", FAIL),
    ("probes", changed(p.ProbeAnswered, {"probe": "other"}), "unplanned_probe", FAIL),
    ("probes", moved(p.ProbeAnswered, 3), "overlap", FAIL),
    ("probes", changed(p.ProbeSent, {"budget": 63}), "not_as_planned", FAIL),
    ("probes", changed(p.ProbeSent, {"max_tokens": 600}), "not_as_planned", FAIL),
    ("probes", changed(p.ProbeSent, {"temperature": 0.7}), "not_as_planned", FAIL),
    ("probes", changed(p.ProbeSent, {"top_p": 1.0}), "not_as_planned", FAIL),
    ("probes", changed(p.ProbeSent, {"stop_token_ids": [3]}), "not_as_planned", FAIL),
    ("probes", changed(p.ProbeSent, {"ignore_eos": True}), "not_as_planned", FAIL),
    ("probes", changed(p.ProbeSent, {"address": "/v1/completions"}), "not_as_planned", FAIL),
    ("probes", other_effort, "other_body", FAIL),
    ("probes", changed(p.ProbeAnswered, {"prompt_token_ids": [1, 2]}), "wrong_prompt", FAIL),
    ("probes", doubled(r.EngineStarted), "engine_starts", FAIL),
    ("attempts", doubled(p.ProbeSent), "sent_again", FAIL),
    ("attempts", doubled(p.ProbeSent), "too_many_probes", FAIL),
    ("attempts", changed(p.ProbeSent, {"attempt": 2}), "retried", FAIL),
    ("attempts", changed(p.ProbeSent, {"retries_allowed": 1}), "retried", FAIL),
    ("attempts", without(p.ProbeSent), "nothing_examined", UNKNOWN),
    ("gates", without(p.GateReceipt, gate="selftest"), "missing_receipt", UNKNOWN),
    ("gates", without(p.GateReceipt), "missing_receipt", UNKNOWN),
    ("gates", changed(p.GateReceipt, {"ok": False}, gate="sampling"), "gate_failed", FAIL),
    ("gates", changed(p.GateReceipt, {"forced_right": 7}, gate="sampling"), "gate_contradicts", FAIL),
    ("gates", changed(p.GateReceipt, {"ordinary_same": 271}, gate="sampling"), "gate_contradicts", FAIL),
    (
        "gates",
        changed(p.GateReceipt, {"ordinary_rows": 8, "ordinary_same": 8}, gate="sampling"),
        "gate_rows",
        UNKNOWN,
    ),
    ("gates", changed(p.GateReceipt, {"forced_rows": 0, "forced_right": 0}, gate="selftest"), "gate_rows", UNKNOWN),
    ("gates", moved(p.GateReceipt, -1), "gate_late", FAIL),
    ("gates", changed(p.GateReceipt, {"guard": "split-top-p"}, gate="sampling"), "wrong_guard", FAIL),
    ("gates", other_source, "gate_sources", UNKNOWN),
    ("usage", usage(prompt=47), "usage_differs", FAIL),
    ("usage", usage(completion=76), "usage_differs", FAIL),
    ("usage", usage(reasoning=63), "usage_differs", FAIL),
    ("usage", usage(reasoning=None), "usage_missing", UNKNOWN),
    ("usage", changed(p.ProbeAnswered, {"token_ids": []}), "missing_tokens", UNKNOWN),
    ("usage", changed(p.ProbeAnswered, {"prompt_token_ids": []}), "missing_tokens", UNKNOWN),
    ("probes", changed(p.ProbeAnswered, {"prompt_token_ids": []}), "missing_prompt", UNKNOWN),
    ("usage", without(p.ProbeAnswered), "nothing_examined", UNKNOWN),
    ("echo", other_body, "body_differs", FAIL),
    ("echo", silent_body, "body_differs", FAIL),
    ("echo", no_object, "wrong_body", UNKNOWN),
    ("echo", changed(p.ProbeSent, {"body_sha256": "0" * 64}), "wrong_body", UNKNOWN),
    ("echo", changed(p.ProbeAnswered, {"echo": {}}), "echo_missing", UNKNOWN),
    ("echo", changed(p.ProbeAnswered, {"echo": {"model": "another"}}), "echo_differs", FAIL),
    ("echo", changed(p.ProbeAnswered, {"echo": {"model": "samestate", "budget": 65}}), "echo_differs", FAIL),
    ("echo", changed(p.ProbeAnswered, {"echo": {"model": "samestate", "x": 1}}), "echo_unknown", UNKNOWN),
    ("identity", drift, "identity_drift", UNKNOWN),
    ("identity", lost_value, "identity_drift", UNKNOWN),
    ("identity", without(p.IdentityRead, when="after"), "missing_identity", UNKNOWN),
    ("identity", changed(p.IdentityRead, {"missing": ["vllm"]}, when="after"), "missing_identity", UNKNOWN),
    ("identity", changed(p.IdentityRead, {"values": {}}), "missing_identity", UNKNOWN),
    ("identity", moved(p.IdentityRead, 6), "identity_misplaced", UNKNOWN),
    ("identity", scheduler_says, "recorders_differ", UNKNOWN),
    ("identity", repaired, "unplanned_intervention", FAIL),
    ("plan-identity", moved(r.PlanResolved, -1), "resolved_late", FAIL),
]


@pytest.mark.parametrize(("check", "spoil", "code", "verdict"), CASES)
def test_it_fires(tmp_path: Path, check: str, spoil: Spoil, code: str, verdict: Verdict) -> None:
    run = k.build()
    spoil(run)
    judgement = run.judge(tmp_path / "a")
    assert code in b.codes(judgement, check), b.result(judgement, check)
    assert b.result(judgement, check).verdict is verdict
    assert judgement.verdict is not Verdict.PASS


def test_none_fires_on_a_clean_run(tmp_path: Path) -> None:
    judgement = k.build().judge(tmp_path / "a")
    for check in ("probes", "attempts", "gates", "identity", "echo", "usage", "anomalies"):
        result = b.result(judgement, check)
        assert (result.verdict, result.findings) == (Verdict.PASS, []), result
        assert result.examined > 0
    assert judgement.verdict is Verdict.PASS


def test_probes_in_another_order_fail(tmp_path: Path) -> None:
    first, second = k.study_b_shape(), k.changed(k.study_b_shape(), name="again")
    run = k.build([first, second])
    at = [at for at, one in enumerate(k.client(run)) if isinstance(one, p.ProbeSent)]
    records = k.client(run)
    one, two = records[at[0] : at[0] + 2], records[at[1] : at[1] + 2]
    records[at[0] : at[0] + 4] = [*two, *one]
    judgement = run.judge(tmp_path / "a")
    assert "out_of_order" in b.codes(judgement, "probes")


def test_an_anomaly_is_listed_and_decides_nothing(tmp_path: Path) -> None:
    run = k.build()
    b.edit(k.client(run), p.ProbeAnswered, {"anomalies": ["nothing came after the reasoning"]})
    judgement = run.judge(tmp_path / "a")
    assert b.only(judgement, "anomalies").message == "served exact-answer: nothing came after the reasoning"
    assert judgement.verdict is Verdict.PASS


# --- where a question does not come up --------------------------------------------------------


def with_markers(plan: Plan, **change: object) -> Plan:
    assert plan.markers is not None
    return plan.model_copy(update={"markers": plan.markers.model_copy(update=change)})


@pytest.mark.parametrize(("known", "verdict"), [("9567,1085,10652", Verdict.PASS), ("1,2,3", Verdict.FAIL)])
def test_an_answer_that_the_plan_knows_is_compared(tmp_path: Path, known: str, verdict: Verdict) -> None:
    plan = k.plan([k.study_b_shape()], answer=known)
    judgement = k.build(the_plan=plan).judge(tmp_path / "a")
    assert b.result(judgement, "answer").verdict is verdict
    assert "answer" in judgement.required
    assert judgement.verdict is verdict


def test_an_answer_that_no_one_knows_is_not_evaluated(tmp_path: Path) -> None:
    judgement = k.build().judge(tmp_path / "a")
    assert b.result(judgement, "answer").summary == "not evaluated: the plan knows no answer"
    assert "answer" not in judgement.required


def test_a_plan_without_gates_asks_for_none_and_one_with_gates_cannot_do_without(tmp_path: Path) -> None:
    plan = k.plan([k.study_b_shape()])
    free = with_markers(plan, gates=[]).model_copy(update={"required_checks": ["integrity"]})
    run = k.build(the_plan=free)
    b.drop(k.client(run), p.GateReceipt)
    judgement = run.judge(tmp_path / "a")
    assert (b.result(judgement, "gates").verdict, judgement.verdict) == (Verdict.NOT_EXERCISED, Verdict.PASS)
    lacking = k.build(the_plan=plan.model_copy(update={"required_checks": ["integrity"]}))
    b.drop(k.client(lacking), p.GateReceipt)
    assert lacking.judge(tmp_path / "b").verdict is Verdict.UNKNOWN


def engine_route() -> b.Run:
    """The same probe, its ids handed to the engine."""
    plan = with_markers(k.plan([k.study_b_shape()]), route="engine", gates=[])
    run = k.build(the_plan=plan.model_copy(update={"required_checks": ["integrity"]}))
    asked = {"request": "exact-answer", "token_ids": k.study_b_shape().prompt, "budget": 64, "max_tokens": 512}
    asked |= {"temperature": 0.6, "top_p": 0.95, "seed": 42, "stop_token_ids": [], "ignore_eos": False}
    body = json.dumps(asked)
    change = {"address": "engine", "model": "engine", "body": body, "body_sha256": sha256_hex(body.encode())}
    b.edit(k.client(run), p.ProbeSent, change)
    none = p.ProbeUsage(prompt=None, completion=None, reasoning=None)
    b.edit(k.client(run), p.ProbeAnswered, {"usage": none, "echo": {"model": "engine", "budget": 64}})
    return run


def test_probes_that_go_to_the_engine_itself(tmp_path: Path) -> None:
    judgement = engine_route().judge(tmp_path / "a")
    assert b.result(judgement, "usage").verdict is Verdict.NOT_EXERCISED
    assert b.result(judgement, "echo").verdict is Verdict.PASS
    assert judgement.verdict is Verdict.PASS, [one for one in judgement.results if one.findings]
    other = engine_route()
    b.edit(k.client(other), p.ProbeAnswered, {"echo": {"model": "engine", "budget": 63}})
    assert b.codes(other.judge(tmp_path / "b"), "echo") == ["echo_differs"]


def test_speculation_is_planned_proposed_and_accepted(tmp_path: Path) -> None:
    plain = k.Shape("plain", [k.Step([], [token]) for token in (*k.thought(2), k.END, 5, k.STOP)], budget=2)
    judgement = k.build([plain], drafts=0).judge(tmp_path / "a")
    assert b.result(judgement, "speculation").verdict is Verdict.NOT_EXERCISED
    idle = k.build([plain])
    judgement = idle.judge(tmp_path / "b")
    assert b.only(judgement, "speculation").code == "vacuous"
    assert judgement.verdict is Verdict.UNKNOWN
    run = k.build([plain], drafts=0, the_plan=k.plan([plain], drafts=3))
    assert "wrong_speculation" in b.codes(run.judge(tmp_path / "c"), "identity")


def test_a_matrix_judged_by_this_analyzer_is_unknown(tmp_path: Path) -> None:
    archive = b.build().write(tmp_path / "a")
    judgement = judge(archive, MARKER_POST_STOP_V1)
    assert judgement.verdict is Verdict.UNKNOWN
    assert b.codes(judgement, "probes") == ["no_marker_plan"]
    assert b.codes(judgement, "trace-whole") == ["missing_trace"]
    assert not judgement.table
