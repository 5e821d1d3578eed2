"""A schedule as a picture: time runs to the right, and each rank has its steps above its hops.

A box is a step, and the bar in it is its share of visible pairs: the rest of the box is waiting. An
arrow is a hop, from the boundary at which it is posted to that at which it lands. Boxes and arrows
have the colour of the travelling chunk's owner.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle
from matplotlib.transforms import Affine2D

from ...masks import Cover
from ...schedule.tables import Hop
from .colours import GREY, INK, RULE, WARN, ink_on, mixed, of_rank
from .page import box, headed, inches
from .scene import ScheduleScene
from .words import caption, title

UNIT = 0.3  # inches of a box's height
STEP, WIDEST_STEP = 1.05, 1.6  # inches of a step; wider where there is room
LANE, GAP, NODE_GAP = 0.5, 0.42, 0.55  # in units
LABELS = 1.12  # inches left of step 0
DRAIN = 0.58  # width, in steps, of each boundary after the last step
LEFT_OUT = {"facecolor": "none", "edgecolor": "#9ca3af", "linewidth": 0.6, "linestyle": (0, (2, 2))}
Kind = tuple[str, bool]  # link class, gradient?


class _Lanes:
    """The lane below a rank's boxes in which each of its hops is drawn, so that none overlap."""

    def __init__(self, hops: Iterable[Hop]):
        self.of: dict[Hop, int] = {}
        by_rank: dict[tuple[int, Kind], list[Hop]] = defaultdict(list)
        for hop in hops:
            by_rank[hop.src, _kind(hop)].append(hop)
        depth: dict[Kind, int] = defaultdict(int)
        for (_, kind), some in by_rank.items():
            ends: list[int] = []
            for hop in sorted(some, key=lambda hop: (hop.post, hop.land)):
                free = [lane for lane, end in enumerate(ends) if end <= hop.post]
                lane = free[0] if free else len(ends)
                ends[lane : lane + 1] = [max(hop.land, hop.post + 1)]
                self.of[hop] = lane
            depth[kind] = max(depth[kind], len(ends))
        self.first, self.count = {}, 0
        for kind in sorted(depth, key=lambda kind: (kind[1], kind[0] != "intra")):
            self.first[kind] = self.count
            self.count += depth[kind]

    def lane(self, hop: Hop) -> int:
        return self.first[_kind(hop)] + self.of[hop]


def draw(scene: ScheduleScene, only: int | None) -> Figure:
    """The figure of one pass, or with `only` of that rank's part in it."""
    ranks = list(range(scene.size)) if only is None else [only]
    mine = [hop for hop in scene.hops if hop.src in ranks]
    missing = [hop for hop in scene.left_out if hop.src in ranks]
    lanes = _Lanes([*mine, *missing])
    tops, depth = _tops(ranks, scene.plan.grid.intra, 1 + LANE * lanes.count + GAP)
    last = max([scene.size, *(max(hop.land, hop.post + 1) for hop in [*mine, *missing])])
    foot = 0.31 + 0.19 * len(caption(scene))
    legend, count = _legend(scene, bool(missing)), _x(last, scene.size)
    texts = max(sum(_wide(label) for label, _ in legend), inches(title(scene), 13))
    step = min(max((texts - LABELS) / count, STEP), WIDEST_STEP)
    wide = max(LABELS + step * count + 0.1, texts)
    figure = headed(wide + 0.6, 1.12 + UNIT * depth + foot + 0.42, scene)
    axes = box(figure, LABELS, foot + 0.42, step * count + 0.1, UNIT * depth)
    axes.set_xlim(0, count + 0.1 / step)
    axes.set_ylim(depth, 0)
    axes.set_axis_off()
    _time(axes, scene.size, last, depth)
    for rank in ranks:
        _rank(axes, scene, rank, tops[rank], lanes)
    for made, hops in ((False, missing), (True, mine)):
        for hop in hops:
            y = tops[hop.src] + 1 + LANE * lanes.lane(hop) + 0.07
            _arrow(axes, hop, y, scene.size, made)
    row = box(figure, 0.3, foot, wide, 0.2)
    _draw_legend(row, legend, wide)
    return figure


def _x(boundary: int, steps: int) -> float:
    """Where a boundary is drawn; those after the last step are closer together."""
    return min(boundary, steps) + DRAIN * max(boundary - steps, 0)


def _kind(hop: Hop) -> Kind:
    return hop.link, hop.chunk.gradient


def _name(kind: Kind) -> str:
    return kind[0] + " gradient" * kind[1]


def _tops(ranks: list[int], per_node: int, each: float) -> tuple[dict[int, float], float]:
    """Where each rank's boxes begin, and the height of the picture, in units from the top."""
    tops, y = {}, 0.0
    for rank in ranks:
        y += NODE_GAP * (rank % per_node == 0 and rank > ranks[0])
        tops[rank] = y
        y += each
    return tops, y


def _time(axes: Axes, steps: int, last: int, depth: float) -> None:
    """The boundaries as hairlines, the steps by name above them."""
    for boundary in range(last + 1):
        x = _x(boundary, steps)
        axes.plot([x, x], [-0.1, depth], color=RULE, linewidth=0.6, zorder=0, clip_on=False)
        if boundary < steps:
            axes.text(x + 0.5, -0.35, f"step {boundary}", ha="center", fontsize=8.5, color=GREY)
    if last > steps:
        axes.text(steps + 0.04, -0.35, "draining", fontsize=8.5, color=GREY)


def _rank(axes: Axes, scene: ScheduleScene, rank: int, top: float, lanes: _Lanes) -> None:
    axes.text(-0.14, top + 0.5, f"rank {rank}", ha="right", va="center_baseline", fontsize=9.5)
    for kind, lane in lanes.first.items():
        axes.text(-0.14, top + 1 + LANE * (lane + 0.5) + 0.04, _name(kind), ha="right",
                  va="center_baseline", fontsize=7, color=GREY)  # fmt: skip
    for step in range(scene.size):
        _box(axes, scene, rank, step, top)


def _box(axes: Axes, scene: ScheduleScene, rank: int, step: int, top: float) -> None:
    """A step, filled to its share of visible pairs; only an outline if it computes nothing."""
    cell = scene.cell(rank, step)
    left, wide = step + 0.03, 0.94
    if cell.pair is None or cell.cover == Cover.EMPTY:
        axes.add_patch(Rectangle((left, top), wide, 1, facecolor="white", edgecolor=RULE,
                                 linewidth=0.8, linestyle=(0, (3, 2))))  # fmt: skip
        axes.text(step + 0.5, top + 0.52, "skipped", ha="center", va="center_baseline",
                  fontsize=7, color=GREY)  # fmt: skip
        return
    colour = of_rank(scene.owner(cell.pair), scene.size)
    tint = mixed(colour, "#ffffff", 0.74)
    axes.add_patch(Rectangle((left, top), wide, 1, facecolor=tint, linewidth=0))
    axes.add_patch(Rectangle((left, top + 0.68), wide * cell.share, 0.32, facecolor=colour,
                             linewidth=0))  # fmt: skip
    if cell.kept:
        axes.add_patch(Rectangle((left, top), wide, 1, facecolor="none", edgecolor=INK))
    axes.text(left + 0.06, top + 0.36, f"q{cell.pair.query} k{cell.pair.key}", fontsize=8,
              va="center_baseline")  # fmt: skip
    mark = "full" if cell.cover == Cover.FULL else "part"
    axes.text(step + 0.91, top + 0.36, mark, ha="right", fontsize=6.5, va="center_baseline",
              color=INK if mark == "full" else GREY)  # fmt: skip


def _arrow(axes: Axes, hop: Hop, y: float, ranks: int, made: bool) -> None:
    """A hop: dashed if it is left out, red if it blocks, which is to say that it lands at the
    boundary at which it is posted, and nothing is computed meanwhile."""
    blocks = hop.land == hop.post
    begin = _x(hop.post, ranks) + 0.03
    end = begin + DRAIN - 0.1 if blocks else _x(hop.land, ranks) - 0.03
    colour = of_rank(hop.chunk.owner, ranks)
    fill = mixed(colour, "#ffffff", 0.62) if hop.chunk.gradient else colour
    if not made:
        axes.add_patch(_shape(begin, end, y, LANE - 0.1, **LEFT_OUT))
        return
    edge = WARN if blocks else colour
    axes.add_patch(_shape(begin, end, y, LANE - 0.1, facecolor=fill, edgecolor=edge,
                          linewidth=1.3 if blocks else 0.7))  # fmt: skip
    letter = "d" * hop.chunk.gradient + hop.chunk.family.removeprefix("d")[0]
    axes.text(begin + 0.04, y + LANE / 2 - 0.04, f"{letter}{hop.chunk.owner} to {hop.dst}",
              va="center_baseline", fontsize=6.4, color=ink_on(fill))  # fmt: skip


def _shape(begin: float, end: float, y: float, high: float, **looks: Any) -> Polygon:
    """A bar with a point at its right end."""
    tip = min(0.09, (end - begin) / 2)
    right, low = end - tip, y + high
    return Polygon(
        [(begin, y), (right, y), (end, y + high / 2), (right, low), (begin, low)], **looks
    )


def _legend(scene: ScheduleScene, missing: bool) -> list[tuple[str, list[Any]]]:
    """The entries of the legend: text and marks, in inches."""
    colour, letter = of_rank(0, scene.size), scene.plan.side[0]
    solid = {"facecolor": colour, "edgecolor": colour, "linewidth": 0.7}
    light = solid | {"facecolor": mixed(colour, "#ffffff", 0.62)}
    back = mixed(colour, "#ffffff", 0.74)
    share = [
        Rectangle((0, 0), 0.3, 0.2, facecolor=back),
        Rectangle((0, 0.14), 0.2, 0.06, facecolor=colour),
    ]
    entries: list[tuple[str, list[Any]]] = [
        ("visible pairs (full bar: busiest step)", share),
        (f"hop of the chunk of rank 0 ({letter}0)", [_shape(0, 0.3, 0.04, 0.12, **solid)]),
    ]
    if scene.backward:
        entries.append((f"hop of its gradient (d{letter}0)", [_shape(0, 0.3, 0.04, 0.12, **light)]))
    if any(hop.land == hop.post for hop in scene.hops):
        blocking = light | {"edgecolor": WARN, "linewidth": 1.3}
        entries.append(("hop that blocks", [_shape(0, 0.3, 0.04, 0.12, **blocking)]))
    if missing:
        entries.append(("hop left out", [_shape(0, 0.3, 0.04, 0.12, **LEFT_OUT)]))
    if scene.plan.kept:
        entries.append(
            ("kept from forward", [Rectangle((0, 0), 0.3, 0.2, facecolor=back, edgecolor=INK)])
        )
    return entries


def _wide(label: str) -> float:
    return 0.37 + inches(label, 8) + 0.28


def _draw_legend(axes: Axes, entries: list[tuple[str, list[Any]]], wide: float) -> None:
    axes.set_xlim(0, wide)
    axes.set_ylim(0.2, 0)
    axes.set_axis_off()
    x = 0.0
    for label, patches in entries:
        for patch in patches:
            patch.set_transform(Affine2D().translate(x, 0) + axes.transData)
            axes.add_artist(patch)
        axes.text(x + 0.37, 0.1, label, fontsize=8, color=GREY, va="center_baseline")
        x += _wide(label)
