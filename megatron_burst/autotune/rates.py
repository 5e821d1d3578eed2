# SPDX-License-Identifier: Apache-2.0
"""Rates of a rank's links and device, measured by `measure` or stated by the user.

Rates are plain numbers, so the simulator needs no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..units import duration, rate
from .host_time import HostTime
from .places import Nodes

BACKWARD = 2.5  # FLOPs of a backward over FLOPs of its forward: five products and two


@dataclass(frozen=True)
class Rates:
    """Rates of one rank's links and device; all ranks are assumed to be equal.

    Attributes:
        intra: Bytes per second that a rank sends within its node while it receives at the same
            rate; math.inf if the grid has no such links.
        inter: Bytes per second that a rank sends between nodes while it receives at the same rate;
            math.inf if the grid has no such links.
        latency: Seconds that each message occupies its link, in addition to its bytes.
        compute: FLOP/s of the local attention. FLOPs are the multiplications and additions of two
            matrix products in forward and five in backward, for visible pairs only. math.inf if
            attention needs no time, None to measure the rate with the plan's kernel.
        launch: Seconds of each call of the local attention, in addition to its FLOPs.
        posting: Seconds that a rank needs to start an exchange, during which it computes nothing; 0
            if the host runs ahead of a device.
        backward: Time of a backward call divided by the time of a forward call on the same rows.
        half_rows: Number of rows of a chunk with which a kernel reaches half of `compute`; 0 if it
            reaches `compute` with any number of rows.
        slowdown: Fraction by which computation is slower while the rank's links are busy.
        exchange: Fraction of a link's rate that an all-to-all reaches.
        nic: Total bytes per second of a NIC while several ranks send on it; None if it equals
            `inter`.
        start: Seconds from the start of a pass to its first message and its first call.
        exchange_start: Seconds of each all-to-all, in addition to its messages.
        copying: Bytes per second at which an all-to-all's tensors are split and joined while its
            messages travel.
        handling: Seconds per byte sent on a ring during which the sender computes nothing; 0 if
            links read the bytes by DMA.
        memory: Bytes per second that a device reads and writes in its memory. This rate limits
            sparse attention, whose calls read all queries and add to all results.
        adding: Bytes per second at which a call of dense attention adds its results to other
            results; math.inf if `compute` and `half_rows`, measured on whole calls, include it.
        room: Bytes of a device's memory that remain for rows of other ranks, measured or stated;
            math.inf if unknown.
        shared: Nodes on which ranks share NICs; `inter` is then the rate of a rank that is alone on
            its NIC. None if all ranks reach `inter` at the same time.
        host: CPU time of kernel launches; None if launches do not run ahead of a device.

    Raises:
        ValueError: A rate has an impossible value. The message names the rate.

    Example:
        >>> rates = mb.Rates(intra=200e9, inter=25e9, latency=10e-6, compute=400e12)
        >>> rates.describe()
        'intra 200 GB/s, inter 25 GB/s, 10 us per message, compute 400 TFLOP/s'
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
                raise ValueError(f"rates: {name} ({unit}) must be finite and >= 0, got {value!r}")

    def between(self, load: float | np.ndarray) -> float | np.ndarray:
        """Return the bytes per second of a message between nodes if `load` messages share a NIC.

        For one message alone (`load` = 1), this is `inter`.
        """
        shared = np.minimum(self.inter, (self.nic or self.inter) / load)
        return np.where(np.asarray(load) > 1, shared, self.inter)[()]

    def describe(self) -> str:
        """Return all rates on one line, with units."""
        compute = "unknown" if self.compute is None else rate(self.compute, "FLOP/s")
        links = f"intra {rate(self.intra, 'B/s')}, inter {rate(self.inter, 'B/s')}"
        own = f" and {duration(self.posting)} to start it" if self.posting > 0 else ""
        shared = "" if self.shared is None else f", {self.shared.description}"
        return f"{links}{shared}, {duration(self.latency)} per message{own}, compute {compute}"


def check_rates(rates: object) -> None:
    """Raise ValueError unless `rates` is a `Rates`."""
    if not isinstance(rates, Rates):
        raise ValueError(f"rates must be mb.Rates or made by mb.measure_rates, got {rates!r:.100}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
