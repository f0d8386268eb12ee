"""Archives: a folder of evidence, written once, sealed last, and judged only whole.

The format, its files and its integrity rules are docs/archive-format.md.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib.resources import files
from itertools import islice
from pathlib import Path, PurePosixPath

import msgspec

from samestate.evidence.canonical import canonical_json, file_sha256, sha256_hex
from samestate.evidence.inputs import Inputs, read_inputs
from samestate.evidence.places import place
from samestate.evidence.records import Line, StreamOpened
from samestate.evidence.seal import (
    OUTSIDE,
    SEAL_NAME,
    SUMS_NAME,
    Seal,
    read_pair,
    read_seal,
    read_sums,
    seal_bytes,
    sealable,
    sums_bytes,
)
from samestate.evidence.stream import Defect, Passed, StreamWriter, read_lines, walk_stream
from samestate.evidence.whole import write_new

__all__ = ["Archive", "ArchiveError", "ArchiveWriter", "Defect", "verifier"]

PLAN_NAME = "plan.json"
ATTEMPTS_NAME = "attempts.jsonl"
RESOLVED_NAME = "resolved.json"
INPUTS_NAME = "inputs.json"
LOG_NAME = "engine.log"
SOURCE_SEAL_NAME = "source-" + SEAL_NAME
SOURCE_SUMS_NAME = "source-" + SUMS_NAME
SOURCE_PLAN_NAME = "source-" + PLAN_NAME
LOCK_NAME = ".lock"
VERIFIER_NAME = "verify.py"
OLDER_VERIFIERS: tuple[str, ...] = (
    "c1aba434cf214712b0f0a160ffea92e06a65e98d0e8207fd58182785f94f045b",
    "8ef34730550b57d321d96b139d127762b1623dee62405798c1c4be56194a670d",
    "a206e24fed59af3822bf6fcaaf60949ed194d361a3e03736533568e3cb21ad84",
)
"""SHA-256 of earlier second verifiers that releases, or the archives in docs/results, carry: these stay undamaged."""
DEFECTS_PER_STREAM = 20
"""More are counted as one, so that a ruined stream does not fill the memory."""

_ARM = re.compile(r"[a-z0-9][a-z0-9.-]*")
_STREAM = re.compile(r"arms/[^/]+/[A-Za-z0-9][A-Za-z0-9._-]*\.jsonl")
_MARKS = {PLAN_NAME, SEAL_NAME, ATTEMPTS_NAME, "arms"}
"""Any of these makes a folder an archive, if a damaged one."""

Visit = Callable[[str, Passed], None]
"""Called with a stream's name inside the archive and a line of it."""


class ArchiveError(Exception):
    """The archive cannot be opened or written as asked. ``str(error)`` is one line."""


@cache
def verifier() -> bytes:
    """The second verifier, as every new archive carries it."""
    return files("samestate.evidence").joinpath(VERIFIER_NAME).read_bytes()


class ArchiveWriter:
    """Writes one archive. Made by `create`, ended by `seal` or `abandon`.

    Every method raises OSError when the file system refuses (a full disk, say).
    """

    def __init__(self, root: Path, plan_sha256: str, attempts: StreamWriter) -> None:
        self.root = root
        self.plan_sha256 = plan_sha256
        self.attempts = attempts
        self._ended = False

    @classmethod
    def create(cls, root: Path, plan_json: bytes) -> ArchiveWriter:
        """Start an archive in a folder that does not exist or is empty; else ArchiveError."""
        try:
            root.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ArchiveError(f"{root} is not a folder: choose another place for the archive") from None
        _take_lock(root)
        try:
            _write_new(root / PLAN_NAME, plan_json)
            _write_new(root / VERIFIER_NAME, verifier())
            attempts = StreamWriter(root / ATTEMPTS_NAME, arm="-", process="attempts")
        except BaseException:
            (root / LOCK_NAME).unlink(missing_ok=True)
            raise
        return cls(root, sha256_hex(plan_json), attempts)

    def arm_dir(self, arm: str) -> Path:
        """Folder of an arm, created when absent. ArchiveError for a name that no plan allows."""
        if _ARM.fullmatch(arm) is None:
            raise ArchiveError(f"{arm!r} cannot name an arm: use a-z, 0-9, dot and hyphen")
        folder = self.root / "arms" / arm
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def log_path(self, arm: str) -> Path:
        """Where the arm's engine writes its own log."""
        return self.arm_dir(arm) / LOG_NAME

    def write_resolved(self, data: bytes) -> str:
        """Write `resolved.json`; returns its SHA-256. ArchiveError when it is there already."""
        _write_new(self.root / RESOLVED_NAME, data)
        return sha256_hex(data)

    def write_inputs(self, inputs: dict[str, list[int]]) -> None:
        """Write `inputs.json`: token digest -> token ids. ArchiveError when it is there already."""
        _write_new(self.root / INPUTS_NAME, canonical_json(inputs))

    def import_arm(self, source: Archive, arm: str, as_arm: str, *, other_plan: bool = False) -> None:
        """Copy an arm byte for byte, with the seal and the list it came from.

        With `other_plan` the source may be of another plan, whose `plan.json` then comes along: the caller
        has decided that it may lend. ArchiveError when the source is unsealed, damaged or of another plan
        without that, when its arm was itself imported, or when this archive has the arm already.
        """
        if defects := source.verify():
            raise ArchiveError(f"{source.root} cannot lend an arm: {defects[0].where}: {defects[0].what}")
        if arm not in source.arms:
            raise ArchiveError(f"{source.root} has no arm {arm}: it has {', '.join(source.arms) or 'none'}")
        if source.imported_from(arm) is not None:
            raise ArchiveError(f"arm {arm} of {source.root} was itself imported: name the archive that recorded it")
        same_plan = source.plan_json is not None and sha256_hex(source.plan_json) == self.plan_sha256
        if not same_plan and not other_plan:
            raise ArchiveError(f"{source.root} is of another plan: an imported arm needs the same plan")
        folder = self.arm_dir(as_arm)
        if any(folder.iterdir()):
            raise ArchiveError(f"{self.root} has an arm {as_arm} already")
        sums, _ = read_sums((source.root / SUMS_NAME).read_bytes(), SUMS_NAME)
        for name, digest in _under(sums, arm).items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.root / "arms" / arm / name, target, follow_symlinks=False)
            if file_sha256(target) != digest:
                raise ArchiveError(f"{source.root}: arms/{arm}/{name} changed while it was copied")
        shutil.copyfile(source.root / SEAL_NAME, folder / SOURCE_SEAL_NAME)
        shutil.copyfile(source.root / SUMS_NAME, folder / SOURCE_SUMS_NAME)
        if not same_plan:
            shutil.copyfile(source.root / PLAN_NAME, folder / SOURCE_PLAN_NAME)

    def seal(self) -> str:
        """Close the attempts and seal all that is in the folder; returns the SHA-256 of `seal.json`.

        Every other stream must be closed by now. Nothing is sealed unless this returns.
        """
        if self._ended:
            raise ArchiveError(f"{self.root} is already sealed or abandoned")
        self.attempts.close()
        names, folders, defects = _scan(self.root)
        names = [name for name in names if name != LOCK_NAME]
        defects += [Defect(ascii(name), "has a name that no archive may list") for name in names if not sealable(name)]
        if defects:
            raise ArchiveError(f"{self.root} cannot be sealed: {defects[0].where}: {defects[0].what}")
        for name in names:
            _fsync(self.root / name)
        sums = sums_bytes({name: file_sha256(self.root / name) for name in names})
        seal = seal_bytes(sums, self.plan_sha256)
        _write_new(self.root / SUMS_NAME, sums)
        _fsync(self.root / SUMS_NAME)
        draft = self.root / f".{SEAL_NAME}"
        _write_new(draft, seal)
        _fsync(draft)
        (self.root / LOCK_NAME).unlink(missing_ok=True)
        draft.rename(self.root / SEAL_NAME)
        for folder in [*folders, ""]:
            _fsync(self.root / folder)
        self._ended = True
        return sha256_hex(seal)

    def abandon(self) -> None:
        """Close the attempts and leave the archive unsealed. Does nothing after `seal`, never raises OSError."""
        if self._ended:
            return
        self._ended = True
        with suppress(OSError):
            self.attempts.close()
        with suppress(OSError):
            (self.root / LOCK_NAME).unlink(missing_ok=True)


class Archive:
    """Reads one archive. Damage is never raised: it is in `defects`, and what is damaged is left out."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._defects: list[Defect] | None = None
        self._kept_inputs: tuple[Inputs, list[Defect]] | None = None
        names, folders, _ = _scan(root)
        self._names = frozenset(names)
        self._marks = _MARKS & {*names, *folders}

    @classmethod
    def open(cls, root: Path) -> Archive:
        """ArchiveError unless `root` is a folder with a plan, or at least with something of a run that lost its own."""
        if not root.is_dir():
            raise ArchiveError(f"{root}: no such folder")
        archive = cls(root)
        if not archive._marks:
            raise ArchiveError(f"{root} is not an archive: it has no {PLAN_NAME}")
        return archive

    @property
    def defects(self) -> list[Defect]:
        """All integrity defects, from the last `verify`; the first use verifies."""
        return self.verify() if self._defects is None else self._defects

    @property
    def seal_sha256(self) -> str | None:
        """SHA-256 of `seal.json`; None without one."""
        data = self._read(SEAL_NAME)
        return None if data is None else sha256_hex(data)

    @property
    def plan_json(self) -> bytes | None:
        """Bytes of `plan.json`; None when lost."""
        return self._read(PLAN_NAME)

    @property
    def resolved_json(self) -> bytes | None:
        """Bytes of `resolved.json`; None when the run did not get that far."""
        return self._read(RESOLVED_NAME)

    @property
    def inputs(self) -> dict[str, list[int]]:
        """Token digest -> token ids, as far as readable and true to their digest."""
        return dict(self.packed_inputs)

    @property
    def packed_inputs(self) -> Inputs:
        """The same, in little memory; as the last `verify` read them."""
        return (self._kept_inputs or self._inputs())[0]

    @property
    def arms(self) -> list[str]:
        """Arms that have a file, sorted. A folder that no plan can name is none: `verify` tells of it."""
        return sorted({PurePosixPath(name).parts[1] for name in self._names if _in_arm(name)})

    def attempts(self) -> Iterator[Line]:
        """The readable lines of `attempts.jsonl`."""
        return self._lines(ATTEMPTS_NAME)

    def streams(self, arm: str) -> list[str]:
        """Process names of an arm's streams, sorted."""
        return sorted(PurePosixPath(name).stem for name in self._streams() if name.startswith(f"arms/{arm}/"))

    def records(self, arm: str, process: str) -> Iterator[Line]:
        """The readable lines of one stream, in file order; none when there is no such stream."""
        return self._lines(f"arms/{arm}/{process}.jsonl")

    def imported_from(self, arm: str) -> str | None:
        """SHA-256 of the seal that the arm was imported under; None for an arm that ran live."""
        data = self._read(f"arms/{arm}/{SOURCE_SEAL_NAME}")
        return None if data is None else sha256_hex(data)

    def sealed_at(self, arm: str) -> str | None:
        """When the archive that an imported arm came from was sealed; None: it ran live, or that cannot be read."""
        data = self._read(f"arms/{arm}/{SOURCE_SEAL_NAME}")
        try:
            return msgspec.json.decode(data, type=Seal).wall_time if data is not None else None
        except msgspec.DecodeError:
            return None

    def source_plan_json(self, arm: str) -> bytes | None:
        """`plan.json` of the archive that an arm was imported from; None: the arm is live, or of this very plan."""
        return self._read(f"arms/{arm}/{SOURCE_PLAN_NAME}")

    def verify(self, visit: Visit | None = None) -> list[Defect]:
        """Read everything again and list every integrity defect. An empty list: sealed and undamaged.

        `visit` is given every readable line of every stream, arm by arm and in file order, as this one reading comes
        by it: what is judged then are the very bytes that were hashed.
        """
        names, _, defects = _scan(self.root)
        self._names = frozenset(names)
        sums, sealed_defects = self._verify_seal()
        defects += sealed_defects
        for name in sorted({PLAN_NAME, ATTEMPTS_NAME, *sums} - self._names):
            defects.append(Defect(name, "missing"))
        origins: dict[str, set[str]] = {arm: set() for arm in self.arms}
        of_streams: list[Defect] = []
        hashes: dict[str, str] = {}
        streams = self._streams() | ({ATTEMPTS_NAME} & self._names)
        for name in sorted(streams, key=lambda name: name.removesuffix(".jsonl")):
            hashes[name], found = self._verify_stream(name, origins, visit)
            of_streams += found
        for name, digest in sums.items():
            if name in self._names and hashes.get(name) != digest:
                changed = Defect(name, "changed after sealing: its SHA-256 is not the listed one")
                read_again = list(self._verify_bytes(name, digest))
                defects += read_again or ([changed] if name in hashes else [])
        for name in sorted(self._names):
            if name.startswith("arms/") and name.count("/") >= 2 and not _in_arm(name):
                defects.append(Defect(_shown(name), "lies in a folder that cannot be an arm's"))
        defects += self._verify_verifier()
        self._kept_inputs = self._inputs()
        defects += [*self._kept_inputs[1], *of_streams]
        for arm in self.arms:
            if self._is_import(arm):
                defects += self._verify_import(arm, origins[arm], sums)
        self._defects = defects
        return defects

    def _verify_stream(self, name: str, origins: dict[str, set[str]], visit: Visit | None) -> tuple[str, list[Defect]]:
        """SHA-256 of what was read of a stream, and its defects, the first `DEFECTS_PER_STREAM` of them."""
        whole = hashlib.sha256()
        found: list[Defect] = []
        full = False
        for item in walk_stream(self.root / name, name, whole):
            if isinstance(item, Passed):
                if visit is not None:
                    visit(name, item)
                if full or item.beyond or type(item.line.rec) is not StreamOpened:
                    continue
                found += self._verify_opened(name, item.line.rec, origins)
            elif not full:
                found.append(item)
                if len(found) > DEFECTS_PER_STREAM:
                    found[-1] = Defect(name, "further defects are not listed")
                    full = True
        return whole.hexdigest(), found

    def _verify_seal(self) -> tuple[dict[str, str], list[Defect]]:
        """What `SHA256SUMS` lists, and the defects of seal, list and the set of files."""
        seal_data, sums_data = self._read(SEAL_NAME), self._read(SUMS_NAME)
        stray = self._names - {SUMS_NAME, SEAL_NAME}
        if seal_data is None:
            defects = [Defect(SEAL_NAME, "missing: the archive is incomplete")]
            if LOCK_NAME in stray:
                defects.append(Defect(LOCK_NAME, "left behind: the writer still works, or died"))
            if sums_data is None:
                return {}, defects
            sums, sums_defects = read_sums(sums_data, SUMS_NAME)
            defects += sums_defects
            stray -= {LOCK_NAME}
        elif sums_data is None:
            return {}, [Defect(SUMS_NAME, "missing"), *read_seal(seal_data, SEAL_NAME)[1]]
        else:
            seal, sums, defects = read_pair(seal_data, sums_data, "")
            defects += self._verify_plan(seal)
        defects += [Defect(_shown(name), "not listed in SHA256SUMS") for name in sorted(stray - sums.keys())]
        return sums, defects

    def _verify_plan(self, seal: Seal | None) -> Iterator[Defect]:
        plan = self.plan_json
        if seal is not None and plan is not None and sha256_hex(plan) != seal.plan_sha256:
            yield Defect(PLAN_NAME, "is not the plan that the seal names")

    def _verify_bytes(self, name: str, digest: str) -> Iterator[Defect]:
        try:
            if file_sha256(self.root / name) != digest:
                yield Defect(name, "changed after sealing: its SHA-256 is not the listed one")
        except OSError as error:
            yield Defect(name, f"cannot be read: {error.strerror}")

    def _verify_verifier(self) -> Iterator[Defect]:
        """Somebody may run the copy, so it must be one that was shipped. An archive without one is older."""
        copy = self._read(VERIFIER_NAME)
        if copy is not None and copy != verifier() and sha256_hex(copy) not in OLDER_VERIFIERS:
            yield Defect(VERIFIER_NAME, "none that this samestate shipped: a newer one's, or changed; do not run it")

    def _verify_opened(self, name: str, opened: StreamOpened, origins: dict[str, set[str]]) -> Iterator[Defect]:
        path = PurePosixPath(name)
        if opened.process != path.stem:
            yield Defect(place(name, 0), f"is the stream of process {opened.process!a}, under another name")
        if name == ATTEMPTS_NAME:
            if opened.arm != "-":
                yield Defect(place(name, 0), f"is a stream of arm {opened.arm!a}")
            return
        arm = path.parts[1]
        origins[arm].add(opened.arm)
        if not self._is_import(arm) and opened.arm != arm:
            yield Defect(place(name, 0), f"is a stream of arm {opened.arm!a}")

    def _verify_import(self, arm: str, origins: set[str], sums: dict[str, str]) -> Iterator[Defect]:
        """Hold an imported arm against the seal that it came from."""
        place = f"arms/{arm}/"
        seal_data, sums_data = self._read(place + SOURCE_SEAL_NAME), self._read(place + SOURCE_SUMS_NAME)
        if seal_data is None or sums_data is None:
            yield Defect(place + (SOURCE_SEAL_NAME if seal_data is None else SOURCE_SUMS_NAME), "missing")
            return
        seal, source_sums, defects = read_pair(seal_data, sums_data, place + "source-")
        yield from defects
        plan = self.source_plan_json(arm) or self.plan_json
        if seal is not None and plan is not None and seal.plan_sha256 != sha256_hex(plan):
            yield Defect(place + SOURCE_SEAL_NAME, "is the seal of another plan")
        if len(origins) != 1:
            yield Defect(place, f"its streams name {len(origins)} arms of origin where one was due")
            return
        was = _under(source_sums, next(iter(origins)))
        now = {name: digest for name, digest in _under(sums, arm).items() if name not in _SOURCE_NAMES}
        for name in sorted(was.keys() | now.keys()):
            if was.get(name) != now.get(name):
                yield Defect(place + name, f"is not the file that {SOURCE_SUMS_NAME} lists")

    def _is_import(self, arm: str) -> bool:
        return any(f"arms/{arm}/{name}" in self._names for name in _SOURCE_NAMES)

    def _inputs(self) -> tuple[Inputs, list[Defect]]:
        data = self._read(INPUTS_NAME)
        if data is None:
            return Inputs({}), []
        try:
            inputs, false = read_inputs(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            return Inputs({}), [Defect(INPUTS_NAME, f"not readable: {error}")]
        return inputs, [Defect(INPUTS_NAME, f"{digest[:12]!a} is not the digest of its token ids") for digest in false]

    def _streams(self) -> set[str]:
        return {name for name in self._names if _in_arm(name) and _STREAM.fullmatch(name)}

    def _lines(self, name: str) -> Iterator[Line]:
        if name in self._names:
            yield from read_lines(self.root / name)

    def _read(self, name: str) -> bytes | None:
        if name not in self._names:
            return None
        try:
            return (self.root / name).read_bytes()
        except OSError:
            return None


_SOURCE_NAMES = (SOURCE_SEAL_NAME, SOURCE_SUMS_NAME, SOURCE_PLAN_NAME)


def _in_arm(name: str) -> bool:
    top, _, inside = name.partition("/")
    arm, _, rest = inside.partition("/")
    return top == "arms" and bool(rest) and _ARM.fullmatch(arm) is not None


def _under(sums: dict[str, str], arm: str) -> dict[str, str]:
    """The part of a list below one arm, by the name inside its folder."""
    place = f"arms/{arm}/"
    return {name.removeprefix(place): digest for name, digest in sums.items() if name.startswith(place)}


def _shown(name: str) -> str:
    return name if name.isprintable() else ascii(name)


def _scan(root: Path) -> tuple[list[str], list[str], list[Defect]]:
    """Regular files, and folders, by name inside `root`, and what is neither. Symlinks are not followed.

    Files in the folders outside the seal are left out.
    """
    names: list[str] = []
    folders: list[str] = []
    defects: list[Defect] = []
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        try:
            entries = sorted(os.scandir(root / folder), key=lambda entry: entry.name)
        except OSError as error:
            defects.append(Defect(_shown(folder) or ".", f"cannot be read: {error.strerror}"))
            continue
        for entry in entries:
            name = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_symlink():
                defects.append(Defect(_shown(name), "is a symlink: an archive holds its own files"))
            elif entry.is_dir(follow_symlinks=False):
                folders.append(name)
                waiting.append(name)
            elif not entry.is_file(follow_symlinks=False):
                defects.append(Defect(_shown(name), "is neither a file nor a folder"))
            elif name.partition("/")[0] not in OUTSIDE or "/" not in name:
                names.append(name)
    return names, folders, defects


def _take_lock(root: Path) -> None:
    """Claim an empty folder. ArchiveError when it holds anything, or another writer was first."""
    held = sorted(entry.name for entry in islice(os.scandir(root), 3))
    if LOCK_NAME in held or (root / LOCK_NAME).exists():
        raise ArchiveError(f"{root} has another writer, or one that died: choose another folder")
    if held:
        raise ArchiveError(f"{root} is not empty: choose another folder, an archive is never written twice")
    try:
        _write_new(root / LOCK_NAME, f"{os.getpid()}\n".encode())
    except ArchiveError:
        raise ArchiveError(f"{root} has another writer: choose another folder") from None


def _write_new(path: Path, data: bytes) -> None:
    """Write a file that must not exist yet (ArchiveError), whole or not at all."""
    try:
        write_new(path, data)
    except FileExistsError:
        raise ArchiveError(f"{path} is there already: an archive is never written twice") from None


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
