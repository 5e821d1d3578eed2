"""One ring and a two-level ring, drawn from their forward schedules."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Rectangle

from drawings.paper import box, figure
from megatron_burst.plugins.tools.show.colours import GREY, INK, PAPER, RULE, WARN, ink_on, of_rank
from megatron_burst.schedule import rings as schedules
from megatron_burst.schedule.program import pairs_of
from megatron_burst.schedule.rings import Schedule
from megatron_burst.schedule.tables import Grid

GRID = Grid(2, 4)
NAMES = {"ring": "one ring", "burst": "two-level ring"}
INTRA = "#4b5563"


def rings() -> dict[str, Schedule]:
    """Return the forward schedules that the drawings compare."""
    return {name: schedules.forward(name, GRID) for name in NAMES}


def crossing(plan: Schedule) -> tuple[int, int]:
    """Return the largest number of hops between nodes per rank, and the fewest steps of such a hop.

    Both numbers are for the rank with most hops between nodes.
    """
    crossing = [h for h in plan.tables.transfers.hops(plan.grid) if h.link == "inter"]
    hops = [[h for h in crossing if h.src == rank] for rank in range(plan.grid.size)]
    busiest = max(hops, key=len)
    return len(busiest), min(h.land - h.post for h in busiest)


def ring_caption(name: str, plan: Schedule) -> str:
    count, steps = crossing(plan)
    what = f"{count} chunk{'s' * (count > 1)} over its link between nodes"
    return f"{NAMES[name]}: a rank sends up to {what}, each within {steps} step{'s' * (steps > 1)}"


def draw_rings() -> Figure:
    subtitle = "an arrow is a link that carries keys and values in forward"
    made = figure(9.4, 4.35, "One ring, and a two-level ring",
                  f"{GRID.inter} nodes of {GRID.intra} ranks; {subtitle}")  # fmt: skip
    for i, (name, plan) in enumerate(rings().items()):
        axes = box(made, 0.3 + 4.5 * i, 0.3, 4.3, 3.2)
        axes.set_xlim(-0.75, 3.75)
        axes.set_ylim(2.45, -0.9)
        axes.set_axis_off()
        _nodes(axes)
        for src, dst, link in sorted(
            {(h.src, h.dst, h.link) for h in plan.tables.transfers.hops(GRID)}
        ):
            _link(axes, src, dst, link)
        count, steps = crossing(plan)
        axes.text(-0.5, -0.72, NAMES[name], fontsize=11, fontweight="bold", color=INK)
        most = f"at most {count} chunk{'s' * (count > 1)} per link between nodes"
        within = f"each within {steps} step{'s' * (steps > 1)}"
        axes.text(-0.5, 2.38, f"{most}, {within}", fontsize=9, color=WARN)
    return made


def _place(rank: int) -> tuple[float, float]:
    node, index = divmod(rank, GRID.intra)
    return float(index), 1.5 * node


def _nodes(axes: Axes) -> None:
    for node in range(GRID.inter):
        y = 1.5 * node
        frame = FancyBboxPatch((-0.5, y - 0.42), GRID.intra, 0.84, boxstyle="round,pad=0.04",
                               facecolor=PAPER, edgecolor=RULE, linewidth=0.8)  # fmt: skip
        axes.add_patch(frame)
        axes.text(-0.58, y, f"node {node}", rotation=90, ha="right", va="center", fontsize=8.5,
                  color=GREY)  # fmt: skip
    for rank in range(GRID.size):
        colour = of_rank(rank, GRID.size)
        axes.add_patch(Circle(_place(rank), 0.19, facecolor=colour, edgecolor="none", zorder=3))
        axes.text(*_place(rank), str(rank), ha="center", va="center_baseline", fontsize=9.5,
                  color=ink_on(colour), zorder=4)  # fmt: skip


def _link(axes: Axes, src: int, dst: int, link: str) -> None:
    (x, y), (to, down) = _place(src), _place(dst)
    bend = 0.0
    if link == "inter":
        bend = 0.16 if x == to else 0.0
    elif abs(src - dst) > 1:
        bend = 0.28 if y == 0 else -0.28  # away from the other node
    arrow = FancyArrowPatch(
        (x, y), (to, down), arrowstyle="-|>", mutation_scale=10, shrinkA=11, shrinkB=11,
        connectionstyle=f"arc3,rad={bend}", linewidth=1.6, zorder=2,
        color=WARN if link == "inter" else INTRA,
    )  # fmt: skip
    axes.add_patch(arrow)


def draw_visits() -> Figure:
    made = figure(9.4, 4.1, "The owner of the keys that each rank computes with",
                  "A frame marks a chunk that has just arrived from the other node")  # fmt: skip
    for i, (name, plan) in enumerate(rings().items()):
        axes = box(made, 0.8 + 4.45 * i, 0.55, 3.9, 2.6)
        axes.set_title(NAMES[name], loc="left", fontsize=10, fontweight="bold", color=INK)
        for rank in range(GRID.size):
            landed = {
                (*h.chunk[:2], h.land)
                for h in plan.tables.transfers.hops(GRID)
                if h.dst == rank and h.link == "inter"
            }
            for pair, step in sorted(pairs_of(plan.tables, rank).items(), key=lambda item: item[1]):
                _visit(axes, rank, step, pair.key, landed)
        axes.set_xlim(0, GRID.size)
        axes.set_ylim(GRID.size + 0.35, 0)
        middles = np.arange(GRID.size) + 0.5
        axes.set_xticks(middles, [str(s) for s in range(GRID.size)])
        rows = middles + 0.35 * (np.arange(GRID.size) >= GRID.intra)
        axes.set_yticks(rows, [f"rank {r}" for r in range(GRID.size)])
        axes.tick_params(length=0, labelsize=8.5)
        axes.set_xlabel("step", fontsize=9)
        axes.spines[:].set_visible(False)
    return made


def _visit(axes: Axes, rank: int, step: int, owner: int, landed: set) -> None:
    colour = of_rank(owner, GRID.size)
    y = rank + 0.35 * (rank >= GRID.intra)
    axes.add_patch(Rectangle((step + 0.04, y + 0.06), 0.92, 0.88, facecolor=colour))
    if ("kv", owner, step) in landed:
        axes.add_patch(Rectangle((step + 0.06, y + 0.08), 0.88, 0.84, facecolor="none",
                                 edgecolor=WARN, linewidth=2.2))  # fmt: skip
    axes.text(step + 0.5, y + 0.5, str(owner), ha="center", va="center_baseline", fontsize=8.5,
              color=ink_on(colour))  # fmt: skip


def captions() -> list[str]:
    """Return the numbers of the drawings as lines of text."""
    return [ring_caption(name, plan) for name, plan in rings().items()]


DRAWINGS = {"two-level-ring": draw_rings, "visits": draw_visits}
