"""Forecasts of a cell by `megatron_burst`, for comparison and for the duration of a benchmark."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from megatron_burst.autotune.candidates import Candidate, FixedSettings, Workload, on_grid
from megatron_burst.autotune.rates import Rates
from megatron_burst.autotune.select import fastest, row_cost
from megatron_burst.schedule.cost import Sizes
from megatron_burst.schedule.topology import Topology

from .cells import REGIMES, WIRES, Cell, Rival
from .cuts import LAYOUTS, cut

RINGS = {"ulysses": "ring", "hybrid": "burst"}
REACHED = 0.94  # fraction of the shaped rate that payload reaches; the rest is headers
# Seconds in addition to the runs, on 2 cores: per rival and problem for the plan and one real
# computation; per run for the check and for waiting.
PER_RIVAL, PER_RUN = 4.0, 0.35


def predict(cell: Cell, rival: Rival, rates: Rates) -> Candidate | None:
    """Return the forecast of a rival at these rates.

    None if its ranks cannot share heads, or if groups of ranks have their own documents.
    """
    if rival.layout.split()[0] not in LAYOUTS:
        return None
    workload = _workload(cell, rival.layout)
    ulysses = rival.ulysses_size(cell.nodes, cell.per_node)
    topology = Topology(cell.nodes * cell.per_node, cell.per_node, ulysses, rival.placement)
    fixed = FixedSettings(
        RINGS.get(rival.algorithm, rival.algorithm),
        None if rival.side == "auto" else rival.side,
        rival.head_chunks,
    )
    try:
        candidates = list(on_grid(workload, topology, rates, fixed))
    except ValueError:
        return None
    return min(candidates, key=lambda option: option.sent.total)


def best_layout(cell: Cell, rates: Rates) -> str:
    """Return the layout of packed documents in which `auto` is predicted to be fastest.

    Candidates are the suites' layouts, and `balanced` with the cost of a row at these rates.
    """
    topology = Topology(cell.nodes * cell.per_node, cell.per_node)
    cost = row_cost(_workload(cell, "balanced").sizes, rates)
    assert cost is not None
    names = [*LAYOUTS, "balanced {:.6g} {:.6g}".format(*cost)]
    times = {name: fastest(_workload(cell, name), [topology], rates).seconds for name in names}
    return min(times, key=times.__getitem__)


def _workload(cell: Cell, layout: str) -> Workload:
    problem, size = cell.problem(), cell.nodes * cell.per_node
    layout_cut = cut(layout, problem.mask, problem.tokens * size, cell.nodes, cell.per_node)
    sizes = Sizes(
        len(layout_cut.tokens) // size, 1, problem.heads, problem.kv_heads, problem.width,
        problem.width, WIRES[problem.dtype], 4, WIRES[problem.wire], (True, True, True),
    )  # fmt: skip
    return Workload(sizes, layout_cut.mask, layout_cut.layout)


def estimate(cells: Sequence[Cell], rivals: Sequence[Rival], repeats: int) -> float:
    """Return an estimate of a benchmark's seconds."""
    problems = {cell._replace(regime="") for cell in cells}
    total = PER_RIVAL * len(problems) * len(rivals)
    for cell in cells:
        times = list(_seconds(cell, rivals))
        autos = len(rivals) - len(times)
        total += repeats * (sum(times) + autos * min(times, default=0) + PER_RUN * len(rivals))
    return total


def busy(cell: Cell, layout: str = "zigzag") -> float:
    """Return seconds in which burst's busiest links are in use at nominal rates, in both passes.

    The side is the side with fewer bytes.
    """
    links = Rates(*(cell.rates.of(link) / 8 for link in ("intra", "inter")), compute=math.inf)
    sides = [predict(cell, Rival("burst", "burst", side, layout=layout), links)
             for side in ("kv", "query")]  # fmt: skip
    return min(
        sum(max(p.intra, p.inter) for p in (candidate.forward, candidate.backward))
        for candidate in sides
        if candidate is not None
    )


def _seconds(cell: Cell, rivals: Sequence[Rival]) -> Iterator[float]:
    """Yield seconds of one run of each rival, at nominal rates."""
    links = Rates(*(REACHED * cell.rates.of(link) / 8 for link in ("intra", "inter")),
                  compute=math.inf)  # fmt: skip
    # overlapped or not, compute makes no run longer than both one after the other
    compute = REGIMES.get(cell.regime, 1.0) * busy(cell, rivals[0].layout) / REACHED
    for rival in rivals:
        if rival.algorithm == "auto":
            continue
        candidate = predict(cell, rival, links)
        if candidate is not None:
            yield max(candidate.seconds, compute)
