# SPDX-License-Identifier: Apache-2.0
"""Picture of a trace: time on the x axis, and for each rank one lane per stream.

A stream is compute, transfer or wait. Transfers are translucent, so that overlapping transfers are
darker. Waits are red, because a better schedule would save this time.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ....units import duration
from .. import lanes
from ..show.colours import GREY, MEANINGS, RULE
from .record import STREAMS, Trace

OPACITY = {"compute": 1.0, "transfer": 0.55, "wait": 1.0}
LANE = 0.13  # height of a lane in inches
LEFT, WIDTH = 0.77, 8.8  # left edge and width of the time axis in inches
HEAD, FOOT = 1.3, 0.42  # space above and below the lanes in inches
# Text style of notes at the right of the lanes.
OUTSIDE = {"xycoords": ("axes fraction", "data"), "color": GREY, "annotation_clip": False}
SHORTEST = 5e-5  # minimum length of a bar in seconds, so that it is visible


def draw(trace: Trace, path: Path) -> None:
    """Draw the picture of a trace and write it to a file."""
    with lanes.styled():
        lanes.save(_figure(trace), path, lanes.ALL_SHADES)


def _figure(trace: Trace) -> Figure:
    count = len(STREAMS) + 1
    depth = count * len(trace.ranks)
    height = LANE * depth + HEAD + FOOT
    figure = lanes.headed(11, height, trace.title, "")
    axes = lanes.box(figure, LEFT, FOOT, WIDTH, height - HEAD - FOOT)
    scale = lanes.clock(axes, trace.end - trace.begin)
    for row, rank in enumerate(trace.ranks):
        for lane, stream in enumerate(STREAMS):
            _lane(axes, trace, rank, stream, row * count + lane, scale)
    middles = [row * count + len(STREAMS) / 2 for row in range(len(trace.ranks))]
    lanes.name_lanes(axes, middles, [f"rank {rank}" for rank in trace.ranks], depth)
    _marks(axes, trace, depth, scale)
    # Below the lanes, because above them it could overlap the name of a short last pass.
    axes.annotate("share of the time", (1.01, depth + 0.6), **OUTSIDE, fontsize=7)
    entries = [(MEANINGS[stream], stream) for stream in STREAMS]
    lanes.legend(axes, entries, alphas=OPACITY, above=0.55 / (height - HEAD - FOOT))
    return figure


def _lane(axes: Axes, trace: Trace, rank: int, stream: str, y: float, scale: float) -> None:
    """Draw a bar per event of a stream, and write the fraction of time in which the stream is busy.

    Args:
        axes: Axes to draw on.
        trace: The trace.
        rank: Rank of the stream.
        stream: Name of the stream, such as "compute".
        y: y coordinate of the lane's upper edge.
        scale: Units of the x axis per second.
    """
    spans = [
        (scale * (event.begin - trace.begin),
         scale * (max(event.end, event.begin + SHORTEST) - trace.begin))
        for event in trace.events
        if (event.rank, event.stream) == (rank, stream)
    ]  # fmt: skip
    edge = "white" if OPACITY[stream] < 1 else "none"
    lanes.bars(
        axes, y + 0.08, 0.84, spans, MEANINGS[stream], edge=edge, width=0.4, alpha=OPACITY[stream]
    )
    share = trace.busy(rank, stream) / (trace.end - trace.begin)
    axes.annotate(f"{stream} {share:.0%}", (1.01, y + 0.5), **OUTSIDE, fontsize=6.5, va="center")


def _marks(axes: Axes, trace: Trace, depth: int, scale: float) -> None:
    """Write name and duration of each pass above its start. Texts that would overlap are stacked.

    Args:
        axes: Axes to draw on.
        trace: The trace.
        depth: y coordinate at which the last lane ends.
        scale: Units of the x axis per second.
    """
    room, level = -1.0, 0  # room: end of the last name, in inches from the left
    for name, begin, end in trace.marks:
        edges = [scale * (t - trace.begin) for t in (begin, end)]
        axes.vlines(edges, -0.2, depth, color=RULE, linewidth=0.8, zorder=0)
        text = f"{name}, {duration(end - begin)}"
        left = WIDTH * (begin - trace.begin) / (trace.end - trace.begin)
        level = level + 1 if left < room + 0.1 else 0
        room = left + lanes.inches(text, 8.5)
        axes.text(edges[0], -0.4 - 1.25 * level, text, fontsize=8.5, color=GREY)
