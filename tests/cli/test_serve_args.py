"""``samestate serve-args``: what it says beside a line for a CPU, and only there."""

from __future__ import annotations

from functools import partial

import pytest
from click.testing import CliRunner

from samestate.cli import commands
from samestate.lab.serve_line import serve_line

NOTE = "does not start where less is free"


@pytest.mark.parametrize(
    ("platform", "own", "said"),
    [
        ("cpu", "", True),
        ("cpu", "--max-model-len 8192", True),
        ("cpu", "--kv-cache-memory-bytes 1073741824", False),
        ("cpu", "--gpu_memory_utilization=0.5", False),
        ("cuda", "", False),
    ],
)
def test_how_much_memory_a_cpu_gives_is_to_be_said(
    platform: str, own: str, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own default is nearly all of it, and our memory tier lies in the same memory."""
    monkeypatch.setattr("samestate.cli.serve_args.serve_line", partial(serve_line, release=lambda: None))
    done = CliRunner().invoke(
        commands.samestate, ["serve-args", "qwen3-next-80b-a3b", "--platform", platform, "--serve-args", own]
    )
    assert done.exit_code in (0, 1, 3), done.output
    assert (NOTE in done.stderr) is said
    assert NOTE not in done.stdout
