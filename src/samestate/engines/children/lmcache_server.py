"""LMCache's multiprocess server as a child process that takes no abbreviated options and ends with its driver.

``python -m samestate.engines.children.lmcache_server DRIVER_PID [OPTION …]``: the options of ``lmcache server``.
Standard output and error are the server's log.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
from typing import Any

PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""


def whole_names_only() -> None:
    """Make ``--chunk`` no longer stand for ``--chunk-size``: what is misspelt must not pass."""
    made = argparse.ArgumentParser.__init__

    def strict(parser: argparse.ArgumentParser, *args: Any, **options: Any) -> None:
        made(parser, *args, **(options | {"allow_abbrev": False}))

    argparse.ArgumentParser.__init__ = strict  # type: ignore[method-assign, assignment]


def end_with(driver: int) -> None:
    """Have Linux kill this process when the process that started it is gone, even by SIGKILL."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != driver:
        sys.exit("the driver is gone")


def main() -> None:
    end_with(int(sys.argv[1]))
    whole_names_only()
    from lmcache.cli.main import main as lmcache

    sys.argv = ["lmcache", "server", *sys.argv[2:]]
    lmcache()


if __name__ == "__main__":
    main()
