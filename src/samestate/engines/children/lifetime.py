"""A child process ends with the driver that started it, even when that is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""


def end_with(driver: int) -> None:
    """Have Linux kill this process when the process `driver`, its parent, is gone, even by SIGKILL.

    On other systems nothing is done: there a killed driver leaves its children.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != driver:
        sys.exit("the driver is gone")


def end_session_with(pipe: int) -> None:
    """Kill this process's whole group when the driver's end of the pipe `pipe` is closed, even by SIGKILL.

    For a process that starts others, which outlive it otherwise. The driver must be the only one to hold that end.
    """

    def wait() -> None:
        while os.read(pipe, 1):
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait, name="driver-watch", daemon=True).start()
