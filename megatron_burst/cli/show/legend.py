"""The legend below a picture of a schedule: what its boxes and arrows stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from ...schedule.tables import Chunk
from ...units import byte_size
from . import arrows
from .arrows import Place, looks
from .colours import GREY, INK, mixed, of_rank
from .page import inches
from .passes import ScheduleScene
from .words import FAMILIES, LETTERS

LINE = 0.22  # inches
NARROWEST = 7.6  # inches of a picture
SIGN, SPACE = 0.37, 0.28  # inches of a sign with the room to its text, and behind the text


Sign = Callable[[Axes, float, float], None]


class Entry(NamedTuple):
    """A sign, drawn at (x, y) in inches from the upper left corner, and its meaning."""

    sign: Sign
    text: str

    @property
    def width(self) -> float:
        return SIGN + inches(self.text, 8) + SPACE


def entries(scene: ScheduleScene, missing: bool, one: bool) -> list[Entry]:
    """missing: are hops that are left out drawn? one: is it the picture of one rank?"""
    found = [Entry(_pairs(scene), "visible pairs (full bar: busiest step)")]
    for family in scene.families:
        each = byte_size(scene.bytes(Chunk(family, 0)))
        text = f"{LETTERS[family]}0: {FAMILIES[family]} of rank 0, whole: {each}"
        found.append(Entry(_hop(scene, family), text))
    if any(scene.partial(hop.chunk) for hop in scene.hops):
        first = next(iter(scene.families), "kv")
        found.append(
            Entry(_hop(scene, first, [(0.2, 0.7)]), "only these rows of it (4/8: 4 of its 8)")
        )
    if any(hop.land == hop.post for hop in scene.hops):
        family = next(hop.chunk.family for hop in scene.hops if hop.land == hop.post)
        found.append(Entry(_hop(scene, family, blocks=True), "hop that blocks"))
    if missing:
        found.append(
            Entry(lambda axes, *at: arrows.draw_left_out(axes, _place(*at)), "hop left out")
        )
    if scene.plan.kept:
        found.append(Entry(_kept(scene), "kept from forward"))
    return found


def lines(found: Sequence[Entry], wide: float) -> list[list[Entry]]:
    """The entries in lines of at most so many inches."""
    rows: list[list[Entry]] = [[]]
    for entry in found:
        if rows[-1] and sum(e.width for e in rows[-1]) + entry.width - SPACE > wide:
            rows.append([])
        rows[-1].append(entry)
    return rows


def draw(axes: Axes, rows: Sequence[Sequence[Entry]], wide: float) -> None:
    """Into axes of so many inches."""
    axes.set_xlim(0, wide)
    axes.set_ylim(LINE * len(rows), 0)
    axes.set_axis_off()
    for i, row in enumerate(rows):
        x = 0.0
        for entry in row:
            entry.sign(axes, x, LINE * i)
            axes.text(x + SIGN, LINE * i + 0.1, entry.text, fontsize=8, color=GREY,
                      va="center_baseline")  # fmt: skip
            x += entry.width


def _place(x: float, y: float) -> Place:
    return Place(x, x + 0.3, y + 0.03, 0.13)


def _box(axes: Axes, scene: ScheduleScene, x: float, y: float, edge: str = "none") -> None:
    tint = mixed(of_rank(0, scene.size), "#ffffff", 0.74)
    axes.add_patch(Rectangle((x, y), 0.3, 0.18, facecolor=tint, edgecolor=edge))


def _pairs(scene: ScheduleScene) -> Sign:
    def sign(axes: Axes, x: float, y: float) -> None:
        _box(axes, scene, x, y)
        colour = of_rank(0, scene.size)
        axes.add_patch(Rectangle((x, y + 0.12), 0.2, 0.06, facecolor=colour, linewidth=0))

    return sign


def _kept(scene: ScheduleScene) -> Sign:
    return lambda axes, x, y: _box(axes, scene, x, y, INK)


def _hop(
    scene: ScheduleScene,
    family: str,
    shares: Sequence[tuple[float, float]] = ((0, 1),),
    blocks: bool = False,
) -> Sign:
    """The arrow of a hop of rank 0's chunk."""
    look = looks(of_rank(0, scene.size), family, blocks)

    def sign(axes: Axes, x: float, y: float) -> None:
        arrows.draw(axes, _place(x, y), look, shares)

    return sign
