"""A schedule as a picture: time runs to the right, and each rank has its steps above its hops.

A box is a step, with a line for each of its pairs, and the bars in it are their shares of visible
pairs: the rest of the box is waiting. An arrow is a hop, from the boundary at which it is posted to
that at which it lands; it stands for the whole chunk, first row on the left, and is filled where
rows travel. Boxes and arrows have the colour of the travelling chunk's owner.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.transforms import TransformedBbox

from ...masks import Cover
from ...schedule.tables import Hop
from ...units import byte_size
from . import arrows, legend
from .arrows import Place, looks
from .colours import GREY, INK, RULE, ink_on, mixed, of_rank
from .page import box, headed, inches
from .passes import Cell, Kind, ScheduleScene, kind_of, share
from .words import caption, name_of, subtitle, title

UNIT = 0.3  # inches of the height of a box with one pair
ROW = 0.62  # in units, the height of a pair where boxes have several
STEP, WIDEST_STEP = 1.05, 1.6  # inches of a step; wider where there is room
LANE, GAP, NODE_GAP = 0.5, 0.42, 0.55  # in units
LABELS = 1.12  # inches left of step 0, at least
DRAIN = 0.58  # width, in steps, of each boundary after the last step
SMALL = 6.4  # points of the text on arrows


class _Lanes:
    """The lane below its sender's boxes in which each hop is drawn, so that none overlap.

    of: number among the lanes of its rank. names: of each rank's lanes by their first one's number.
    """

    def __init__(self, hops: Iterable[Hop], ranks: Iterable[int]):
        self.of: dict[Hop, int] = {}
        self.names: dict[int, dict[int, str]] = {}
        self.count: dict[int, int] = {}
        by_rank: dict[tuple[int, Kind], list[Hop]] = defaultdict(list)
        for hop in hops:
            by_rank[hop.src, kind_of(hop)].append(hop)
        kinds = sorted({kind for _, kind in by_rank}, key=lambda k: (k[1], k[0] != "intra"))
        for rank in ranks:
            names, first = {}, 0
            for kind in kinds:
                names[first] = " ".join(kind).strip()
                first += max(1, self._stack(by_rank[rank, kind], first))
            self.names[rank], self.count[rank] = names, first

    def _stack(self, hops: list[Hop], first: int) -> int:
        """Give each of these hops a lane; how many there are."""
        ends: list[int] = []
        for hop in sorted(hops, key=lambda hop: (hop.post, hop.land)):
            free = [lane for lane, end in enumerate(ends) if end <= hop.post]
            lane = free[0] if free else len(ends)
            ends[lane : lane + 1] = [max(hop.land, hop.post + 1)]
            self.of[hop] = first + lane
        return len(ends)


def draw(scene: ScheduleScene, only: int | None) -> Figure:
    """The figure of one pass, or with `only` of that rank's part in it."""
    ranks = list(range(scene.size)) if only is None else [only]
    mine = [hop for hop in scene.hops if hop.src in ranks]
    missing = [hop for hop in scene.left_out if hop.src in ranks]
    lanes = _Lanes([*mine, *missing], ranks)
    high = {rank: max(1.0, ROW * scene.most(rank)) for rank in ranks}
    each = {rank: high[rank] + LANE * lanes.count[rank] + GAP for rank in ranks}
    tops, depth = _tops(each, scene.plan.grid.intra)
    depth += LANE * (only is not None)
    last = max([scene.end, *(hop.post + 1 for hop in mine), *(hop.land for hop in missing)])
    count = _x(last, scene.steps)
    entries = legend.entries(scene, bool(missing), only is not None)
    left = max([LABELS, *(inches(name, 7) + 0.48 for name in lanes.names[ranks[0]].values())])
    texts = [(title(scene), 13), (subtitle(scene), 9.5), *((line, 9) for line in caption(scene))]
    wide = max([left + STEP * count, legend.NARROWEST, *(inches(*text) for text in texts)])
    step = min((wide - left) / count, WIDEST_STEP)
    lines = legend.lines(entries, wide)
    foot = 0.31 + 0.19 * len(caption(scene))
    below = foot + legend.LINE * len(lines) + 0.17
    figure = headed(wide + 0.6, 1.12 + UNIT * depth + below, scene)
    axes = box(figure, left, below, step * count + 0.1, UNIT * depth)
    axes.set_xlim(0, count + 0.1 / step)
    axes.set_ylim(depth, 0)
    axes.set_axis_off()
    _time(axes, scene.steps, last, depth)
    for rank in ranks:
        _rank(axes, scene, rank, tops[rank], high[rank], lanes)
    for made, hops in ((False, missing), (True, mine)):
        for hop in hops:
            y = tops[hop.src] + high[hop.src] + LANE * lanes.of[hop] + 0.07
            _arrow(axes, scene, hop, y, made, step)
    if only is not None:
        _released(axes, scene, only, depth - LANE)
    legend.draw(box(figure, 0.3, foot, wide, legend.LINE * len(lines)), lines, wide)
    return figure


def _x(boundary: int, steps: int) -> float:
    """Where a boundary is drawn; those after the last step are closer together."""
    return min(boundary, steps) + DRAIN * max(boundary - steps, 0)


def _tops(each: dict[int, float], per_node: int) -> tuple[dict[int, float], float]:
    """Where each rank's boxes begin, and the height of the picture, in units from the top."""
    tops, y = {}, 0.0
    for rank, high in each.items():
        y += NODE_GAP * (rank % per_node == 0 and y > 0)
        tops[rank] = y
        y += high
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


def _rank(
    axes: Axes, scene: ScheduleScene, rank: int, top: float, high: float, lanes: _Lanes
) -> None:
    axes.text(-0.14, top + high / 2, f"rank {rank}", ha="right", va="center_baseline", fontsize=9.5)
    for lane, name in lanes.names[rank].items():
        axes.text(-0.14, top + high + LANE * (lane + 0.5) + 0.04, name,
                  ha="right", va="center_baseline", fontsize=7, color=GREY)  # fmt: skip
    for step in range(scene.steps):
        _box(axes, scene, rank, step, top, high)


def _box(axes: Axes, scene: ScheduleScene, rank: int, step: int, top: float, high: float) -> None:
    """A step, a line for each pair; only an outline if it computes nothing."""
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
    """One pair; its bar begins where that of the pair before it ends."""
    left, top, high = place
    query, key = (of_rank(owner, scene.size) for owner in cell.pair[:2])
    colour = of_rank(scene.owner(rank, cell.pair), scene.size)
    halves = (query, key) if rank not in cell.pair[:2] else (colour, colour)
    for i, each in enumerate(halves):
        axes.add_patch(Rectangle((left + 0.47 * i, top), 0.47, high, linewidth=0,
                                 facecolor=mixed(each, "#ffffff", 0.74)))  # fmt: skip
    axes.add_patch(Rectangle((left + 0.94 * done, top + 0.7 * high), 0.94 * cell.share, 0.3 * high,
                             facecolor=colour, linewidth=0))  # fmt: skip
    if cell.kept:
        axes.add_patch(Rectangle((left, top), 0.94, high, facecolor="none", edgecolor=INK))
    axes.text(left + 0.06, top + 0.37 * high, f"q{cell.pair.query} k{cell.pair.key}", fontsize=8,
              va="center_baseline")  # fmt: skip
    part = " ".join(scene.parts(cell.pair))
    mark = part or ("full" if cell.cover == Cover.FULL else "part")
    axes.text(left + 0.88, top + 0.37 * high, mark, ha="right", fontsize=6.5,
              va="center_baseline", color=INK if mark == "full" else GREY)  # fmt: skip


def _arrow(axes: Axes, scene: ScheduleScene, hop: Hop, y: float, made: bool, inch: float) -> None:
    """A hop: dashed if it is left out, red if it blocks, which is to say that it lands at the
    boundary at which it is posted, and nothing is computed meanwhile. inch: inches of a step."""
    blocks = hop.land == hop.post
    begin = _x(hop.post, scene.steps) + 0.03
    end = begin + DRAIN - 0.1 if blocks else _x(hop.land, scene.steps) - 0.03
    place = Place(begin, end, y, LANE - 0.1)
    if not made:
        arrows.draw_left_out(axes, place)
        return
    look = looks(of_rank(hop.chunk.owner, scene.size), hop.chunk.family, blocks)
    of = scene.rows(hop.chunk)[1]
    rows = [(first / of, stop / of) for first, stop in scene.ranges(hop.chunk)]
    filled = arrows.draw(axes, place, look, rows)
    label = f"{name_of(hop.chunk)} to {hop.dst}"
    part = share(*scene.rows(hop.chunk))
    for more in (f" {part} {byte_size(scene.bytes(hop.chunk))}", f" {part}"):
        if part and inches(label + more, SMALL) < (end - begin) * inch - 0.14:
            label += more
            break
    at = begin + 0.04, y + LANE / 2 - 0.04
    style = {"va": "center_baseline", "fontsize": SMALL, "clip_on": True}
    axes.text(*at, label, color=INK, **style)
    if ink_on(look.filled) != INK:
        for where in filled:
            text = axes.text(*at, label, color=ink_on(look.filled), **style)
            text.set_clip_box(TransformedBbox(where, axes.transData))


def _released(axes: Axes, scene: ScheduleScene, rank: int, y: float) -> None:
    """What the rank has no more use for, where it lets it go."""
    axes.text(-0.14, y + 0.04, "released", ha="right", va="center_baseline", fontsize=7, color=GREY)
    for boundary, chunks in scene.released(rank).items():
        axes.text(_x(boundary, scene.steps) + 0.04, y + 0.04, " ".join(map(name_of, chunks)),
                  fontsize=SMALL, color=GREY, va="center_baseline")  # fmt: skip
