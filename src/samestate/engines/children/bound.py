"""A program that ends with its driver.

``python -m samestate.engines.children.bound DRIVER_PID PROGRAM [ARGUMENT …]``
"""

from __future__ import annotations

import os
import sys

from samestate.engines.children.lifetime import end_with

if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    # What was asked of Linux above holds for the program too (prctl(2), PR_SET_PDEATHSIG: kept over execve).
    os.execvp(sys.argv[2], sys.argv[2:])
