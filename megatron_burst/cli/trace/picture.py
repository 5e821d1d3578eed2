"""A trace as a picture: time runs to the right, and each rank has one lane per stream.

Transfers that overlap on one link class share its lane; they are translucent, so that the overlap
is darker. Waiting is red, because it is the time that a better schedule would save.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ..show.colours import GREY, INK, RULE
from ..show.page import box, inches
from .files import Trace
from .record import STREAMS

COLOURS = {"compute": "#44aa99", "intra": "#88ccee", "inter": "#332288", "wait": "#cc6677"}
OPACITY = {"compute": 1.0, "intra": 0.55, "inter": 0.55, "wait": 1.0}
LABELS = {
    "compute": "compute",
    "intra": "transfer within a node",
    "inter": "transfer between nodes",
    "wait": "wait",
}
LANE = 0.13  # inches
LEFT, WIDTH = 0.77, 8.8  # inches; of the time axis
HEAD, FOOT = 1.0, 0.62  # inches above and below the lanes


def draw(trace: Trace, path: Path) -> None:
    """Write the PNG of a trace, and the folders it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with style.context(["default", {"font.family": "DejaVu Sans", "font.size": 9}]):
        _figure(trace).savefig(path, format="png", dpi=130, metadata={"Software": None})


def _figure(trace: Trace) -> Figure:
    ranks, lanes = trace.ranks, len(STREAMS) + 1
    height = LANE * lanes * len(ranks) + HEAD + FOOT
    figure = Figure(figsize=(11, height))
    axes = box(figure, LEFT, FOOT, WIDTH, height - HEAD - FOOT)
    for row, rank in enumerate(ranks):
        for lane, stream in enumerate(STREAMS):
            _lane(axes, trace, rank, stream, row * lanes + lane)
    _shares(figure, axes, trace, lanes)
    axes.set_xlim(0, 1e3 * (trace.end - trace.begin))
    axes.set_ylim(lanes * len(ranks) - 0.5, -0.7)
    axes.set_yticks([row * lanes + 1.5 for row in range(len(ranks))], [f"rank {r}" for r in ranks])
    axes.set_xlabel("milliseconds", color=GREY, loc="left")
    axes.tick_params(length=0, colors=INK)
    axes.spines["bottom"].set_color(RULE)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    _marks(axes, trace, lanes * len(ranks))
    figure.text(0.02, 1 - 0.3 / height, trace.title, fontsize=12, fontweight="bold", color=INK)
    patches = [
        Patch(color=colour, label=LABELS[stream], alpha=OPACITY[stream], linewidth=0)
        for stream, colour in COLOURS.items()
    ]
    figure.legend(handles=patches, loc="lower right", ncols=4, frameon=False, fontsize=8.5)
    return figure


def _marks(axes: Axes, trace: Trace, depth: int) -> None:
    """Each pass by name and length above its begin; higher up where it would hit the last name."""
    room, level = -1.0, 0  # inches from the left at which the last name ends
    for name, begin, end in trace.marks:
        edges = [1e3 * (t - trace.begin) for t in (begin, end)]
        axes.vlines(edges, -0.7, depth, color=RULE, linewidth=0.8, zorder=0)
        text = f"{name}, {edges[1] - edges[0]:.0f} ms"
        left = WIDTH * (begin - trace.begin) / (trace.end - trace.begin)
        level = level + 1 if left < room + 0.1 else 0
        room = left + inches(text, 8.5)
        axes.text(edges[0], -0.9 - 1.25 * level, text, fontsize=8.5, color=GREY)


def _lane(axes: Axes, trace: Trace, rank: int, stream: str, y: float) -> None:
    spans = [
        (1e3 * (event.begin - trace.begin), max(1e3 * (event.end - event.begin), 0.05))
        for event in trace.events
        if (event.rank, event.stream) == (rank, stream)
    ]
    overlaps = OPACITY[stream] < 1
    axes.broken_barh(spans, (y - 0.42, 0.84), facecolors=COLOURS[stream],
                     alpha=OPACITY[stream],
                     edgecolor="white" if overlaps else "none", linewidth=0.4)  # fmt: skip


def _shares(figure: Figure, axes: Axes, trace: Trace, lanes: int) -> None:
    """Right of each rank, the share of the time in which each stream was busy."""
    whole = trace.end - trace.begin
    axes.annotate("share of the time", (1.01, -1.2), xycoords=("axes fraction", "data"),
                  fontsize=7, color=GREY, annotation_clip=False)  # fmt: skip
    for row, rank in enumerate(trace.ranks):
        for lane, stream in enumerate(STREAMS):
            share = trace.busy(rank, stream) / whole
            axes.annotate(f"{stream} {share:.0%}", (1.01, row * lanes + lane),
                          xycoords=("axes fraction", "data"), fontsize=6.5, va="center",
                          color=GREY, annotation_clip=False)  # fmt: skip
