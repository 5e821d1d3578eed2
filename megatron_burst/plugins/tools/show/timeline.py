# SPDX-License-Identifier: Apache-2.0
"""Picture of a schedule. Time is on the x axis; each rank has a row of steps, and hops below it.

A box is a step, with one line per pair of chunks (queries of one rank, keys of another). The length
of a bar in a box is proportional to the number of visible pairs; the remaining width is waiting
time. A box has the colour of the rank that owns the received chunk.

An arrow is a hop (one message), from the boundary at which it is posted to the boundary at which it
arrives. A boundary is the moment before a step. The arrow has the colour of the chunk's owner. Its
length represents the owner's shard, with the first row on the left; the sent rows are filled.
Queries, keys and values have the full colour, gradients are lighter, partial outputs are striped. A
hop that blocks compute has a red edge.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.patches import Patch, Rectangle
from matplotlib.transforms import Bbox, TransformedBbox

from ....masks import Cover
from ....schedule.tables import Chunk, Hop
from ....units import byte_size
from ..lanes import DASHED, ArrowLook, arrow, box, dashed_arrow, headed, inches
from .colours import GREY, INK, RULE, WARN, ink_on, mixed, of_rank
from .scene import Cell, Kind, ScheduleScene, in_order, kind_of, share
from .words import FAMILIES, LETTERS, caption, name_of, subtitle, title

UNIT = 0.3  # height of a box with one pair, in inches
ROW = 0.62  # height of a pair in a box with several pairs, in units
STEP, WIDEST_STEP = 1.05, 1.6  # minimum and maximum width of a step, in inches
LANE, GAP, NODE_GAP = 0.5, 0.42, 0.55  # in units
LABELS = 1.12  # minimum space to the left of step 0, in inches
DRAIN = 0.58  # distance of boundaries after the last step, in steps
SMALL = 6.4  # size of the text on arrows, in points
NARROWEST = 7.6  # minimum width of a picture, in inches
LINE, COLUMN = 0.2, 3.4  # height of a line and width of a column of the legend, in inches


class _HopLanes:
    """Lanes (strips of the picture) for each rank's transfers. Transfers in a lane do not overlap.

    Attributes:
        of: Transfer -> number of its lane, among the lanes of the sender.
        names: Rank -> first lane of a group -> name of the group. A group has one kind of transfer.
        count: Rank -> number of its lanes.
    """

    def __init__(self, hops: Iterable[Hop], ranks: Iterable[int]):
        self.of: dict[Hop, int] = {}
        self.names: dict[int, dict[int, str]] = {}
        self.count: dict[int, int] = {}
        by_rank: dict[tuple[int, Kind], list[Hop]] = defaultdict(list)
        for hop in hops:
            by_rank[hop.src, kind_of(hop)].append(hop)
        kinds = sorted({kind for _, kind in by_rank}, key=in_order)
        for rank in ranks:
            names, first = {}, 0
            for kind in kinds:
                names[first] = " ".join(kind).strip()
                first += max(1, self._stack(by_rank[rank, kind], first))
            self.names[rank], self.count[rank] = names, first

    def _stack(self, hops: list[Hop], first: int) -> int:
        """Assign lanes, from number `first` on, to transfers. Return the number of these lanes."""
        ends: list[int] = []
        for hop in sorted(hops, key=lambda hop: (hop.post, hop.land)):
            free = [lane for lane, end in enumerate(ends) if end <= hop.post]
            lane = free[0] if free else len(ends)
            ends[lane : lane + 1] = [max(hop.land, hop.post + 1)]
            self.of[hop] = first + lane
        return len(ends)


def draw(scene: ScheduleScene) -> Figure:
    """Return the figure of a schedule."""
    ranks, only = scene.ranks, scene.only
    made = [hop for hop in scene.hops if hop.src in ranks]
    missing = [hop for hop in scene.left_out if hop.src in ranks]
    lanes = _HopLanes([*made, *missing], ranks)
    high = {rank: max(1.0, ROW * scene.most(rank)) for rank in ranks}
    tops, depth = _tops(scene, high, lanes)
    depth += 0.0 if only is None else LANE
    last = max([scene.end, *(hop.post + 1 for hop in made), *(hop.land for hop in missing)])
    count, words = _x(last, scene.steps), caption(scene)
    left = max([LABELS, *(inches(name, 7) + 0.48 for name in lanes.names[ranks[0]].values())])
    texts = [(title(scene), 13), (subtitle(scene), 9.5), *((line, 9) for line in words)]
    wide = max([left + STEP * count, NARROWEST, *(inches(*text) for text in texts)])
    step = min((wide - left) / count, WIDEST_STEP)
    foot = 0.31 + 0.19 * len(words)
    columns = max(1, int(wide / COLUMN))
    lines = LINE * -(-(len(scene.families) + 4) // columns)
    below = foot + lines + 0.17
    height = 1.12 + UNIT * depth + below
    figure = headed(wide + 0.6, height, title(scene), subtitle(scene), words)
    axes = box(figure, left, below, step * count + 0.1, UNIT * depth)
    axes.set_xlim(0, count + 0.1 / step)
    axes.set_ylim(depth, 0)
    axes.set_axis_off()
    _time(axes, scene.steps, last, depth)
    for rank in ranks:
        _rank(axes, scene, rank, tops[rank], high[rank], lanes)
    for hop in (*missing, *made):
        y = tops[hop.src] + high[hop.src] + LANE * lanes.of[hop] + 0.07
        _hop(axes, scene, hop, y, step, made=hop not in missing)
    if only is not None:
        _freed_chunks(axes, scene, only, depth - LANE)
    legend = _legend(figure, scene, bool(missing), columns)
    legend.set_bbox_to_anchor((0.3 / (wide + 0.6), foot / height))
    return figure


def _x(boundary: int, steps: int) -> float:
    """Return the x coordinate of a boundary, the moment before a step.

    Boundaries after the last step, at which ranks only wait for transfers, are closer together.
    """
    return min(boundary, steps) + DRAIN * max(boundary - steps, 0)


def _tops(
    scene: ScheduleScene, high: dict[int, float], lanes: _HopLanes
) -> tuple[dict[int, float], float]:
    """Return the y coordinate of the top of each rank's boxes, and the total height.

    Args:
        scene: The scene.
        high: Rank -> height of its boxes.
        lanes: Lanes of the transfers.
    """
    tops, y = {}, 0.0
    for rank in high:
        if rank % scene.plan.grid.intra == 0 and y > 0:
            y += NODE_GAP
        tops[rank] = y
        y += high[rank] + LANE * lanes.count[rank] + GAP
    return tops, y


def _time(axes: Axes, steps: int, last: int, depth: float) -> None:
    """Draw a thin vertical line at each boundary (before a step), and the names of steps above.

    Args:
        axes: Axes to draw on.
        steps: Number of steps with compute.
        last: Last boundary, after all transfers have arrived.
        depth: y coordinate at which the lines end.
    """
    for boundary in range(last + 1):
        x = _x(boundary, steps)
        axes.plot([x, x], [-0.1, depth], color=RULE, linewidth=0.6, zorder=0, clip_on=False)
        if boundary < steps:
            axes.text(x + 0.5, -0.35, f"step {boundary}", ha="center", fontsize=8.5, color=GREY)
    if last > steps:
        axes.text(steps + 0.04, -0.35, "draining", fontsize=8.5, color=GREY)


# --- what is computed ----------------------------------------------------------------------


def _rank(
    axes: Axes, scene: ScheduleScene, rank: int, top: float, high: float, lanes: _HopLanes
) -> None:
    """Draw the boxes of a rank, and write the names of its lanes.

    Args:
        axes: Axes to draw on.
        scene: The scene.
        rank: The rank.
        top: y coordinate of the top of the boxes.
        high: Height of the boxes.
        lanes: Lanes of the transfers.
    """
    axes.text(-0.14, top + high / 2, f"rank {rank}", ha="right", va="center_baseline", fontsize=9.5)
    for lane, name in lanes.names[rank].items():
        axes.text(-0.14, top + high + LANE * (lane + 0.5) + 0.04, name,
                  ha="right", va="center_baseline", fontsize=7, color=GREY)  # fmt: skip
    for step in range(scene.steps):
        _box(axes, scene, rank, step, top, high)


def _box(axes: Axes, scene: ScheduleScene, rank: int, step: int, top: float, high: float) -> None:
    """Draw the box of a step, with a line per pair of chunks. An idle step is an empty outline.

    Args:
        axes: Axes to draw on.
        scene: The scene.
        rank: The rank.
        step: The step.
        top: y coordinate of the top of the box.
        high: Height of the box.
    """
    cells = [cell for cell in scene.cells(rank, step) if cell.cover != Cover.EMPTY]
    if not cells:
        axes.add_patch(Rectangle((step + 0.03, top), 0.94, high, facecolor="white", edgecolor=RULE,
                                 linewidth=0.8, linestyle=(0, (3, 2))))  # fmt: skip
        axes.text(step + 0.5, top + 0.52 * high, "idle", ha="center", va="center_baseline",
                  fontsize=7, color=GREY)  # fmt: skip
        return
    done, row = 0.0, high / len(cells)
    for i, cell in enumerate(cells):
        _pair(axes, scene, rank, cell, (step + 0.03, top + row * i, row), done)
        done += cell.share


def _pair(
    axes: Axes, scene: ScheduleScene, rank: int, cell: Cell, place: tuple[float, float, float],
    done: float,
) -> None:  # fmt: skip
    """Draw the line of one pair of chunks in a box.

    Args:
        axes: Axes to draw on.
        scene: The scene.
        rank: The rank.
        cell: The pair of chunks.
        place: (left, top, height) of the line.
        done: Sum of `Cell.share` of the previous pairs in the box, at which the bar begins.
    """
    left, top, high = place
    query, key = (of_rank(owner, scene.size) for owner in cell.pair[:2])
    colour = of_rank(scene.owner(rank, cell.pair), scene.size)
    halves = (query, key) if rank not in cell.pair[:2] else (colour, colour)
    for i, half in enumerate(halves):
        axes.add_patch(Rectangle((left + 0.47 * i, top), 0.47, high, linewidth=0,
                                 facecolor=mixed(half, "#ffffff", 0.74)))  # fmt: skip
    axes.add_patch(Rectangle((left + 0.94 * done, top + 0.7 * high), 0.94 * cell.share, 0.3 * high,
                             facecolor=colour, linewidth=0))  # fmt: skip
    axes.text(left + 0.06, top + 0.37 * high, f"q{cell.pair.query} k{cell.pair.key}", fontsize=8,
              va="center_baseline")  # fmt: skip
    part = " ".join(scene.parts(cell.pair))
    mark = part or ("full" if cell.cover == Cover.FULL else "part")
    axes.text(left + 0.88, top + 0.37 * high, mark, ha="right", fontsize=6.5,
              va="center_baseline", color=INK if mark == "full" else GREY)  # fmt: skip


# --- hops ----------------------------------------------------------------------------------


def _look(colour: str, family: str, blocks: bool) -> ArrowLook:
    """Return the style of a transfer's arrow.

    Args:
        colour: Colour of the chunk's owner.
        family: Kind of the sent tensors, such as "kv".
        blocks: True if the transfer blocks compute.
    """
    edge, width = (WARN, 1.3) if blocks else (colour, 0.7)
    if family in ("kv", "query"):
        return ArrowLook(edge, width, colour, None)
    if family == "out":
        return ArrowLook(edge, width, mixed(colour, "#ffffff", 0.85), mixed(colour, "#ffffff", 0.5))
    return ArrowLook(edge, width, mixed(colour, "#ffffff", 0.62), None)


def _hop(axes: Axes, scene: ScheduleScene, hop: Hop, y: float, inch: float, made: bool) -> None:
    """Draw a transfer: dashed if the schedule omits it, with a red edge if it blocks compute.

    A transfer blocks compute if it starts and arrives at the same boundary.

    Args:
        axes: Axes to draw on.
        scene: The scene.
        hop: The transfer.
        y: y coordinate of the arrow's upper edge.
        inch: Width of a step in inches.
        made: False if the schedule omits the transfer.
    """
    blocks = hop.land == hop.post
    begin = _x(hop.post, scene.steps) + 0.03
    end = begin + DRAIN - 0.1 if blocks else _x(hop.land, scene.steps) - 0.03
    place = Bbox.from_bounds(begin, y, end - begin, LANE - 0.1)
    if not made:
        dashed_arrow(axes, place)
        return
    look = _look(of_rank(hop.chunk.owner, scene.size), hop.chunk.family, blocks)
    of = scene.rows(hop.chunk)[1]
    rows = [(first / of, stop / of) for first, stop in scene.ranges(hop.chunk)]
    filled = arrow(axes, place, look, rows)
    label = f"{name_of(hop.chunk)} to {hop.dst}"
    part = share(*scene.rows(hop.chunk))
    for suffix in (f" {part} {byte_size(scene.bytes(hop.chunk))}", f" {part}"):
        if part and inches(label + suffix, SMALL) < (end - begin) * inch - 0.14:
            label += suffix
            break
    at = begin + 0.04, y + LANE / 2 - 0.04
    style = {"va": "center_baseline", "fontsize": SMALL, "clip_on": True}
    axes.text(*at, label, color=INK, **style)
    if ink_on(look.filled) != INK:
        for area in filled:
            text = axes.text(*at, label, color=ink_on(look.filled), **style)
            text.set_clip_box(TransformedBbox(area, axes.transData))


def _freed_chunks(axes: Axes, scene: ScheduleScene, rank: int, y: float) -> None:
    """Write the names of the chunks that the rank frees before each step, at height `y`."""
    axes.text(-0.14, y + 0.04, "released", ha="right", va="center_baseline", fontsize=7, color=GREY)
    for boundary, chunks in scene.released(rank).items():
        axes.text(_x(boundary, scene.steps) + 0.04, y + 0.04, " ".join(map(name_of, chunks)),
                  fontsize=SMALL, color=GREY, va="center_baseline")  # fmt: skip


# --- the legend ----------------------------------------------------------------------------


def _legend(figure: Figure, scene: ScheduleScene, missing: bool, columns: int) -> Legend:
    """Add the legend to the figure and return it.

    Args:
        figure: The figure.
        scene: The scene.
        missing: True if the picture shows omitted transfers.
        columns: Number of columns of the legend.
    """
    colour = of_rank(0, scene.size)

    def entry(family: str, text: str, blocks: bool = False) -> Patch:
        look = _look(colour, family, blocks)
        return Patch(
            facecolor=look.filled, edgecolor=look.stripes or look.edge, linewidth=look.width,
            hatch="/////" if look.stripes else None, label=text,
        )  # fmt: skip

    handles = [Patch(facecolor=colour, label="visible pairs (full bar: busiest step)")]
    for family in scene.families:
        size = byte_size(scene.bytes(Chunk(family, 0)))
        handles.append(
            entry(family, f"{LETTERS[family]}0: {FAMILIES[family]} of rank 0, whole: {size}")
        )
    if any(scene.partial(hop.chunk) for hop in scene.hops):
        handles.append(Patch(facecolor="none", edgecolor=colour, label="4/8: 4 of the 8 rows"))
    blocking = [hop.chunk.family for hop in scene.hops if hop.land == hop.post]
    if blocking:
        handles.append(entry(blocking[0], "hop that blocks compute", blocks=True))
    if missing:
        handles.append(Patch(facecolor="none", label="skipped transfer", **DASHED))
    return figure.legend(
        handles=handles, loc="lower left", ncols=columns, frameon=False, fontsize=8,
        labelcolor=GREY, handlelength=2.6, borderpad=0, columnspacing=1.5,
    )  # fmt: skip
