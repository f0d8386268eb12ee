"""Whether vLLM's own parser takes serve arguments: `samestate.engines.inquiry.read_arguments`. No engine is started.

``python -m samestate.engines.children.arguments_child DRIVER_PID QUESTION REPLY``, two JSON files. Output is the log.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from samestate.engines.children.environment import DEFAULTS, FIXED

os.environ.update({**DEFAULTS, **os.environ, **FIXED})

from samestate.engines.children.arguments import BadArguments, engine_arguments, server_arguments
from samestate.engines.children.lifetime import end_with
from samestate.engines.inquiry import Arguments, Reading


def read(asked: Arguments) -> Reading:
    """Whether they would be read."""
    try:
        (server_arguments if asked.server else engine_arguments)(asked.model, asked.serve_args)
    except BadArguments as error:
        return Reading(str(error))
    return Reading(None)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    question = msgspec.json.decode(Path(sys.argv[2]).read_bytes(), type=Arguments)
    Path(sys.argv[3]).write_bytes(msgspec.json.encode(read(question)))
