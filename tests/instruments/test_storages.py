"""Every parameter and buffer has a digest of its values, wherever and however they lie."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("xxhash")

from samestate.evidence.records import StorageRow
from samestate.instruments.storages import digested


class Model(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 2).to(torch.bfloat16)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("empty", torch.zeros(0))


def rows(model: Model) -> dict[str, StorageRow]:
    said = digested(model, "start")
    assert (said.rank, said.digest) == (0, "xxh3-128")
    assert [row.name for row in said.rows] == sorted(row.name for row in said.rows)
    return {row.name: row for row in said.rows}


def test_names_roles_shapes_and_dtypes() -> None:
    found = rows(Model())
    assert set(found) == {"layer.weight", "layer.bias", "count", "empty"}
    weight, count = found["layer.weight"], found["count"]
    assert (weight.role, weight.shape, weight.dtype) == ("parameter", [2, 3], "torch.bfloat16")
    assert (count.role, count.shape, count.dtype) == ("buffer", [], "torch.int64")


def test_values_decide_and_nothing_else() -> None:
    one, other = Model(), Model()
    assert rows(one) == rows(other)
    with torch.no_grad():
        # The same values, transposed in memory.
        other.layer.weight = torch.nn.Parameter(other.layer.weight.t().contiguous().t())
    assert not other.layer.weight.is_contiguous()
    assert rows(one) == rows(other)
    with torch.no_grad():
        other.layer.weight[0, 0] += 1
    differing = {name for name, row in rows(other).items() if row != rows(one)[name]}
    assert differing == {"layer.weight"}
    other.count += 1
    assert rows(other)["count"] != rows(one)["count"]
