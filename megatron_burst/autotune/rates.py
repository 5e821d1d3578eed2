# SPDX-License-Identifier: Apache-2.0
"""The rates of a rank's links and device, as `measure` finds them or as the user states them.

Plain numbers, which the simulator reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..units import duration, rate
from .host_time import HostTime
from .places import Nodes

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
    backward: time of a backward over that of its forward, at equal rows.
    half_rows: rows of a chunk with which a kernel reaches half of `compute`; 0: any rows reach it.
    slowdown: by which fraction computing is slower while the rank's links carry something.
    exchange: fraction of a link's rate that an all-to-all reaches.
    nic: bytes per second of a NIC that several ranks send by at once, all of them together; None:
    `inter`, as of one rank alone.
    start: seconds that a pass takes before its first message and its first call; exchange_start:
    seconds that each all-to-all takes besides its messages.
    handling: seconds of a rank's own time for each byte that it sends round a ring; 0 where links
    fetch it themselves.
    copying: bytes per second at which an all-to-all's tensors are cut up and joined, beside its
    messages.
    memory: bytes per second that a device reads and writes of its memory; for sparse attention,
    whose calls read all queries and add to all results.
    adding: bytes per second at which a call of dense attention adds its results to those of other
    calls; math.inf where `compute` and `half_rows`, found on whole calls, are taken to say it.
    room: bytes of a device's memory that are left for what a rank holds for others, where measured
    or stated; math.inf where nobody knows.
    shared: on which nodes ranks share NICs, `inter` being that of a rank alone; None: it is what
    every rank gets.
    host: what launching takes of the processor; None: nothing, as where it does not run ahead.

    Raises ValueError that names the rate.
    """

    intra: float
    inter: float
    latency: float = 0.0
    compute: float | None = None
    launch: float = 0.0
    posting: float = 0.0
    backward: float = BACKWARD
    half_rows: float = 0.0
    slowdown: float = 0.0
    exchange: float = 1.0
    nic: float | None = None
    start: float = 0.0
    exchange_start: float = 0.0
    copying: float = math.inf
    handling: float = 0.0
    memory: float = math.inf
    adding: float = math.inf
    room: float = math.inf
    shared: Nodes | None = None
    host: HostTime | None = None

    def __post_init__(self):
        for name in (
            "intra",
            "inter",
            "compute",
            "backward",
            "exchange",
            "nic",
            "copying",
            "memory",
            "adding",
            "room",
        ):
            value = getattr(self, name)
            if name in ("compute", "nic") and value is None:
                continue
            if not _is_number(value) or not value > 0:
                raise ValueError(f"rates: {name} must be a positive number, got {value!r}")
            if name in ("backward", "exchange", "nic") and value == math.inf:
                raise ValueError(f"rates: {name} must be a finite number, got {value!r}")
        for name in (
            "latency", "launch", "posting", "half_rows", "slowdown", "start", "exchange_start",
            "handling",
        ):  # fmt: skip
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value < math.inf:
                unit = {"half_rows": "rows", "slowdown": "a fraction"}.get(name, "seconds")
                raise ValueError(f"rates: {name} must be {unit}, 0 or more, got {value!r}")

    def between(self, load: float | np.ndarray) -> float | np.ndarray:
        """Bytes per second, to another node, of each of `load` messages that share a NIC: `inter`
        for one by itself.
        """
        shared = np.minimum(self.inter, (self.nic or self.inter) / load)
        return np.where(np.asarray(load) > 1, shared, self.inter)[()]

    def describe(self) -> str:
        """All rates on one line, with units."""
        compute = "unknown" if self.compute is None else rate(self.compute, "FLOP/s")
        links = f"intra {rate(self.intra, 'B/s')}, inter {rate(self.inter, 'B/s')}"
        own = f" and {duration(self.posting)} to start it" if self.posting > 0 else ""
        shared = "" if self.shared is None else f", {self.shared.said}"
        return f"{links}{shared}, {duration(self.latency)} per message{own}, compute {compute}"


def check_rates(rates: object) -> None:
    """Raise ValueError unless these are `Rates`."""
    if not isinstance(rates, Rates):
        raise ValueError(f"rates must be mb.Rates or made by mb.measure_rates, got {rates!r:.100}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
