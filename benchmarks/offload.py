"""Cost of offloading layer outputs to the host: overlap, `auto`'s fraction, bytes.

    python benchmarks/offload.py            # 8 and 16 layers, links of 0.9 and 2.0 of a forward

Compute and link are emulated, so the ratios follow from the order of copies and waits. They include
the tail of a step, where the last layer's copies overlap nothing. Time is counted and not measured.
A layer adds its seconds. A copy begins when it is requested, its link is free and earlier copies
have ended. A waiting layer continues when the copy ends. The figures are exact and equal on every
machine.

The forward of a layer takes `--seconds`, and backward takes twice that time. Recomputation of the
part that is not offloaded takes the same part of a forward. The rate of a link is stated as the
time for one layer's output in one direction, in layer forwards. The step "without" keeps everything
on the device and recomputes nothing.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

import report
import torch

import megatron_burst as mb
from megatron_burst.recompute.host_limits import choose_fraction

ROWS = 1000  # rows of the output of a layer
FIXED = (0.0, 0.25, 0.5, 0.75, 1.0)


class Counted:
    """Clock that advances only by `sleep`."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


class CountedEvent:
    """End of a copy in counted time."""

    def __init__(self, clock: Counted, end: float):
        self.clock, self.end = clock, end

    def done(self) -> bool:
        return self.end <= self.clock.time

    def wait(self) -> None:
        self.clock.time = max(self.clock.time, self.end)

    def settle(self) -> None:
        self.wait()


class CountedEngine:
    """Link in one direction in counted time, in place of the package's engines."""

    def __init__(self, clock: Counted, rate: float):
        self.clock, self.rate, self.free = clock, rate, 0.0

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> CountedEvent:
        target.copy_(source)
        begin = max([self.clock.time, self.free, *(event.end for event in after)])
        self.free = begin + len(source) / self.rate
        return CountedEvent(self.clock, self.free)

    def guard(self, tensor: torch.Tensor) -> None:
        """Do nothing: the tensor has been copied."""


def memory(limit: int, rate: float, clock: Counted) -> mb.HostMemory:
    """Return host memory behind an emulated link."""
    host = mb.HostMemory(limit, device="cpu")
    traffic: Any = host._traffic
    traffic.out, traffic.back = CountedEngine(clock, rate), CountedEngine(clock, rate)
    return host


class Stack:
    """Layers that compute for stated times; each returns a tensor [rows, width]."""

    def __init__(self, layers: int, seconds: float, rate: float, width: int):
        self.layers, self.seconds, self.width = layers, seconds, width
        self.clock = Counted()
        self.host = memory(2 * layers * ROWS * width + 2**20, rate, self.clock)

    def step(self, fraction: float | None) -> float:
        """Return seconds of a forward and a backward; fraction None keeps all on the device."""
        begun = self.clock.now()
        left = []
        for number in range(self.layers):
            tensor = torch.full((ROWS, self.width), number, dtype=torch.uint8)
            if fraction is not None:
                with self.host.frame():
                    left.append(self.host.move(tensor, fraction))
            del tensor
            self.clock.sleep(self.seconds)
        again = 0.0 if fraction is None else 1 - fraction
        for number in reversed(range(self.layers)):
            if left:
                assert (left.pop().get()[-1] == number).all()
            self.clock.sleep((2 + again) * self.seconds)
        return self.clock.now() - begun


def ratio(stack: Stack, fraction: float | None, baseline: float | None) -> float:
    """Return (time of a step with `fraction`) / (time with `baseline`)."""
    return stack.step(fraction) / stack.step(baseline)


def measure(layers: int, link: float, args: argparse.Namespace) -> list[list[str]]:
    """Return rows of the table for one number of layers and one link."""
    nbytes = ROWS * args.width
    rate = nbytes / (link * args.seconds)
    stack = Stack(layers, args.seconds, rate, args.width)
    host = stack.host
    chosen = choose_fraction(nbytes, args.seconds, rate, host.limit, layers)
    stack.step(1.0)  # the order of backward is learned, host memory is mapped
    rows, ratios = [], {}
    for fraction in sorted({*FIXED, chosen.fraction}):
        before = host.bytes_out, host.bytes_back
        ratios[fraction] = ratio(stack, fraction, None)
        moved = {host.bytes_out - before[0], host.bytes_back - before[1]}
        formula = layers * math.ceil(fraction * ROWS) * args.width
        if moved != {formula}:
            raise SystemExit(f"offload: moved {moved} bytes, expected {formula}")
        name = f"auto: {fraction} ({chosen.bound})" if fraction == chosen.fraction else fraction
        rows.append([layers, link, name, f"{ratios[fraction]:.3f}", f"{formula:,}"])
    best = min((f for f in FIXED), key=ratios.__getitem__)
    if best != chosen.fraction:
        ratio_to_best = f"{ratio(stack, chosen.fraction, best):.3f}"
        rows.append([layers, link, f"auto / best fixed ({best})", ratio_to_best, ""])
    return [[str(cell) for cell in row] for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--links", type=float, nargs="+", default=[0.9, 2.0])
    parser.add_argument("--seconds", type=float, default=0.04, help="of a layer's forward")
    parser.add_argument("--width", type=int, default=1000, help="bytes per row that a layer leaves")
    parser.add_argument("--quick", action="store_true", help="8 layers")
    args = parser.parse_args()
    if args.quick:
        args.layers = [8]
    rows = [row for n in args.layers for link in args.links for row in measure(n, link, args)]
    heads = ["layers", "link", "fraction", "step / without", "bytes each way"]
    print(f"{report.provenance()}\n\n{report.markdown(heads, rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
