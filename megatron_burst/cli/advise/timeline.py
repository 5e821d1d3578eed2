"""When the best run does what: one attention call, one layer, one step, as plain spans of time.

From the events of the model itself: the simulator of schedules and the pipeline's order. Decides
nothing; `picture` draws it. Times are in seconds from the beginning of each.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...advisor.advice import Advice
from ...advisor.forecast.attention_time import AttentionTime, attention_time
from ...advisor.forecast.layer_time import layer_time
from ...advisor.forecast.pipeline import timeline
from ...advisor.forecast.states_time import GATHERING, GRADIENTS, OPTIMIZER
from ...advisor.forecast.step_time import SENDS, stages_of
from ...advisor.settings import Settings
from ...advisor.shapes.model import FULL, Part
from ...autotune.recording import Recording, Span

EXCHANGE = "exchange"  # of heads, before and after the ring
STATES = (GRADIENTS, GATHERING, OPTIMIZER)


class Call(NamedTuple):
    """One attention call: what every rank of a ring does, and where backward begins.

    spans: as of the simulator, all-to-alls (`EXCHANGE`) besides; size: ranks of the ring.
    """

    spans: list[Span]
    size: int
    backward: float
    end: float
    time: AttentionTime


class Bar(NamedTuple):
    """A part of something: in which phase, what it is, and when."""

    phase: str
    name: str
    start: float
    end: float


class Turn(NamedTuple):
    """A pass of a micro-batch on a pipeline stage."""

    stage: int
    backward: bool
    micro_batch: int
    start: float
    end: float


class Step(NamedTuple):
    """One step: turns of all stages, what follows the last one, and its end."""

    turns: list[Turn]
    states: list[Bar]
    stages: int
    end: float


def call_of(found: Advice) -> Call:
    """The attention call of the best run."""
    run = found.best.run
    told = Recording(), Recording()
    time = attention_time(found.model, found.cluster, run, recordings=told)
    spans, size = [], run.cp // run.ulysses
    for recording, start, whole, shared in zip(
        told, (0.0, time.forward), (time.forward, time.backward), time.exchange, strict=True
    ):
        half = shared / 2
        spans += [
            span._replace(start=span.start + start + half, end=span.end + start + half)
            for span in recording.spans
        ]
        for rank in range(size if shared else 0):
            spans.append(Span(rank, EXCHANGE, start, start + half))
            spans.append(Span(rank, EXCHANGE, start + whole - half, start + whole))
    return Call(spans, size, time.forward, time.seconds, time)


def attending(found: Advice) -> Part:
    """What a layer with attention to all keys is made of; the last layer's if none is."""
    parts = found.model.parts
    return next((part for part in parts if part.attention == FULL), parts[-1])


def layer_bars(found: Advice) -> list[Bar]:
    """The parts of one layer and micro-batch, phase by phase, one after another."""
    layer = layer_time(found.model, found.cluster, found.best.run, part=attending(found))
    bars, clock = [], 0.0
    for phase in ("forward", "recompute", "backward"):
        for name, taken in getattr(layer, phase).items():
            bars.append(Bar(phase, name, clock, clock + taken))
            clock += taken
    return bars


def step_of(found: Advice) -> Step:
    """The step of the best run: its pipeline by events, then what its states cost."""
    run = found.best.run
    forward, backward = _seconds(found, run)
    parts = found.best.time.parts
    hop = parts.get(SENDS, 0.0) / max(1, 2 * run.micro_batches)
    turns = [
        Turn(stage, turn.backward, turn.micro_batch, start, end)
        for stage, turn, start, end in timeline(forward, backward, vpp=run.vpp, hop=hop)
    ]
    clock = max(turn.end for turn in turns)
    states = []
    for name in STATES:
        if parts.get(name):
            states.append(Bar("states", name, clock, clock + parts[name]))
            clock += parts[name]
    return Step(turns, states, run.pp, clock)


def _seconds(found: Advice, run: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Forward and backward seconds [stages * vpp, micro-batches] of each chunk of layers."""
    model, cluster = found.model, found.cluster
    stages = stages_of(model, cluster, run, lambda part: layer_time(model, cluster, run, part=part))
    both = (
        np.array([[getattr(stage, name).total / run.vpp] for stage in stages])
        for name in ("forward", "backward")
    )
    there, back = (np.tile(each, (run.vpp, run.micro_batches)) for each in both)
    return there, back
