"""A serving process as it is: what the kernel says, what lies on the disk, what the server itself answers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from samestate.custody.base import field, missing
from samestate.custody.ports import listening
from samestate.custody.processes import limits_of
from samestate.custody.secrets import masked, masked_words
from samestate.custody.served import Served, elsewhere, place_of, served
from samestate.custody.spec import IdentitySpec
from samestate.engines.openai_client import ClientError, OpenAIClient
from samestate.engines.processes import identity
from samestate.evidence.canonical import canonical_json, file_sha256, sha256_hex
from samestate.evidence.custody_records import Field

PROC = Path("/proc")
SECONDS = 30.0
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
"""Of variables: none of them is told, not even as a hash."""
_OURS = "SAMESTATE_*"
"""Listed whatever a spec says: whether a diagnostic is left must be seen."""
MODEL = ("model.files", "model.revision")
"""Fields of a checkpoint: that of its files alone where none can be read, else one of each."""
_TEMPLATES = ("chat_template.jinja", "chat_template.json")


class Cgroup(NamedTuple):
    """The memory cgroup of a process."""

    path: str
    """As ``/proc/PID/cgroup`` has it."""
    folder: Path | None
    """Where it is mounted; None: it is not, here."""


def boot_id() -> str:
    """Of this start of the kernel; ``unknown`` where it says none."""
    with suppress(OSError):
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    return "unknown"


def snapshot(pid: int, url: str, spec: IdentitySpec, key: str | None = None) -> list[Field]:
    """All fields of the process `pid` that answers at `url`. Raises nothing: what cannot be read is missing.

    `key`: of its API; sent, never recorded.
    """
    configuration = _configuration(url, spec, key)
    return [*_process(pid, spec), *listening(pid, url), *_files(pid, spec), *configuration, *_machine()]


def declared(spec: IdentitySpec) -> list[str]:
    """Names of the fields that a spec asks for, each of which every snapshot has, or says why not."""
    model = [*MODEL, "template"] if spec.model is not None else []
    template = ["template"] if spec.template is not None else []
    places = [*(f"sources.{name}" for name in spec.sources), *(f"mount.{path}" for path in spec.mounts)]
    return list(dict.fromkeys([*model, *template, *places, "config"]))


# --- what the kernel says ---------------------------------------------------------------------------


def _process(pid: int, spec: IdentitySpec) -> Iterator[Field]:
    home = PROC / str(pid)
    yield field("pid", str(pid))
    who = identity(pid)
    yield field("process_start", who.partition("@")[2]) if who else missing("process_start", "the process is gone")
    yield _read("executable", lambda: os.readlink(home / "exe"))
    yield argv_field(pid)
    yield _read("cwd", lambda: os.readlink(home / "cwd"))
    yield from _environment(home, spec.environment)
    yield _read("user", lambda: _status(home, "Uid", "Gid", "Groups"))
    yield _read("umask", lambda: _status(home, "Umask"))
    yield _read("limits", lambda: json.dumps({str(number): both for number, both in limits_of(pid).items()}))
    yield _read("affinity", lambda: _status(home, "Cpus_allowed_list"))
    yield _read("nice", lambda: (home / "stat").read_text().rpartition(")")[2].split()[16])
    yield _read("oom_score_adj", lambda: (home / "oom_score_adj").read_text().strip())
    yield _read("mount_namespace", lambda: os.readlink(home / "ns/mnt"))
    for path in spec.mounts:
        yield _read(f"mount.{path}", lambda path=path: _mount(home, path))  # type: ignore[misc]
    yield _read("cgroup", lambda: _cgroup_line(pid))


def argv_field(pid: int) -> Field:
    """The command line, secrets hashed."""
    words = PROC / str(pid) / "cmdline"
    return _read("argv", lambda: json.dumps(masked_words(_words(words)), ensure_ascii=False))


def _read(name: str, read: Callable[[], str]) -> Field:
    try:
        return field(name, read())
    except OSError as error:
        return missing(name, f"cannot be read: {error.strerror or error}")
    except (ValueError, LookupError) as error:
        return missing(name, f"cannot be read: {error}")


def _words(path: Path) -> list[str]:
    data = path.read_bytes()
    if not data:
        raise ValueError("the process has no command line any more")
    return [word.decode(errors="backslashreplace") for word in data.rstrip(b"\0").split(b"\0")]


def _environment(home: Path, allowed: list[str]) -> Iterator[Field]:
    """The environment as a whole, and each variable of the allow-list, as hashes: values never leave the host."""
    try:
        words = [word for word in (home / "environ").read_bytes().split(b"\0") if word]
    except OSError as error:
        yield missing("environment", f"cannot be read: {error.strerror}")
        return
    yield field("environment", sha256_hex(b"\0".join(sorted(words))))
    for word in sorted(words):
        name, _, value = word.decode(errors="backslashreplace").partition("=")
        secret = any(part in name.upper() for part in _SECRET)
        if not secret and any(fnmatchcase(name, pattern) for pattern in (*allowed, _OURS)):
            yield field(f"environment.{name}", sha256_hex(value.encode()))


def _status(home: Path, *names: str) -> str:
    lines = dict(line.split(":", 1) for line in (home / "status").read_text().splitlines() if ":" in line)
    return "; ".join(f"{name} {' '.join(lines[name].split())}" for name in names)


def _mount(home: Path, path: str) -> str:
    """What lies at `path` as the process sees it, and what is mounted there or above."""
    state = os.stat(home / "root" / path.lstrip("/"))
    best: tuple[str, str, str] | None = None
    for line in (home / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        words, kind = before.split(), after.split()
        point = words[4].encode().decode("unicode_escape")
        if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= len(best[0] if best else ""):
            best = (point, f"{kind[0]} {words[3]}", words[5])
    if best is None:
        raise ValueError("nothing is mounted there")
    return f"inode {state.st_ino} on {state.st_dev}; {best[1]} at {best[0]} ({best[2]})"


def cgroup(pid: int, proc: Path = PROC, root: Path = Path("/sys/fs/cgroup")) -> Cgroup:
    """The memory cgroup of a process, of version 1 where there is a memory controller, else of version 2.

    Raises OSError for a process that is gone, LookupError for one that is in none.
    """
    paths = {}
    for line in (proc / str(pid) / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    if "memory" in paths:
        path, places = paths["memory"], [root / "memory"]
    elif "" in paths:
        path, places = paths[""], [root, root / "unified"]
    else:
        raise LookupError("it is in no memory cgroup")
    folders = (place / path.lstrip("/") for place in places)
    return Cgroup(path, next((folder for folder in folders if folder.is_dir()), None))


def _cgroup_line(pid: int) -> str:
    found = cgroup(pid)
    if found.folder is None:
        raise LookupError(f"{found.path} is not mounted here")
    return f"{found.path} (inode {found.folder.stat().st_ino})"


# --- what lies on the disk --------------------------------------------------------------------------


def _files(pid: int, spec: IdentitySpec) -> Iterator[Field]:
    says = served(pid)
    if spec.model is not None:
        if elsewhere(pid, spec.model, says.model):
            yield from (missing(name, f"the process serves {says.model}, not {spec.model}") for name in MODEL)
        else:
            folder = Path(spec.model)
            files = dict(_hashes("model.files", folder))
            yield from files.values()
            yield _revision(folder, list(files.values()))
    if spec.template is not None and elsewhere(pid, spec.template, says.template):
        yield missing("template", f"the process was told {says.template}, not {spec.template}")
    elif (template := _template(pid, spec, says)) is not None:
        yield _read("template", lambda: file_sha256(template))
    elif spec.model is not None:
        yield field("template", "none")
    for name, source in spec.sources.items():
        yield source_field(name, Path(source))


def _hashes(prefix: str, folder: Path) -> Iterator[tuple[str, Field]]:
    paths = sorted(folder.rglob("*"))
    files = [path for path in paths if path.is_file() and not _hidden(path.relative_to(folder))]
    if not files:
        yield prefix, missing(prefix, f"{folder} holds no file that can be read")
    for path in files:
        name = f"{prefix}.{path.relative_to(folder).as_posix()}"
        yield name, _read(name, lambda path=path: file_sha256(path))  # type: ignore[misc]


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _revision(folder: Path, files: list[Field]) -> Field:
    """A snapshot of a hub is named by its revision; any other folder by its files."""
    real = folder.resolve()
    if real.parent.name == "snapshots":
        return field("model.revision", real.name)
    if any(one.value is None for one in files):
        return missing("model.revision", "not all files can be read")
    return field("model.revision", f"files {sha256_hex(canonical_json({one.name: one.value for one in files}))}")


def _template(pid: int, spec: IdentitySpec, says: Served) -> Path | None:
    """The file that the spec names, else the one that the process was told, else the one in the model's folder."""
    if spec.template is not None:
        return Path(spec.template)
    if says.template is not None:
        return place_of(pid, says.template)
    folder = Path(spec.model) if spec.model is not None else None
    if folder is None:
        return None
    return next((folder / name for name in _TEMPLATES if (folder / name).is_file()), None)


def source_field(name: str, folder: Path) -> Field:
    """Every file of an installed package under one hash, what Python itself compiles left out."""
    parts = dict(_hashes("file", folder))
    unread = [one for one in parts.values() if one.value is None]
    if unread:
        return missing(f"sources.{name}", f"{unread[0].name}: {unread[0].missing}")
    return field(f"sources.{name}", sha256_hex(canonical_json({key: one.value for key, one in parts.items()})))


# --- what the server and the machine say ------------------------------------------------------------


def _configuration(url: str, spec: IdentitySpec, key: str | None) -> Iterator[Field]:
    try:
        with OpenAIClient(url, api_key=key, seconds=SECONDS) as client:
            if spec.configuration == "server_info":
                tree = client.get("/server_info?config_format=json").tree["vllm_config"]
            else:
                tree = {"models": [_lasting(one) for one in client.get("/v1/models").tree["data"]]}
    except (ClientError, LookupError, TypeError, AttributeError) as error:
        yield missing("config", f"the server does not say: {error}".replace(url, "it"))
        return
    found = dict(_flat("config", masked(tree)))
    if not found:
        yield missing("config", "the server says nothing of it")
    for name, value in found.items():
        yield field(name, value)


def _lasting(model: dict[str, Any]) -> dict[str, Any]:
    """A model of ``/v1/models`` without what is new at every call."""
    return {name: value for name, value in model.items() if name not in ("created", "permission")}


def _flat(name: str, tree: Any) -> Iterator[tuple[str, str]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _flat(f"{name}.{key}", value)
    else:
        yield name, json.dumps(tree, ensure_ascii=False, sort_keys=True)


def _machine() -> Iterator[Field]:
    yield _read("gpus", gpus)
    yield field("boot_id", boot_id()) if boot_id() != "unknown" else missing("boot_id", "the kernel says none")


def gpus(proc: Path = PROC, devices: Path = Path("/dev")) -> str:
    """UUIDs as the driver has them; ``none`` where neither a driver nor a device is. Raises OSError, LookupError."""
    folder = proc / "driver/nvidia/gpus"
    if not folder.is_dir():
        seen = next((name for name in ("nvidiactl", "nvidia0", "kfd") if (devices / name).exists()), None)
        if seen is not None or folder.parent.exists():
            raise LookupError(f"{seen or 'a driver'} is there, and no driver lists its devices")
        return "none"
    found = []
    for card in sorted(folder.iterdir()):
        lines = (card / "information").read_text().splitlines()
        found.append(next((line.split(":", 1)[1].strip() for line in lines if "UUID" in line), card.name))
    return ", ".join(found) or "none"
