"""A fault acts on the source it was written for, or not at all; what it patched comes back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, GPULoadStoreSpec

from samestate.faults.catalogue import FAULTS
from samestate.instruments import faults
from samestate.instruments.live_faults import LIVE_FAULTS, Armoury
from samestate.instruments.page_faults import GroupOrder, orders, specs


class Tier(BlockIDsLoadStoreSpec):
    @staticmethod
    def medium() -> str:
        return "CPU"


def test_every_fault_of_the_catalogue_can_be_armed_on_vllm() -> None:
    assert set(FAULTS) == set(LIVE_FAULTS)


def test_an_unknown_fault_is_refused_by_name() -> None:
    for arm in (Armoury().arm, Armoury().arm_at_start):
        with pytest.raises(faults.FaultError, match=r"'no-such': not available on vLLM; use one of early-complete, "):
            arm("no-such")


def test_a_connector_that_it_does_not_fit_is_refused() -> None:
    armoury = Armoury()
    armoury.offer(object(), KVConnectorRole.SCHEDULER, None)
    armoury.arm_at_start("full-lookup")
    with pytest.raises(faults.FaultError, match="needs an OffloadingConnector inside, not object"):
        armoury.offer(object(), KVConnectorRole.SCHEDULER, None)


def test_a_fault_whose_connector_is_in_another_process_is_refused() -> None:
    armoury = Armoury()
    armoury.offer(object.__new__(OffloadingConnector), KVConnectorRole.SCHEDULER, None)
    with pytest.raises(faults.FaultError, match="'zero-page': no audited worker connector in this process"):
        armoury.arm("zero-page")


def test_unknown_source_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "source_sha256", lambda function: "0" * 64)
    armoury = Armoury()
    armoury.offer(object.__new__(OffloadingConnector), KVConnectorRole.SCHEDULER, None)
    with pytest.raises(faults.FaultError, match=r"unknown source of _lookup_complete_chunks, sha256 0{64}"):
        armoury.arm("full-lookup")


def test_patches_end_together_and_leave_no_trace() -> None:
    class Owner:
        def inherited(self) -> str:
            return "class"

    owner = Owner()
    owner.own = "object"  # type: ignore[attr-defined]
    undo = faults.Undo()
    for name in ("inherited", "own", "own"):
        undo.patch(owner, name, SimpleNamespace())
    undo.close()
    assert owner.inherited() == "class"
    assert vars(owner) == {"own": "object"}


@pytest.mark.parametrize("blocks_per_row", [1, 4])
def test_orders_and_specs_are_inverse(blocks_per_row: int) -> None:
    """Rows hold one block or four."""
    rows = {1: [5, 6, 7, 8, 9], 4: [5, 6]}[blocks_per_row]
    device = GPULoadStoreSpec([3, 1, 2, 4, 8], group_sizes=[1, 0, 4], block_indices=[0, 0, 4])
    given = orders(device, Tier(rows), blocks_per_row)
    assert given[1] == GroupOrder(0, [], [])
    assert given[2] == GroupOrder(4, [1, 2, 4, 8], rows[1:])
    again, tier = specs(given, Tier)
    assert again.block_ids.tolist() == [3, 1, 2, 4, 8]
    assert (again.group_sizes, again.block_indices) == ([1, 0, 4], [0, 0, 4])
    assert tier.block_ids.tolist() == rows
