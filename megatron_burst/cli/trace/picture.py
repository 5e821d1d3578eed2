"""A trace as a picture: time to the right, a band of four lanes for every rank.

Exchanges that overlap on one link class share its lane, one translucent over the other. Waiting
is red: it is what there is to remove.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ..show.colours import GREY, INK, RULE
from .files import Trace
from .record import STREAMS

COLOURS = {"compute": "#44aa99", "intra": "#88ccee", "inter": "#332288", "wait": "#cc6677"}
LANE = 0.13  # inches


def draw(trace: Trace, path: Path) -> None:
    """Write the PNG of a trace."""
    path.parent.mkdir(parents=True, exist_ok=True)  # as for the other files of a trace
    with style.context(["default", {"font.family": "DejaVu Sans", "font.size": 9}]):
        _figure(trace).savefig(path, format="png", dpi=130, metadata={"Software": None})


def _figure(trace: Trace) -> Figure:
    ranks, lanes = trace.ranks, len(STREAMS) + 1
    height = LANE * lanes * len(ranks) + 1.5
    figure = Figure(figsize=(11, height))
    axes = figure.add_axes((0.07, 0.62 / height, 0.8, (height - 1.42) / height))
    for row, rank in enumerate(ranks):
        for lane, stream in enumerate(STREAMS):
            _lane(axes, trace, rank, stream, row * lanes + lane)
    _shares(figure, axes, trace, lanes)
    axes.set_xlim(0, 1e3 * (trace.end - trace.begin))
    axes.set_ylim(lanes * len(ranks) - 0.5, -0.7)
    axes.set_yticks([row * lanes + 1.5 for row in range(len(ranks))], [f"rank {r}" for r in ranks])
    axes.set_xlabel("milliseconds", color=GREY)
    axes.tick_params(length=0, colors=INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    for name, begin, end in trace.marks:
        edges = [1e3 * (t - trace.begin) for t in (begin, end)]
        axes.vlines(edges, -0.7, lanes * len(ranks), color=RULE, linewidth=0.8, zorder=0)
        axes.text(edges[0], -0.9, f"{name}, {edges[1] - edges[0]:.0f} ms", fontsize=8.5, color=GREY)
    figure.text(0.02, 1 - 0.3 / height, trace.title, fontsize=12, fontweight="bold", color=INK)
    patches = [Patch(color=colour, label=stream) for stream, colour in COLOURS.items()]
    figure.legend(handles=patches, loc="lower right", ncols=4, frameon=False, fontsize=8.5)
    return figure


def _lane(axes: Axes, trace: Trace, rank: int, stream: str, y: float) -> None:
    spans = [
        (1e3 * (event.begin - trace.begin), max(1e3 * (event.end - event.begin), 0.05))
        for event in trace.events
        if (event.rank, event.stream) == (rank, stream)
    ]
    overlaps = stream in ("intra", "inter")
    axes.broken_barh(spans, (y - 0.42, 0.84), facecolors=COLOURS[stream],
                     alpha=0.55 if overlaps else 1.0,
                     edgecolor="white" if overlaps else "none", linewidth=0.4)  # fmt: skip


def _shares(figure: Figure, axes: Axes, trace: Trace, lanes: int) -> None:
    """Right of each rank, for how much of the time each stream was busy."""
    whole = trace.end - trace.begin
    for row, rank in enumerate(trace.ranks):
        for lane, stream in enumerate(STREAMS):
            share = trace.busy(rank, stream) / whole
            axes.annotate(f"{stream} {share:.0%}", (1.01, row * lanes + lane),
                          xycoords=("axes fraction", "data"), fontsize=6.5, va="center",
                          color=GREY, annotation_clip=False)  # fmt: skip
