"""How much of what a layer leaves behind should go to the host: numbers in, one fraction out.

Plain arithmetic, without torch and without a process group: `auto` of the flags, the memory
account and the benchmark share it. Its rule is MEMO's (arXiv 2407.12117, section 4): as much as
the link hides behind a layer's forward, and no more than the host holds; the rest is computed
again, which costs a layer at most another forward, and a link that is slower than the layers costs
more than that for each byte.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple


class Chosen(NamedTuple):
    """A fraction from 0 to 1, and what keeps it from being larger: the "link" or the "host"'s
    memory; "none" where all goes."""

    fraction: float
    bound: Literal["none", "link", "host"]
    link: float  # the fraction that the link alone would allow, at most 1
    host: float  # the fraction that the host's memory alone would allow, at most 1


def choose_fraction(
    bytes_per_layer: float,
    seconds_per_layer: float,
    rate: float,
    limit: float,
    in_flight: float,
    ranks_per_node: int = 1,
) -> Chosen:
    """The fraction of what layers leave that is moved to the host.

    bytes_per_layer: what a layer leaves for one micro-batch on one rank: its input and what its
    attention keeps. seconds_per_layer: of its forward. rate: bytes per second that one rank copies
    in one direction while all ranks of its node do. limit: bytes of host memory of a node.
    in_flight: how many such leavings a rank holds at once: its layers times the micro-batches of
    its pipeline stage that are in flight. ranks_per_node: how many ranks share the limit.

    Rounded down to thousandths, so that what is stated is what was taken. Raises ValueError for a
    number that is negative, or not one.
    """
    named = {
        "bytes_per_layer": bytes_per_layer, "seconds_per_layer": seconds_per_layer, "rate": rate,
        "limit": limit, "in_flight": in_flight, "ranks_per_node": ranks_per_node,
    }  # fmt: skip
    for name, value in named.items():
        if not (isinstance(value, (int, float)) and value >= 0) or isinstance(value, bool):
            raise ValueError(f"{name} must be a number from 0 on, got {value!r}")
    link = _share(seconds_per_layer * rate, bytes_per_layer)
    host = _share(limit, bytes_per_layer * in_flight * ranks_per_node)
    fraction = min(link, host)
    bound = "none" if fraction == 1 else "link" if link <= host else "host"
    return Chosen(fraction, bound, link, host)


def _share(there: float, wanted: float) -> float:
    """The part of what is wanted that is there, in thousandths."""
    if wanted <= there:
        return 1.0
    return math.floor(1000 * (there / wanted)) / 1000
