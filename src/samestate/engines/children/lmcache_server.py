"""LMCache's multiprocess server as a child process that takes no abbreviated options and ends with its driver.

``python -m samestate.engines.children.lmcache_server DRIVER_PID [OPTION …]``: the options of ``lmcache server``.
Standard output and error are the server's log.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from samestate.engines.children.lifetime import end_with


def whole_names_only() -> None:
    """Make ``--chunk`` no longer stand for ``--chunk-size``: what is misspelt must not pass."""
    made = argparse.ArgumentParser.__init__

    def strict(parser: argparse.ArgumentParser, *args: Any, **options: Any) -> None:
        made(parser, *args, **(options | {"allow_abbrev": False}))

    argparse.ArgumentParser.__init__ = strict  # type: ignore[method-assign, assignment]


def main() -> None:
    end_with(int(sys.argv[1]))
    whole_names_only()
    from lmcache.cli.main import main as lmcache

    sys.argv = ["lmcache", "server", *sys.argv[2:]]
    lmcache()


if __name__ == "__main__":
    main()
