"""Edits of sealed archives: an archive as bytes by name, what may be done to it, and how to seal it again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

Files = dict[str, bytes]
Edit = Callable[[Random, Files], str]
"""Changes the files in place and says what it did."""

SAID = pytest.StashKey[list[str]]()
"""Lines for the end of the test session."""
OUTSIDE = ("verdicts/", "amendments/", "signatures/")


def read(root: Path) -> Files:
    """Every file below `root` but those outside the seal."""
    names = {path: path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for path, name in names.items() if not name.startswith(OUTSIDE)}


def write(root: Path, before: Files, after: Files) -> None:
    """Make the folder, which holds `before`, hold `after`."""
    for name in before.keys() - after.keys():
        (root / name).unlink()
    for name, data in after.items():
        if before.get(name) != data:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(data)


# --- edits under the old seal ---------------------------------------------------------------------


def _any(chance: Random, files: Files, suffix: str = "") -> str:
    return chance.choice(sorted(name for name in files if name.endswith(suffix) and files[name]))


def _flip(chance: Random, files: Files) -> str:
    name = _any(chance, files)
    at, bit = chance.randrange(len(files[name])), 1 << chance.randrange(8)
    data = bytearray(files[name])
    data[at] ^= bit
    files[name] = bytes(data)
    return f"bit {bit} of byte {at} of {name} flipped"


def _splice(chance: Random, files: Files) -> str:
    name = _any(chance, files)
    data = files[name]
    at = chance.randrange(len(data) + 1)
    gone, put = (
        chance.randrange(4),
        chance.choice([b"", b" ", b"\n", b"0", b",", b'"', b"\\u0041", chance.randbytes(3)]),
    )
    files[name] = data[:at] + put + data[at + gone :]
    return f"{gone} bytes at {at} of {name} replaced by {put!r}"


def _digit(chance: Random, files: Files) -> str:
    name = _any(chance, files)
    places = [at for at, byte in enumerate(files[name]) if chr(byte).isdigit()]
    if not places:
        return "nothing"
    at, put = chance.choice(places), chance.choice(b"0123456789")
    files[name] = files[name][:at] + bytes([put]) + files[name][at + 1 :]
    return f"a digit at {at} of {name} changed"


def _truncate(chance: Random, files: Files) -> str:
    name = _any(chance, files)
    files[name] = files[name][: chance.randrange(len(files[name]))]
    return f"{name} truncated to {len(files[name])}"


def _lines(chance: Random, files: Files) -> str:
    name = _any(chance, files, chance.choice([".jsonl", ".jsonl", "SHA256SUMS"]))
    lines = files[name].splitlines(keepends=True)
    at, other = chance.randrange(len(lines)), chance.randrange(len(lines))
    foreign = chance.choice(files[_any(chance, files, ".jsonl")].splitlines(keepends=True))
    what = chance.choice(["removed", "doubled", "moved", "swapped", "reversed", "replaced", "repeated at the end"])
    if what == "removed":
        del lines[at : at + chance.choice([1, 1, 2, 5])]
    elif what == "doubled":
        lines.insert(at, lines[at])
    elif what == "moved":
        lines.insert(other, lines.pop(at))
    elif what == "swapped":
        lines[at], lines[other] = lines[other], lines[at]
    elif what == "reversed":
        lines.reverse()
    elif what == "replaced":
        lines[at] = foreign
    else:
        lines.append(lines[at])
    files[name] = b"".join(lines)
    return f"line {at} of {name} {what}"


def _remove(chance: Random, files: Files) -> str:
    name = _any(chance, files)
    del files[name]
    return f"{name} removed"


def _add(chance: Random, files: Files) -> str:
    near = _any(chance, files)
    name = near.rpartition("/")[0] + chance.choice(
        ["/extra", "/worker-7.jsonl", "/zz.log", "/a.jsonl", "/.lock", "/seal"]
    )
    files[name.strip("/")] = chance.choice([b"", b"{}\n", files[near]])
    return f"{name} added"


def _rename(chance: Random, files: Files) -> str:
    name = _any(chance, files)
    to = chance.choice([name + "x", name.replace("control", "candidate") + "l", "arms/" + name, "x" + name])
    files[to] = files.pop(name)
    return f"{name} renamed {to}"


def _swap(chance: Random, files: Files) -> str:
    one, other = _any(chance, files), _any(chance, files)
    files[one], files[other] = files[other], files[one]
    return f"{one} and {other} swapped"


def _seal_field(chance: Random, files: Files) -> str:
    """A field of the seal, or of a plan, changed as JSON; nothing else made to fit."""
    name = _any(chance, files, chance.choice(["seal.json", "plan.json", "resolved.json", "inputs.json"]))
    tree = json.loads(files[name])
    key = chance.choice(sorted(tree))
    tree[key] = chance.choice([None, 0, 1, "x", [], {}, [tree[key]], f"{tree[key]}"])
    if chance.random() < 0.3:
        del tree[key]
    files[name] = canonical(tree)
    return f"{key} of {name} changed"


EDITS: list[Edit] = [
    _flip, _splice, _digit, _truncate, _lines, _lines, _remove, _add, _rename, _swap, _seal_field
]  # fmt: skip


# --- edits under a new seal -----------------------------------------------------------------------


def canonical(tree: Any) -> bytes:
    return json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def records(data: bytes) -> list[dict[str, Any]]:
    """The lines of a stream."""
    return [json.loads(line) for line in data.splitlines()]


def stream(lines: list[dict[str, Any]]) -> bytes:
    """A stream of these lines, numbered and chained anew."""
    written, prev = [], "0" * 64
    for n, line in enumerate(lines):
        raw = json.dumps({**line, "n": n, "prev": prev}, separators=(",", ":"), ensure_ascii=False).encode()
        written.append(raw + b"\n")
        prev = sha256(raw)
    return b"".join(written)


def sealed(files: Files) -> Files:
    """The same files under a new list and a new seal, by the words of docs/archive-format.md."""
    kept = {name: data for name, data in files.items() if name not in ("SHA256SUMS", "seal.json")}
    sums = "".join(f"{sha256(kept[name])}  {name}\n" for name in sorted(kept)).encode()
    seal: dict[str, Any] = {
        "files": len(kept),
        "format": 1,
        "plan_sha256": sha256(kept.get("plan.json", b"")),
        "samestate_version": "0",
        "sha256sums_sha256": sha256(sums),
        "wall_time": "2026-01-01T00:00:00.000Z",
    }
    return {**kept, "SHA256SUMS": sums, "seal.json": canonical({**seal, "self_sha256": sha256(canonical(seal))})}


def _value(chance: Random, old: Any) -> Any:
    """Another value, mostly of the same type."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int | float):
        return chance.choice([0, 1, old + 1, old - 1, old + 16, old - 16, 16, 2 * old, None])
    if isinstance(old, list) and old:
        at = chance.randrange(len(old))
        return chance.choice([old[:at] + old[at + 1 :], [*old, old[at]], old[::-1], []])
    if isinstance(old, dict) and old:
        gone = chance.choice(sorted(old))
        return {name: value for name, value in old.items() if name != gone}
    return chance.choice(["", "x", "control", "candidate", "N32.cold", "N32.reload", "connector", 0, None])


def _inside(chance: Random, tree: Any) -> Any:
    """The same with one value somewhere in it changed."""
    if isinstance(tree, dict | list) and tree and chance.random() < 0.85:
        at = chance.choice(sorted(tree)) if isinstance(tree, dict) else chance.randrange(len(tree))
        changed = tree.copy()
        changed[at] = _inside(chance, tree[at])
        return changed
    return _value(chance, tree)


def _record(chance: Random, files: Files) -> str:
    """A value of a record changed, a record lost, doubled, moved or taken from another place; chained anew."""
    name = _any(chance, files, ".jsonl")
    lines = records(files[name])
    # Kinds are as likely as each other, or only steps would ever be changed.
    kind = chance.choice(sorted({line["rec"]["kind"] for line in lines}))
    at = chance.choice([at for at, line in enumerate(lines) if line["rec"]["kind"] == kind])
    what = chance.choice(["changed", "changed", "changed", "changed", "lost", "doubled", "moved", "replaced"])
    said = json.dumps(lines[at]["rec"])
    if what == "changed":
        lines[at]["rec"] = {**_inside(chance, lines[at]["rec"]), "kind": kind}
    elif what == "lost":
        del lines[at]
    elif what == "doubled":
        lines.insert(at, lines[at])
    elif what == "moved":
        lines.insert(chance.randrange(len(lines)), lines.pop(at))
    else:
        lines[at]["rec"] = chance.choice(lines)["rec"]
    for before, line in pairwise(lines):
        line["t_ns"] = max(before["t_ns"], line["t_ns"])
    files[name] = stream(lines)
    return f"{name}:{at} {what}: {said}"


def _document(chance: Random, files: Files) -> str:
    """A value of the plan, of what was resolved, or of the inputs changed."""
    name = chance.choice(["plan.json", "plan.json", "resolved.json", "resolved.json", "inputs.json"])
    before = json.loads(files[name])
    files[name] = canonical(_inside(chance, before))
    return f"{name} changed"


def _renamed(chance: Random, files: Files) -> str:
    """An arm, or a stream of one, under another name, or gone."""
    name = _any(chance, files, ".jsonl")
    new = chance.choice(["scheduler-2", "scheduler", "worker-1", "client", ""])
    folder = name.rpartition("/")[0]
    data = files.pop(name)
    if new and folder:
        files[f"{folder}/{new}.jsonl"] = data
    return f"{name} became {new or 'nothing'}"


RESEALED: list[Edit] = [_record] * 12 + [_document] * 3 + [_renamed]
"""Edits after which everything is sealed again."""
