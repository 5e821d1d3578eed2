# SPDX-License-Identifier: Apache-2.0
"""Selects the algorithm, side, head chunks and ulysses groups that are predicted to be fastest.

Takes one of the `candidates` and says why. `choose` works before there are process groups and
without tensors; `mb.prepare` asks `best` for the groups that it has. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..layout import Layout, make
from ..masks import Causal, Mask
from ..options import WITH_SHARED_HEADS, AttentionKeywords, WireDtype, ring_algorithm
from ..schedule.algorithms import ALGORITHMS
from ..schedule.cost import Sizes
from ..schedule.topology import Topology
from ..units import duration
from .candidates import (
    AlgorithmOnGrid,
    Candidate,
    Fixed,
    GridSchedules,
    GridWork,
    SchedulesOf,
    Workload,
    grids,
    on_grid,
)
from .places import Nodes
from .rates import Rates, check_rates

OPEN = Fixed()
# Predictions closer than this are a tie: then the simplest is taken, with the fewest bytes.
TIE = 0.015
FASTEST = 1e30  # FLOP/s: where computing takes no time
PLACES = 64  # more than candidates of one algorithm on a grid
BUSY = {
    "compute": "compute",
    "intra": "the link within nodes",
    "inter": "the link between nodes",
    "host": "launching",
}


@dataclass(frozen=True)
class Choice:
    """What `choose` selected, and why.

    taken: the candidate with the shortest predicted time; others: the rest, by predicted time;
    rates: what the prediction is based on; per_node: ranks per node; wire: the dtype of travelling
    gradients, where that was left open. `call` holds keywords for `mb.prepare` or `mb.attention`,
    `groups` those for `mb.Groups.from_topology`.
    """

    taken: Candidate
    others: tuple[Candidate, ...] = field(repr=False)
    rates: Rates
    per_node: int
    wire: WireDtype | None = None

    @property
    def call(self) -> AttentionKeywords:
        """Keywords for `mb.prepare` or `mb.attention`."""
        taken = self.taken
        call: AttentionKeywords = {
            "algorithm": taken.algorithm,
            "side": taken.side,  # pyright: ignore[reportAssignmentType]
            "head_chunks": taken.head_chunks,
        }
        return call if self.wire is None else call | {"grad_wire_dtype": self.wire}

    @property
    def groups(self) -> dict[str, Any]:
        """Keywords for `mb.Groups.from_topology`."""
        taken = self.taken
        return {"intra": self.per_node, "ulysses": taken.ulysses, "placement": taken.placement}

    @property
    def seconds(self) -> float:
        """Predicted for one forward and backward."""
        return self.taken.seconds

    @property
    def why(self) -> str:
        """ "41 ms; ring 180 ms; the link between nodes is the bottleneck"."""
        parts = [duration(self.seconds)]
        rival = next((o for o in self.others if o.name != self.taken.name), None)
        if rival is not None:
            parts.append(f"{rival.name} {duration(rival.seconds)}")
        if self.seconds > 0:
            parts.append(f"{BUSY[self.taken.bottleneck]} is the bottleneck")
        if self.wire is not None:
            parts.append(f"gradients travel in {self.wire}")
        return "; ".join(parts)


def choose(
    *,
    ranks: int,
    intra: int,
    rates: Rates,
    tokens: int,
    heads: int,
    kv_heads: int | None = None,
    width: int,
    value_width: int | None = None,
    batch: int = 1,
    itemsize: int = 2,
    wire_itemsize: int | None = None,
    mask: Mask | None = None,
    layout: str | Layout = "zigzag",
) -> Choice:
    """The fastest way to run attention on `ranks` ranks, `intra` per node, before groups exist.

    tokens: rows of each rank; heads, kv_heads, width, value_width, batch: of its q, k and v;
    itemsize: bytes per element, wire_itemsize: of travelling gradients (default: fp32's 4, or
    itemsize where that is larger); mask, layout: as in `prepare`; rates: with `compute`. Head
    parallelism (ulysses, hybrid) is tried wherever ranks can share these heads::

        choice = mb.choose(ranks=8, intra=4, rates=mb.Rates(...), tokens=4096, heads=32, width=128)
        groups = mb.Groups.from_topology(pg, **choice.groups)
        plan = mb.prepare(q, k, v, groups=groups, **choice.call)

    Raises ValueError naming the invalid argument.
    """
    _check_stated(rates)
    kv_heads = heads if kv_heads is None else kv_heads
    value_width = width if value_width is None else value_width
    numbers = {"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "width": width,
               "value_width": value_width, "batch": batch, "itemsize": itemsize,
               "wire_itemsize": 4 if wire_itemsize is None else wire_itemsize}  # fmt: skip
    for name, value in numbers.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    wire = max(4, itemsize) if wire_itemsize is None else wire_itemsize
    if heads % kv_heads:
        raise ValueError(f"kv_heads must divide the {heads} heads, got {kv_heads}")
    Topology(ranks, intra)
    layout = make(layout, cp_size=ranks) if isinstance(layout, str) else layout
    if not isinstance(layout, Layout) or layout.cp_size != ranks:
        raise ValueError(f"layout must be a name or a Layout of {ranks} ranks, got {layout!r}")
    mask = Causal() if mask is None else mask
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be one of mb.masks, got {mask!r}")
    try:
        layout.check(tokens * ranks)
    except ValueError as error:
        raise ValueError(
            f"tokens: {tokens} rows on each of {ranks} ranks are {tokens * ranks} positions; "
            f"{error}"
        ) from error
    mask.check(tokens * ranks)
    stat = 8 if itemsize == 8 else 4
    sizes = Sizes(
        tokens, batch, heads, kv_heads, width, value_width, itemsize, stat, wire, (True, True, True)
    )
    return best(Workload(sizes, mask, layout), grids(ranks, intra, sizes), rates)


def best(
    workload: Workload,
    topologies: Sequence[Topology],
    rates: Rates,
    fixed: Fixed = OPEN,
    nodes: Nodes | None = None,
) -> Choice:
    """The candidate that is predicted to be fastest; of those within TIE of it the simplest.

    topologies: the grids to try; nodes: as of `on_grid`. Raises ValueError where rates are too
    small to compare times.
    """
    found = [c for each in topologies for c in on_grid(workload, each, rates, fixed, nodes)]
    found.sort(key=lambda candidate: candidate.seconds)
    if not all(math.isfinite(candidate.seconds) for candidate in found):
        raise ValueError(f"rates: too small for calls of this size: {rates.describe()}")
    limit = min(_weighed(candidate) for candidate in found) * (1 + TIE)
    taken = min((c for c in found if _weighed(c) <= limit), key=_simplicity)
    others = tuple(candidate for candidate in found if candidate is not taken)
    return Choice(taken, others, rates, topologies[0].per_node)


def fastest(
    workload: Workload,
    topologies: Sequence[Topology],
    rates: Rates,
    fixed: Fixed = OPEN,
    nodes: Nodes | None = None,
    schedules: SchedulesOf = GridSchedules,
) -> Candidate:
    """What `best` takes, without simulating candidates that cannot be taken. schedules:
    `schedules_of` of `GridWork.of`.

    A candidate is not simulated if its bound exceeds what ties with the fastest so far, nor if
    a simpler one is certain to tie: with the fastest so far, and with all bounds of the others.
    """
    works = [GridWork.of(workload, each, rates, fixed, nodes, schedules) for each in topologies]
    left = [_Open(one, at) for at, one in enumerate(o for w in works for o in w.algorithms())]
    found: list[tuple[Candidate, int]] = []  # with the place that it has among all
    while True:
        upper = min((_weighed(one) for one, _ in found), default=math.inf)
        left = [each for each in left if each.at_least <= upper * (1 + TIE)]
        found = [each for each in found if _weighed(each[0]) <= upper * (1 + TIE)]
        lower = min((upper, *(each.at_least for each in left)))
        tied = [each for each in found if _weighed(each[0]) <= lower * (1 + TIE)]
        taken = min(map(_place, tied), default=None)
        if taken is not None:
            simpler = [each for each in left if each.simplest <= taken[0][: len(each.simplest)]]
            if not simpler and all(taken <= _place(each) for each in found):
                return next(one for one, at in tied if at == taken[1])
        else:
            simpler = []
        # Else those that decide whether a simpler one ties.
        each = min(simpler or left, key=lambda one: (one.at_least, one.simplest, one.at))
        if not each.looked_at:
            each.look()
            continue
        made = each.next()
        if not all(math.isfinite(one.seconds) for one, _ in made):
            raise ValueError(f"rates: too small for calls of this size: {rates.describe()}")
        found += made
        left = [one for one in left if one.open]


def row_cost(sizes: Sizes, rates: Rates) -> tuple[float, float] | None:
    """How many pairs a rank computes in the time for which a row of another rank is on its link, of
    the same node and of another one: what layout balanced takes. None where `rates` do not say how
    fast a rank computes.

    A row is its key and value in both passes, and its gradients in backward; all ranks of a node
    send at once.
    """
    if rates.compute is None:
        return None
    columns = (sizes.width + sizes.value_width) * sizes.batch
    pair = 2.0 * sizes.heads * columns * (1 + rates.backward) / min(rates.compute, FASTEST)
    row = sizes.forward.kv + sizes.backward.kv + sizes.backward.dkv
    load = 1.0 if rates.shared is None else rates.shared.per_nic
    return row / rates.intra / pair, row / float(rates.between(load)) / pair


def _place(each: tuple[Candidate, int]) -> tuple[tuple[Any, ...], int]:
    return _simplicity(each[0]), each[1]


class _Open:
    """An algorithm on a grid with the candidates of it that were not simulated yet. at: its place
    among all of them.
    """

    def __init__(self, what: AlgorithmOnGrid, at: int):
        self.at, self.open = at * PLACES, True
        self._what, self._made, self._counts = what, what.by_chunks(), list(what.counts)
        algorithm = ALGORITHMS[what.algorithm]
        self._handicap, self.looked_at = algorithm.handicap, False
        self.at_least = what.at_least * algorithm.handicap
        self._first = what.on.topology.ulysses > 1, algorithm.holds_more

    @property
    def simplest(self) -> tuple[Any, ...]:
        """What `_simplicity` of those that are left begins with, at least."""
        return (*self._first, self._counts[0])

    def look(self) -> None:
        """Make the schedules, which have a better bound."""
        self.looked_at = True
        self.at_least = max(self.at_least, self._what.busy * self._handicap)

    def next(self) -> list[tuple[Candidate, int]]:
        """Those with the next number of head chunks, with their places; none where no more are
        tried.
        """
        del self._counts[:1]
        made = next(self._made, [])
        first, self.at = self.at, self.at + len(made)
        self.open = bool(made and self._counts)
        return list(zip(made, range(first, self.at), strict=True))


def _weighed(candidate: Candidate) -> float:
    return candidate.seconds * ALGORITHMS[ring_algorithm(candidate.algorithm)].handicap


def _simplicity(candidate: Candidate) -> tuple[Any, ...]:
    algorithm = ALGORITHMS[ring_algorithm(candidate.algorithm)]
    return (
        candidate.ulysses > 1,
        algorithm.holds_more,
        candidate.head_chunks,
        candidate.sent.inter,
        candidate.sent.total,
        algorithm.complexity,
        candidate.algorithm in WITH_SHARED_HEADS,
        candidate.seconds,
    )


def _check_stated(rates: Rates) -> None:
    check_rates(rates)
    if rates.compute is None:
        raise ValueError(
            "rates: compute is None, and there are no tensors to measure it with; state it, or "
            "call mb.measure_rates(groups, like=(q, k, v))"
        )
