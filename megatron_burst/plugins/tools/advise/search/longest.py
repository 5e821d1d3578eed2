# SPDX-License-Identifier: Apache-2.0
"""The longest sequence that any run of a search can train: `mb.advise(seq="longest")`, `memory
--longest`.

Of every way to share the GPUs out the runs that take least memory are tried, whatever their time,
with the attention that would be taken at such a length. The search then finds the fastest run of
that length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from .....autotune.clusters import Cluster
from ..account.memory import Account, MemoryLeft, account, fit, least_bytes
from ..account.rings import CoreOf, remembering
from ..settings import ENDS, Settings, check, uneven_rounds
from ..shapes.model import Model
from .attention_choice import AttentionForecast
from .remedies import does_not_fit
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
GRANULE = 1 << 15  # tokens: sequences are multiples of it, and of 2 x cp


@dataclass(frozen=True)
class Longest:
    """The longest sequence of a run on a cluster: the run at that length, its memory, what is left,
    and what the next longer one lacks.
    """

    run: Settings
    account: Account
    left: MemoryLeft
    binds: str


def longest_of(
    model: Model, cluster: Cluster, run: Settings, core_of: CoreOf | None = None
) -> Longest:
    """The longest sequence of `run`, whose own length does not count. core_of: what core attention
    holds, from a caller that remembers it.

    ValueError, with what would help, if not even a granule of tokens fits.
    """
    unit, core_of = _unit(run), core_of or remembering()

    def tried(units: int) -> tuple[Account, MemoryLeft]:
        found = account(model, replace(run, seq=units * unit), False, core_of)
        return found, fit(found, cluster)

    low, high = 0, 1
    while tried(high)[1].fits:
        low, high = high, 2 * high
    while high - low > max(1, low // 500):
        middle = (low + high) // 2
        low, high = (middle, high) if tried(middle)[1].fits else (low, middle)
    if not low:
        raise ValueError(does_not_fit(tried(1)[0], cluster))
    found, left = tried(low)
    _, beyond = tried(high)
    binds = beyond.binds if beyond.device < 0 else "host memory"
    return Longest(found.run, found, left, binds)


def best(
    model: Model, cluster: Cluster, runs: Iterable[Settings], core_of: CoreOf | None = None
) -> Longest:
    """The one of these runs with the longest sequence; runs that do not fit are passed over.
    core_of: same as in `longest_of`.

    ValueError, with what would help the last of them, where none fits.
    """
    found: Longest | None = None
    core_of = core_of or remembering()
    refused: ValueError | None = None
    last: Settings | None = None
    for run in runs:
        unit = _unit(run)
        units = 1 if found is None else found.run.seq // unit + 1
        try:
            if least_bytes(model, replace(run, seq=units * unit)) > cluster.room:
                last = last or run
                continue
            longer = account(model, replace(run, seq=units * unit), False, core_of)
            last = run
            if fit(longer, cluster).fits:
                other = longest_of(model, cluster, run, core_of)
                found = other if found is None or other.run.seq > found.run.seq else found
        except ValueError as error:  # no such run
            refused = error
    if found is None and last is not None:
        return longest_of(model, cluster, last, core_of)
    if found is None:
        raise refused or ValueError("no run to try")
    return found


def _unit(run: Settings) -> int:
    """The lengths of a run that are tried are multiples of it."""
    even = evenly(run)
    return even * -(-GRANULE // even)


def evenly(run: Settings) -> int:
    """A length whose multiples ranks, chunks and tiles of rows all divide."""
    return 2 * run.cp * run.tp * math.lcm(run.sequence_chunks, run.mlp_tiles)


def layouts_of(
    model: Model, cluster: Cluster, run: Settings, ep: int | None = None,
    documents: tuple[int, ...] = (),
) -> list[Settings]:  # fmt: skip
    """Return the run with every tensor-parallel size, all other ranks context-parallel.

    Args:
        model: The model.
        cluster: The cluster.
        run: The run, whose stages, virtual stages and micro-batch stay.
        ep: Expert-parallel size; None: the largest that divides ranks and experts.
        documents: Same as in `TrainingGoal`.

    Raises:
        ValueError: If there is no such size.
    """
    ends = {name: size for name in ENDS if (size := getattr(run, name)) is not None}
    fixed = {"pp": run.pp, "vpp": run.vpp, "micro_batch": run.micro_batch, "dp": 1, **ends}
    fixed |= {} if ep is None else {"ep": ep}
    seq = run.seq if run.seq > 1 else EVEN * cluster.gpus
    goal = TrainingGoal(seq, FULL * cluster.gpus * run.micro_batch, fixed, documents=documents)
    check_wanted(model, cluster, goal)
    found, refused = {}, None
    for each in groups_of(model, cluster, goal):  # the most expert-parallel ranks last
        own = replace(run, tp=each.tp, cp=each.cp, dp=1, ep=each.ep, intra=each.intra)
        try:
            check(model, replace(own, seq=each.seq))
        except ValueError as error:
            refused = error
        else:
            found[own.tp] = own
    if refused is not None and not found:
        raise refused
    return list(found.values())


# --- over all ways to share the GPUs out --------------------------------------------------------


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
    if not runs:
        check(model, groups[0])
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
    host first; without a store and with half of one, whose layout may hold less.
    """
    for chunked in (True, False):
        yield from options_of(groups, goal, chunked, STORES[:0:-1], (1.0, 0.5, 0.0))
