"""A fault acts on the source it was written for, or not at all."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from samestate.faults.catalogue import FAULTS
from samestate.instruments import faults


def test_an_unknown_fault_is_refused_by_name() -> None:
    with pytest.raises(faults.FaultError, match=r"'no-such': not available on vLLM; use one of full-lookup"):
        faults.arm_fault("no-such", object(), KVConnectorRole.SCHEDULER)


def test_a_connector_that_it_does_not_fit_is_refused() -> None:
    with pytest.raises(faults.FaultError, match="needs an OffloadingConnector inside, not object"):
        faults.arm_fault("full-lookup", object(), KVConnectorRole.SCHEDULER)


def test_unknown_source_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "source_sha256", lambda function: "0" * 64)
    inner = object.__new__(faults.OffloadingConnector)
    with pytest.raises(faults.FaultError, match=r"unknown source of _lookup_complete_chunks, sha256 0{64}"):
        faults.arm_fault("full-lookup", inner, KVConnectorRole.SCHEDULER)


def test_every_fault_names_its_public_reports_and_its_check() -> None:
    for name, fault in FAULTS.items():
        assert fault.name == name
        assert fault.reports
        assert fault.check
        assert fault.code
