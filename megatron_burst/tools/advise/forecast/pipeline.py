# SPDX-License-Identifier: Apache-2.0
"""How long the micro-batches of a step take on a pipeline, stage times being given.

Runs the order in which Megatron-Core's schedules run (`pipeline_parallel/schedules.py`): 1F1B
(PipeDream-Flush, arXiv 2006.09503) and, with several chunks of layers per rank, its interleaved
form (arXiv 2104.04473, section 2.2). Stages and micro-batches may differ, so slow ranks and
packed documents of unequal work cost what they cost. For equal ones `step_time` takes the same
bubble by formula.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Turn(NamedTuple):
    """One pass of one micro-batch through one chunk of layers, of `stages` x `vpp` chunks in the
    order of the layers."""

    backward: bool
    chunk: int
    micro_batch: int


def pipeline_seconds(
    forward: np.ndarray, backward: np.ndarray, *, vpp: int = 1, hop: float = 0.0
) -> float:
    """Seconds from the first forward of a step to its last backward.

    forward, backward: seconds [stages * vpp, micro_batches] of each chunk of layers, chunk c being
    on rank c % stages; with recompute, backward includes it. hop: seconds that a message takes to
    a neighbour, in which neither end waits for it unless it has nothing else to do.

    Raises ValueError for shapes that are no such table.
    """
    return max(end for *_, end in timeline(forward, backward, vpp=vpp, hop=hop))


def timeline(
    forward: np.ndarray, backward: np.ndarray, *, vpp: int = 1, hop: float = 0.0
) -> list[tuple[int, Turn, float, float]]:
    """(stage, turn, start, end) of all turns, by stage and time. Arguments: `pipeline_seconds`."""
    forward, backward = (np.asarray(each, dtype=float) for each in (forward, backward))
    if forward.shape != backward.shape or forward.ndim != 2 or not forward.size:
        raise ValueError(
            f"forward and backward must be [stages * vpp, micro_batches] alike, got "
            f"{forward.shape} and {backward.shape}"
        )
    stages, rest = divmod(len(forward), vpp)
    if rest:
        raise ValueError(f"vpp {vpp} does not divide {len(forward)} chunks of layers")
    found = []
    for turn, end in _run(stages, vpp, forward.tolist(), backward.tolist(), hop).items():
        taken = (backward if turn.backward else forward)[turn.chunk, turn.micro_batch]
        found.append((turn.chunk % stages, turn, end - float(taken), end))
    return sorted(found, key=lambda each: (each[0], each[2]))


def turns(stage: int, stages: int, micro_batches: int, vpp: int = 1) -> list[Turn]:
    """What the rank of one stage runs, in order: forwards to fill the pipeline, then one forward
    and one backward by turns, then the backwards that are left."""
    passes = [
        (part, micro_batch)
        for first in range(0, micro_batches, stages)
        for part in range(vpp)
        for micro_batch in range(first, min(first + stages, micro_batches))
    ]
    forwards = [Turn(False, part * stages + stage, each) for part, each in passes]
    backwards = [Turn(True, (vpp - 1 - part) * stages + stage, each) for part, each in passes]
    ahead = stages - stage - 1
    if vpp > 1:
        ahead = 2 * ahead + (vpp - 1) * stages
    ahead = min(ahead, len(passes))
    steady = len(passes) - ahead
    both = [
        turn for pair in zip(forwards[ahead:], backwards[:steady], strict=True) for turn in pair
    ]
    return [*forwards[:ahead], *both, *backwards[steady:]]


def _run(
    stages: int, vpp: int, forward: list[list[float]], backward: list[list[float]], hop: float
) -> dict[Turn, float]:
    """When each turn ends; every rank runs its turns in order, each when its input is in."""
    orders = [turns(stage, stages, len(forward[0]), vpp) for stage in range(stages)]
    last = len(forward) - 1
    ended: dict[Turn, float] = {}
    clock, at = [0.0] * stages, [0] * stages
    ready = list(range(stages))
    while ready:
        stage = ready.pop()
        order = orders[stage]
        while at[stage] < len(order):
            is_backward, chunk, each = order[at[stage]]
            # The last chunk's backward follows its own forward, without a message.
            turned = is_backward and chunk == last
            above = chunk if turned else chunk + (1 if is_backward else -1)
            before = Turn(is_backward and not turned, above, each)
            arrived = 0.0
            if is_backward or chunk:
                if before not in ended:
                    break  # the rank that ends it looks here again
                arrived = ended[before] + hop * (not turned and stages > 1)
            taken = (backward if is_backward else forward)[chunk][each]
            clock[stage] = max(clock[stage], arrived) + taken
            ended[Turn(is_backward, chunk, each)] = clock[stage]
            at[stage] += 1
            ready.append((stage + (-1 if is_backward else 1)) % stages)
    assert all(n == len(order) for n, order in zip(at, orders, strict=True)), "turns wait in a ring"
    return ended
