from __future__ import annotations

import threading
import time
from io import StringIO

import pytest
from rich.console import Console

from samestate.cli.progress import BarProgress, LineProgress


def until(capsys: pytest.CaptureFixture[str], word: str) -> str:
    """What stderr had said when it said `word`; pytest's own limit ends what never comes."""
    heard = ""
    while word not in heard:
        heard += capsys.readouterr().err
        time.sleep(0.001)
    return heard


def test_while_an_engine_starts_it_says_so_again_and_again(capsys: pytest.CaptureFixture[str]) -> None:
    before = set(threading.enumerate())
    with LineProgress(still=0.001) as shown:
        shown.stage("control: start")
        heard = until(capsys, "starting engine, 0 s\n")
        assert heard.splitlines()[0].endswith(" s  control: starting engine")
        shown.stage("control: operations")
        until(capsys, "control: operations\n")
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)
    capsys.readouterr()
    shown.operation("control", 1, 5, "N1.cold")
    assert capsys.readouterr().err.endswith("  control: N1 (1 of 5 operations)\n")


def test_nothing_goes_on_after_it_was_left(capsys: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    with LineProgress(still=60.0) as shown:
        shown.stage("candidate: start")
        assert threading.active_count() == before + 1
    while threading.active_count() > before:
        time.sleep(0.001)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_bar_says_it_too() -> None:
    file = StringIO()
    with BarProgress(Console(file=file, force_terminal=True, width=100)) as shown:
        shown.stage("control: start")
        shown._bar.refresh()
    assert "control: starting engine" in file.getvalue()
