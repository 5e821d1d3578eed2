# SPDX-License-Identifier: Apache-2.0
"""`megatron-burst advise --png`: one layer and one step of the best run, over time.

Three parts: the layer's parts one after another; in it the attention call, rank by rank of one
ring, with what is sent beside the compute; and the step, stage by stage, with what follows its
last backward. Red in a compute lane is waiting. Times come from the model itself: the simulator
of schedules and the pipeline's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...autotune.recording import Recording, TimeSpan
from ...units import duration
from .. import lanes
from ..show.colours import GREY, INK, MEANINGS
from .advice import Advice
from .forecast.attention_time import AttentionTime, attention_time
from .forecast.layer_time import layer_time
from .forecast.pipeline import Turn, timeline
from .forecast.step_time import GATHERING, GRADIENTS, OPTIMIZER, SENDS, stages_of
from .shapes.layer_kinds import FULL, LayerPart

EXCHANGE = "exchange"  # of heads, before and after the ring
LABELS = {
    "compute": "attention kernel", "intra": "sent within the node", "inter": "sent between nodes",
    EXCHANGE: "all-to-all of heads", "wait": "waiting for a hop",
}  # fmt: skip
STATES = (GRADIENTS, GATHERING, OPTIMIZER)
MOST = 16  # ranks, and stages, that are shown
LANES = {"compute": 0, EXCHANGE: 0, "intra": 1, "inter": 2}
DETAILED = 24  # micro-batches up to which each is named


# --- when what happens: seconds from the beginning of each ---------------------------------


class TimedAttention(NamedTuple):
    """One attention call: what every rank of a ring does, and where backward begins.

    spans: as of the simulator, all-to-alls (`EXCHANGE`) besides; size: ranks of the ring.
    """

    spans: list[TimeSpan]
    size: int
    time: AttentionTime


class NamedSpan(NamedTuple):
    """A part of a layer or a step: in which phase, what it is, and when."""

    phase: str
    name: str
    start: float
    end: float


class StepSpans(NamedTuple):
    """One step: (stage, turn, start, end) of its micro-batches, what follows, and its end."""

    turns: list[tuple[int, Turn, float, float]]
    states: list[NamedSpan]
    end: float


def call_of(advice: Advice) -> TimedAttention:
    """The attention call of the best run."""
    run = advice.best.run
    recordings = Recording(), Recording()
    time = attention_time(advice.model, advice.cluster, run, recordings=recordings)
    spans, size = [], run.cp // run.ulysses
    for recording, start, whole, shared in zip(
        recordings, (0.0, time.forward), (time.forward, time.backward), time.exchange, strict=True
    ):
        half = shared / 2
        spans += [
            span._replace(start=span.start + start + half, end=span.end + start + half)
            for span in recording.spans
        ]
        for rank in range(size if shared else 0):
            spans.append(TimeSpan(rank, EXCHANGE, start, start + half))
            spans.append(TimeSpan(rank, EXCHANGE, start + whole - half, start + whole))
    return TimedAttention(spans, size, time)


def attending(advice: Advice) -> LayerPart:
    """What a layer with attention to all keys is made of; the last layer's if none is."""
    parts = advice.model.parts
    return next((part for part in parts if part.attention == FULL), parts[-1])


def layer_bars(advice: Advice) -> list[NamedSpan]:
    """The parts of one layer and micro-batch, phase by phase, one after another."""
    layer = layer_time(advice.model, advice.cluster, advice.best.run, part=attending(advice))
    spans, clock = [], 0.0
    for phase in ("forward", "recompute", "backward"):
        for name, taken in getattr(layer, phase).items():
            spans.append(NamedSpan(phase, name, clock, clock + taken))
            clock += taken
    return spans


def step_of(advice: Advice) -> StepSpans:
    """The step of the best run: its pipeline by events, then what its states cost."""
    model, cluster, run = advice.model, advice.cluster, advice.best.run
    parts = advice.best.time.parts
    stages = stages_of(model, cluster, run, lambda part: layer_time(model, cluster, run, part=part))
    forward, backward = (  # [stages * vpp, micro-batches] of each chunk of layers
        np.tile(np.array([[each.total / run.vpp] for each in way]), (run.vpp, run.micro_batches))
        for way in zip(*stages, strict=True)
    )
    hop = parts.get(SENDS, 0.0) / max(1, 2 * run.micro_batches)
    turns = timeline(forward, backward, vpp=run.vpp, hop=hop)
    clock = max(end for *_, end in turns)
    states = []
    for name in STATES:
        if parts.get(name):
            states.append(NamedSpan("states", name, clock, clock + parts[name]))
            clock += parts[name]
    return StepSpans(turns, states, clock)


# --- the picture ---------------------------------------------------------------------------


def draw(advice: Advice, path: Path) -> None:
    """Write the picture. ValueError for packed documents, whose rings differ from pack to pack."""
    if advice.lengths:
        raise ValueError("--png and --svg draw one sequence: leave --packed out, or them")
    with lanes.styled():
        lanes.save(_figure(advice), path, lanes.ALL_SHADES)


def _figure(advice: Advice) -> Figure:
    call, step = call_of(advice), step_of(advice)
    run, time = advice.best.run, advice.best.time
    ranks, stages = min(call.size, MOST), min(run.pp, MOST)
    heights = [0.75, max(1.2, 0.34 * ranks), max(0.7, 0.34 * stages)]
    top, gap, foot = 1.1, 1.15, 0.55
    height = top + sum(heights) + 2 * gap + foot
    groups = f"TP {run.tp}, CP {run.cp}, PP {run.pp}, DP {run.dp}, {run.algorithm}"
    title = f"{advice.model.name}, {run.seq:,} tokens on {run.gpus} {advice.cluster.gpu.name}"
    predicted = f"predicted {duration(time.seconds)} per step, MFU {time.mfu:.0%}"
    figure = lanes.headed(12, height, f"{title}: {groups}", predicted)
    bottom, axes = height - top, []
    for each in heights:
        axes.append(lanes.box(figure, 1.02, bottom - each, 10.62, each))
        bottom -= each + gap
    _draw_layer(axes[0], layer_bars(advice))
    _draw_call(axes[1], call, ranks)
    _draw_step(axes[2], step, stages, run.pp)
    return figure


def _draw_layer(axes: Axes, spans: Sequence[NamedSpan]) -> None:
    """The parts of a layer, in one row; phases between rules."""
    end = spans[-1].end
    scale = lanes.clock(axes, end, f"One layer, one micro-batch: {duration(end)}")
    names = list(dict.fromkeys(span.name for span in spans))
    lanes.bars(axes, -0.35, 0.7, [(scale * span.start, scale * span.end) for span in spans],
               [MEANINGS[span.name] for span in spans], width=0)  # fmt: skip
    for phase in dict.fromkeys(span.phase for span in spans):
        some = [span for span in spans if span.phase == phase]
        axes.axvline(scale * some[0].start, color=INK, linewidth=0.8)
        middle = scale * (some[0].start + some[-1].end) / 2
        if some[-1].end - some[0].start > 0.06 * end:
            axes.text(middle, 0.42, phase, ha="center", va="bottom", fontsize=8, color=GREY)
    axes.set_ylim(-0.4, 0.62)
    axes.set_yticks([])
    lanes.legend(axes, [(MEANINGS[name], name) for name in names])


def _draw_call(axes: Axes, call: TimedAttention, ranks: int) -> None:
    """The attention call: for each rank a lane of its device and one of each of its links."""
    end = call.time.seconds
    shown = "" if ranks == call.size else f"; {ranks} of {call.size} ranks of a ring"
    title = f"Its attention, forward and backward: {duration(end)}{shown}"
    scale = lanes.clock(axes, end, title)
    for rank in range(ranks):
        lanes.bars(axes, 3 * rank, 0.8, [(0, scale * end)], MEANINGS["wait"], width=0)
        for what, lane in LANES.items():
            spans = [(scale * span.start, scale * span.end) for span in call.spans
                     if (span.rank, span.what) == (rank, what)]  # fmt: skip
            lanes.bars(axes, 3 * rank + 0.85 * lane, 0.8, spans, MEANINGS[what], width=0.15)
    axes.axvline(scale * call.time.forward, color=INK, linewidth=0.8)
    names = [f"rank {rank}" for rank in range(ranks)]
    lanes.name_lanes(axes, [3 * rank + 1.25 for rank in range(ranks)], names, 3 * ranks - 0.3)
    drawn = {span.what for span in call.spans} | {"wait"}
    lanes.legend(axes, [(MEANINGS[what], LABELS[what]) for what in LABELS if what in drawn])


def _draw_step(axes: Axes, step: StepSpans, stages: int, of: int) -> None:
    """The step: each pipeline stage's forwards and backwards, then gradients and optimizer."""
    shown = "" if stages == of else f"; {stages} of {of} stages"
    scale = lanes.clock(axes, step.end, f"One step: {duration(step.end)}{shown}")
    count = 1 + max(turn.micro_batch for _, turn, *_ in step.turns)
    for shown_stage in range(stages):
        turns = [each[1:] for each in step.turns if each[0] == shown_stage]
        spans = [(scale * start, scale * end) for _, start, end in turns]
        colours = [MEANINGS["backward" if turn.backward else "forward"] for turn, *_ in turns]
        numbers = [str(turn.micro_batch + 1) for turn, *_ in turns] if count <= DETAILED else []
        lanes.bars(axes, shown_stage, 0.8, spans, colours, numbers, size=7, width=0.4,
                   least=0.012 * scale * step.end)  # fmt: skip
        for state in step.states:
            lanes.bars(axes, shown_stage, 0.8, [(scale * state.start, scale * state.end)],
                       MEANINGS[state.name], width=0)  # fmt: skip
    names = [f"stage {stage}" for stage in range(stages)]
    lanes.name_lanes(axes, [stage + 0.4 for stage in range(stages)], names, stages)
    after = [(MEANINGS[state.name], state.name) for state in step.states]
    lanes.legend(
        axes,
        [
            (MEANINGS["forward"], "forward"),
            (MEANINGS["backward"], "backward and recompute"),
            *after,
        ],
    )
