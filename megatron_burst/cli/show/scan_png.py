"""A scan of states as a picture: the chain as a strip, below it the rounds with their hops.

A round is a column with every rank on its left, sending, and on its right, receiving.
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from .colours import GREY, INK, RULE, WARN, ink_on, of_rank
from .page import box, headed
from .scans import ScanScene

ROW, GAP = 0.34, 0.5  # inches of a rank; of which the gap between nodes takes this share
LEFT, NARROW, WIDE = 0.75, 1.15, 1.9  # inches: of the names of ranks; of a round
STRIP = 0.5  # inches of the chain
LABELS = 8  # hops of a round that are named, at most
MOST = 9.5  # inches that rounds are given, at most, unless they would be narrower than readable


def draw(scene: ScanScene) -> Figure:
    """A figure of the chain and of all rounds."""
    rounds, ranks = max(1, scene.rounds), scene.grid.size
    busiest = max([int((scene.hops.round == n).sum()) for n in range(rounds)], default=0)
    each = min(WIDE if busiest > 6 else NARROW, max(0.55, MOST / rounds))
    tall = ROW * (_at(scene, ranks - 1) + 1)
    width = max(6.4, LEFT + rounds * each + 0.3)
    height = 0.85 + STRIP + 0.55 + tall + 0.3 + 0.19 * (len(scene.counts()) + 1)
    figure = headed(width, height, scene)
    top = height - 0.85 - STRIP
    _strip(box(figure, LEFT, top, width - LEFT - 0.3, STRIP), scene)
    axes = box(figure, LEFT, top - 0.5 - tall, rounds * each, tall)
    _rounds(axes, scene, rounds, each)
    return figure


def _at(scene: ScanScene, rank: int) -> float:
    """The middle of a rank's row, in rows from the first."""
    return rank + GAP * (rank // scene.grid.intra)


def _strip(axes: Axes, scene: ScanScene) -> None:
    """The pieces in the order of positions, each as wide as its rows."""
    chain, start = scene.chains, 0
    total = int(chain.table[:, 2].sum())
    for i in scene.pieces:
        length, rank = int(chain.table[i, 2]), int(chain.rank[i])
        colour = of_rank(rank, chain.ranks)
        axes.add_patch(Rectangle((start, 0), length, 1, facecolor=colour, edgecolor="white"))
        first = chain.ends[i] if scene.backward else chain.begins[i]
        if first and start:
            axes.plot([start, start], [-0.25, 1.25], color=INK, linewidth=1.4, clip_on=False)
        if length * 40 > total:
            at = (start + length / 2, 0.5)
            axes.text(*at, f"{i}", ha="center", va="center", fontsize=8, color=ink_on(colour))
        start += length
    axes.text(-0.01, 0.5, "pieces", transform=axes.transAxes, ha="right", va="center",
              fontsize=8.5, color=GREY)  # fmt: skip
    axes.set_xlim(0, total)
    axes.set_ylim(0, 1)
    axes.set_axis_off()


def _rounds(axes: Axes, scene: ScanScene, rounds: int, each: float) -> None:
    hops = scene.hops
    for rank in range(scene.grid.size):
        colour, y = of_rank(rank, scene.grid.size), _at(scene, rank)
        axes.plot([0, rounds], [y, y], color=RULE, linewidth=0.7, zorder=0)
        axes.plot(
            list(range(rounds + 1)),
            [y] * (rounds + 1),
            "o",
            color=colour,
            ms=5,
            clip_on=False,
        )
        axes.text(-0.1 / each, y, f"rank {rank}", ha="right", va="center", fontsize=8.5, color=INK)
    named = [int((hops.round == n).sum()) <= LABELS for n in range(rounds)]
    for hop in range(len(hops)):
        number = int(hops.round[hop])
        source, destination = int(hops.source[hop]), int(hops.destination[hop])
        begin, end = _at(scene, source), _at(scene, destination)
        colour = WARN if scene.between[hop] else of_rank(source, scene.grid.size)
        axes.annotate(
            "", xy=(number + 1 - 0.06 / each, end), xytext=(number + 0.06 / each, begin),
            arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.1,
                        "shrinkA": 0, "shrinkB": 0, "mutation_scale": 8},
        )  # fmt: skip
        if named[number]:
            share = 0.36
            axes.text(
                number + share, begin + share * (end - begin), scene.name(hop), fontsize=7,
                ha="center", va="center", color=INK,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
            )  # fmt: skip
    for number in range(scene.rounds):
        name = f"round {number}" if each > 0.8 else str(number)
        axes.text(number + 0.5, -0.75, name, ha="center", fontsize=8.5, color=GREY)
    if each <= 0.8:
        axes.text(-0.1 / each, -0.75, "round", ha="right", fontsize=8.5, color=GREY)
    axes.set_xlim(0, rounds)
    axes.set_ylim(_at(scene, scene.grid.size - 1) + 0.5, -0.5)
    axes.set_axis_off()
