"""The family index against a model that computes everything anew from what is there."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from samestate.cache.family_index import Family, FamilyIndex, Member, PolicyName, Want

PAGES, STATES = (0, 3), (1, 2)
GROUPS = [*PAGES, *STATES]
CHAINS = [(), (0,), (1,), (0, 0), (0, 1), (0, 0, 0), (0, 0, 1), (1, 0), (0, 0, 0, 0), (1, 0, 0)]
"""Families as paths: the last of a path is the boundary, what is before it its parent."""
PATHS = [path for path in CHAINS if path]


def name(path: tuple[int, ...]) -> Family:
    return Family(bytes(path) + b"!")


def parent(path: tuple[int, ...]) -> tuple[int, ...] | None:
    return path[:-1] or None


def add(index: FamilyIndex, path: tuple[int, ...], group: int, size: int = 10) -> None:
    above = parent(path)
    index.add(name(path), group, size, parent=name(above) if above else None, end=100 * len(path))
    while above and (higher := parent(above)) and index.link(name(above), name(higher)):
        above = higher


def fill(index: FamilyIndex, path: tuple[int, ...], *, state: bool, size: int = 10) -> None:
    for group in [*PAGES, *(STATES if state else ())]:
        add(index, path, group, size)


class Model:
    """What is there; every answer from scratch."""

    def __init__(self, there: dict[tuple[int, ...], dict[int, int]] | None = None) -> None:
        self.there = there or {}
        self.held: dict[tuple[int, ...], int] = {}
        self.wanted: set[tuple[int, ...]] = set()

    def restorable(self, path: tuple[int, ...]) -> bool:
        prefixes = [path[:i] for i in range(1, len(path) + 1)]
        whole = all(set(PAGES) <= self.there.get(prefix, {}).keys() for prefix in prefixes)
        return whole and set(STATES) <= self.there.get(path, {}).keys()

    def needed(self, path: tuple[int, ...]) -> bool:
        return any(self.restorable(other) for other in PATHS if other[: len(path)] == path)

    def orphan_bytes(self, without: Collection[tuple[int, ...]] = ()) -> int:
        orphans = 0
        for path, sizes in self.there.items():
            if path in without:
                continue
            if not self.needed(path):
                orphans += sum(sizes.values())
            elif not self.restorable(path):
                orphans += sum(size for group, size in sizes.items() if group in STATES)
        return orphans

    def bytes(self) -> int:
        return sum(sum(sizes.values()) for sizes in self.there.values())

    def below(self, path: tuple[int, ...]) -> bool:
        return any(sizes and other != path and other[: len(path)] == path for other, sizes in self.there.items())

    def fixed(self, beside: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
        """Families that may not go: held or named, and all above them."""
        return {
            held[:i] for held in [*(p for p, n in self.held.items() if n), *beside] for i in range(1, len(held) + 1)
        }


class IndexMachine(RuleBasedStateMachine):
    policy: PolicyName = "lru"
    held = Bundle("held")
    steps = 0
    evictions = 0

    def __init__(self) -> None:
        super().__init__()
        self.index = FamilyIndex(PAGES, STATES, self.policy)
        self.model = Model()

    @rule(path=st.sampled_from(PATHS), group=st.sampled_from(GROUPS), size=st.integers(1, 40))
    def add_page(self, path: tuple[int, ...], group: int, size: int) -> None:
        add(self.index, path, group, size)
        self.model.there.setdefault(path, {})[group] = size

    @rule(path=st.sampled_from(PATHS), state=st.booleans())
    def add_family(self, path: tuple[int, ...], state: bool) -> None:
        fill(self.index, path, state=state)
        self.model.there.setdefault(path, {}).update(dict.fromkeys([*PAGES, *(STATES if state else ())], 10))

    @rule(path=st.sampled_from(PATHS), group=st.sampled_from(GROUPS))
    def lose_page(self, path: tuple[int, ...], group: int) -> None:
        sizes = self.model.there.get(path, {})
        assert self.index.remove(name(path), group) == sizes.pop(group, 0)

    @rule(path=st.sampled_from(PATHS), wanted=st.sampled_from(Want))
    def want(self, path: tuple[int, ...], wanted: Want) -> None:
        self.index.want(name(path), wanted)
        (self.model.wanted.add if wanted and name(path) in self.index else self.model.wanted.discard)(path)

    @rule(path=st.sampled_from(PATHS), reused=st.booleans())
    def touch(self, path: tuple[int, ...], reused: bool) -> None:
        self.index.touch([name(path[:i]) for i in range(1, len(path) + 1)], reused=reused)

    @rule(target=held, path=st.sampled_from(PATHS))
    def hold(self, path: tuple[int, ...]) -> tuple[int, ...]:
        if name(path) not in self.index:
            add(self.index, path, 0)
            self.model.there.setdefault(path, {})[0] = 10
        self.index.hold(name(path))
        self.model.held[path] = self.model.held.get(path, 0) + 1
        return path

    @precondition(lambda self: any(self.model.held.values()))
    @rule(path=held)
    def release(self, path: tuple[int, ...]) -> None:
        if self.model.held.get(path):
            self.model.held[path] -= 1
            self.index.release(name(path))

    @rule(need=st.integers(1, 80), beside=st.lists(st.sampled_from(PATHS), max_size=2))
    def evict(self, need: int, beside: list[tuple[int, ...]]) -> None:
        before = {path: dict(sizes) for path, sizes in self.model.there.items()}
        fixed = self.model.fixed(beside)
        wanted = set(self.model.wanted)
        gone = self.index.evict(need, [name(path[:i]) for path in beside for i in range(1, len(path) + 1)])
        free = sum(sum(sizes.values()) for path, sizes in before.items() if path not in fixed)
        if gone is None:
            assert free < need
            return
        type(self).evictions += 1
        assert sum(member.size for member in gone) >= need
        self._carry_out(gone, fixed)
        # What a family needs that is spared, it may need again: it goes with it.
        wanted = {path for path in wanted if self.model.there.get(path)}
        spared = fixed | {path[:i] for path in wanted for i in range(1, len(path) + 1)}
        assert self.model.orphan_bytes(without=spared) <= Model(before).orphan_bytes(without=spared)

    def _carry_out(self, gone: list[Member], fixed: set[tuple[int, ...]]) -> None:
        for path in dict.fromkeys(tuple(member.family[:-1]) for member in gone):
            assert path not in fixed
            assert not self.model.below(path), "a parent went before its child"
            members = {member.group: member.size for member in gone if member.family == name(path)}
            assert members == self.model.there.pop(path), "pages and state go together"

    @rule()
    def clear(self) -> None:
        if not any(self.model.held.values()):
            self.index.clear()
            self.model.there.clear()

    @invariant()
    def agrees(self) -> None:
        type(self).steps += 1
        self.model.wanted = {path for path in self.model.wanted if name(path) in self.index}
        for path in PATHS:
            assert self.index.is_restorable(name(path)) == self.model.restorable(path)
            assert {m.group: m.size for m in self.index.members(name(path))} == self.model.there.get(path, {})
        assert self.index.bytes == self.model.bytes()
        assert self.index.orphan_bytes == self.model.orphan_bytes()


class ValueMachine(IndexMachine):
    policy = "value"


@pytest.mark.slow
@pytest.mark.parametrize("machine", [IndexMachine, pytest.param(ValueMachine, marks=pytest.mark.deep)])
def test_ten_thousand_steps_serve_no_orphan(machine: type[IndexMachine]) -> None:
    machine.steps = machine.evictions = 0
    case = machine.TestCase
    checks = list(HealthCheck)
    case.settings = settings(max_examples=250, stateful_step_count=100, deadline=None, suppress_health_check=checks)
    case().runTest()
    assert machine.steps >= 10_000
    assert machine.evictions >= 200


# --- single points --------------------------------------------------------------------------------


@pytest.mark.sanity
def test_a_prefix_is_restorable_where_its_pages_reach_and_its_state_is() -> None:
    index = FamilyIndex(PAGES, STATES)
    chain = [(0,), (0, 0), (0, 0, 0)]
    for path in chain:
        fill(index, path, state=False)
    assert index.restorable([name(path) for path in chain]) == 0
    assert index.orphan_bytes == index.bytes == 60
    add(index, (0, 0), 1)
    assert index.restorable([name(path) for path in chain]) == 0, "half of a state is none"
    add(index, (0, 0), 2)
    assert index.restorable([name(path) for path in chain]) == 2
    assert index.orphan_bytes == 20, "the pages behind the state"
    index.remove(name((0,)), 3)
    assert index.restorable([name(path) for path in chain]) == 0, "a page in the middle is damaged"
    assert index.orphan_bytes == index.bytes


def test_with_a_leaf_go_the_families_that_only_it_needed() -> None:
    index = FamilyIndex(PAGES, STATES)
    fill(index, (0,), state=True)
    for path in [(0, 0), (0, 0, 0)]:
        fill(index, path, state=False)
    fill(index, (0, 0, 0, 0), state=True)
    index.touch([name((0,))])
    gone = index.evict(1)
    assert gone is not None
    assert [m.family for m in gone if m.group == 0] == [name((0, 0, 0, 0)), name((0, 0, 0)), name((0, 0))]
    assert index.restorable([name((0,)), name((0, 0))]) == 1
    assert (index.orphan_bytes, index.evicted, len(index)) == (0, 3, 1)


def test_the_least_recently_used_goes_first() -> None:
    index = FamilyIndex(PAGES, STATES)
    for path in [(0,), (1,)]:
        fill(index, path, state=True)
    index.touch([name((0,))])
    gone = index.evict(1)
    assert gone is not None
    assert {m.family for m in gone} == {name((1,))}


def test_by_value_goes_what_saves_least_for_its_bytes_unless_it_is_reused() -> None:
    def first_to_go(reuses: int) -> Family:
        index = FamilyIndex(PAGES, STATES, "value")
        fill(index, (0,), state=True, size=1000)
        fill(index, (1,), state=True, size=10)
        for _ in range(reuses):
            index.touch([name((0,))], reused=True)
        gone = index.evict(1)
        assert gone is not None
        return gone[0].family

    assert first_to_go(reuses=0) == name((0,)), "a hundred times the bytes for the same tokens"
    assert first_to_go(reuses=400) == name((1,))


def test_a_refused_eviction_changes_nothing() -> None:
    index = FamilyIndex(PAGES, STATES)
    fill(index, (0,), state=True)
    fill(index, (0, 0), state=True)
    fill(index, (1,), state=True)
    assert index.evict(90, beside=[name((0, 0))]) is None
    assert (index.bytes, index.evicted, index.orphan_bytes) == (120, 0, 0)
    assert index.restorable([name((0,)), name((0, 0))]) == 2
    gone = index.evict(40, beside=[name((0, 0))])
    assert gone is not None
    assert {m.family for m in gone} == {name((1,))}


def test_what_is_held_stays_with_everything_above_it() -> None:
    index = FamilyIndex(PAGES, STATES)
    fill(index, (0,), state=True)
    fill(index, (0, 0), state=True)
    index.hold(name((0, 0)))
    assert index.evict(1) is None
    index.release(name((0, 0)))
    gone = index.evict(1)
    assert gone is not None
    assert {m.family for m in gone} == {name((0, 0))}


def test_orphans_go_first_however_fresh() -> None:
    index = FamilyIndex(PAGES, STATES)
    fill(index, (0,), state=True)
    fill(index, (1,), state=False)
    index.touch([name((1,))])
    gone = index.evict(1)
    assert gone is not None
    assert {m.family for m in gone} == {name((1,))}


def test_what_is_wanted_goes_last_orphan_or_not() -> None:
    index = FamilyIndex(PAGES, STATES)
    fill(index, (0,), state=False)
    index.want(name((0,)), Want.ASKED)
    fill(index, (1,), state=True)
    gone = index.evict(1)
    assert gone is not None
    assert {m.family for m in gone} == {name((1,))}
    gone = index.evict(1)
    assert gone is not None
    assert {m.family for m in gone} == {name((0,))}
    fill(index, (0,), state=False)
    fill(index, (1,), state=True)
    index.want(name((0,)), Want.ASKED)
    index.want(name((0,)), Want.NO)
    gone = index.evict(1)
    assert gone is not None
    assert {m.family for m in gone} == {name((0,))}


def test_what_is_growing_goes_in_its_turn_and_not_before() -> None:
    index = FamilyIndex(PAGES, STATES)
    fill(index, (0,), state=True)
    fill(index, (1,), state=False)
    index.want(name((1,)), Want.GROWING)
    fill(index, (2,), state=True)
    gone = [index.evict(1) or [] for _ in range(3)]
    assert [{m.family for m in one} for one in gone] == [{name((number,))} for number in (0, 1, 2)]


def test_a_model_without_recurrent_state_restores_wherever_its_pages_reach() -> None:
    index = FamilyIndex([0], [])
    for path in [(0,), (0, 0)]:
        add(index, path, 0)
    assert index.restorable([name((0,)), name((0, 0))]) == 2
    assert index.orphan_bytes == 0
