# SPDX-License-Identifier: Apache-2.0
"""The longest sequence that any run of a search can train: `mb.advise(seq="longest")`, `memory
--longest`.

Of every way to share the GPUs out the runs that take least memory are tried, whatever their time,
with the attention that would be taken at such a length. The search then finds the fastest run of
that length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .....autotune.clusters import Cluster
from ..account.fitting import Longest, best, evenly
from ..account.memory import account, fit
from ..settings import Settings, uneven_rounds
from ..shapes.model import Model
from .attention_choice import AttentionForecast
from .search_space import (
    STORES,
    TrainingGoal,
    check_fixed,
    check_wanted,
    groups_of,
    options_of,
)

EVEN = 1 << 15  # rows of a rank, which all sizes of groups divide
LEAST = 0.6  # of the longest with other attention: what falls short of it is not looked at
FULL = 64  # micro-batches that keep every stage of a pipeline busy


def longest(
    model: Model, cluster: Cluster, want: TrainingGoal, attention: AttentionForecast,
    micro_batches: int | None = None,
) -> Longest:  # fmt: skip
    """The run with the longest sequence, at that length. want: whose length does not count;
    micro_batches: of a step, None: as many as keep every stage of a pipeline busy.

    ValueError where nothing that is fixed goes together, or not even a short sequence fits.
    """
    check_fixed(want)
    # Data-parallel ranks share no sequence: one, unless other sizes need more.
    for dp in ({"dp": 1}, {}):
        goal = replace(
            want, seq=EVEN * cluster.gpus, sequences=FULL * cluster.gpus,
            pinned={**dp, **want.pinned},
        )  # fmt: skip
        if next(groups_of(model, cluster, goal), None) is not None:
            break
    check_wanted(model, cluster, goal)
    groups = [
        replace(each, micro_batches=micro_batches or each.micro_batches)
        for each in groups_of(model, cluster, goal)
        if each.vpp == goal.pinned.get("vpp", 1)
    ]
    if all(odd := [uneven_rounds(each) for each in groups]):
        raise ValueError(odd[0])
    runs = [run for each in groups if not uneven_rounds(each) for run in _smallest(each, goal)]
    core_of = attention.core_of
    first = best(model, cluster, runs, core_of)
    # Which attention is fastest depends on the length, and how much that holds on which it is.
    near = [_at(run, first.run.seq * LEAST) for run in runs]
    hopeful = (run for run in near if fit(account(model, run, False, core_of), cluster).fits)
    return best(model, cluster, map(attention.settled, hopeful), core_of)


def _at(run: Settings, seq: float) -> Settings:
    """The run at a length like this one that its ranks, chunks and tiles divide."""
    step = evenly(run)
    return replace(run, seq=max(1, int(seq) // step) * step)


def _smallest(groups: Settings, goal: TrainingGoal) -> Iterator[Settings]:
    """Runs that recompute all, if nothing else is fixed, in chunks of rows and with most on the
    host first; without a store and with half of one, whose layout may hold less."""
    for chunked in (True, False):
        yield from options_of(groups, goal, chunked, STORES[:0:-1], (1.0, 0.5, 0.0))
