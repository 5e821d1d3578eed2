# SPDX-License-Identifier: Apache-2.0
"""A cache of the values that were used last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Recent(dict[Any, Any]):
    """A dictionary of at most `most` values: those that were used last."""

    def __init__(self, most: int):
        super().__init__()
        self.most = most

    def find(self, key: Any) -> Any:
        """Return the value of a key, which is then the latest; None if there is none."""
        return self.keep(key, self[key]) if key in self else None

    def keep(self, key: Any, value: Any) -> Any:
        """Add a value and return it; the oldest one is removed if there are too many."""
        self.pop(key, None)
        while len(self) >= self.most:
            del self[next(iter(self))]
        self[key] = value
        return value

    def of(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the value of a key; if there is none, keep the result of `make`."""
        return self.keep(key, self[key] if key in self else make())
