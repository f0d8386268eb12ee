"""Every fault is known by name, has a public precedent and names what must find it."""

from __future__ import annotations

import re

from samestate.faults.catalogue import FAULTS


def test_every_fault_names_its_public_reports_its_check_and_its_finding() -> None:
    for name, fault in FAULTS.items():
        assert fault.name == name
        assert re.fullmatch(r"[a-z]+(-[a-z]+)+", name)
        assert fault.summary
        assert fault.reports
        assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", report) for report in fault.reports), fault.reports
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", fault.check)
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", fault.code)
