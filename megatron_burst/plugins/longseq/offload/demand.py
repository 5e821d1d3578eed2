# SPDX-License-Identifier: Apache-2.0
"""Host memory that offloading requires, measured in the first step and compared with the limit.

This module makes the start-up log line, and the error message for a limit that is too small. It
uses plain numbers only: no tensors, no communication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ....recompute.host_limits import OffloadFraction, choose_fraction
from ....units import byte_size, duration, rate


class HostNode(NamedTuple):
    """Host memory of a node that a run may use, in bytes, and the number of ranks that share it."""

    limit: int
    ranks: int

    @property
    def share(self) -> int:
        """Host memory of one rank, in bytes."""
        return self.limit // self.ranks


class HostDemand(NamedTuple):
    """Bytes that one rank moves in the first step, including bytes that did not fit.

    Attributes:
        call_bytes: Largest number of bytes that one call of a layer (or of a checkpoint around
            layers) moves.
        call_seconds: Median seconds of the forward of such a call.
        pass_bytes: Largest number of bytes that one micro-batch moves in one model chunk.
        passes: Maximum number of forward passes that wait for backward at the same time. A
            micro-batch has one forward pass in each model chunk.
        cut: True if some bytes did not fit on the host.
        key_bytes: Largest number of bytes that other ranks' keys need on the host during one
            attention call in row chunks. It does not depend on the offloaded fraction.
    """

    call_bytes: int
    call_seconds: float
    pass_bytes: int
    passes: int
    cut: bool
    key_bytes: int = 0

    @property
    def saved_bytes(self) -> int:
        """Maximum bytes of the layers' saved tensors that are on the host at the same time."""
        return self.pass_bytes * self.passes

    @property
    def total(self) -> int:
        """Maximum bytes that are on the host at the same time."""
        return self.saved_bytes + self.key_bytes


def passes_in_flight(warmup: int, total: int) -> int:
    """Return the maximum number of forward passes that wait for backward in Megatron's schedules.

    The schedules are 1F1B. Source: Megatron-Core, `get_pp_rank_microbatches`.

    Args:
        warmup: Forward passes before the first backward.
        total: Forward passes of a step.
    """
    return min(total, warmup + 1)


def choice(demand: HostDemand, node: HostNode, link: float) -> OffloadFraction:
    """Return the fraction of saved tensors that one rank can move with `--burst-offload auto`.

    Args:
        demand: Bytes and times of a first step that moved all saved tensors.
        node: Host memory of the node.
        link: Bytes per second in the slower direction while all ranks of the node copy.
    """
    calls = demand.saved_bytes / max(1, demand.call_bytes)
    # Keys of other ranks use the link and the memory too, for any fraction.
    seconds = max(0.0, demand.call_seconds - demand.key_bytes / link) if link else 0.0
    limit = max(0, node.limit - demand.key_bytes * node.ranks)
    return choose_fraction(demand.call_bytes, seconds, link, limit, calls, node.ranks)


def too_small(fraction: float, of_ranks: Sequence[tuple[HostDemand, HostNode]]) -> str | None:
    """Return an error message if some rank's moved tensors do not fit in host memory, else None.

    Args:
        fraction: Fraction of the saved tensors that is moved.
        of_ranks: Demand and node of every rank, so that all ranks raise the same message.
    """
    if not any(demand.cut for demand, _ in of_ranks):
        return None
    worst, node = max(of_ranks, key=lambda pair: pair[0].total / pair[1].share)
    # Blocks of varying sizes leave gaps, so slightly more than their sum may be necessary.
    need = max(worst.total, math.ceil(1.1 * node.share))
    free = max(0, node.share - worst.key_bytes)
    fitting = math.floor(100 * fraction * free / max(1, worst.saved_bytes)) / 100
    advice = f"set --burst-host-memory {math.ceil(need * node.ranks / 2**20)}MiB"
    if 0 < fitting < fraction:
        advice += f" or --burst-offload {fitting:g}"
    return (
        f"--burst-offload {fraction:g} moves up to {byte_size(worst.total)} per rank "
        f"({byte_size(worst.pass_bytes)} for each of {worst.passes} micro-batches in flight"
        f"{_keys(worst)}), but --burst-host-memory allows {byte_size(node.share)} per rank "
        f"({byte_size(node.limit)} per node of {node.ranks} ranks); {advice}"
    )


def _keys(demand: HostDemand) -> str:
    return f", {byte_size(demand.key_bytes)} of keys of other ranks" if demand.key_bytes else ""


def line(fraction: float, own: HostDemand, node: HostNode, link: float | None = None) -> str:
    """Return the start-up log line on offloading, with the numbers of this rank.

    Args:
        fraction: Fraction of the saved tensors that is moved.
        own: Demand of this rank.
        node: Host memory of the node.
        link: With `auto`, bytes per second in the slower direction while all ranks of a node copy;
            the first step then moved all saved tensors. Otherwise None.
    """
    auto = link is not None
    parts = [f"--burst-offload {'auto: ' if auto else ''}{fraction:.3g} of saved activations"]
    parts.append(
        f"a layer's forward {'saves' if auto else 'moves'} {byte_size(own.call_bytes)} and takes "
        f"{duration(own.call_seconds)}"
    )
    if link is not None:
        chosen = choice(own, node, link)
        parts.append(
            f"the link copies {rate(link, 'B/s')} with {node.ranks} ranks of a node: fraction "
            f"{chosen.link:.3g} overlaps with compute, and fraction {chosen.host:.3g} fits on the "
            "host"
        )
    at_most = own.saved_bytes * (fraction if auto else 1) + own.key_bytes * (fraction > 0)
    parts.append(
        f"at most {byte_size(at_most)} per rank ({own.passes} micro-batches in flight"
        f"{_keys(own)}); {byte_size(node.share)} per rank allowed ({byte_size(node.limit)} per "
        f"node of {node.ranks} ranks)"
    )
    return " | ".join(parts)
