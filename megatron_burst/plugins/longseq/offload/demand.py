# SPDX-License-Identifier: Apache-2.0
"""What offloading asks of the host: measured in the first step, compared with what a node holds.

Decides the words of the start-up line and of the error for a host that is too small. Plain numbers:
no tensors, no communication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ....recompute.host_limits import OffloadFraction, choose_fraction
from ....units import byte_size, duration, rate


class Node(NamedTuple):
    """Host memory of a node, in bytes, and how many ranks share it."""

    limit: int
    ranks: int

    @property
    def share(self) -> int:
        """Bytes of one rank."""
        return self.limit // self.ranks


class HostDemand(NamedTuple):
    """What one rank moves, and would if there were room, at the fraction of the first step.

    call_bytes: most that one call of a layer (or of a checkpoint around layers) leaves for the
    host; call_seconds: median time of such a call's forward; pass_bytes: most that one micro-batch
    leaves in one model chunk; passes: micro-batches, once per model chunk, in flight at the same
    time; cut: whether some of it did not fit on the host. key_bytes: most keys of other ranks that
    one attention call in row chunks keeps on the host, whatever the fraction.
    """

    call_bytes: int
    call_seconds: float
    pass_bytes: int
    passes: int
    cut: bool
    key_bytes: int = 0

    @property
    def left(self) -> int:
        """Bytes on the host at once of what layers leave for backward."""
        return self.pass_bytes * self.passes

    @property
    def total(self) -> int:
        """Bytes on the host at once."""
        return self.left + self.key_bytes


def passes_in_flight(warmup: int, total: int) -> int:
    """Forward passes whose backward is outstanding at once in Megatron's 1F1B schedules.

    warmup: passes before the first backward; total: passes of a step. Source: Megatron-Core,
    `get_pp_rank_microbatches`.
    """
    return min(total, warmup + 1)


def choice(demand: HostDemand, node: Node, link: float) -> OffloadFraction:
    """What `auto` takes for one rank; demand: of a first step that moved everything.

    link: bytes/s that the slower direction of its link carries while all ranks of the node copy.
    """
    calls = demand.left / max(1, demand.call_bytes)
    # Keys of other ranks take their share of the link and of the memory, whatever the fraction.
    seconds = max(0.0, demand.call_seconds - demand.key_bytes / link) if link else 0.0
    limit = max(0, node.limit - demand.key_bytes * node.ranks)
    return choose_fraction(demand.call_bytes, seconds, link, limit, calls, node.ranks)


def too_small(fraction: float, of_ranks: Sequence[tuple[HostDemand, Node]]) -> str | None:
    """The error if what a fraction moves does not fit on the host of some rank; None if it fits.

    of_ranks: of every rank, so that all raise with the same words.
    """
    if not any(demand.cut for demand, _ in of_ranks):
        return None
    worst, node = max(of_ranks, key=lambda one: one[0].total / one[1].share)
    # Blocks of changing sizes leave gaps: a little more than their sum may be needed.
    need = max(worst.total, math.ceil(1.1 * node.share))
    free = max(0, node.share - worst.key_bytes)
    fitting = math.floor(100 * fraction * free / max(1, worst.left)) / 100
    advice = f"--burst-host-memory {math.ceil(need * node.ranks / 2**20)}MiB would do"
    if 0 < fitting < fraction:
        advice += f", or --burst-offload {fitting:g}"
    return (
        f"--burst-offload {fraction:g} moves up to {byte_size(worst.total)} per rank "
        f"({byte_size(worst.pass_bytes)} of each of {worst.passes} micro-batches in flight"
        f"{_keys(worst)}), and "
        f"--burst-host-memory leaves {byte_size(node.share)} to each of {node.ranks} ranks of a "
        f"node ({byte_size(node.limit)}): {advice}"
    )


def _keys(demand: HostDemand) -> str:
    """What keys of other ranks take, for a line; "" without any."""
    return f", {byte_size(demand.key_bytes)} of keys of other ranks" if demand.key_bytes else ""


def line(fraction: float, own: HostDemand, node: Node, link: float | None = None) -> str:
    """The line that says what is moved, with the numbers of this rank.

    link: with `auto`, bytes/s that the slower direction carries while all ranks of a node copy; the
    first step then moved everything.
    """
    auto = link is not None
    parts = [f"--burst-offload {'auto: ' if auto else ''}{fraction:.3g} of what layers leave"]
    parts.append(
        f"a layer's forward {'leaves' if auto else 'moves'} {byte_size(own.call_bytes)} and takes "
        f"{duration(own.call_seconds)}"
    )
    if link is not None:
        chosen = choice(own, node, link)
        parts.append(
            f"the link carries {rate(link, 'B/s')} with {node.ranks} ranks of a node copying: it "
            f"hides {chosen.link:.3g}, and the host holds {chosen.host:.3g}"
        )
    at_most = own.left * (fraction if auto else 1) + own.key_bytes * (fraction > 0)
    parts.append(
        f"at most {byte_size(at_most)} per rank ({own.passes} micro-batches in flight"
        f"{_keys(own)}), {byte_size(node.share)} allowed ({byte_size(node.limit)} per node of "
        f"{node.ranks} ranks)"
    )
    return " | ".join(parts)
