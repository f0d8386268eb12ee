"""A store that is opened in a thread, again and again until it can be used. The engine serves meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable

from vllm.logger import init_logger

from samestate.cache.base import PageStore, StoreError

logger = init_logger(__name__)

OpenStore = Callable[[], PageStore]
"""Opens the store of this engine's namespace; may take long. Raises StoreError where it may work later."""

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 60.0


class OpenedStore:
    """See the module.

    Attributes:
        store: None: not open, not yet or not any more.
        refused: It cannot be opened at all.

    """

    def __init__(self, url: str) -> None:
        self.store: PageStore | None = None
        self.refused = False
        self._url = url
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def begun(self) -> bool:
        """Whether anybody has asked for it to be opened."""
        return self._thread is not None

    def open(self, open_store: OpenStore) -> None:
        """Begin. Returns at once."""
        self._thread = threading.Thread(target=self._try, args=(open_store,), name="samestate-open", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait until it is open or refused; whether it is open."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self.store is not None

    def close(self) -> None:
        """No further attempt; close what is open."""
        self._closing.set()
        store, self.store = self.store, None
        if store is not None:
            store.close()

    def _try(self, open_store: OpenStore) -> None:
        pause = FIRST_PAUSE_S
        while not self._closing.is_set():
            try:
                self.store = open_store()
                if self._closing.is_set():
                    self.close()
                return
            except StoreError as error:
                logger.warning("%s: cannot be used, requests go on without it: %s", self._url, error)
            except Exception as error:
                self.refused = True
                logger.exception("%s: cannot be opened, this engine goes on without it: %s", self._url, error)
                return
            self._closing.wait(pause)
            pause = min(pause * 2, LONGEST_PAUSE_S)
