"""The worker's own copy speed: measured where it is asked for, of whole copies; nothing is told where it cannot be."""

from __future__ import annotations

from unittest.mock import patch

import pytest

torch = pytest.importorskip("torch")
from samestate.evidence.latency_records import MEASURE_COPIES
from samestate.instruments import copy_speed

CACHES = {"attention": torch.zeros(4, dtype=torch.int8), "recurrent": [torch.zeros(4), torch.zeros(2)]}
ASKED = {MEASURE_COPIES: "1"}


def test_every_copy_is_timed_and_no_cache_is_touched() -> None:
    with patch.object(copy_speed, "BYTES", 1 << 20):
        rec = copy_speed.asked(3, CACHES, ASKED)
    assert rec is not None
    assert (rec.rank, rec.route, rec.device, rec.bytes) == (3, "host-to-host", "cpu", 1 << 20)
    assert len(rec.took_ns) == copy_speed.COPIES
    assert not CACHES["attention"].any()


def test_the_bytes_really_arrive() -> None:
    source, target = torch.ones(copy_speed.BYTES, dtype=torch.uint8), torch.zeros(copy_speed.BYTES, dtype=torch.uint8)
    copy_speed.on_host(source, target)()
    assert bool(target.all())


def test_first_of_a_list_of_tensors_says_the_device() -> None:
    with patch.object(copy_speed, "BYTES", 1 << 10):
        assert copy_speed.asked(0, {"recurrent": CACHES["recurrent"]}, ASKED) is not None


def test_a_device_that_cannot_be_waited_for_is_not_measured() -> None:
    assert copy_speed.asked(0, {"attention": torch.zeros(4, device="meta")}, ASKED) is None


def test_nobody_asked() -> None:
    assert copy_speed.asked(0, CACHES, {}) is None


def test_without_memory_nothing_is_told() -> None:
    with patch.object(copy_speed, "measured", side_effect=RuntimeError("out of memory")):
        assert copy_speed.asked(0, CACHES, ASKED) is None


def test_onto_a_device_the_clock_runs_until_the_bytes_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy itself is asynchronous there, so that without the wait nothing would be measured."""
    waited: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    source, target = torch.ones(1000, dtype=torch.uint8), torch.zeros(1000, dtype=torch.uint8)
    copy_speed.onto_device(source, target)()
    assert bool(target.all())
    assert waited == [target.device]
