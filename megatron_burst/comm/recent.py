# SPDX-License-Identifier: Apache-2.0
"""A cache of recently used values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class RecentCache(dict[Any, Any]):
    """A dictionary with the `most` recently used values."""

    def __init__(self, most: int):
        super().__init__()
        self.most = most

    def find(self, key: Any) -> Any:
        """Return the value of a key and mark it as used; None if there is none."""
        return self.keep(key, self[key]) if key in self else None

    def keep(self, key: Any, value: Any) -> Any:
        """Add a value and return it; if there are too many, remove the least recently used."""
        self.pop(key, None)
        while len(self) >= self.most:
            del self[next(iter(self))]
        self[key] = value
        return value

    def of(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the value of a key; if there is none, add the result of `make`."""
        return self.keep(key, self[key] if key in self else make())
