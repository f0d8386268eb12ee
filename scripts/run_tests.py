"""`make test`: the tests without an engine and those with one, side by side.

An engine computes on one core and the other tests start many processes, so that two cores do both in less time than one
after the other. Those without an engine speak as they go; what the engines' say comes after them. Exit code: 0 where
both runs pass, else the first that is not 0.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

PYTEST = (sys.executable, "-m", "pytest")
NOT_HERE = "not lmcache and not soak and not deep"
SPREAD = ("-n", "auto", "--maxprocesses", "4", "--dist", "loadfile", "--durations", "25")
WITHOUT_ENGINE = (*SPREAD, "-m", f"not vllm and {NOT_HERE}")
WITH_ENGINE = ("-o", "cache_dir=.pytest_cache/engines", "-m", f"vllm and {NOT_HERE}")
SECONDS = 30


def side_by_side(spoken: Sequence[str], kept: Sequence[str]) -> int:
    """Run two commands at once and print what the second said after the first; neither outlives the caller."""
    with (
        tempfile.TemporaryFile("w+", errors="replace") as log,
        subprocess.Popen(kept, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT) as second,
    ):
        try:
            first = subprocess.run(spoken, check=False).returncode
            if second.poll() is None:
                print("\nthe tests on real engines still run", flush=True)
            second.wait()
        finally:
            if second.poll() is None:
                stop(second)
            log.seek(0)
            print(log.read(), flush=True)
    return first or second.returncode


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end, as the keyboard does, so that fixtures close their engines; kill it where it does not."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


if __name__ == "__main__":
    sys.exit(side_by_side((*PYTEST, *WITHOUT_ENGINE), (*PYTEST, *WITH_ENGINE)))
