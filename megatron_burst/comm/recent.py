# SPDX-License-Identifier: Apache-2.0
"""A cache with least-recently-used eviction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class RecentCache(dict[Any, Any]):
    """A dict that keeps at most `most` values and evicts the least recently used value."""

    def __init__(self, most: int):
        super().__init__()
        self.most = most

    def find(self, key: Any) -> Any:
        """Return the value of a key and mark it as used; None if the key is missing."""
        return self.keep(key, self[key]) if key in self else None

    def keep(self, key: Any, value: Any) -> Any:
        """Add a value and return it. Evicts the least recently used value if the cache is full."""
        self.pop(key, None)
        while len(self) >= self.most:
            del self[next(iter(self))]
        self[key] = value
        return value

    def of(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the value of a key; if the key is missing, add and return the result of `make`."""
        return self.keep(key, self[key] if key in self else make())
