"""What has been found out about one grid: rates, choices, and parts of plans that are needed again.

It lies in the cache that `Groups` carries and has its lifetime. Decides how much of it is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .rates import Rates

CHOICES_KEPT = 64  # kinds of layers times batches of different documents
WORKS_KEPT = 8  # kinds of layers


def known(cache: dict[str, Any]) -> Known:
    """What is known of the groups that carry this cache; nothing at first."""
    return cache.setdefault("known", Known())


@dataclass
class Known:
    """What has been found out about one grid, and is the same on all its ranks.

    rates: of its links, without `compute`; speeds: by kernel, (FLOP/s, seconds per call);
    choices: by call, the last CHOICES_KEPT; works: what a plan is made of that is the same in every
    micro-batch, by problem, the last WORKS_KEPT.
    """

    rates: Rates | None = None
    speeds: dict[Any, tuple[float, float]] = field(default_factory=dict)
    choices: dict[Any, Any] = field(default_factory=dict)
    works: dict[Any, Any] = field(default_factory=dict)

    def choice(self, key: Any, make: Callable[[], Any]) -> Any:
        """The choice for `key`, made when it is first asked for."""
        return _kept(self.choices, CHOICES_KEPT, key, make)

    def work(self, key: Any, make: Callable[[], Any]) -> Any:
        """The work for `key`, made when it is first asked for."""
        return _kept(self.works, WORKS_KEPT, key, make)


def _kept(found: dict[Any, Any], most: int, key: Any, make: Callable[[], Any]) -> Any:
    """found[key]; the one that was not asked for the longest makes room for a new one."""
    value = found.pop(key) if key in found else make()
    if len(found) >= most:
        del found[next(iter(found))]
    found[key] = value
    return value
