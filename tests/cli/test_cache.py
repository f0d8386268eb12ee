from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result

from cache.kept import NAME, OTHER, SPACE, OnDisk, holds, key, page
from cache.servers import InServer, Server
from samestate.cache.base import Groups, PageKey
from samestate.cache.envelope import HEADER_BYTES

Command = Callable[..., Result]
STORED = HEADER_BYTES + 5000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.kill()


@pytest.fixture
def tier(tmp_path: Path) -> OnDisk:
    """Three pages of one namespace, a minute apart, and one of another."""
    kept = OnDisk(tmp_path / "tier")
    for number in (1, 2, 3):
        kept.store().write(key(number), page(number))
        past = time.time() - 86400 + 60 * number
        os.utime(kept.path(key(number)), (past, past))
    kept.store(OTHER).write(key(1), page(1, 100))
    return kept


def damage(kept: OnDisk, of: PageKey) -> None:
    kept.put(of, (kept.get(of) or b"")[:-1] + b"?")


def numbers(kept: OnDisk) -> list[int]:
    return [number for number in range(9) if holds(kept.store(), number)]


# --- stat and list --------------------------------------------------------------------------------


def test_stat_counts_every_namespace(samestate: Command, tier: OnDisk) -> None:
    result = samestate("cache", "stat", tier.root)
    assert result.exit_code == 0, result.output
    assert f"2 namespaces, 4 pages, {3 * STORED + HEADER_BYTES + 100:,} bytes" in result.stdout
    assert NAME in result.stdout and SPACE.digest.hex()[:12] in result.stdout
    told = json.loads(samestate("cache", "stat", tier.root, "--json").stdout)
    by_name = {one["namespace"]: one for one in told}
    assert by_name[NAME]["pages"] == 3 and by_name[NAME]["stored_bytes"] == 3 * STORED
    assert by_name[NAME]["digest"] == SPACE.digest.hex()
    assert by_name[NAME]["last_used"] == pytest.approx(time.time() - 86400 + 180, abs=60)
    assert by_name[NAME]["orphan_bytes"] is None, "no engine has said what belongs together"


def test_stat_measures_orphans_where_a_folder_says_what_belongs_together(samestate: Command, tier: OnDisk) -> None:
    store = tier.store()
    store.describe(Groups(frozenset({0}), frozenset({1})))
    store.touch([key(1), key(2), key(3)])
    store.write(key(2, 1), page(2))
    told = json.loads(samestate("cache", "stat", tier.root, "--json").stdout)
    assert {one["namespace"]: one["orphan_bytes"] for one in told} == {NAME: STORED, OTHER.name: None}
    assert f"{STORED:,}" in samestate("cache", "stat", tier.root).stdout


def test_a_url_is_a_folder_too(samestate: Command, tier: OnDisk) -> None:
    told = [samestate("cache", "stat", url, "--json").stdout for url in (tier.root, tier.root.as_uri())]
    assert told[0] == told[1] and len(json.loads(told[0])) == 2


def test_list_names_every_page(samestate: Command, tier: OnDisk) -> None:
    lines = samestate("cache", "list", tier.root).stdout.splitlines()
    assert len(lines) == 4 and sum(key(2).hex() in line for line in lines) == 1
    told = json.loads(samestate("cache", "list", tier.root, "--namespace", NAME, "--json").stdout)
    assert {one["key"] for one in told} == {key(number).hex() for number in (1, 2, 3)}


@pytest.mark.parametrize("wanted", [OTHER.name, OTHER.digest.hex(), OTHER.digest.hex()[:6]])
def test_a_namespace_is_named_or_abbreviated(samestate: Command, tier: OnDisk, wanted: str) -> None:
    (told,) = json.loads(samestate("cache", "stat", tier.root, "--namespace", wanted, "--json").stdout)
    assert (told["namespace"], told["pages"]) == (OTHER.name, 1)


def test_looking_changes_nothing(samestate: Command, tier: OnDisk) -> None:
    def state() -> dict[str, tuple[float, int]]:
        files = (path for path in tier.root.rglob("*") if path.is_file())
        return {str(path): (path.stat().st_mtime, path.stat().st_size) for path in files}

    damage(tier, key(1))
    before = state()
    for command in ("stat", "list", "verify"):
        samestate("cache", command, tier.root)
    samestate("cache", "evict", tier.root, "--bytes", "0", "--dry-run")
    assert state() == before


# --- verify ---------------------------------------------------------------------------------------


def test_verify_finds_a_clean_tier_clean(samestate: Command, tier: OnDisk) -> None:
    result = samestate("cache", "verify", tier.root)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"4 pages whole, {3 * STORED + HEADER_BYTES + 100:,} bytes; 0 damaged; 0 went meanwhile\n"


@pytest.mark.tamper
def test_verify_names_damaged_pages_and_fails(samestate: Command, tier: OnDisk) -> None:
    damage(tier, key(2))
    tier.put(key(4), b"")
    for _ in range(2):
        result = samestate("cache", "verify", tier.root)
        assert result.exit_code == 1
        assert f"{key(2).hex()}  damaged: checksum of the page\n" in result.stdout
        assert f"{key(4).hex()}  damaged: 0 bytes, not 256\n" in result.stdout
        assert result.stderr == ""
        assert "3 pages whole" in result.stdout and "2 damaged" in result.stdout
    result = samestate("cache", "verify", tier.root, "--json", "--namespace", NAME)
    assert result.exit_code == 1
    (told,) = json.loads(result.stdout)
    assert told["whole"] == 2
    assert told["damaged"] == {key(2).hex(): "checksum of the page", key(4).hex(): "0 bytes, not 256"}


def test_verify_removes_damaged_pages_where_told(samestate: Command, tier: OnDisk) -> None:
    damage(tier, key(2))
    result = samestate("cache", "verify", tier.root, "--remove")
    assert (result.exit_code, "damaged, removed" in result.stdout) == (1, True)
    assert samestate("cache", "verify", tier.root).exit_code == 0
    assert numbers(tier) == [1, 3]


def test_verify_of_nothing_is_unknown(samestate: Command, tier: OnDisk, tmp_path: Path) -> None:
    OnDisk(tmp_path / "empty").open()
    for arguments in (("verify", tmp_path / "empty"), ("warm", tmp_path / "empty", tmp_path / "copy")):
        result = samestate("cache", *arguments)
        assert result.exit_code == 3, result.output
        assert "there was nothing to look at" in result.stderr


# --- evict ----------------------------------------------------------------------------------------


def test_evict_by_age(samestate: Command, tier: OnDisk) -> None:
    result = samestate("cache", "evict", tier.root, "--older-than", "12h", "--namespace", NAME)
    assert (result.exit_code, result.stdout) == (0, f"3 pages, {3 * STORED:,} bytes are gone\n")
    assert numbers(tier) == [] and holds(tier.store(OTHER), 1, 100)
    assert samestate("cache", "evict", tier.root, "--older-than", "12h").stdout == "0 pages, 0 bytes are gone\n"


def test_evict_down_to_a_size_takes_the_least_recently_used(samestate: Command, tier: OnDisk) -> None:
    result = samestate("cache", "evict", tier.root, "--bytes", str(2 * STORED))
    assert result.exit_code == 0, result.output
    assert numbers(tier) == [3]
    assert samestate("cache", "evict", tier.root, "--bytes", "1GiB", "--json").stdout
    assert numbers(tier) == [3]


def test_evict_a_namespace(samestate: Command, tier: OnDisk) -> None:
    result = samestate("cache", "evict", tier.root, "--namespace", OTHER.name, "--json")
    assert json.loads(result.stdout) == {"pages": 1, "stored_bytes": HEADER_BYTES + 100, "dry_run": False}
    assert numbers(tier) == [1, 2, 3] and not holds(tier.store(OTHER), 1, 100)
    assert [one["namespace"] for one in json.loads(samestate("cache", "stat", tier.root, "--json").stdout)] == [NAME]


def test_evict_a_page_or_a_family_by_its_key(samestate: Command, tier: OnDisk) -> None:
    store = tier.store()
    store.write(key(1, 1), page(1))
    samestate("cache", "evict", tier.root, "--key", key(2).hex().upper())
    assert numbers(tier) == [1, 3]
    family = key(1).hex()[:-8]
    result = samestate("cache", "evict", tier.root, "--namespace", NAME, "--key", family)
    assert (result.exit_code, result.stdout) == (0, f"2 pages, {2 * STORED:,} bytes are gone\n")
    assert numbers(tier) == [3]
    assert holds(tier.store(OTHER), 1, 100), "another namespace has this family too"


@pytest.mark.parametrize("beginning", ["", "00", "zz" * 8])
def test_a_key_that_may_stand_for_anything_evicts_nothing(samestate: Command, tier: OnDisk, beginning: str) -> None:
    result = samestate("cache", "evict", tier.root, "--key", beginning)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert "--key" in result.stderr
    assert numbers(tier) == [1, 2, 3]


def test_a_dry_run_says_what_the_run_then_does(samestate: Command, tier: OnDisk) -> None:
    dry = samestate("cache", "evict", tier.root, "--older-than", "30m", "--bytes", "50", "--dry-run").stdout
    assert numbers(tier) == [1, 2, 3]
    done = samestate("cache", "evict", tier.root, "--older-than", "30m", "--bytes", "50").stdout
    assert dry.replace("would go", "are gone") == done and done.startswith("4 pages")


# --- warm -----------------------------------------------------------------------------------------


def test_warm_copies_into_a_new_folder_and_again_nothing(samestate: Command, tier: OnDisk, tmp_path: Path) -> None:
    target = OnDisk(tmp_path / "copy")
    for words in ("4 pages copied", "0 pages copied, 0 bytes; 4 were there"):
        result = samestate("cache", "warm", tier.root, target.root)
        assert result.exit_code == 0, result.output
        assert words in result.stdout
    assert numbers(target) == [1, 2, 3] and holds(target.store(OTHER), 1, 100)


def test_warm_into_a_server_and_back(samestate: Command, tier: OnDisk, server: Server, tmp_path: Path) -> None:
    url = f"valkey://127.0.0.1:{server.port}/0?timeout=20"
    kept, back = InServer(server, url), OnDisk(tmp_path / "back")
    assert samestate("cache", "warm", tier.root, url, "--namespace", NAME).exit_code == 0
    assert [one["pages"] for one in json.loads(samestate("cache", "stat", url, "--json").stdout)] == [3]
    assert samestate("cache", "verify", url).exit_code == 0
    assert samestate("cache", "warm", url, back.root).exit_code == 0
    assert numbers(back) == [1, 2, 3]
    kept.put(key(2), (kept.get(key(2)) or b"")[:-1])
    assert samestate("cache", "verify", url).exit_code == 1
    assert samestate("cache", "evict", url, "--bytes", "0").stdout.startswith("3 pages")


def test_a_damaged_page_is_not_copied(samestate: Command, tier: OnDisk, tmp_path: Path) -> None:
    damage(tier, key(2))
    target = OnDisk(tmp_path / "copy")
    result = samestate("cache", "warm", tier.root, target.root, "--json")
    assert result.exit_code == 1
    told = {one["namespace"]: one for one in json.loads(result.stdout)}
    assert told[NAME]["copied"] == 2 and told[NAME]["damaged"] == {key(2).hex(): "checksum of the page"}
    assert numbers(target) == [1, 3]


def test_what_finds_no_room_is_said(samestate: Command, tier: OnDisk, tmp_path: Path) -> None:
    result = samestate("cache", "warm", tier.root, f"{(tmp_path / 'copy').as_uri()}?budget=1KiB")
    assert result.exit_code == 1
    assert "1 page copied" in result.stdout and "3 found no room" in result.stdout


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["stat", "nosuch"], "holds no pages (no samestate-pages.json there); check the path"),
        (["stat", "gopher://host"], "no place for pages; say file:///folder, valkey://host:port/0"),
        (["stat", "valkey://127.0.0.1:1/0"], "valkey://127.0.0.1:1/0: Error 111"),
        (["stat", "valkey://:s3cr3t@host/0?nothing=1"], "valkey://host/0: no option nothing"),
        (["stat", "object+sftp://host/x"], "pages may be seen half-written there; use one of"),
        (["verify", "TIER", "--namespace", "nosuch"], "--namespace: 0 of them are 'nosuch'; there: "),
        (["evict", "TIER"], "say what goes: --older-than, --bytes, --key or --namespace"),
        (["evict", "TIER", "--older-than", "1 week"], "--older-than: '1 week' is no time; say 90s, 30m, 12h or 7d"),
        (["evict", "TIER", "--bytes", "few"], "--bytes: 'few' is no size"),
        (["evict", "object+memory://x", "--bytes", "-5"], "--bytes: '-5' is no size"),
        (["warm", "TIER", __file__], "samestate: "),
    ],
)
def test_bad_input_is_one_line(samestate: Command, tier: OnDisk, arguments: list[str], words: str) -> None:
    result = samestate("cache", *[str(tier.root) if word == "TIER" else word for word in arguments])
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1), result.output
    assert words in result.stderr
    assert numbers(tier) == [1, 2, 3]


def test_what_a_place_does_not_know_is_said(samestate: Command, tier: OnDisk, tmp_path: Path) -> None:
    bucket = f"object+file://{tmp_path}/bucket"
    assert samestate("cache", "warm", tier.root, bucket).exit_code == 0
    result = samestate("cache", "evict", bucket, "--older-than", "1s")
    assert result.exit_code == 2
    assert "does not know when its pages were used; use --bytes or --namespace" in result.stderr
    assert "unknown" in samestate("cache", "list", bucket).stdout
    assert samestate("cache", "evict", bucket, "--bytes", "0").stdout.startswith("4 pages")


@pytest.mark.parametrize(
    ("url", "package", "extra"), [("valkey://host/0", "valkey", "valkey"), ("object+memory://x", "fsspec", "object")]
)
def test_a_package_that_is_not_installed_is_named(
    samestate: Command, monkeypatch: pytest.MonkeyPatch, url: str, package: str, extra: str
) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] == package or name in {
            "samestate.cache.stores.valkey",
            "samestate.cache.stores.valkey_wire",
            "samestate.cache.stores.object",
        }:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    result = samestate("cache", "stat", url)
    assert result.exit_code == 2
    assert f"pip install 'samestate[{extra}]'" in result.stderr
