"""How long a look-up in the family index takes, and what a family weighs, from a thousand to ten million families.

    python benchmarks/family_index.py [--most 10000000] [--policy lru|value] [--json FILE]

Families lie as an engine leaves them: prompts of `DEPTH` boundaries, a shared beginning, state at the end of each.
Bytes are what the process grew by; a family's own name, 32 bytes, is among them. Times are medians of `ROUNDS` rounds
of `LOOKUPS` look-ups, hits and misses in turn, in random order. Beside them, in turns and for the same names, stands
what two bare dictionaries of those names take: one is asked whether a name is there, the other also for a field of the
object that it has for it. What grows with the index and not with them, is the index's own; ratios are medians of the
rounds'. ``hot`` asks for the same `HOT` names, and as many that are not there, over and over, so that only the index
itself could take longer. A collection is Python's, over everything: the interpreter makes one each time the index has
grown by a quarter.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

from samestate.cache.family_index import Family, FamilyIndex

DEPTH = 8
"""Boundaries of a prompt; half of them are shared with the prompt before it."""
LOOKUPS = 20_000
HOT = 500
ROUNDS = 15
ROW_BYTES = 917_504
Ask: TypeAlias = Callable[[Family], object]
PAGES, STATES = (3,), (0, 1, 2)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def fill(index: FamilyIndex, names: list[Family], goal: int) -> None:
    """Prompt after prompt until there are `goal` families, named in `names`. Pages are held while they are written."""
    rng = random.Random(len(names))
    chain: list[Family] = []
    while len(names) < goal:
        chain = [] if rng.random() < 0.1 else chain[: DEPTH // 2]
        fresh: list[Family] = []
        while len(chain) < DEPTH and len(names) < goal:
            family = Family(rng.randbytes(32))
            parent, end = (chain[-1] if chain else None), 1792 * (len(chain) + 1)
            chain.append(family)
            fresh.append(family)
            names.append(family)
            for group in PAGES:
                index.add(family, group, ROW_BYTES, parent=parent, end=end, hold=True)
        for group in STATES:
            index.add(chain[-1], group, ROW_BYTES)
        for family in fresh:
            for _ in PAGES:
                index.release(family)


class Boxed:
    """What the second dictionary has for a name."""

    __slots__ = ("there",)

    def __init__(self) -> None:
        self.there = True


def boxed(names: list[Family]) -> Ask:
    """A dictionary access and one of an object."""
    boxes = {name: Boxed() for name in names}

    def ask(name: Family) -> bool:
        box = boxes.get(name)
        return box is not None and box.there

    return ask


def timed(asks: dict[str, Ask], names: list[Family], hot: int | None = None) -> list[dict[str, float]]:
    """Microseconds per look-up, round by round; `hot`: of so many names, and so many others, over and over."""
    rounds = []
    for number in range(ROUNDS):
        rng = random.Random(number)
        seconds = {}
        for who in rng.sample(sorted(asks), len(asks)):
            asked = [
                rng.choice(names) if i % 2 else Family(rng.randbytes(32)) for i in range(2 * hot if hot else LOOKUPS)
            ]
            if hot:
                asked *= LOOKUPS // len(asked)
            ask = asks[who]
            began = time.perf_counter()
            for family in asked:
                ask(family)
            seconds[who] = (time.perf_counter() - began) / LOOKUPS * 1e6
        rounds.append(seconds)
    return rounds


def middle(rounds: list[dict[str, float]], who: str, over: str | None = None) -> float:
    return statistics.median(one[who] / (one[over] if over else 1.0) for one in rounds)


def evicted(index: FamilyIndex, families: int) -> float:
    """Microseconds to make room for one row, `families` times."""
    began = time.perf_counter()
    for _ in range(families):
        index.evict(ROW_BYTES)
    return (time.perf_counter() - began) / families * 1e6


def machine() -> dict[str, object]:
    """What the figures were seen on."""
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": model.partition(":")[2].strip() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "samestate": metadata.version("samestate"),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--most", type=int, default=10**7)
    arguments.add_argument("--policy", choices=["lru", "value"], default="lru")
    arguments.add_argument("--json", type=Path)
    chosen = arguments.parse_args()
    index, names = FamilyIndex(PAGES, STATES, chosen.policy), []
    gc.collect()
    seen_on = machine()
    before, rows, goal = resident(), [], 1000
    heads = (
        "families",
        "us/look-up",
        "us/hot",
        "us/dict",
        "us/dict+object",
        "over dict",
        "over d+o",
        "us/add",
        "us/eviction",
        "bytes/family",
        "s/collection",
        "orphans",
    )
    print(" ".join(f"{head:>14}" for head in heads))
    while goal <= chosen.most:
        had = len(names)
        gc.disable()
        began = time.perf_counter()
        fill(index, names, goal)
        adding = (time.perf_counter() - began) / (goal - had) * 1e6
        gc.enable()
        began = time.perf_counter()
        gc.collect()
        collecting = time.perf_counter() - began
        weight = (resident() - before - 8 * len(names)) / len(names)
        asks: dict[str, Ask] = {
            "index": index.is_restorable,
            "dictionary": dict.fromkeys(names).__contains__,
            "boxed": boxed(names),
        }
        rounds = timed(asks, names)
        hot = middle(timed({"index": index.is_restorable}, names, HOT), "index")
        del asks
        going = evicted(index, 100)
        rows.append(
            {
                "families": goal,
                "us_per_lookup": middle(rounds, "index"),
                "us_per_hot_lookup": hot,
                "us_per_dictionary_lookup": middle(rounds, "dictionary"),
                "us_per_boxed_lookup": middle(rounds, "boxed"),
                "over_dictionary": middle(rounds, "index", "dictionary"),
                "over_boxed": middle(rounds, "index", "boxed"),
                "rounds": rounds,
                "us_per_add": adding,
                "us_per_eviction": going,
                "bytes_per_family": weight,
                "seconds_per_collection": collecting,
                "orphan_bytes": index.orphan_bytes,
            }
        )
        said = (
            f"{goal:,}",
            f"{middle(rounds, 'index'):.3f}",
            f"{hot:.3f}",
            f"{middle(rounds, 'dictionary'):.3f}",
            f"{middle(rounds, 'boxed'):.3f}",
            f"{middle(rounds, 'index', 'dictionary'):.2f}",
            f"{middle(rounds, 'index', 'boxed'):.2f}",
            f"{adding:.2f}",
            f"{going:.2f}",
            f"{weight:.0f}",
            f"{collecting:.3f}",
            f"{index.orphan_bytes:,}",
        )
        print(" ".join(f"{word:>14}" for word in said), flush=True)
        goal *= 10
    if chosen.json:
        found = {"machine": seen_on, "load_after": os.getloadavg(), "policy": chosen.policy, "rows": rows}
        chosen.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
