"""How fast the links and the device of a rank are, as measured or as stated by the user.

Plain numbers, for `forecast`; how they are measured is `probe`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

CHOICES_KEPT = 64  # kinds of layers times batches of different documents
WORKS_KEPT = 8  # kinds of layers
BACKWARD = 2.5  # FLOPs of a backward over those of its forward: five products for two


@dataclass(frozen=True)
class Rates:
    """What one rank's links and device carry; all ranks are taken to be alike.

    intra, inter: bytes per second that a rank sends within its node and between nodes, while it
    receives as many; a link class that the grid does not have may be math.inf.
    latency: seconds that each message occupies its link besides its bytes.
    compute: FLOP/s of the local attention (multiplications and additions counted apart, two
    products in forward, five in backward, visible pairs only); math.inf if it takes no time, None
    to have it measured with the plan's kernel.
    launch: seconds that each call of the local attention takes besides its FLOPs.
    posting: seconds of a rank's own time that starting an exchange takes, in which it computes
    nothing; 0 where the host runs ahead of a device.
    """

    intra: float
    inter: float
    latency: float = 0.0
    compute: float | None = None
    launch: float = 0.0
    posting: float = 0.0

    def __post_init__(self):
        for name in ("intra", "inter", "compute"):
            value = getattr(self, name)
            if name == "compute" and value is None:
                continue
            if not _is_number(value) or not value > 0:
                raise ValueError(f"rates: {name} must be a positive number, got {value!r}")
        for name in ("latency", "launch", "posting"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value < math.inf:
                raise ValueError(f"rates: {name} must be seconds, 0 or more, got {value!r}")

    def describe(self) -> str:
        """On one line, in the units people compare."""
        compute = "unknown" if self.compute is None else _short(self.compute, "FLOP/s")
        links = f"intra {_short(self.intra, 'B/s')}, inter {_short(self.inter, 'B/s')}"
        own = f" and {self.posting * 1e6:.3g} us to start it" * (self.posting > 0)
        return f"{links}, {self.latency * 1e6:.3g} us per message{own}, compute {compute}"


def check_rates(rates: object) -> None:
    """Raise ValueError unless these are `Rates`."""
    if not isinstance(rates, Rates):
        raise ValueError(f"rates must be mb.Rates or made by mb.measure_rates, got {rates!r:.100}")


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


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _short(value: float, unit: str) -> str:
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= size or prefix == "M":
            return f"{value / size:.3g} {prefix * (value < math.inf)}{unit}"
    raise AssertionError
