"""The repair of the indexer's order: sorts before the pinned function, and refuses whatever else it meets."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")

from samestate.evidence.controls import STABLE_TOPK
from samestate.evidence.records import InterventionApplied
from samestate.instruments import budget_plugin, interventions, topk_repair
from samestate.instruments.topk_repair import FUNCTION, POOLS_MODULE, TopkRepairError


def expand_pools_and_append_tail(pool_ids: Any, seq_lens: Any, pool_size: int) -> Any:
    """As vLLM's: every pool becomes its tokens, in the order given; -1 stays."""
    tokens = pool_ids[..., None] * pool_size + torch.arange(pool_size)
    return torch.where(pool_ids[..., None] >= 0, tokens, -1).flatten(1), seq_lens


class SparseAttnIndexerKpool(torch.nn.Module):  # type: ignore[misc]
    """Calls the function as vLLM's layer does, as an attribute of its module."""

    def forward(self, pool_ids: Any) -> Any:
        return getattr(sys.modules[POOLS_MODULE], FUNCTION)(pool_ids, torch.tensor([6]), pool_size=2)[0]


class Glm(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.indexer = SparseAttnIndexerKpool()


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module in the place of vLLM's, whose function's source is the pinned one."""
    module = ModuleType(POOLS_MODULE)
    parts = POOLS_MODULE.split(".")
    for end in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    monkeypatch.setitem(sys.modules, POOLS_MODULE, module)
    # A stand-in of its own: the test module holds the function above by name.
    module.__dict__[FUNCTION] = copied()
    digest = hashlib.sha256(inspect.getsource(expand_pools_and_append_tail).encode()).hexdigest()
    monkeypatch.setattr(topk_repair, "KNOWN", {digest: "0.33.0"})
    monkeypatch.setattr(topk_repair, "_done", None)
    yield module


def copied() -> Any:
    function = expand_pools_and_append_tail
    return FunctionType(function.__code__, function.__globals__, FUNCTION, function.__defaults__)


def refused(call: Any, *args: Any) -> str:
    with pytest.raises(TopkRepairError) as raised:
        call(*args)
    assert "\n" not in str(raised.value) and str(raised.value).startswith("repair 'stable-topk': ")
    return str(raised.value)


def test_one_set_of_pools_gives_one_order_and_loses_none(pools: ModuleType) -> None:
    ids, others = torch.tensor([[3, -1, 0, 7], [2, 5, -1, -1]]), torch.tensor([[7, 0, 3, -1], [-1, 5, -1, 2]])
    model = Glm()
    before = model.indexer(ids)
    assert not torch.equal(before, model.indexer(others))
    replaced = topk_repair.repair()
    assert (replaced.module, replaced.qualname) == (POOLS_MODULE, FUNCTION)
    assert replaced.source_sha256 in topk_repair.KNOWN
    after = model.indexer(ids)
    assert torch.equal(after, model.indexer(others))
    assert torch.equal(after.sort(-1).values, before.sort(-1).values)
    assert after[0].tolist() == [14, 15, 6, 7, 0, 1, -1, -1]
    assert topk_repair.in_force(model, 1) == InterventionApplied(name=STABLE_TOPK, functions=[replaced], rank=1)


def test_unknown_source_is_refused_and_left(pools: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk_repair, "KNOWN", {"0" * 64: "0.33.0"})
    before = getattr(pools, FUNCTION)
    assert "unknown source" in refused(topk_repair.repair)
    assert getattr(pools, FUNCTION) is before
    assert "was not put on" in refused(topk_repair.in_force, Glm(), 0)


def test_a_second_application_is_refused(pools: ModuleType) -> None:
    topk_repair.repair()
    assert "replaced already" in refused(topk_repair.repair)


def test_a_release_without_the_function_is_refused(pools: ModuleType) -> None:
    delattr(pools, FUNCTION)
    assert f"no function {FUNCTION}" in refused(topk_repair.repair)


def test_another_model_is_refused(pools: ModuleType) -> None:
    topk_repair.repair()
    assert "Linear has no SparseAttnIndexerKpool" in refused(topk_repair.in_force, torch.nn.Linear(1, 1), 0)


def test_a_module_that_holds_the_function_by_name_is_refused(
    pools: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = ModuleType("vllm.some_caller")
    caller.__dict__[FUNCTION] = getattr(pools, FUNCTION)
    monkeypatch.setitem(sys.modules, "vllm.some_caller", caller)
    topk_repair.repair()
    assert "vllm.some_caller holds" in refused(topk_repair.in_force, Glm(), 0)


def test_the_plugin_puts_it_on_where_the_environment_asks(pools: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[InterventionApplied] = []
    monkeypatch.setattr(interventions, "_applied", told)
    monkeypatch.setattr(budget_plugin, "_registered", False)
    monkeypatch.setenv("SAMESTATE_VLLM_REPAIRS", "")
    budget_plugin.register()
    assert not hasattr(getattr(pools, FUNCTION), "__wrapped__") and not told
    monkeypatch.setenv("SAMESTATE_VLLM_REPAIRS", STABLE_TOPK)
    budget_plugin.register()
    assert hasattr(getattr(pools, FUNCTION), "__wrapped__")
    assert [one.name for one in told] == [STABLE_TOPK]

    class Worker:
        class model_runner:
            @staticmethod
            def get_model() -> Any:
                return Glm()

    answer = msgspec.json.decode(topk_repair.in_force_in_worker(Worker()), type=InterventionApplied)
    assert (answer.rank, answer.functions) == (0, told[0].functions)
