"""The guard: forced rows keep their token, no ordinary row changes a bit, unknown source is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from interpreted import Done, Interpreter
from samestate.evidence import marker_records
from samestate.evidence.marker_records import SAMPLING_GUARD, SPLIT_TOP_P
from samestate.instruments import top_p_guard
from samestate.instruments.top_p_guard import ANCHOR, GuardError, patch, register, require_known

Interpreted = Callable[[str], Done]
SOURCE = Path(top_p_guard.__file__).parents[2]


def child(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A guard stays on: a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": str(SOURCE), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def interpreted(interpreter: Interpreter) -> Interpreted:
    pytest.importorskip("triton")
    return lambda program: interpreter.run(INTERPRETED + program)


INTERPRETED = """
from samestate.instruments.interpreted import interpret
interpret()
import torch
from vllm.v1.sample.ops import topk_topp_triton as kernels
from samestate.instruments import top_p_guard

def masked(logits, top_p, splits=1):
    logits = logits.clone()
    kernels._apply_topp_split(logits, None, torch.full((len(logits),), top_p), float("-inf"), len(logits) * splits)
    return logits

def same(one, other):
    return torch.equal(one.view(torch.int32), other.view(torch.int32))
"""

PROOF = """
from hypothesis import given, settings, strategies as st

bare, source = kernels._topp_sb_mask_kernel, top_p_guard.kernel_source(kernels)
assert top_p_guard.guard().patched_sha256 == top_p_guard.AFTER
patched = kernels._topp_sb_mask_kernel
assert patched is not bare and kernels._topp_split_mask.kernel is patched

def masks(logits, top_p):
    # By both kernels, from one search for the pivot.
    kernels._topp_split_mask.kernel = bare
    before, mask, found = logits.clone(), kernels._topp_split_mask, []

    def twice(given, *rest):
        for kernel in (bare, patched):
            mask.kernel = kernel
            found.append(given.clone())
            mask(found[-1], *rest)

    kernels._topp_split_mask = twice
    kernels._apply_topp_split(before, None, torch.full((len(logits),), top_p), float("-inf"), len(logits))
    kernels._topp_split_mask = mask
    return found

numbers = st.floats(-64, 64, width=32) | st.sampled_from([0.0, 1.0, 1.0, 20.0, float("-inf"), 1e9, 1e30])
seen = {"ordinary": 0, "whole": 0}

@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(numbers, min_size=2, max_size=24), st.sampled_from([0.05, 0.5, 0.95, 0.999]))
def every_row(row, top_p):
    logits = torch.tensor([row])
    before, after = masks(logits, top_p)
    if before.isfinite().any() or not logits.isfinite().any():
        seen["ordinary"] += 1
        assert same(before, after), (row, top_p)
    else:  # masked whole: now the maximum stays, or of several the first ones, and nothing else
        seen["whole"] += 1
        kept = after.isfinite()
        assert kept.any() and (after[kept] == logits.max()).all(), (row, top_p)

every_row()
assert min(seen.values()) >= 5, seen
"""


def test_no_row_that_kept_a_token_changes_a_bit(interpreted: Interpreted) -> None:
    """The kernel as it is and as it is patched, both interpreted, on rows of any kind."""
    done = interpreted(PROOF)
    assert done.returncode == 0, done.said[-3000:]


FORCED = """
rows = torch.randn(2, 256, generator=torch.Generator().manual_seed(3)) * 3
rows[torch.arange(2), torch.tensor([7, 200])] = 1e9
for splits in (1, 2):
    for temperature in (0.6, 1.0):
        for top_p in (0.5, 0.95, 0.999):
            kept = masked(rows / temperature, top_p, splits).isfinite()
            assert kept.sum(1).tolist() == KEPT, (splits, temperature, top_p, kept.sum(1))
"""


@pytest.mark.deep
def test_a_forced_row_keeps_its_token_with_the_guard_and_nothing_without(interpreted: Interpreted) -> None:
    """Rows that are masked whole are among those of the test before it, which is not deep."""
    done = interpreted("KEPT = [0] * 2" + FORCED + "top_p_guard.guard(); KEPT = [1] * 2" + FORCED)
    assert done.returncode == 0, done.said[-3000:]


REFUSALS = """
from samestate.instruments.top_p_guard import GuardError, guard

def refused(line):
    try:
        guard()
    except GuardError as error:
        assert line in str(error), error
    else:
        raise AssertionError("was not refused")

kernel = kernels._topp_sb_mask_kernel
kernels._topp_sb_mask_kernel = kernels._topp_sb_step_kernel
refused("has unknown source (sha256 ")
kernels._topp_sb_mask_kernel = kernel.fn
refused("is no Triton kernel here")
del kernels._topp_sb_mask_kernel
refused("has no _topp_sb_mask_kernel; this release of vLLM is not known")
kernels._topp_sb_mask_kernel = kernel
top_p_guard.AFTER = "0" * 64
refused("the patched source is not the pinned one")
assert kernels._topp_sb_mask_kernel is kernel
found = top_p_guard.FAULTY.popitem()
top_p_guard.MENDED = dict([found])
assert guard().patched_sha256 is None
assert kernels._topp_sb_mask_kernel is kernel
top_p_guard.MENDED, top_p_guard.FAULTY, top_p_guard.AFTER = {}, dict([found]), AFTER
guard()
refused("has unknown source")
"""


def test_a_source_that_is_not_known_is_refused_and_nothing_is_replaced(interpreted: Interpreted) -> None:
    done = interpreted(f"AFTER = {top_p_guard.AFTER!r}" + REFUSALS)
    assert done.returncode == 0, done.said[-3000:]


@pytest.mark.parametrize("source", ["", ANCHOR * 2])
def test_the_line_must_be_there_once(source: str) -> None:
    with pytest.raises(GuardError, match=r"is there \d times, not once"):
        patch(source)


def test_a_guard_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GuardError, match="guard 'other': unknown; use split-top-p"):
        require_known("other")
    monkeypatch.setenv(SAMPLING_GUARD, "other")
    with pytest.raises(GuardError, match="unknown; use split-top-p"):
        register()


PLUGIN = """
import sys
from samestate.instruments.top_p_guard import register
register()
register()
assert "vllm.utils.cpu_triton_utils" not in sys.modules, "the plugin imported what it waits for"
from vllm.platforms import current_platform
current_platform.register_triton_kernel_overrides()
import torch
from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens
junk = [torch.full((3,), 7.0) for _ in range(16)]
del junk
print(expand_batch_to_tokens(torch.tensor([0.5]), torch.tensor([3], dtype=torch.int32), 3, 0, 1).tolist())
"""


@pytest.mark.deep
@pytest.mark.parametrize(("asked", "right"), [(SPLIT_TOP_P, True), ("", False)])
def test_the_entry_point_mends_vllm_on_a_cpu_where_it_is_asked_to(asked: str, right: bool) -> None:
    """As shipped, drafted rows get a temperature that nobody wrote."""
    done = child(PLUGIN, **{SAMPLING_GUARD: asked})
    assert done.returncode == 0, done.stderr[-3000:]
    assert (done.stdout.strip().splitlines()[-1] == "[0.5, 0.5, 0.5]") is right


def test_the_entry_point_is_declared() -> None:
    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["project"]
    name = project["entry-points"]["vllm.general_plugins"]["samestate_top_p_guard"]
    assert name == f"{register.__module__}:{register.__name__}"
    assert marker_records.SAMPLING_GUARD == "SAMESTATE_SAMPLING_GUARD"


EXPANDED = """
import torch
from hypothesis import given, settings, strategies as st
import vllm._custom_ops
from vllm.utils import cpu_triton_utils as vllm
from samestate.instruments import expand_repair
from samestate.instruments.top_p_guard import GuardError

original = vllm._expand_kernel_impl
assert expand_repair.repair().before.source_sha256 in expand_repair.FAULTY
assert vllm._expand_kernel_impl is expand_repair.expand

@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), min_size=1), st.integers(0, 2), st.integers(0, 2))
def as_vllm_does_where_the_type_is_int64(requests, old, new):
    values = torch.tensor([value for value, _ in requests])
    ends = torch.tensor([count for _, count in requests]).cumsum(0)
    own, theirs = (torch.full((int(ends[-1]),), 9) for _ in range(2))
    expand_repair.expand(own, values, ends, old, new)
    original(theirs, values, ends, old, new)
    assert torch.equal(own, theirs)
    in_float = torch.empty(len(own))
    expand_repair.expand(in_float, values.float(), ends.int(), old, new)
    assert torch.equal(in_float, own.float())

as_vllm_does_where_the_type_is_int64()

def refused(line):
    try:
        expand_repair.repair()
    except GuardError as error:
        assert line in str(error), error
    else:
        raise AssertionError("was not refused")

refused("was replaced already")
vllm._expand_kernel_impl = lambda *args: None
refused("has unknown source")
del vllm._expand_kernel_impl
refused("has unknown source")
"""


@pytest.mark.deep
def test_the_repair_for_cpus_is_what_vllm_does_with_int64() -> None:
    done = child(EXPANDED)
    assert done.returncode == 0, done.stderr[-3000:]
