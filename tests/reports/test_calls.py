"""Captured calls side by side: the first differing argument, a defect from equal inputs alone, one run alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from checks import builder as b
from samestate.checks.history import ArmHistory, History
from samestate.evidence import records as r
from samestate.evidence.archive import Archive
from samestate.reports.calls import Compared, compare_calls

MODULE = "model.layers.3.self_attn"
OP = "N32.cold"


def argument(name: str, value: str = "1", written: bool = False) -> r.Argument:
    return r.Argument(name=name, value=f"bfloat16 {value * 32}", shape=[16, 8], written=written)


def call(at_ns: int, number: int, **change: Any) -> r.CallCaptured:
    one = r.CallCaptured(
        rank=0,
        module=MODULE,
        call=number,
        at_ns=at_ns,
        inputs=[argument("hidden_states"), argument("positions"), argument("output", "9", written=True)],
        outputs=[argument("output (after)", "2")],
    )
    return msgspec.structs.replace(one, **change)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Archive:
    return b.build().write(tmp_path_factory.mktemp("calls") / "plain")


def arms(history: History, change: dict[str, Any] | None = None, at: int = 1) -> tuple[ArmHistory, ArmHistory]:
    """Both arms with a call in every step of the operation; the candidate's call number `at` is changed."""
    for name in ("control", "candidate"):
        arm = history.arm(name)
        begin = next(seen for seen in arm.started if seen.rec.op == OP)
        steps = len(arm.schedule(OP) or ())
        arm.calls = [
            begin._replace(
                rec=call(begin.t_ns, n, **(change or {} if name == "candidate" and n == at else {})), n=1000 + n
            )
            for n in range(steps)
        ]
    return history.arm("control"), history.arm("candidate")


def compared(archive: Archive, change: dict[str, Any] | None = None, **options: Any) -> Compared:
    control, candidate = arms(History.read(archive), change)
    return compare_calls(options.get("module", MODULE), control, OP, candidate, OP, options.get("rank", 0))


def test_equal_calls(plain: Archive) -> None:
    found = compared(plain, module="self_attn")
    assert found.outcome == "equal" and found.calls > 2


def test_the_first_differing_input_is_named_and_blames_nobody(plain: Archive) -> None:
    changed = [argument("hidden_states"), argument("positions", "7"), argument("output", "8", written=True)]
    found = compared(plain, {"inputs": changed, "outputs": [argument("output (after)", "3")]})
    assert found.outcome == "inputs_differ"
    assert "input positions differs already (1 others agree): no defect is shown" in found.message
    assert found.calls == 2 and len(found.evidence) == 2


def test_an_input_that_is_written_in_place_alone_blames_nobody_either(plain: Archive) -> None:
    changed = [argument("hidden_states"), argument("positions"), argument("output", "8", written=True)]
    found = compared(plain, {"inputs": changed, "outputs": [argument("output (after)", "3")]})
    assert found.outcome == "inputs_differ"
    assert "input output differs already (2 others agree), written in place" in found.message


def test_equal_inputs_and_another_output_show_a_defect(plain: Archive) -> None:
    found = compared(plain, {"outputs": [argument("output (after)", "3")]})
    assert found.outcome == "same_inputs_other_outputs"
    assert "all 3 inputs agree and output (after) differs" in found.message


def test_a_shape_is_part_of_an_argument(plain: Archive) -> None:
    other = msgspec.structs.replace(argument("hidden_states"), shape=[8, 16])
    changed = [other, argument("positions"), argument("output", "9", written=True)]
    assert compared(plain, {"inputs": changed}).outcome == "inputs_differ"


def test_probes_of_two_runs_are_not_joined(plain: Archive, tmp_path: Path) -> None:
    borrowed = b.imported(b.build(arms=("candidate",)), control=plain).write(tmp_path / "borrowed")
    found = compared(borrowed)
    assert found.outcome == "not_compared"
    assert "recorded in another run: probes of two runs are not joined" in found.message


@pytest.mark.parametrize(
    ("options", "word"), [({"rank": 1}, "0 calls were captured in"), ({"module": "mlp"}, "0 calls were captured in")]
)
def test_what_was_not_captured_is_not_compared(plain: Archive, options: dict[str, Any], word: str) -> None:
    found = compared(plain, **options)
    assert found.outcome == "not_compared" and word in found.message


def test_a_call_too_few_is_not_compared(plain: Archive) -> None:
    control, candidate = arms(History.read(plain))
    del candidate.calls[0]
    assert compare_calls(MODULE, control, OP, candidate, OP).outcome == "not_compared"
    assert compare_calls(MODULE, control, OP, candidate, "none.such").outcome == "not_compared"


def test_without_an_input_no_defect_is_shown(plain: Archive) -> None:
    """Nought of nought inputs agree: that is no evidence that the module was given the same."""
    history = History.read(plain)
    control, candidate = arms(history)
    for arm in (control, candidate):
        arm.calls = [
            seen._replace(rec=msgspec.structs.replace(seen.rec, inputs=[], outputs=[argument("output", arm.name[1])]))
            for seen in arm.calls
        ]
    found = compare_calls(MODULE, control, OP, candidate, OP)
    assert found.outcome == "not_compared" and "no input was captured: no defect is shown" in found.message


def test_an_input_that_was_not_captured_shows_no_defect(plain: Archive) -> None:
    history = History.read(plain)
    control, candidate = arms(history, {"outputs": [argument("output (after)", "3")]})
    opaque = r.Argument(name="metadata", value="<AttentionMetadata>", shape=None, written=False)
    for arm in (control, candidate):
        arm.calls = [
            seen._replace(rec=msgspec.structs.replace(seen.rec, inputs=[*seen.rec.inputs, opaque]))
            for seen in arm.calls
        ]
    found = compare_calls(MODULE, control, OP, candidate, OP)
    assert found.outcome == "not_compared"
    assert "what input metadata holds was not captured: no defect is shown" in found.message


def test_without_an_output_nothing_is_equal(plain: Archive) -> None:
    history = History.read(plain)
    control, candidate = arms(history)
    for arm in (control, candidate):
        arm.calls = [seen._replace(rec=msgspec.structs.replace(seen.rec, outputs=[])) for seen in arm.calls]
    assert compare_calls(MODULE, control, OP, candidate, OP).outcome == "not_compared"


def test_an_operation_against_itself_is_not_compared(plain: Archive) -> None:
    control, _ = arms(History.read(plain))
    assert "named twice" in compare_calls(MODULE, control, OP, control, OP).message
