# SPDX-License-Identifier: Apache-2.0
"""What is kept because it will be asked for again, and how much of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Recent(dict[Any, Any]):
    """What was made for the keys that were asked for last, at most `most` of them."""

    def __init__(self, most: int):
        super().__init__()
        self.most = most

    def of(self, key: Any, make: Callable[[], Any]) -> Any:
        """What was made for `key`, or is made now, for which the oldest makes room."""
        value = self.pop(key) if key in self else make()
        while len(self) >= self.most:
            del self[next(iter(self))]
        self[key] = value
        return value
