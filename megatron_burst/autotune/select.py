# SPDX-License-Identifier: Apache-2.0
"""Selection of the algorithm, side, head chunks and ulysses groups with the shortest prediction.

This module selects one of the `candidates` and states the reason. `choose` is the public function,
which needs neither process groups nor tensors. `mb.prepare` calls `best`. This module does not
import torch.
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
    FixedSettings,
    GridSchedules,
    GridWork,
    SchedulesOf,
    Workload,
    grids,
    on_grid,
)
from .places import Nodes
from .rates import Rates, check_rates

OPEN = FixedSettings()
# Predictions that differ by at most this fraction are ties, and the simplest candidate is selected.
TIE = 0.015
FASTEST = 1e30  # FLOP/s that replace math.inf
PLACES = 64  # more than the number of candidates of one algorithm on a grid
BUSY = {
    "compute": "compute",
    "intra": "the link within nodes",
    "inter": "the link between nodes",
    "host": "launching",
}


@dataclass(frozen=True)
class Choice:
    """The candidate that `choose` selected, and the reason.

    Attributes:
        taken: Selected candidate: the simplest whose predicted time is within TIE of the shortest.
        others: All other candidates, sorted by predicted time.
        rates: Rates that the prediction used.
        per_node: Ranks per node.
        wire: Wire dtype of gradients, if the search selected one; otherwise None.
    """

    taken: Candidate
    others: tuple[Candidate, ...] = field(repr=False)
    rates: Rates
    per_node: int
    wire: WireDtype | None = None

    @property
    def keywords(self) -> AttentionKeywords:
        """Keyword arguments for `mb.prepare` or `mb.attention` that select these settings."""
        taken = self.taken
        call: AttentionKeywords = {
            "algorithm": taken.algorithm,
            "side": taken.side,  # pyright: ignore[reportAssignmentType]
            "head_chunks": taken.head_chunks,
        }
        return call if self.wire is None else call | {"grad_wire_dtype": self.wire}

    @property
    def groups(self) -> dict[str, Any]:
        """Keyword arguments for `mb.Groups.from_topology` that select these settings."""
        taken = self.taken
        return {"intra": self.per_node, "ulysses": taken.ulysses, "placement": taken.placement}

    @property
    def seconds(self) -> float:
        """Predicted seconds of one forward and one backward."""
        return self.taken.seconds

    @property
    def why(self) -> str:
        """Text with the predicted times and the bottleneck.

        In "41 ms; ring 180 ms; the link between nodes is the bottleneck", 41 ms is the time of the
        selected candidate, and "ring" is the fastest of the others.
        """
        parts = [duration(self.seconds)]
        rival = next(
            (candidate for candidate in self.others if candidate.name != self.taken.name), None
        )
        if rival is not None:
            parts.append(f"{rival.name} {duration(rival.seconds)}")
        if self.seconds > 0:
            parts.append(f"{BUSY[self.taken.bottleneck]} is the bottleneck")
        if self.wire is not None:
            parts.append(f"gradients are sent in {self.wire}")
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
    """Return the settings with the shortest predicted time for attention on `ranks` ranks.

    This function needs no process groups. Ulysses and hybrid are tried if ranks can share these
    heads.

    Args:
        ranks: Number of ranks.
        intra: Ranks per node.
        rates: Rates with `compute`.
        tokens: Rows of each rank.
        heads: Query heads.
        kv_heads: Key/value heads; default: `heads`.
        width: Head width of queries and keys.
        value_width: Head width of values; default: `width`.
        batch: Batch size.
        itemsize: Bytes per element of q, k and v.
        wire_itemsize: Bytes per element of gradients that are sent; default: 4 (fp32), or
            `itemsize` if that is larger.
        mask: The mask; default: causal.
        layout: The layout, or its name.

    Raises:
        ValueError: An argument is invalid. The message names it.

    Example:
        >>> choice = mb.choose(ranks=8, intra=4, rates=rates, tokens=4096, heads=32, width=128)
        >>> groups = mb.Groups.from_topology(pg, **choice.groups)
        >>> plan = mb.prepare(q, k, v, groups=groups, **choice.keywords)
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
    fixed: FixedSettings = OPEN,
    nodes: Nodes | None = None,
) -> Choice:
    """Return the simplest candidate whose predicted time is within TIE of the shortest.

    Args:
        workload: The attention.
        topologies: Grids to try.
        rates: Rates of each rank, with `compute`.
        fixed: Settings that the user has chosen.
        nodes: Nodes on which ranks share NICs; see `on_grid`.

    Raises:
        ValueError: The rates are too small to compare times.
    """
    candidates = [
        candidate
        for topology in topologies
        for candidate in on_grid(workload, topology, rates, fixed, nodes)
    ]
    candidates.sort(key=lambda candidate: candidate.seconds)
    if not all(math.isfinite(candidate.seconds) for candidate in candidates):
        raise ValueError(
            "rates: too small for calls of this size: predicted times are infinite at "
            f"{rates.describe()}; pass larger rates"
        )
    limit = min(_weighed(candidate) for candidate in candidates) * (1 + TIE)
    taken = min(
        (candidate for candidate in candidates if _weighed(candidate) <= limit), key=_simplicity
    )
    others = tuple(candidate for candidate in candidates if candidate is not taken)
    return Choice(taken, others, rates, topologies[0].per_node)


def fastest(
    workload: Workload,
    topologies: Sequence[Topology],
    rates: Rates,
    fixed: FixedSettings = OPEN,
    nodes: Nodes | None = None,
    schedules: SchedulesOf = GridSchedules,
) -> Candidate:
    """Return the candidate that `best` selects, without simulating all candidates.

    A candidate is not simulated if its lower bound exceeds the shortest time so far by more than
    TIE. It is also not simulated if a simpler candidate is within TIE of the shortest time so far
    and of all remaining lower bounds.

    Args:
        workload: The attention.
        topologies: Grids to try.
        rates: Rates of each rank, with `compute`.
        fixed: Settings that the user has chosen.
        nodes: Nodes on which ranks share NICs; see `on_grid`.
        schedules: Argument `schedules_of` of `GridWork.of`.

    Raises:
        ValueError: The rates are too small to compare times.
    """
    works = [GridWork.of(workload, grid, rates, fixed, nodes, schedules) for grid in topologies]
    pending = [
        _PendingCandidates(algorithm, index)
        for index, algorithm in enumerate(a for work in works for a in work.algorithms())
    ]
    simulated: list[tuple[Candidate, int]] = []  # with the index among all candidates
    while True:
        upper = min((_weighed(candidate) for candidate, _ in simulated), default=math.inf)
        pending = [search for search in pending if search.at_least <= upper * (1 + TIE)]
        simulated = [entry for entry in simulated if _weighed(entry[0]) <= upper * (1 + TIE)]
        lower = min((upper, *(search.at_least for search in pending)))
        tied = [entry for entry in simulated if _weighed(entry[0]) <= lower * (1 + TIE)]
        taken = min(map(_place, tied), default=None)
        if taken is not None:
            simpler = [s for s in pending if s.simplest <= taken[0][: len(s.simplest)]]
            if not simpler and all(taken <= _place(entry) for entry in simulated):
                return next(candidate for candidate, index in tied if index == taken[1])
        else:
            simpler = []
        # Without a certain tie, simulate the candidates that decide it.
        search = min(simpler or pending, key=lambda s: (s.at_least, s.simplest, s.index))
        if not search.scheduled:
            search.make_schedules()
            continue
        candidates = search.next()
        if not all(math.isfinite(candidate.seconds) for candidate, _ in candidates):
            raise ValueError(
                "rates: too small for calls of this size: predicted times are infinite at "
                f"{rates.describe()}; pass larger rates"
            )
        simulated += candidates
        pending = [search for search in pending if search.open]


def row_cost(sizes: Sizes, rates: Rates) -> tuple[float, float] | None:
    """Return how many visible pairs a rank computes in the time in which it receives one row.

    Layout `balanced` uses the result. Of each row, a rank receives key and value in both passes,
    and their gradients in backward. All ranks of a node are assumed to send at the same time.

    Returns:
        Two numbers of pairs: for a row from the same node, and for a row from another node. None if
        `rates` have no `compute`.
    """
    if rates.compute is None:
        return None
    columns = (sizes.width + sizes.value_width) * sizes.batch
    pair = 2.0 * sizes.heads * columns * (1 + rates.backward) / min(rates.compute, FASTEST)
    row = sizes.forward.kv + sizes.backward.kv + sizes.backward.dkv
    load = 1.0 if rates.shared is None else rates.shared.per_nic
    return row / rates.intra / pair, row / float(rates.between(load)) / pair


def _place(entry: tuple[Candidate, int]) -> tuple[tuple[Any, ...], int]:
    return _simplicity(entry[0]), entry[1]


class _PendingCandidates:
    """The candidates of an algorithm on a grid that are not simulated yet.

    Attributes:
        index: Index of the next candidate among all candidates.
        open: True if more candidates remain to be simulated.
        at_least: Lower bound on the seconds of the candidates, times the algorithm's handicap.
        scheduled: True if the schedules were made; `at_least` is then a tighter bound.
    """

    def __init__(self, algorithm_on_grid: AlgorithmOnGrid, index: int):
        self.index, self.open = index * PLACES, True
        self._on_grid, self._made = algorithm_on_grid, algorithm_on_grid.by_chunks()
        self._counts = list(algorithm_on_grid.counts)
        algorithm = ALGORITHMS[algorithm_on_grid.algorithm]
        self._handicap, self.scheduled = algorithm.handicap, False
        self.at_least = algorithm_on_grid.at_least * algorithm.handicap
        self._first = algorithm_on_grid.on.topology.ulysses > 1, algorithm.holds_more

    @property
    def simplest(self) -> tuple[Any, ...]:
        """First three values of `_simplicity` for the simplest candidate that is not simulated."""
        return (*self._first, self._counts[0])

    def make_schedules(self) -> None:
        """Make the schedules, and raise `at_least` to the bound that they give."""
        self.scheduled = True
        self.at_least = max(self.at_least, self._on_grid.busy * self._handicap)

    def next(self) -> list[tuple[Candidate, int]]:
        """Simulate the candidates with the next number of head chunks; return them with indices.

        The list is empty if no candidates remain.
        """
        del self._counts[:1]
        made = next(self._made, [])
        first, self.index = self.index, self.index + len(made)
        self.open = bool(made and self._counts)
        return list(zip(made, range(first, self.index), strict=True))


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
            "rates: compute is None, and it cannot be measured without tensors; set compute in "
            "FLOP/s, or use mb.measure_rates(groups, like=(q, k, v))"
        )
