"""One page between a store and its row of the memory tier. Called by a tier's threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from vllm.v1.kv_offload.base import OffloadKey, get_offload_group_idx

from samestate.cache import tier_metrics as metric
from samestate.cache.base import PageKey, PageStore, Read, Write
from samestate.cache.layout import Span
from samestate.cache.tier_jobs import Job, Passage
from samestate.cache.tier_metrics import Counts


class RowPages:
    """Pages in rows, by where each group's bytes lie in a row.

    Args:
        rows: vLLM's view of the memory tier, shape (rows, bytes).
        counts: Told of every page.

    Attributes:
        writing: Passed by every write to a store. It begins before its job is over, and may end long after.

    """

    def __init__(self, rows: memoryview, counts: Counts) -> None:
        self._rows: np.ndarray | None = np.asarray(rows).view(np.uint8)
        self._counts = counts
        self.writing = Passage()
        self.spans: Mapping[int, Sequence[Span]] = {}

    def let_go(self) -> None:
        """The rows are not ours any more."""
        self._rows = None

    def load(self, store: PageStore, job: Job, index: int) -> str | None:
        """Read a page, verify it and put it into its row. What went wrong, in a word, or None. Raises `StoreError`."""
        key = job.keys[index]
        spans = self.spans[get_offload_group_idx(key)]
        page = np.empty(sum(span.end - span.start for span in spans), np.uint8)
        found = store.read(page_key(key), memoryview(page))
        if found is Read.DAMAGED:
            self._counts.add(metric.DAMAGED_PAGES)
            return "damaged"
        if found is Read.MISS:
            return "lost"

        def into_row() -> None:
            row, at = self._row(job, index), 0
            for span in spans:
                size = span.end - span.start
                row[span.start : span.end] = page[at : at + size]
                at += size

        if not job.touch_row(into_row):
            return "slow"
        job.count(page.nbytes)
        self._counts.add(metric.LOADED_PAGES)
        self._counts.add(metric.LOADED_BYTES, page.nbytes)
        return None

    def save(self, store: PageStore, job: Job, index: int) -> str | None:
        """Take a page from its row and write it, unless it is there. As `load`."""
        key = job.keys[index]
        if not job.related:
            job.related = True
            store.relate([page_key(one) for one in job.prefix])
        if store.contains([page_key(key)])[0]:
            self._counts.add(metric.UNSTORED_PAGES, 1, Write.PRESENT)
            return None
        spans = self.spans[get_offload_group_idx(key)]
        taken: list[np.ndarray] = []

        def from_row() -> None:
            row = self._row(job, index)
            taken.append(np.concatenate([row[span.start : span.end] for span in spans]))

        with self.writing.inside():
            if not job.touch_row(from_row):
                return "slow"
            (page,) = taken
            written = store.write(page_key(key), memoryview(page))
        if written is Write.NO_ROOM:
            return written
        if written is Write.PRESENT:
            self._counts.add(metric.UNSTORED_PAGES, 1, written)
            return None
        job.count(page.nbytes)
        self._counts.add(metric.STORED_PAGES)
        self._counts.add(metric.STORED_BYTES, page.nbytes)
        return None

    def _row(self, job: Job, index: int) -> np.ndarray:
        assert self._rows is not None
        return self._rows[job.rows[index]]


def page_key(key: OffloadKey) -> PageKey:
    """vLLM's key, as stores know it."""
    return PageKey(bytes(key))
