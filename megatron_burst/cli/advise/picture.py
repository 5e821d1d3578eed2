"""`megatron-burst advise --png`: one layer and one step of the best run, over time.

Three parts: the layer's parts one after another; in it the attention call, rank by rank of one
ring, with what is sent beside the compute; and the step, stage by stage, with what follows its
last backward. White in a compute lane is waiting. Everything shown comes from `timeline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ...advisor.advice import Advice
from ...units import duration
from ..show.colours import GREY, INK, RULE
from .timeline import EXCHANGE, Bar, Call, Step, call_of, layer_bars, step_of

COLOURS = {
    "compute": "#44aa99", "intra": "#88ccee", "inter": "#332288", EXCHANGE: "#ddaa33",
    "wait": "#f3d5d9",
}  # fmt: skip
LABELS = {
    "compute": "attention kernel", "intra": "sent within the node", "inter": "sent between nodes",
    EXCHANGE: "all-to-all of heads", "wait": "waiting for a hop",
}  # fmt: skip
FORWARD, BACKWARD = "#88ccee", "#44aa99"
PARTS = ("#44aa99", "#88ccee", "#ddcc77", "#cc6677", "#aa4499", "#999933", "#117733", "#882255")
MOST = 16  # ranks, and stages, that are shown
LANES = {"compute": 0, EXCHANGE: 0, "intra": 1, "inter": 2}
DETAILED = 24  # micro-batches up to which each is named


def draw(found: Advice, path: Path) -> None:
    """Write the PNG, and the folders it lies in. ValueError for packed documents, whose rings
    differ from pack to pack."""
    if found.lengths:
        raise ValueError("--png draws one sequence: leave --packed out, or --png")
    path.parent.mkdir(parents=True, exist_ok=True)
    with style.context(["default", {"font.family": "DejaVu Sans", "font.size": 9}]):
        _figure(found).savefig(path, format="png", dpi=120, metadata={"Software": None})


def _figure(found: Advice) -> Figure:
    call, bars, step = call_of(found), layer_bars(found), step_of(found)
    ranks, stages = min(call.size, MOST), min(step.stages, MOST)
    heights = [0.75, max(1.2, 0.34 * ranks), max(0.7, 0.34 * stages)]
    top, gap, foot = 1.0, 1.15, 0.55
    height = top + sum(heights) + 2 * gap + foot
    figure = Figure(figsize=(12, height))
    bottom, boxes = height - top, []
    for each in heights:
        bottom -= each
        boxes.append(figure.add_axes((0.085, bottom / height, 0.885, each / height)))
        bottom -= gap
    run, time = found.best.run, found.best.time
    words = f"TP {run.tp}, CP {run.cp}, PP {run.pp}, DP {run.dp}, {run.algorithm}"
    title = (
        f"{found.model.name}, {run.seq:,} tokens on {run.gpus} {found.cluster.gpu.name}: {words}"
    )
    figure.text(0.012, 1 - 0.3 / height, title, fontsize=12, fontweight="bold", color=INK)
    about = f"predicted {duration(time.seconds)} per step, MFU {time.mfu:.0%}"
    figure.text(0.012, 1 - 0.52 / height, about, color=GREY)
    _layer(boxes[0], bars)
    _call(boxes[1], call, ranks)
    _step(boxes[2], step, stages)
    return figure


def _bare(axes: Axes, end: float, title: str) -> float:
    """Axis, title and unit; returns how many of the unit a second has."""
    scale, unit = (1.0, "seconds") if end >= 10 else (1e3, "milliseconds")
    axes.set_xlim(0, scale * end)
    axes.set_xlabel(unit, color=GREY, loc="left", labelpad=1)
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK, pad=17)
    axes.tick_params(length=0, colors=INK)
    axes.spines["bottom"].set_color(RULE)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    return scale


def _legend(axes: Axes, entries: Sequence[tuple[str, str]]) -> None:
    patches = [Patch(color=colour, label=label) for colour, label in entries]
    axes.legend(handles=patches, loc="lower right", bbox_to_anchor=(1.0, 0.985), frameon=False,
                ncols=len(patches), fontsize=8, handlelength=1.0, columnspacing=1.3,
                borderaxespad=0.2)  # fmt: skip


def _layer(axes: Axes, bars: Sequence[Bar]) -> None:
    """The parts of a layer, in one row; phases between rules."""
    end = bars[-1].end
    scale = _bare(axes, end, f"One layer, one micro-batch: {duration(end)}")
    names = list(dict.fromkeys(bar.name for bar in bars))
    colour = {name: PARTS[index % len(PARTS)] for index, name in enumerate(names)}
    for bar in bars:
        left, width = scale * bar.start, scale * (bar.end - bar.start)
        axes.barh(0, width, left=left, height=0.7, color=colour[bar.name], linewidth=0)
    for phase in dict.fromkeys(bar.phase for bar in bars):
        some = [bar for bar in bars if bar.phase == phase]
        axes.axvline(scale * some[0].start, color=INK, linewidth=0.8)
        middle = scale * (some[0].start + some[-1].end) / 2
        if some[-1].end - some[0].start > 0.06 * end:
            axes.text(middle, 0.42, phase, ha="center", va="bottom", fontsize=8, color=GREY)
    axes.set_ylim(-0.4, 0.62)
    axes.set_yticks([])
    _legend(axes, [(colour[name], name) for name in names])


def _call(axes: Axes, call: Call, ranks: int) -> None:
    """The attention call: of each rank a lane for its device and one for each of its links."""
    shown = "" if ranks == call.size else f"; {ranks} of {call.size} ranks of a ring"
    scale = _bare(
        axes, call.end, f"Its attention, forward and backward: {duration(call.end)}{shown}"
    )
    for rank in range(ranks):
        axes.barh(3 * rank, scale * call.end, height=0.8, color=COLOURS["wait"], linewidth=0)
    for span in call.spans:
        if span.rank < ranks:
            axes.barh(3 * span.rank + 0.85 * LANES[span.what], scale * (span.end - span.start),
                      left=scale * span.start, height=0.8, color=COLOURS[span.what],
                      edgecolor="white", linewidth=0.15)  # fmt: skip
    axes.axvline(scale * call.backward, color=INK, linewidth=0.8)
    axes.set_ylim(3 * ranks - 0.7, -0.8)
    axes.set_yticks([3 * rank + 0.85 for rank in range(ranks)],
                    [f"rank {rank}" for rank in range(ranks)])  # fmt: skip
    there = {span.what for span in call.spans} | {"wait"}
    _legend(axes, [(COLOURS[what], LABELS[what]) for what in LABELS if what in there])


def _step(axes: Axes, step: Step, stages: int) -> None:
    """The step: of each pipeline stage its forwards and backwards, then gradients and optimizer."""
    shown = "" if stages == step.stages else f"; {stages} of {step.stages} stages"
    scale = _bare(axes, step.end, f"One step: {duration(step.end)}{shown}")
    count = 1 + max(turn.micro_batch for turn in step.turns)
    for turn in step.turns:
        if turn.stage >= stages:
            continue
        left, width = scale * turn.start, scale * (turn.end - turn.start)
        colour = BACKWARD if turn.backward else FORWARD
        axes.barh(turn.stage, width, left=left, height=0.8, color=colour, edgecolor="white",
                  linewidth=0.4)  # fmt: skip
        if count <= DETAILED and width > 0.012 * scale * step.end:
            axes.text(left + width / 2, turn.stage, str(turn.micro_batch + 1), ha="center",
                      va="center", fontsize=7, color=INK)  # fmt: skip
    entries = [(FORWARD, "forward"), (BACKWARD, "backward and recompute")]
    for bar, colour in zip(step.states, ("#cc6677", "#ddcc77", "#aa4499"), strict=False):
        for stage in range(stages):
            axes.barh(stage, scale * (bar.end - bar.start), left=scale * bar.start, height=0.8,
                      color=colour, linewidth=0)  # fmt: skip
        entries.append((colour, bar.name))
    axes.set_ylim(stages - 0.4, -0.6)
    axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
    _legend(axes, entries)
