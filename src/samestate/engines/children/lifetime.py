"""A child process ends with the driver that started it, even when that is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

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
