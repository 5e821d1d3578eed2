# SPDX-License-Identifier: Apache-2.0
"""A cache with least-recently-used eviction, which several threads may use."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any


class RecentCache(dict[Any, Any]):
    """A dict that keeps at most `most` values and evicts the least recently used value.

    Threads may call the methods at the same time. Two threads that call `of` with the same missing
    key may both make the value.
    """

    def __init__(self, most: int):
        super().__init__()
        self.most = most
        self._lock = Lock()

    def find(self, key: Any) -> Any:
        """Return the value of a key and mark it as used; None if the key is missing."""
        with self._lock:
            if key in self:
                self[key] = self.pop(key)
            return self.get(key)

    def keep(self, key: Any, value: Any) -> Any:
        """Add a value and return it. Evicts the least recently used value if the cache is full."""
        with self._lock:
            self.pop(key, None)
            while len(self) >= self.most:
                del self[next(iter(self))]
            self[key] = value
        return value

    def of(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the value of a key; if the key is missing, add and return the result of `make`."""
        with self._lock:
            if key in self:
                value = self[key] = self.pop(key)
                return value
        return self.keep(key, make())
