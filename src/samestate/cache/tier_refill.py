"""Pages that a store lost while the memory tier still has them: they are written once more.

vLLM writes a page through when it is saved, and not again while memory has it. So when a request is over, a tier looks
whether its store still has the prefix. What it lacks is asked of the memory tier at the end of the next step, as vLLM
lets secondary tiers do (`ParentManager`): pages that lie there are pinned and saved like any others.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, TierFilter

if TYPE_CHECKING:
    from vllm.v1.kv_offload.tiering.base import ParentManager, TransferJob

PREFIXES = 64
"""Remembered at most; a later request with an older one says it again."""
PAGES_A_STEP = 128
"""vLLM is asked for at most so many at once, and so many are pinned."""
_numbers = itertools.count()


class _Refilling:
    """In a context: no request of a client's."""


class _Lost(NamedTuple):
    prefix: Sequence[OffloadKey]
    missing: Sequence[OffloadKey]


class Refill:
    """What a store lacks. Told by threads, asked by the scheduler.

    Attributes:
        in_memory: Whether a page may lie in memory. Most of what a hybrid's store lacks are states at boundaries where
            no step ended, which nobody has: vLLM, which counts what it is asked for, need not be asked for those.

    Args:
        saving: Pages that are on their way to the store: a request may be over before its pages are there.

    """

    def __init__(self, saving: Callable[[], Container[OffloadKey]] = frozenset) -> None:
        self.in_memory: Callable[[OffloadKey], bool] = lambda key: True
        self._saving = saving
        self._lost: deque[_Lost] = deque(maxlen=PREFIXES)

    def lacks(self, prefix: Sequence[OffloadKey], found: Sequence[bool]) -> None:
        """Which pages of a prefix the store has."""
        missing = [key for key, there in zip(prefix, found, strict=True) if not there]
        if missing:
            self._lost.append(_Lost(prefix, missing))

    def order(self, parent: ParentManager) -> TransferJob | None:
        """The next pages that lie in memory, pinned, to be saved; None: there are none among those asked for now."""
        prefix, missing = self._next()
        if not missing:
            return None
        if len(missing) > PAGES_A_STEP:
            self._lost.appendleft(_Lost(prefix, missing[PAGES_A_STEP:]))
        # No tier but memory is asked: what would be promoted for it might push out what requests need.
        context = ReqContext(req_id=f"samestate-refill-{next(_numbers)}", load_tier_filter=TierFilter())
        context.set_state(_Refilling())
        for number, key in enumerate(prefix, 1):
            context.set_offload_key_position(key, number)
        parent.on_new_request(context)
        try:
            ready = [key for key in missing[:PAGES_A_STEP] if parent.lookup(key, context) is LookupResult.HIT]
            return parent.create_store_job(ready, context) if ready else None
        finally:
            parent.on_request_finished(context)

    def _next(self) -> _Lost:
        saving = self._saving() if self._lost else ()
        while self._lost:
            prefix, missing = self._lost.popleft()
            if here := [key for key in missing if key not in saving and self.in_memory(key)]:
                return _Lost(prefix, here)
        return _Lost((), ())

    def clear(self) -> None:
        """Nothing is lacked any more."""
        self._lost.clear()


def refills(req_context: ReqContext) -> bool:
    """Whether this is no request of a client's, but a `Refill`'s, of whichever tier."""
    return req_context.get_state(_Refilling) is not None
