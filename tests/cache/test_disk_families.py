"""A folder with a budget that knows what belongs together: whole families go, also after a restart."""

from __future__ import annotations

import random
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from cache.kept import SPACE, key, page
from samestate.cache.base import Groups, PageKey, PageStore, Write
from samestate.cache.envelope import HEADER_BYTES
from samestate.cache.stores import admin, disk_families
from samestate.cache.stores.disk import DiskPlace
from samestate.cache.stores.disk_families import GROUPS_FILE, LINKS_FILE, FamilyFiles, family_of

STORED = HEADER_BYTES + 5000
GROUPS = Groups(frozenset({0}), frozenset({1}))


def opened(tmp_path: Path, pages: int | None, groups: Groups | None = GROUPS) -> PageStore:
    """A store as an engine opens it, with room for so many pages."""
    store = DiskPlace(tmp_path / "pages", None if pages is None else pages * STORED).store(SPACE)
    if groups is not None:
        store.describe(groups)
    return store


def save(store: PageStore, *families: int, states: tuple[int, ...] | None = None) -> None:
    """A request's prefix, in order: a page each, a state where one is named, by default everywhere."""
    keys = [key(number, group) for number in families for group in (0, 1)]
    store.relate(keys)
    for number in families:
        for group in (0, 1) if states is None or number in states else (0,):
            store.write(key(number, group), page(number))
    store.touch(keys)


def there(store: PageStore) -> dict[int, list[int]]:
    """By family, which of its groups are there."""
    found: dict[int, list[int]] = {}
    for info in store.scan():
        found.setdefault(int.from_bytes(info.key[:4], "big"), []).append(info.key[-1])
    return {number: sorted(groups) for number, groups in sorted(found.items())}


def links(tmp_path: Path) -> Path:
    (found,) = (tmp_path / "pages").rglob(LINKS_FILE)
    return found


def test_pages_and_state_of_a_boundary_go_together(tmp_path: Path) -> None:
    store = opened(tmp_path, 6)
    save(store, 1, 2)
    save(store, 5)
    assert store.write(key(6), page(6)) is Write.WRITTEN
    assert there(store) == {1: [0, 1], 5: [0, 1], 6: [0]}, "of 2, which goes before its parent, nothing is left"


def test_without_groups_pages_go_one_by_one(tmp_path: Path) -> None:
    store = opened(tmp_path, 6, groups=None)
    save(store, 1, 2)
    save(store, 5)
    store.write(key(6), page(6))
    assert there(store) == {1: [0, 1], 2: [0], 5: [0, 1], 6: [0]}
    assert (store.orphan_bytes, store.measure_orphans()) == (None, None)


def test_with_a_family_go_those_above_it_that_nothing_needs_any_more(tmp_path: Path) -> None:
    """Only the third boundary had a state: without it the pages of the first two restore nothing."""
    store = opened(tmp_path, 6)
    save(store, 1, 2, 3, states=(3,))
    save(store, 7)
    store.write(key(8), page(8))
    assert there(store) == {7: [0, 1], 8: [0]}


def test_a_prefix_that_others_share_stays(tmp_path: Path) -> None:
    store = opened(tmp_path, 7)
    save(store, 1, 2, states=(2,))
    save(store, 1, 3, states=(3,))
    save(store, 7)
    store.write(key(8), page(8))
    assert there(store) == {1: [0], 3: [0, 1], 7: [0, 1], 8: [0]}


def test_parents_are_known_after_a_restart(tmp_path: Path) -> None:
    save(opened(tmp_path, 7), 1, 2, 3, states=(3,))
    again = opened(tmp_path, 6, groups=None)
    save(again, 7)
    again.write(key(8), page(8))
    assert there(again) == {7: [0, 1], 8: [0]}, "by what lies in the folder, before anybody says it"
    assert again.orphan_bytes == STORED


def test_orphans_are_counted_as_they_come_and_by_looking(tmp_path: Path) -> None:
    store = opened(tmp_path, 20)
    save(store, 1, 2, 3, states=(2, 3))
    assert (store.orphan_bytes, store.measure_orphans()) == (0, 0)
    store.delete([key(3, 1)])
    assert (store.orphan_bytes, store.measure_orphans()) == (STORED, STORED), "the page of 3"
    store.delete([key(1, 0)])
    assert (store.orphan_bytes, store.measure_orphans()) == (3 * STORED, 3 * STORED)
    stranger = DiskPlace(tmp_path / "pages")
    (stat,) = admin.stat(stranger, stranger.namespaces())
    assert (stat.orphan_bytes, stat.stored_bytes) == (3 * STORED, 3 * STORED)


def test_orphans_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_families, "GROWING_SECONDS", -1.0)
    store = opened(tmp_path, 6)
    save(store, 7)
    save(store, 1, 2)
    store.delete([key(1, 0)])
    for number in (8, 9, 10):
        store.write(key(number), page(number))
    assert 7 in there(store)
    assert there(store).keys() & {1, 2} == set()


def test_what_is_still_being_written_is_no_orphan_yet(tmp_path: Path) -> None:
    """The state comes last: until then nothing can use the pages before it."""
    store = opened(tmp_path, 6)
    for number in (7, 8, 9):
        save(store, number)
    prefix = [key(number, group) for number in (1, 2, 3) for group in (0, 1)]
    store.relate(prefix)
    for number, group in ((1, 0), (2, 0), (3, 0), (3, 1)):
        assert store.write(key(number, group), page(number)) is Write.WRITTEN
    assert there(store) == {1: [0], 2: [0], 3: [0, 1], 9: [0, 1]}
    assert (store.orphan_bytes, store.measure_orphans()) == (0, 0)


def test_after_a_minute_it_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path, 6)
    save(store, 7)
    save(store, 1, 2, 3, states=())
    now = time.time()
    monkeypatch.setattr(disk_families.time, "time", lambda: now + disk_families.GROWING_SECONDS + 1)
    save(store, 8)
    assert 7 in there(store)
    assert there(store).keys() & {1, 2, 3} == set()


def test_a_request_that_is_never_over_leaves_its_families_known(tmp_path: Path) -> None:
    """An engine hears that a request is over with the next one: of its last request it never does."""
    store = opened(tmp_path, 6)
    store.relate([key(number, group) for number in (1, 2, 3) for group in (0, 1)])
    for number, group in ((3, 1), (3, 0), (1, 0), (2, 0)):
        store.write(key(number, group), page(number))
    assert store.orphan_bytes == 0
    again = opened(tmp_path, 6, groups=None)
    assert (again.orphan_bytes, again.measure_orphans()) == (0, 0)
    save(again, 7)
    again.write(key(8), page(8))
    assert there(again) == {7: [0, 1], 8: [0]}, "the whole prefix went"


def test_a_torn_or_foreign_line_costs_its_link_only(tmp_path: Path) -> None:
    save(opened(tmp_path, None), 1, 2, 3)
    whole = links(tmp_path).read_text()
    links(tmp_path).write_text(
        whole + "zz zz\nabc\n" + family_of(key(9)).hex() + " 0\n" + family_of(key(9)).hex() + " 1122"
    )
    files = FamilyFiles(str(links(tmp_path).parent))
    one, two, three = (family_of(key(number)) for number in (1, 2, 3))
    assert files.parents() == {two: one, three: two}
    save(opened(tmp_path, None), 1, 2, 3, 4)
    assert FamilyFiles(str(links(tmp_path).parent)).parents() == {two: one, three: two, family_of(key(4)): three}


@pytest.mark.parametrize("said", ["", "[]", '{"pages": 1, "states": []}', '{"pages": ["x"], "states": []}', "{}"])
def test_groups_that_cannot_be_read_are_none(tmp_path: Path, said: str) -> None:
    save(opened(tmp_path, None), 1, 2)
    (groups_file,) = (tmp_path / "pages").rglob(GROUPS_FILE)
    assert FamilyFiles(str(groups_file.parent)).groups() == GROUPS
    groups_file.write_text(said)
    assert FamilyFiles(str(groups_file.parent)).groups() is None
    store = opened(tmp_path, 6, groups=None)
    assert (store.orphan_bytes, store.measure_orphans()) == (None, None)


def test_links_of_what_is_gone_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_families, "FEW_LINES", 8)
    monkeypatch.setattr(disk_families, "GROWING_SECONDS", -1.0)
    store = opened(tmp_path, 16)
    for number in range(100, 400, 2):
        save(store, number, number + 1)
    assert len(links(tmp_path).read_text().split("\n")) < 100
    known = FamilyFiles(str(links(tmp_path).parent)).parents()
    for child in [number for number in there(store) if number % 2]:
        assert known[family_of(key(child))] == family_of(key(child - 1))


def test_a_page_that_no_room_can_be_made_for_evicts_nothing(tmp_path: Path) -> None:
    store = opened(tmp_path, 4)
    save(store, 1, 2)
    assert store.write(key(3), page(3, 5 * STORED)) is Write.NO_ROOM
    assert there(store) == {1: [0, 1], 2: [0, 1]}
    assert store.orphan_bytes == 0


def test_links_that_cannot_be_written_cost_no_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path, 8)
    save(store, 1, 2)

    def refuse(files: FamilyFiles, new: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(FamilyFiles, "_append", refuse)
    save(store, 1, 2, 3)
    assert there(store) == {1: [0, 1], 2: [0, 1], 3: [0, 1]}


def test_links_that_a_full_disk_tore_are_written_again(tmp_path: Path) -> None:
    chain = [family_of(key(number)) for number in (1, 2, 3)]
    files = FamilyFiles(str(tmp_path))
    files.learn(chain[:2], None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / LINKS_FILE).stat().st_size + 20, hard))
    try:
        with pytest.raises(OSError, match="No space left"):
            files.learn(chain, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert FamilyFiles(str(tmp_path)).parents() == {chain[1]: chain[0]}
    assert files.learn(chain, None) == [(chain[2], chain[1])]
    assert FamilyFiles(str(tmp_path)).parents() == {chain[1]: chain[0], chain[2]: chain[1]}


def test_two_engines_in_one_folder_learn_the_links_of_both(tmp_path: Path) -> None:
    one, other = opened(tmp_path, 20), opened(tmp_path, 20)
    save(one, 1, 2)
    save(other, 1, 3)
    known = FamilyFiles(str(links(tmp_path).parent)).parents()
    assert known == {family_of(key(number)): family_of(key(1)) for number in (2, 3)}


@pytest.mark.regression
def test_a_link_that_is_written_down_stays_until_its_pages_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scan of another thread tidies up in between."""
    monkeypatch.setattr(disk_families, "FEW_LINES", 0)
    chain = [family_of(key(number)) for number in (1, 2, 3)]
    parents = {chain[1]: chain[0], chain[2]: chain[1]}
    files = FamilyFiles(str(tmp_path))
    files.learn(chain, None)
    files.keep(lambda family: False)
    assert files.parents() == FamilyFiles(str(tmp_path)).parents() == parents
    files.learn([chain[0], family_of(key(9))], None)
    now = time.time()
    monkeypatch.setattr(disk_families.time, "time", lambda: now + disk_families.GROWING_SECONDS + 1)
    files.keep(lambda family: family in chain)
    assert files.parents() == parents, "what never came is forgotten"


@pytest.mark.regression
def test_a_scan_between_a_link_and_its_page_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = DiskPlace(tmp_path / "pages", 20 * STORED)
    store = place.store(SPACE)
    store.describe(GROUPS)
    assert place.budget is not None
    budget, learn = place.budget, place.budget.learn

    def scan_first(*arguments: Any) -> None:
        budget.scan()
        learn(*arguments)
        budget.scan()

    monkeypatch.setattr(budget, "learn", scan_first)
    monkeypatch.setattr(disk_families, "FEW_LINES", 0)
    save(store, 1, 2, 3, states=(3,))
    assert (store.orphan_bytes, store.measure_orphans()) == (0, 0)
    assert FamilyFiles(str(links(tmp_path).parent)).parents().keys() == {family_of(key(2)), family_of(key(3))}


@pytest.mark.regression
def test_what_another_engine_wrote_later_is_no_orphan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its links too are read with its pages: else all of its prefixes but their ends would go first."""
    one, other = opened(tmp_path, 16), opened(tmp_path, 16)
    save(one, 7)
    save(other, 1, 2, 3, states=(3,))
    save(one, 8)  # A sixteenth is written: it reads the folder before the next page.
    now = time.time()
    monkeypatch.setattr(disk_families.time, "time", lambda: now + disk_families.GROWING_SECONDS + 1)
    save(one, 9)
    assert (one.orphan_bytes, one.measure_orphans()) == (0, 0)
    for number in range(10, 18):
        save(one, number, states=(number,))
        if 7 not in there(one):
            break
    assert {1, 2, 3} <= there(one).keys(), "7 was used before them, and goes first"


@pytest.mark.regression
def test_a_link_of_another_engine_stays_until_its_pages_come(tmp_path: Path) -> None:
    """Read, and tidied away before the page was there, it would not be read again."""
    one, other = opened(tmp_path, 16), opened(tmp_path, 16)
    save(one, 7)
    prefix = [key(number, group) for number in (1, 2) for group in (0, 1)]
    other.relate(prefix)
    save(one, 8)  # It reads the folder before each of these.
    other.write(key(1, 0), page(1))
    other.write(key(2, 0), page(2))
    other.write(key(2, 1), page(2))
    save(one, 9)
    assert (one.orphan_bytes, one.measure_orphans()) == (0, 0)


def test_links_that_others_write_are_read_from_where_reading_ended(tmp_path: Path) -> None:
    one, two, three, four, five = (family_of(key(number)) for number in (1, 2, 3, 4, 5))
    ours, theirs = FamilyFiles(str(tmp_path)), FamilyFiles(str(tmp_path))
    assert ours.catch_up() == []
    theirs.learn([one, two], None)
    assert ours.catch_up() == [(two, one)]
    assert ours.catch_up() == []
    ours.learn([two, three], None)
    assert (ours.catch_up(), theirs.catch_up()) == ([], [(three, two)])
    whole = (tmp_path / LINKS_FILE).read_bytes()
    line = f"{four.hex()} {three.hex()}\n".encode()
    (tmp_path / LINKS_FILE).write_bytes(whole + line[:70])
    assert ours.catch_up() == [], "half a line"
    (tmp_path / LINKS_FILE).write_bytes(whole + line)
    assert ours.catch_up() == [(four, three)]
    theirs._replace(tmp_path / LINKS_FILE, f"{five.hex()} {four.hex()}\n")
    assert ours.catch_up() == [(five, four)], "written anew, and shorter"


def test_whatever_happens_the_budget_holds_and_the_counts_agree(tmp_path: Path) -> None:
    """Branching prefixes, saved, deleted and found again by a new engine, in a random order."""
    chance = random.Random(7)
    store = opened(tmp_path, 12)
    for _ in range(300):
        if chance.random() < 0.1:
            store = opened(tmp_path, 12)
        elif chance.random() < 0.2 and (infos := list(store.scan())):
            store.delete([chance.choice(infos).key])
        else:
            depth = chance.randint(1, 4)
            chain = [chance.randint(1, 3) * 10**level for level in range(depth)]
            numbers = [sum(chain[: level + 1]) for level in range(depth)]
            save(store, *numbers, states=tuple(number for number in numbers if chance.random() < 0.7))
        infos = list(store.scan())
        assert sum(info.stored_bytes for info in infos) <= 12 * STORED
        # A family whose link came after this engine's own look at the folder is counted by both alike.
        assert store.orphan_bytes == store.measure_orphans()


def test_keys_are_taken_apart_as_vllm_puts_them_together() -> None:
    base = pytest.importorskip("vllm.v1.kv_offload.base")
    made = base.make_offload_key(b"h" * 32, 3)
    assert family_of(PageKey(bytes(made))) == base.get_offload_block_hash(made)
    assert disk_families._group_of(PageKey(bytes(made))) == base.get_offload_group_idx(made)
